// rejected, left-out: goto
// helpers
// body
const uint i = thread_position_in_grid.x;
out[i] = x[i];
goto end; // BAD
end:
out[i] += 1.0f;

// rejected, symbol: smoothstep occurs neither
// helpers
// body
const uint i = thread_position_in_grid.x;
out[i] = metal::smoothstep(0.0f, 1.0f, x[i]); // BAD

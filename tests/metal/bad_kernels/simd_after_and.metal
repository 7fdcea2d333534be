// rejected, simd-uniform: depends on the thread
// helpers
// body
const uint i = thread_position_in_grid.x;
const bool any = x[i] > 0.0f && simd_any(x[i] > 1.0f); // BAD
out[i] = any ? 1.0f : 0.0f;

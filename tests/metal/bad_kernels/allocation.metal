// rejected, language: 'default new' is not supported in Metal
// helpers
// body
const uint i = thread_position_in_grid.x;
thread float* p = new float[4]; // BAD
out[i] = p[0];

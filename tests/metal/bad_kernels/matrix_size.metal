// rejected, language: 8 x 8 only
// helpers
// body
const uint i = thread_position_in_grid.x;
simdgroup_matrix<float, 16, 16> m;
out[i] = x[i];

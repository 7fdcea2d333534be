// rejected, language: another number of components
// helpers
// body
const uint i = thread_position_in_grid.x;
const float4 v = float4(x[i], 1.0f, 2.0f);
out[i] = v.x;

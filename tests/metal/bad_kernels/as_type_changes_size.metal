// rejected, language: as_type changes the size
// helpers
// body
const uint i = thread_position_in_grid.x;
out[i] = float(as_type<ushort>(x[i]));

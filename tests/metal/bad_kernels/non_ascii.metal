// rejected, ascii: is not ASCII
// helpers
// body
const uint i = thread_position_in_grid.x;
out[i] = x[i]; _Pragma("mark é") // BAD

// Where a lane's two elements of an 8x8 simdgroup_matrix stand.
//
// Lane l holds the elements (row, column) and (row, column + 1) with row = lily_fragment_row(l) and
// column = lily_fragment_column(l). This is the layout that MLX's own Metal kernels rely on. The other
// backends define the two functions themselves (and LILY_FRAGMENT): kernels never assume a layout.
#ifndef LILY_FRAGMENT
#define LILY_FRAGMENT
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

inline int lily_fragment_row(uint lane) {
  return int(((lane / 4) & 4) + ((lane / 2) % 4));
}

inline int lily_fragment_column(uint lane) {
  return int(((lane / 4) & 2) * 2 + (lane % 2) * 2);
}
#endif

// The inner engine of tiled products that runs on every Apple GPU: simdgroup matrices. Needs tile.h before it.
//
// tensor_engine.h has the same names for Metal 4's tensor operations; a kernel is written against these names and gets
// one of the two headers. The accumulator holds M x N floats of a simdgroup, multiplied K columns at a time. How many
// elements a lane has and where they stand is the engine's business: ask accumulator_size, _row and _column.
#ifndef LILY_SIMDGROUP_ENGINE
#define LILY_SIMDGROUP_ENGINE

// Whether several simdgroups may share an output, each with a slice of K, and add up by the elements' order.
constant constexpr bool ENGINE_SLICES_DEPTH = true;

// Declares an accumulator NAME. Its elements have no values yet.
#define LILY_ACCUMULATOR(NAME, M, N, K) Tile<M, N> NAME

template <int M, int N>
inline int accumulator_size(thread Tile<M, N>& acc) {
  return Tile<M, N>::ELEMENTS;
}

template <int M, int N>
inline void accumulator_clear(thread Tile<M, N>& acc) {
  acc.clear();
}

template <int M, int N>
inline float accumulator_get(thread Tile<M, N>& acc, int i) {
  return acc.get(i);
}

template <int M, int N>
inline void accumulator_set(thread Tile<M, N>& acc, int i, float value) {
  acc.set(i, value);
}

// Where the i-th element of `lane` stands inside the tile. A lane may have elements that stand nowhere: their row is
// beyond that of any output.
template <int M, int N>
inline int accumulator_row(thread Tile<M, N>& acc, int i, uint lane) {
  return Tile<M, N>::row(i, lane);
}

template <int M, int N>
inline int accumulator_column(thread Tile<M, N>& acc, int i, uint lane) {
  return Tile<M, N>::column(i, lane);
}
#endif

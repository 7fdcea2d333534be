// Sum of the words in share `block` of BLOCKS of COUNT pieces of 16 bytes.
template <int COUNT, int BLOCKS>
inline uint read_share(const device uint4* pieces, uint block, uint lane) {
  constexpr int SHARE = (COUNT + BLOCKS - 1) / BLOCKS;
  const int start = int(block) * SHARE;
  uint sum = 0u;
#pragma clang loop unroll_count(8)
  for (int i = int(lane); i < SHARE; i += 32) {
    if (start + i < COUNT) {
      const uint4 piece = pieces[start + i];
      sum += piece.x ^ piece.y ^ piece.z ^ piece.w;
    }
  }
  return sum;
}

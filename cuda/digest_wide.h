// digest_wide.h: digests cells by vectors of LANES numbers of 64 bits.  digest.cpp includes it once an instruction set, and defines
//
//   ISA, LANES        its name for the compiler, and how many numbers it has in a vector
//   EVEN, ODD         of two vectors: the first, and the second, halves of their cells
//   CELLS             which cell's halves these are, by lane
//   WORDS(x, f, g)    the sum of the lower 32 bits of each lane times f, and of the upper ones times g
//   STREAM(p, v)      stores a vector around the cache
//
// Operators are those of each lane.  No function is called from the loop: one without this attribute would be compiled for less.

typedef uint64_t Vector __attribute__((vector_size(8 * LANES)));
typedef uint64_t Unaligned __attribute__((vector_size(8 * LANES), aligned(1), may_alias));

__attribute__((target(ISA))) uint64_t digest(const kvbm_cells& cells) {
  using namespace kvbm;
  constexpr Vector kCells = CELLS;
  const uint64_t step = scaled_key(cells.key_step), whole = cells.count / LANES * LANES;
  uint64_t total = 0;
  Vector sum = {};
  for (uint64_t row = 0; row < cells.rows; ++row) {
    const char* src = cells.src + static_cast<int64_t>(row) * cells.src_row;
    char* dst = cells.dst ? cells.dst + static_cast<int64_t>(row) * cells.dst_row : nullptr;
    bool around = cells.streaming;
    if (dst && around && (kSanitized || reinterpret_cast<uint64_t>(dst) % sizeof(Vector))) {  // digested from the cache
      copy_run<16>(dst, src, 16 * cells.count, true);
      dst = nullptr;
    }
    Vector scaled = scaled_key(cells.key + row * cells.key_row) + kCells * step;
    for (uint64_t i = 0; i < whole; i += LANES, scaled += LANES * step) {
      const Vector a = *reinterpret_cast<const Unaligned*>(src + 16 * i);
      const Vector b = *reinterpret_cast<const Unaligned*>(src + 16 * i + sizeof(Vector));
      if (dst && around) {
        STREAM(dst + 16 * i, a);
        STREAM(dst + 16 * i + sizeof(Vector), b);
      } else if (dst) {
        *reinterpret_cast<Unaligned*>(dst + 16 * i) = a;
        *reinterpret_cast<Unaligned*>(dst + 16 * i + sizeof(Vector)) = b;
      }
      Vector content = WORDS(EVEN(a, b), kOfWord0, kOfWord1) + WORDS(ODD(a, b), kOfWord2, kOfWord3) + kOfCell;
      content ^= content >> 32;
      Vector weight = (scaled ^ scaled >> 32) * kOfKey1;
      weight = (weight ^ weight >> 32) | 1;
      sum += weight * content;
    }
    if (whole < cells.count)
      total += plain_row(src + 16 * whole, dst ? dst + 16 * whole : nullptr, cells.count - whole,
                         cells.key + row * cells.key_row + whole * cells.key_step, cells);
  }
  uint64_t sums[LANES];
  memcpy(sums, &sum, sizeof sum);
  for (const uint64_t each : sums) total += each;
  return total;
}

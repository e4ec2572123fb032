// digest_wide.h: digests of cells with SIMD vectors.  digest.cpp includes it once per instruction set, and defines before
//
//   ISA               the name of the instruction set for the compiler
//   LANES             64-bit lanes of a vector
//   EVEN(a, b)        the first halves of the cells in two vectors
//   ODD(a, b)         their second halves
//   CELLS             the number of the cell in each lane of EVEN and ODD
//   WORDS(x, f, g)    per lane: the lower 32 bits times f plus the upper 32 bits times g
//   STREAM(p, v)      stores a vector around the cache
//
// Operators act on each lane.  The loops call no other function, because functions without the target attribute are compiled for
// the base instruction set, and so they are not inlined.

typedef uint64_t Vector __attribute__((vector_size(8 * LANES)));
typedef uint64_t Unaligned __attribute__((vector_size(8 * LANES), aligned(1), may_alias));

// The digests of the cells in two vectors, in the order of CELLS.
__attribute__((target(ISA), always_inline)) inline Vector digests_of(Vector scaled, Vector a, Vector b) {
  using namespace kvbm;
  Vector content = WORDS(EVEN(a, b), kWordFactor0, kWordFactor1) + WORDS(ODD(a, b), kWordFactor2, kWordFactor3) + kCellOffset;
  content ^= content >> 32;
  Vector weight = (scaled ^ scaled >> 32) * kKeyFactor1;
  weight = (weight ^ weight >> 32) | 1;
  return weight * content;
}

__attribute__((target(ISA))) uint64_t digest(const kvbm_cells& cells) {
  using namespace kvbm;
  constexpr Vector kCells = CELLS;
  const uint64_t step = scaled_key(cells.key_step), whole = cells.count / LANES * LANES;
  uint64_t total = 0;
  Vector sum = {};
  uint64_t row = 0;
  if (cells.count == LANES / 2 && !cells.dst) {  // two rows at a time
    const Vector in_row = kCells % (LANES / 2) * step, keys = in_row + kCells / (LANES / 2) * scaled_key(cells.key_row);
    for (; row + 2 <= cells.rows; row += 2) {
      const char* src = cells.src + static_cast<int64_t>(row) * cells.src_row;
      const Vector a = *reinterpret_cast<const Unaligned*>(src), b = *reinterpret_cast<const Unaligned*>(src + cells.src_row);
      sum += digests_of(scaled_key(cells.key + row * cells.key_row) + keys, a, b);
    }
  }
  for (; row < cells.rows; ++row) {
    const char* src = cells.src + static_cast<int64_t>(row) * cells.src_row;
    char* dst = cells.dst ? cells.dst + static_cast<int64_t>(row) * cells.dst_row : nullptr;
    bool streaming = cells.streaming;
    if (dst && streaming &&
        (kSanitized || reinterpret_cast<uint64_t>(dst) % sizeof(Vector))) {  // copy first, then digest from the cache
      copy_run<16>(dst, src, 16 * cells.count, true);
      dst = nullptr;
    }
    Vector scaled = scaled_key(cells.key + row * cells.key_row) + kCells * step;
    for (uint64_t i = 0; i < whole; i += LANES, scaled += LANES * step) {
      const Vector a = *reinterpret_cast<const Unaligned*>(src + 16 * i);
      const Vector b = *reinterpret_cast<const Unaligned*>(src + 16 * i + sizeof(Vector));
      if (dst && streaming) {
        STREAM(dst + 16 * i, a);
        STREAM(dst + 16 * i + sizeof(Vector), b);
      } else if (dst) {
        *reinterpret_cast<Unaligned*>(dst + 16 * i) = a;
        *reinterpret_cast<Unaligned*>(dst + 16 * i + sizeof(Vector)) = b;
      }
      sum += digests_of(scaled, a, b);
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

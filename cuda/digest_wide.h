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

__attribute__((target(ISA))) uint64_t digest(const char* cells, uint64_t count, uint64_t key, uint64_t step, char* to,
                                             bool streaming) {
  using namespace kvbm;
  if (to && streaming && (kSanitized || reinterpret_cast<uint64_t>(to) % sizeof(Vector))) {
    copy_run<16>(to, cells, 16 * count, true);
    to = nullptr;
  }
  constexpr Vector kCells = CELLS;
  const uint64_t scaled_step = scaled_key(step);
  Vector scaled = scaled_key(key) + kCells * scaled_step, sum = {};
  uint64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Vector a = *reinterpret_cast<const Unaligned*>(cells + 16 * i);
    const Vector b = *reinterpret_cast<const Unaligned*>(cells + 16 * i + sizeof(Vector));
    if (to && streaming) {
      STREAM(to + 16 * i, a);
      STREAM(to + 16 * i + sizeof(Vector), b);
    } else if (to) {
      *reinterpret_cast<Unaligned*>(to + 16 * i) = a;
      *reinterpret_cast<Unaligned*>(to + 16 * i + sizeof(Vector)) = b;
    }
    Vector content = WORDS(EVEN(a, b), kOfWord0, kOfWord1) + WORDS(ODD(a, b), kOfWord2, kOfWord3) + kOfCell;
    content ^= content >> 32;
    Vector weight = (scaled ^ scaled >> 32) * kOfKey1;
    weight = (weight ^ weight >> 32) | 1;
    sum += weight * content;
    scaled += LANES * scaled_step;
  }
  uint64_t sums[LANES], total = 0;
  memcpy(sums, &sum, sizeof sum);
  for (const uint64_t each : sums) total += each;
  if (i < count) total += plain(cells + 16 * i, count - i, key + i * step, step, to ? to + 16 * i : nullptr, streaming);
  return total;
}

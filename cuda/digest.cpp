// digest.cpp: digests of cells on the host, by the widest instructions that the processor has.
#include <stdint.h>
#include <string.h>

#include "permute.cuh"

#ifdef __x86_64__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // in GCC 12's own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

namespace {

uint64_t plain(const char* cells, uint64_t count, uint64_t key) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < count; ++i) {
    kvbm::Word16 v;
    kvbm::load(v, cells + 16 * i);
    sum += kvbm::digest_of(key + i, v);
  }
  return sum;
}

#ifdef __x86_64__
// Both widths from one text: 64-bit lanes hold two words of a cell.  A product of 64 bits is made of products of 32.
#define KVBM_WIDE(name, isa, Vector, LANES, load_wide, set1, zero, add, shift_right, shift_left, exclusive, either, multiply, \
                  low_words, high_words)                                                                                      \
  __attribute__((target(isa))) uint64_t name(const char* cells, uint64_t count, uint64_t key) {                               \
    constexpr uint64_t kHalf = UINT64_C(0xffffffff);                                                                          \
    alignas(64) uint64_t even[LANES], even_high[LANES], odd[LANES], odd_high[LANES], keys[LANES];                             \
    for (int i = 0; i < LANES; ++i) {                                                                                         \
      even[i] = (i % 2 ? kvbm::kOfWord2 : kvbm::kOfWord0) & kHalf;                                                            \
      even_high[i] = (i % 2 ? kvbm::kOfWord2 : kvbm::kOfWord0) >> 32;                                                         \
      odd[i] = (i % 2 ? kvbm::kOfWord3 : kvbm::kOfWord1) & kHalf;                                                             \
      odd_high[i] = (i % 2 ? kvbm::kOfWord3 : kvbm::kOfWord1) >> 32;                                                          \
      /* Lane i of the two halves of words side by side, which the unpacking interleaves. */                                  \
      keys[i] = (key + static_cast<uint64_t>(i / 2 + i % 2 * (LANES / 2))) * kvbm::kOfKey0;                                   \
    }                                                                                                                         \
    const Vector w_even = load_wide(even), w_even_high = load_wide(even_high), w_odd = load_wide(odd),                        \
                 w_odd_high = load_wide(odd_high), cell = set1(kvbm::kOfCell), one = set1(1),                                 \
                 key_low = set1(kvbm::kOfKey1 & kHalf), key_high = set1(kvbm::kOfKey1 >> 32),                                 \
                 key_step = set1(LANES * kvbm::kOfKey0);                                                                      \
    Vector k = load_wide(keys), sum = zero();                                                                                 \
    uint64_t i = 0;                                                                                                           \
    for (; i + LANES <= count; i += LANES) {                                                                                  \
      const Vector a = load_wide(cells + 16 * i), b = load_wide(cells + 16 * i + 8 * LANES);                                  \
      const Vector a1 = shift_right(a, 32), b1 = shift_right(b, 32);                                                          \
      const Vector sa = add(add(multiply(a, w_even), multiply(a1, w_odd)),                                                    \
                            shift_left(add(multiply(a, w_even_high), multiply(a1, w_odd_high)), 32));                         \
      const Vector sb = add(add(multiply(b, w_even), multiply(b1, w_odd)),                                                    \
                            shift_left(add(multiply(b, w_even_high), multiply(b1, w_odd_high)), 32));                         \
      Vector s = add(add(low_words(sa, sb), high_words(sa, sb)), cell);                                                       \
      s = exclusive(s, shift_right(s, 32));                                                                                   \
      Vector w = exclusive(k, shift_right(k, 32));                                                                            \
      k = add(k, key_step);                                                                                                   \
      w = add(multiply(w, key_low), shift_left(add(multiply(shift_right(w, 32), key_low), multiply(w, key_high)), 32));       \
      w = either(exclusive(w, shift_right(w, 32)), one);                                                                      \
      sum = add(sum,                                                                                                          \
                add(multiply(w, s), shift_left(add(multiply(shift_right(w, 32), s), multiply(w, shift_right(s, 32))), 32)));  \
    }                                                                                                                         \
    alignas(64) uint64_t sums[LANES];                                                                                         \
    memcpy(sums, &sum, sizeof sums);                                                                                          \
    uint64_t total = plain(cells + 16 * i, count - i, key + i);                                                               \
    for (int lane = 0; lane < LANES; ++lane) total += sums[lane];                                                             \
    return total;                                                                                                             \
  }

#define KVBM_LOAD_256(p) _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
#define KVBM_SET_256(x) _mm256_set1_epi64x(static_cast<long long>(x))
KVBM_WIDE(by_256, "avx2", __m256i, 4, KVBM_LOAD_256, KVBM_SET_256, _mm256_setzero_si256, _mm256_add_epi64, _mm256_srli_epi64,
          _mm256_slli_epi64, _mm256_xor_si256, _mm256_or_si256, _mm256_mul_epu32, _mm256_unpacklo_epi64, _mm256_unpackhi_epi64)
#define KVBM_LOAD_512(p) _mm512_loadu_si512(p)
#define KVBM_SET_512(x) _mm512_set1_epi64(static_cast<long long>(x))
KVBM_WIDE(by_512, "avx512f", __m512i, 8, KVBM_LOAD_512, KVBM_SET_512, _mm512_setzero_si512, _mm512_add_epi64, _mm512_srli_epi64,
          _mm512_slli_epi64, _mm512_xor_si512, _mm512_or_si512, _mm512_mul_epu32, _mm512_unpacklo_epi64, _mm512_unpackhi_epi64)

using Way = uint64_t (*)(const char*, uint64_t, uint64_t);
Way widest() {
  if (__builtin_cpu_supports("avx512f")) return by_512;
  if (__builtin_cpu_supports("avx2")) return by_256;
  return plain;
}
const Way way = widest();
#else
constexpr auto way = plain;
#endif

}  // namespace

extern "C" uint64_t kvbm_digest_cells(const char* cells, uint64_t count, uint64_t key) { return way(cells, count, key); }

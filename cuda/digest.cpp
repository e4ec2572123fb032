// digest.cpp: digests of cells on the host, with the widest vectors of the processor.
#include <stdint.h>
#include <string.h>

#include "cells.cuh"

#ifdef __x86_64__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // a false one in GCC 12's header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace {

// For processors without AVX2: they have no faster 64-bit multiplication in vectors.
uint64_t plain_row(const char* src, char* dst, uint64_t count, uint64_t key, const kvbm_cells& cells) {
  if (dst) kvbm::copy_run<16>(dst, src, 16 * count, cells.streaming);
  uint64_t sum = 0;
  for (uint64_t i = 0; i < count; ++i) {
    kvbm::Word16 v;
    kvbm::load(v, src + 16 * i);
    sum += kvbm::digest_of(key + i * cells.key_step, v);
  }
  return sum;
}

uint64_t plain(const kvbm_cells& cells) {
  uint64_t sum = 0;
  for (uint64_t row = 0; row < cells.rows; ++row)
    sum += plain_row(cells.src + static_cast<int64_t>(row) * cells.src_row,
                     cells.dst ? cells.dst + static_cast<int64_t>(row) * cells.dst_row : nullptr, cells.count,
                     cells.key + row * cells.key_row, cells);
  return sum;
}

#ifdef __x86_64__
namespace avx2 {
#define ISA "avx2"
#define LANES 4
#define CELLS {0, 2, 1, 3}
#define EVEN(a, b) Vector(_mm256_unpacklo_epi64(__m256i(a), __m256i(b)))
#define ODD(a, b) Vector(_mm256_unpackhi_epi64(__m256i(a), __m256i(b)))
#define PRODUCT(x, f) Vector(_mm256_mul_epu32(__m256i(x), __m256i(Vector{} + (f))))  // of the lower 32 bits of each lane
#define WORDS(x, f, g) (PRODUCT(x, f) + PRODUCT((x) >> 32, g) + ((PRODUCT(x, (f) >> 32) + PRODUCT((x) >> 32, (g) >> 32)) << 32))
#define STREAM(p, v) _mm256_stream_si256(reinterpret_cast<__m256i*>(p), __m256i(v))
#include "digest_wide.h"
#undef ISA
#undef LANES
#undef CELLS
#undef EVEN
#undef ODD
#undef PRODUCT
#undef WORDS
#undef STREAM
}  // namespace avx2

namespace avx512 {
#define ISA "avx512f,avx512dq"
#define LANES 8
#define CELLS {0, 4, 1, 5, 2, 6, 3, 7}
#define EVEN(a, b) Vector(_mm512_unpacklo_epi64(__m512i(a), __m512i(b)))
#define ODD(a, b) Vector(_mm512_unpackhi_epi64(__m512i(a), __m512i(b)))
#define WORDS(x, f, g) ((x) * (f) + ((x) >> 32) * ((g) - ((f) << 32)))  // x = lower + 2^32 * upper
#define STREAM(p, v) _mm512_stream_si512(reinterpret_cast<__m512i*>(p), __m512i(v))
#include "digest_wide.h"
}  // namespace avx512
#endif

using Way = uint64_t (*)(const kvbm_cells&);
Way widest() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return avx512::digest;
  if (__builtin_cpu_supports("avx2")) return avx2::digest;
#endif
  return plain;
}
const Way way = widest();

}  // namespace

extern "C" uint64_t kvbm_digest_cells(const kvbm_cells* cells) { return way(*cells); }

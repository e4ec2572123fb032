// square.cuh: transposes a square of elements, held in words of 16 bytes.
#pragma once

#include "words.cuh"

namespace kvbm {

// A square has N x N elements, N = 16 / ELEMENT bytes, and one word is one row.
template <int ELEMENT>
struct Square {
  static constexpr int N = 16 / ELEMENT;
#ifdef __CUDACC__
  static __device__ __forceinline__ void transpose(Word16 (&v)[N]) {
    Word16 out[N];
    KVBM_UNROLL
    for (int j = 0; j < N; ++j) {
      KVBM_UNROLL
      for (int k = 0; k < 4; ++k) {
        if constexpr (ELEMENT == 8) {
          out[j].x[k] = v[k / 2].x[2 * j + k % 2];
        } else if constexpr (ELEMENT == 4) {
          out[j].x[k] = v[k].x[j];
        } else if constexpr (ELEMENT == 2) {
          out[j].x[k] = __byte_perm(v[2 * k].x[j / 2], v[2 * k + 1].x[j / 2], j % 2 ? 0x7632 : 0x5410);
        } else {
          const uint32_t spread = j % 4 < 2 ? 0x5140 : 0x7362;  // interleaves bytes 0 and 1, or 2 and 3, of two rows
          const uint32_t ab = __byte_perm(v[4 * k].x[j / 4], v[4 * k + 1].x[j / 4], spread);
          const uint32_t cd = __byte_perm(v[4 * k + 2].x[j / 4], v[4 * k + 3].x[j / 4], spread);
          out[j].x[k] = __byte_perm(ab, cd, j % 2 ? 0x7632 : 0x5410);
        }
      }
    }
    KVBM_UNROLL
    for (int j = 0; j < N; ++j) v[j] = out[j];
  }
#elif defined(__SSE2__)
  static __m128i low(__m128i a, __m128i b) {
    return ELEMENT == 1   ? _mm_unpacklo_epi8(a, b)
           : ELEMENT == 2 ? _mm_unpacklo_epi16(a, b)
           : ELEMENT == 4 ? _mm_unpacklo_epi32(a, b)
                          : _mm_unpacklo_epi64(a, b);
  }
  static __m128i high(__m128i a, __m128i b) {
    return ELEMENT == 1   ? _mm_unpackhi_epi8(a, b)
           : ELEMENT == 2 ? _mm_unpackhi_epi16(a, b)
           : ELEMENT == 4 ? _mm_unpackhi_epi32(a, b)
                          : _mm_unpackhi_epi64(a, b);
  }
  // Interleaving the first half of the rows with the second half, log2(N) times, transposes the square.
  static void transpose(Word16 (&v)[N]) {
    __m128i rows[N], next[N];
    for (int i = 0; i < N; ++i) rows[i] = _mm_load_si128(reinterpret_cast<const __m128i*>(&v[i]));
    for (int round = 1; round < N; round *= 2) {
      for (int i = 0; i < N / 2; ++i) {
        next[2 * i] = low(rows[i], rows[i + N / 2]);
        next[2 * i + 1] = high(rows[i], rows[i + N / 2]);
      }
      for (int i = 0; i < N; ++i) rows[i] = next[i];
    }
    for (int i = 0; i < N; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(&v[i]), rows[i]);
  }
#else
  static void transpose(Word16 (&v)[N]) {
    Word16 out[N];
    for (int j = 0; j < N; ++j)
      for (int i = 0; i < N; ++i)
        std::memcpy(reinterpret_cast<char*>(&out[j]) + i * ELEMENT, reinterpret_cast<const char*>(&v[i]) + j * ELEMENT,
                    ELEMENT);
    std::memcpy(v, out, sizeof v);
  }
#endif
};

}  // namespace kvbm

// cast_host.cuh: runs of contiguous elements on the host, eight or sixteen at a time, for each instruction set.
#pragma once

#include "formats.cuh"

#ifndef __CUDACC__
namespace kvbm {

template <class T, int N>
struct VectorOf {
  typedef T Type __attribute__((vector_size(sizeof(T) * N)));
};
template <class T, int N>
using Vector = typename VectorOf<T, N>::Type;

// Eight codes of 4 bits as eight bytes, and back.
KVBM_FORMAT uint64_t spread(uint32_t codes) {
  uint64_t x = codes;
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
}
KVBM_FORMAT uint32_t join(uint64_t x) {
  x = (x | x >> 4) & 0x00ff00ff00ff00ff;
  x = (x | x >> 8) & 0x0000ffff0000ffff;
  return uint32_t(x | x >> 16);
}

// N codes of a format from memory, and to memory.
template <class F, int N, class U>
KVBM_FORMAT void load_lanes(const char* from, U& codes) {
  if constexpr (F::kBits == 32) {
    std::memcpy(&codes, from, sizeof codes);
  } else if constexpr (F::kBits == 16) {
    Vector<uint16_t, N> halves;
    std::memcpy(&halves, from, sizeof halves);
    codes = __builtin_convertvector(halves, U);
  } else {
    Vector<uint8_t, N> bytes;
    if constexpr (F::kBits == 8) {
      std::memcpy(&bytes, from, sizeof bytes);
    } else {
      uint32_t packed[N / 8];
      uint64_t apart[N / 8];
      std::memcpy(packed, from, sizeof packed);
      for (int i = 0; i < N / 8; ++i) apart[i] = spread(packed[i]);
      std::memcpy(&bytes, apart, sizeof bytes);
    }
    codes = __builtin_convertvector(bytes, U);
  }
}
template <class F, int N, class U>
KVBM_FORMAT void store_lanes(char* to, const U& codes) {
  if constexpr (F::kBits == 32) {
    std::memcpy(to, &codes, sizeof codes);
  } else if constexpr (F::kBits == 16) {
    const Vector<uint16_t, N> halves = __builtin_convertvector(codes, Vector<uint16_t, N>);
    std::memcpy(to, &halves, sizeof halves);
  } else {
    const Vector<uint8_t, N> bytes = __builtin_convertvector(codes, Vector<uint8_t, N>);
    if constexpr (F::kBits == 8) {
      std::memcpy(to, &bytes, sizeof bytes);
    } else {
      uint32_t packed[N / 8];
      uint64_t apart[N / 8];
      std::memcpy(apart, &bytes, sizeof bytes);
      for (int i = 0; i < N / 8; ++i) packed[i] = join(apart[i]);
      std::memcpy(to, packed, sizeof packed);
    }
  }
}

// Casts contiguous elements, a multiple of eight, N at a time.
template <class FROM, class TO, int N>
KVBM_FORMAT void cast_run(const char* from, char* to, uint64_t elements, float factor) {
  typename Lanes<N>::Bits codes;
  uint64_t i = 0;
  for (; i + N <= elements; i += N) {
    load_lanes<FROM, N>(from + i * FROM::kBits / 8, codes);
    store_lanes<TO, N>(to + i * TO::kBits / 8, TO::round(FROM::value(codes) * factor));
  }
  if constexpr (N > 8) {
    if (i < elements) cast_run<FROM, TO, 8>(from + i * FROM::kBits / 8, to + i * TO::kBits / 8, 8, factor);
  }
}

// The largest code without sign of the finite ones among contiguous elements, a multiple of eight; 0 for quantised ones.
template <class FROM, int N>
KVBM_FORMAT uint32_t largest_of_run(const char* from, uint64_t elements) {
  uint32_t most = 0;
  if constexpr (FROM::kBits >= 16) {
    typename Lanes<N>::Bits codes, found = {};
    uint64_t i = 0;
    for (; i + N <= elements; i += N) {
      load_lanes<FROM, N>(from + i * FROM::kBits / 8, codes);
      codes &= ~0u >> (33 - FROM::kBits);
      codes = codes < FROM::kInfinite ? codes : typename Lanes<N>::Bits{};
      found = codes > found ? codes : found;
    }
    for (int k = 0; k < N; ++k) most = found[k] > most ? found[k] : most;
    if constexpr (N > 8) {
      if (i < elements) {
        const uint32_t rest = largest_of_run<FROM, 8>(from + i * FROM::kBits / 8, 8);
        most = rest > most ? rest : most;
      }
    }
  }
  return most;
}

// The two for each instruction set.
template <class FROM, class TO>
struct HostRuns {
  void (*cast)(const char*, char*, uint64_t, float);
  uint32_t (*largest)(const char*, uint64_t);
};
#define KVBM_HOST_RUNS(name, n, target)                                                  \
  template <class FROM, class TO>                                                        \
  target void cast_##name(const char* from, char* to, uint64_t elements, float factor) { \
    cast_run<FROM, TO, n>(from, to, elements, factor);                                   \
  }                                                                                      \
  template <class FROM>                                                                  \
  target uint32_t largest_##name(const char* from, uint64_t elements) {                  \
    return largest_of_run<FROM, n>(from, elements);                                      \
  }
#ifdef __x86_64__
KVBM_HOST_RUNS(avx2, 8, __attribute__((target("avx2"))))
KVBM_HOST_RUNS(avx512, 16, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))))
#endif
KVBM_HOST_RUNS(plain, 8, )

template <class FROM, class TO>
inline HostRuns<FROM, TO> host_runs() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return {cast_avx512<FROM, TO>, largest_avx512<FROM>};
  if (__builtin_cpu_supports("avx2")) return {cast_avx2<FROM, TO>, largest_avx2<FROM>};
#endif
  return {cast_plain<FROM, TO>, largest_plain<FROM>};
}

}  // namespace kvbm
#endif

// cast_host.cuh: runs of contiguous elements on the host, eight or sixteen at a time, for each instruction set.
#pragma once

#include "formats.cuh"

#ifndef __CUDACC__
#include <type_traits>

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

// 2 * N codes of a format of at most 16 bits: those of even and those of odd numbers.
template <class F, int N, class U>
KVBM_FORMAT void load_pairs(const char* from, U& even, U& odd) {
  if constexpr (F::kBits == 4) {
    Vector<uint8_t, N> bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const U both = __builtin_convertvector(bytes, U);
    even = both & 15;
    odd = both >> 4;
  } else {
    Vector<uint16_t, 2 * N> halves;
    if constexpr (F::kBits == 8) {
      Vector<uint8_t, 2 * N> bytes;
      std::memcpy(&bytes, from, sizeof bytes);
      halves = __builtin_convertvector(bytes, Vector<uint16_t, 2 * N>);
    } else {
      std::memcpy(&halves, from, sizeof halves);
    }
    even = (U)halves & 0xffff;
    odd = (U)halves >> 16;
  }
}
template <class F, int N, class U>
KVBM_FORMAT void store_pairs(char* to, const U& even, const U& odd) {
  if constexpr (F::kBits == 4) {
    const Vector<uint8_t, N> bytes = __builtin_convertvector(even | odd << 4, Vector<uint8_t, N>);
    std::memcpy(to, &bytes, sizeof bytes);
  } else {
    const auto halves = (Vector<uint16_t, 2 * N>)(even | odd << 16);
    if constexpr (F::kBits == 8) {
      const auto bytes = __builtin_convertvector(halves, Vector<uint8_t, 2 * N>);
      std::memcpy(to, &bytes, sizeof bytes);
    } else {
      std::memcpy(to, &halves, sizeof halves);
    }
  }
}

// F::round in fewer operations.  Adding a number whose last bit is worth the unit of the code rounds to that unit.  The number is
// 2^e * (2^23 + kRest), so the sum has the mantissa kRest + the value in units, and its bits without the mantissa are a multiple
// of e: with kRest both add up to the code.  The product is exact.
template <class F, class X>
KVBM_FORMAT auto round_lanes(const X& x) {
  if constexpr (F::kBits <= 8 && !kSame<F, I8>) {
    constexpr int kMantissa = 23 - F::kShift, kBias = 128 - int(F::kFirstNormal >> 23);
    constexpr uint32_t kRest = uint32_t((kBias - 151 + kMantissa) * (1 << kMantissa)) & ((1u << F::kBits) - 1);
    constexpr float kNumber = float(0x800000 + kRest) / (1 << kMantissa);
    const auto bits = bits_of(x), size = bits & ~kSign;
    using U = Plain<decltype(bits)>;
    const U most = bits_of(all<X>(range_of<F>().most)), least = all<U>(F::kFirstNormal);
    const U limited = size < most ? size : most;
    const U sum = bits_of(float_of((limited > least ? limited : least) & kInfinity) * kNumber + float_of(limited));
    const U code = (sum + (sum >> F::kShift) & F::kCodes) | bits >> 31 << (F::kBits - 1);
    return size > kInfinity ? F::round(all<X>(float_of(kInfinity | 1))) : code;
  } else {
    return F::round(x);
  }
}

// Casts contiguous elements, a multiple of eight, N or 2 * N at a time.
template <class FROM, class TO, int N>
KVBM_FORMAT void cast_run(const char* from, char* to, uint64_t elements, float factor) {
  typename Lanes<N>::Bits codes, odd;
  constexpr bool kPairs = FROM::kBits <= 16 && TO::kBits <= 16;
  constexpr int kStep = kPairs ? 2 * N : N;
  for (; elements >= kStep; elements -= kStep) {
    if constexpr (kPairs) {
      load_pairs<FROM, N>(from, codes, odd);
      store_pairs<TO, N>(to, round_lanes<TO>(FROM::value(codes) * factor), round_lanes<TO>(FROM::value(odd) * factor));
    } else {
      load_lanes<FROM, N>(from, codes);
      store_lanes<TO, N>(to, round_lanes<TO>(FROM::value(codes) * factor));
    }
    from += kStep * FROM::kBits / 8;
    to += kStep * TO::kBits / 8;
  }
  if constexpr (kStep > 8)
    if (elements) cast_run<FROM, TO, N / 2>(from, to, elements, factor);
}

// The largest of N lanes, as signed numbers.
template <int N, class V>
KVBM_FORMAT auto largest_lane(const V& lanes) {
  using Code = Plain<std::remove_reference_t<decltype(lanes[0])>>;
  using Signed = std::make_signed_t<Code>;
  if constexpr (sizeof lanes > 16) {
    Vector<Code, N / 2> low, high;
    std::memcpy(&low, &lanes, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&lanes) + sizeof low, sizeof high);
    using S = Vector<Signed, N / 2>;
    return largest_lane<N / 2>((S)low > (S)high ? low : high);
  } else {
    Code most = lanes[0];
    for (int k = 1; k < N; ++k) most = Signed(lanes[k]) > Signed(most) ? lanes[k] : most;
    return most;
  }
}

// The largest code without sign of the finite ones among contiguous elements, a multiple of eight, N words at a time.
template <class FROM, int N>
KVBM_FORMAT uint32_t largest_of_run(const char* from, uint64_t elements) {
  using Code = std::conditional_t<FROM::kBits == 16, uint16_t, uint32_t>;
  using Signed = std::make_signed_t<Code>;
  // Added to codes that are not finite, it makes them negative.
  constexpr Code kOffset = Code(Code(~Code{0}) >> 1) - Code(FROM::kInfinite - 1);
  constexpr int kStep = 4 / sizeof(Code) * N;
  using V = Vector<Code, kStep>;
  using S = Vector<Signed, kStep>;
  uint32_t most = 0;
  if (elements >= kStep) {
    V found = V{} + kOffset;
    for (; elements >= kStep; elements -= kStep) {
      V codes;
      std::memcpy(&codes, from, sizeof codes);
      codes = (codes & Code(Code(~Code{0}) >> 1)) + kOffset;
      found = (S)codes > (S)found ? codes : found;
      from += sizeof codes;
    }
    most = largest_lane<kStep>(found) - kOffset;
  }
  if constexpr (kStep > 8) {
    if (elements) {
      const uint32_t rest = largest_of_run<FROM, N / 2>(from, elements);
      most = rest > most ? rest : most;
    }
  }
  return most;
}

// Groups that are cast one after the other.
struct HostGroups {
  static constexpr uint32_t kMost = 64;
  uint32_t count;
  uint64_t run;  // contiguous elements of a group
  const char* src[kMost];
  char* dst[kMost];
  uint32_t largest[kMost];  // the largest finite codes without sign
  float factor[kMost];
};

// For each instruction set: adds a run of each group to the largest codes, and casts it.  The run is so many bytes behind the
// first one.
struct HostRuns {
  void (*largest)(HostGroups&, uint64_t src);
  void (*cast)(const HostGroups&, uint64_t src, uint64_t dst);
};
#define KVBM_HOST_RUNS(name, n, target)                                                     \
  template <class FROM, class TO>                                                           \
  target void cast_##name(const HostGroups& groups, uint64_t src, uint64_t dst) {           \
    for (uint32_t i = 0; i < groups.count; ++i)                                             \
      cast_run<FROM, TO, n>(groups.src[i] + src, groups.dst[i] + dst, groups.run, groups.factor[i]); \
  }                                                                                         \
  template <class FROM>                                                                     \
  target void largest_##name(HostGroups& groups, uint64_t src) {                            \
    if constexpr (FROM::kBits >= 16)                                                        \
      for (uint32_t i = 0; i < groups.count; ++i) {                                         \
        const uint32_t most = largest_of_run<FROM, n>(groups.src[i] + src, groups.run);     \
        groups.largest[i] = most > groups.largest[i] ? most : groups.largest[i];            \
      }                                                                                     \
  }
#ifdef __x86_64__
KVBM_HOST_RUNS(avx2, 8, __attribute__((target("avx2"))))
KVBM_HOST_RUNS(avx512, 16, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))))
#endif
KVBM_HOST_RUNS(plain, 8, )

template <class FROM, class TO>
inline HostRuns host_runs() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return {largest_avx512<FROM>, cast_avx512<FROM, TO>};
  if (__builtin_cpu_supports("avx2")) return {largest_avx2<FROM>, cast_avx2<FROM, TO>};
#endif
  return {largest_plain<FROM>, cast_plain<FROM, TO>};
}

}  // namespace kvbm
#endif

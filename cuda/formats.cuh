// formats.cuh: number formats of elements and scales, on the GPU and on the host, with the same bits on both.
//
// docs/reference/cast.md specifies the arithmetic.  Every rounding is to nearest, ties to even, unless it says otherwise.  All
// of it is done on the bits of float32, so that it does not depend on instructions that an architecture may lack.
#pragma once

#include "words.cuh"

namespace kvbm {

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

KVBM_INLINE uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}
KVBM_INLINE float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u, kLeastNormal = 0x00800000u, kLargest = 0x7f7fffffu;

// A format of 1 bit of sign, EXPONENT bits with this BIAS, and MANTISSA bits.  LARGEST: the code to which larger values are
// rounded, without sign: the largest finite one, or infinity.  NOT_A_NUMBER: the code of NaN; 0: the format has none.
template <int EXPONENT, int MANTISSA, int BIAS, uint32_t LARGEST, uint32_t NOT_A_NUMBER>
struct Float {
  static constexpr int kBits = 1 + EXPONENT + MANTISSA, kShift = 23 - MANTISSA;
  static constexpr uint32_t kCodes = (1u << (kBits - 1)) - 1;           // codes without sign
  static constexpr uint32_t kFirstNormal = uint32_t(128 - BIAS) << 23;  // float32 bits of the least normal value
  // float32 whose last bit is worth the least subnormal value: adding it rounds to a multiple of that.
  static constexpr uint32_t kUnit = uint32_t(127 + 24 - BIAS - MANTISSA) << 23;

  static KVBM_INLINE uint32_t round(float x) {
    const uint32_t bits = bits_of(x), size = bits & ~kSign;
    const uint32_t normal = ((size + ((1u << (kShift - 1)) - 1) + (size >> kShift & 1)) >> kShift) - (uint32_t(127 - BIAS) << MANTISSA);
    const uint32_t subnormal = bits_of(float_of(size) + float_of(kUnit)) - kUnit;
    uint32_t code = size < kFirstNormal ? subnormal : normal < LARGEST ? normal : LARGEST;
    code |= bits >> 31 << (kBits - 1);
    return size > kInfinity ? NOT_A_NUMBER : code;
  }
  static KVBM_INLINE float value(uint32_t code) {
    const uint32_t size = code & kCodes;
    const uint32_t normal = (size << kShift) + (uint32_t(127 - BIAS) << 23);
    const uint32_t subnormal = bits_of(float_of(kUnit + size) - float_of(kUnit));
    uint32_t bits = size >> MANTISSA ? normal : subnormal;
    // Codes above LARGEST, or from infinity on.
    constexpr bool kHasInfinity = EXPONENT >= 5;
    if (kHasInfinity && size >> MANTISSA == (1u << EXPONENT) - 1) bits = kInfinity | (size << kShift & 0x7fffff);
    if (!kHasInfinity && NOT_A_NUMBER && size == NOT_A_NUMBER) bits = kInfinity | 1;
    return float_of(bits | code >> (kBits - 1) << 31);
  }
};

using F16 = Float<5, 10, 15, 0x7c00, 0x7fff>;
using E5m2 = Float<5, 2, 15, 0x7b, 0x7f>;
using E4m3 = Float<4, 3, 7, 0x7e, 0x7f>;
using E2m1 = Float<2, 1, 1, 0x7, 0>;

struct Bf16 {
  static constexpr int kBits = 16;
  static KVBM_INLINE uint32_t round(float x) {
    const uint32_t bits = bits_of(x);
    return (bits & ~kSign) > kInfinity ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static KVBM_INLINE float value(uint32_t code) { return float_of(code << 16); }
};

struct F32 {
  static constexpr int kBits = 32;
  static KVBM_INLINE uint32_t round(float x) {
    const uint32_t bits = bits_of(x);
    return (bits & ~kSign) > kInfinity ? 0x7fffffff : bits;
  }
  static KVBM_INLINE float value(uint32_t code) { return float_of(code); }
};

struct I8 {
  static constexpr int kBits = 8;
  static KVBM_INLINE uint32_t round(float x) {
    constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: its last bit is worth one
    const float most = x > 127.0f ? 127.0f : x;
    const float both = most < -127.0f ? -127.0f : most;
    return x != x ? 0 : bits_of(both + kWhole) & 0xff;
  }
  static KVBM_INLINE float value(uint32_t code) { return float(int8_t(uint8_t(code))); }
};

// A power of two, or NaN.
struct E8m0 {
  static constexpr int kBits = 8;
  static KVBM_INLINE float value(uint32_t code) {
    return float_of(code == 0xff ? kInfinity | 1 : code == 0 ? kLeastNormal >> 1 : code << 23);
  }
};

// No scale in memory: the caller gave one.
struct None {
  static constexpr int kBits = 0;
};

// ---- scales --------------------------------------------------------------------------------------------------------

// The largest value of a format, and its exponent.
template <class Q>
struct Range;
template <>
struct Range<E4m3> {
  static constexpr float kMost = 448;
  static constexpr int kExponent = 8;
};
template <>
struct Range<E5m2> {
  static constexpr float kMost = 57344;
  static constexpr int kExponent = 15;
};
template <>
struct Range<I8> {
  static constexpr float kMost = 127;
  static constexpr int kExponent = 6;
};
template <>
struct Range<E2m1> {
  static constexpr float kMost = 6;
  static constexpr int kExponent = 2;
};

// Rounds a positive value up.  LEAST, MOST: codes of the least normal and of the largest finite value.
template <class S>
KVBM_INLINE uint32_t round_up(float x, uint32_t least, uint32_t most) {
  uint32_t code = S::round(x);
  code += S::value(code) < x;
  return code < least ? least : code > most ? most : code;
}

// The scale of a group, as it is stored.  `largest`: bits of the largest finite |x|.  `given`: as for factor_of.
template <class S, class Q>
struct Scale;

template <class Q>
KVBM_INLINE float plain_scale(uint32_t largest) {
  return largest ? float_of(largest) / Range<Q>::kMost : 1.0f;
}
template <class Q>
struct Scale<F32, Q> {
  static KVBM_INLINE uint32_t of(uint32_t largest, float) {
    const uint32_t bits = bits_of(plain_scale<Q>(largest));
    return bits < kLeastNormal ? kLeastNormal : bits;
  }
};
template <class Q>
struct Scale<Bf16, Q> {
  static KVBM_INLINE uint32_t of(uint32_t largest, float) { return round_up<Bf16>(plain_scale<Q>(largest), 0x80, 0x7f7f); }
};
template <class Q>
struct Scale<F16, Q> {
  static KVBM_INLINE uint32_t of(uint32_t largest, float) { return round_up<F16>(plain_scale<Q>(largest), 0x400, 0x7bff); }
};
template <class Q>
struct Scale<E8m0, Q> {
  static KVBM_INLINE uint32_t of(uint32_t largest, float) {
    if (largest == 0) return 127;
    int exponent = int(largest >> 23) - 127;
    if (largest < kLeastNormal) {
      exponent = -150;
      for (uint32_t rest = largest; rest; rest >>= 1) ++exponent;
    }
    const int code = exponent - Range<Q>::kExponent + 127;
    return uint32_t(code < 0 ? 0 : code);  // at most 254
  }
};
template <class Q>
struct Scale<E4m3, Q> {
  static KVBM_INLINE uint32_t of(uint32_t largest, float given) {
    if (largest == 0) return 0x38;  // 1
    const uint32_t code = E4m3::round(plain_scale<Q>(largest) / given);
    return code < 1 ? 1 : code;
  }
};

// The factor from an element's code to its value.  `given`: the scale of all groups if none is stored (None); the scale of the
// whole tensor, by which stored scales are multiplied (E4m3); not used by other formats.  The caller ensures that neither the
// factor nor its reciprocal is zero or infinite.
template <class S>
KVBM_INLINE float factor_of(uint32_t scale, float given) {
  if constexpr (kSame<S, None>)
    return given;
  else if constexpr (kSame<S, E4m3>)
    return S::value(scale) * given;
  else
    return S::value(scale);
}

#ifndef __CUDACC__
// Sets rounding to nearest, with subnormals, as long as it lives: a program may have changed it for its threads.
class DefaultArithmetic {
 public:
#if defined(__SSE__)
  DefaultArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultArithmetic() { _mm_setcsr(before_); }

 private:
  uint32_t before_;
#elif defined(__aarch64__)
  DefaultArithmetic() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    __asm__ volatile("msr fpcr, xzr");
  }
  ~DefaultArithmetic() { __asm__ volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};
#endif

}  // namespace kvbm

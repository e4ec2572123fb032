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

#ifndef __CUDACC__
// On the host the same text computes several values at a time (cast_host.cuh).
#pragma GCC diagnostic ignored "-Wpsabi"  // all functions of vectors are inlined
#define KVBM_FORMAT inline __attribute__((always_inline))
template <int N>
struct Lanes {
  typedef uint32_t Bits __attribute__((vector_size(4 * N)));
  typedef float Floats __attribute__((vector_size(4 * N)));
};
#define KVBM_LANES(n)                                                                         \
  KVBM_FORMAT Lanes<n>::Bits bits_of(const Lanes<n>::Floats& x) { return (Lanes<n>::Bits)x; } \
  KVBM_FORMAT Lanes<n>::Floats float_of(const Lanes<n>::Bits& bits) { return (Lanes<n>::Floats)bits; }
KVBM_LANES(4)
KVBM_LANES(8)
KVBM_LANES(16)
#else
#define KVBM_FORMAT KVBM_INLINE
#endif

// A number, as often as X has values.
template <class X, class N>
KVBM_FORMAT X all(N number) {
  return X{} + number;
}

constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u, kLeastNormal = 0x00800000u, kLargest = 0x7f7fffffu;

template <class X>
struct PlainOf {
  using Type = X;
};
template <class X>
struct PlainOf<const X> {
  using Type = X;
};
template <class X>
using Plain = typename PlainOf<X>::Type;

// A format of 1 bit of sign, EXPONENT bits with this BIAS, and MANTISSA bits.  LARGEST: the code to which larger values are
// rounded, without sign: the largest finite one, or infinity.  NOT_A_NUMBER: the code of NaN; 0: the format has none.
template <int EXPONENT, int MANTISSA, int BIAS, uint32_t LARGEST, uint32_t NOT_A_NUMBER>
struct Float {
  static constexpr int kBits = 1 + EXPONENT + MANTISSA, kShift = 23 - MANTISSA;
  // If it has infinity: codes from here on are not finite.
  static constexpr uint32_t kInfinite = ((1u << EXPONENT) - 1) << MANTISSA;
  static constexpr uint32_t kCodes = (1u << (kBits - 1)) - 1;           // codes without sign
  static constexpr uint32_t kFirstNormal = uint32_t(128 - BIAS) << 23;  // float32 bits of the least normal value
  // float32 whose last bit is worth the least subnormal value: adding it rounds to a multiple of that.
  static constexpr uint32_t kUnit = uint32_t(127 + 24 - BIAS - MANTISSA) << 23;

  template <class X>
  static KVBM_FORMAT auto round(X x) {
    const auto bits = bits_of(x), size = bits & ~kSign;
    using U = Plain<decltype(bits)>;
    const U normal =
        ((size + ((1u << (kShift - 1)) - 1) + (size >> kShift & 1)) >> kShift) - (uint32_t(127 - BIAS) << MANTISSA);
    const U subnormal = bits_of(float_of(size) + float_of(kUnit)) - kUnit;
    U code = normal < LARGEST ? normal : all<U>(LARGEST);
    code = (size < kFirstNormal ? subnormal : code) | bits >> 31 << (kBits - 1);
    return size > kInfinity ? all<U>(NOT_A_NUMBER) : code;
  }
  template <class U>
  static KVBM_FORMAT auto value(U code) {
    const U size = code & kCodes;
    const U normal = (size << kShift) + (uint32_t(127 - BIAS) << 23);
    const U subnormal = bits_of(float_of(kUnit + size) - float_of(kUnit));
    U bits = size > (1u << MANTISSA) - 1 ? normal : subnormal;
    // Codes from infinity on, or NaN above LARGEST.
    constexpr bool kHasInfinity = EXPONENT >= 5;
    if (kHasInfinity) bits = size > kInfinite - 1 ? kInfinity | (size << kShift & 0x7fffff) : bits;
    if (!kHasInfinity && NOT_A_NUMBER) bits = size == NOT_A_NUMBER ? all<U>(kInfinity | 1) : bits;
    return float_of(bits | code >> (kBits - 1) << 31);
  }
};

using F16 = Float<5, 10, 15, 0x7c00, 0x7fff>;
using E5m2 = Float<5, 2, 15, 0x7b, 0x7f>;
using E4m3 = Float<4, 3, 7, 0x7e, 0x7f>;
using E2m1 = Float<2, 1, 1, 0x7, 0>;

struct Bf16 {
  static constexpr int kBits = 16;
  static constexpr uint32_t kInfinite = 0x7f80;
  template <class X>
  static KVBM_FORMAT auto round(X x) {
    const auto bits = bits_of(x);
    using U = Plain<decltype(bits)>;
    return (bits & ~kSign) > kInfinity ? all<U>(0x7fffu) : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  template <class U>
  static KVBM_FORMAT auto value(U code) {
    return float_of(code << 16);
  }
};

struct F32 {
  static constexpr int kBits = 32;
  static constexpr uint32_t kInfinite = kInfinity;
  template <class X>
  static KVBM_FORMAT auto round(X x) {
    const auto bits = bits_of(x);
    using U = Plain<decltype(bits)>;
    return (bits & ~kSign) > kInfinity ? all<U>(0x7fffffffu) : bits;
  }
  template <class U>
  static KVBM_FORMAT auto value(U code) {
    return float_of(code);
  }
};

struct I8 {
  static constexpr int kBits = 8;
  template <class X>
  static KVBM_FORMAT auto round(X x) {
#ifdef __CUDA_ARCH__
    int whole;  // NaN: 0
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(whole) : "f"(x));
    return uint32_t(max(min(whole, 127), -127)) & 0xff;
#else
    constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: its last bit is worth one
    const X most = x > 127.0f ? all<X>(127.0f) : x;
    const X both = most < -127.0f ? all<X>(-127.0f) : most;
    const auto code = bits_of(both + kWhole) & 0xff;
    return (bits_of(x) & ~kSign) > kInfinity ? all<Plain<decltype(code)>>(0u) : code;
#endif
  }
  // The code is added below a number whose last bit is worth one.
  template <class U>
  static KVBM_FORMAT auto value(U code) {
    return float_of(0x4b400000u + (code ^ 0x80)) - 12583040.0f;  // 1.5 * 2^23 + 128
  }
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

// ---- two codes at a time -------------------------------------------------------------------------------------------

// Two values in a format; the first code is in the low bits.  Instructions that round like `round`, where there are some.
template <class F>
KVBM_INLINE uint32_t round_two(float first, float second) {
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 890
  if constexpr (kSame<F, E4m3> || kSame<F, E5m2>) {
    uint16_t codes;
    if constexpr (kSame<F, E4m3>)
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    else
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
  }
#endif
#if __CUDA_ARCH__ >= 800
  if constexpr (kSame<F, Bf16> || kSame<F, F16>) {
    uint32_t codes;
    if constexpr (kSame<F, Bf16>)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(second), "f"(first));
    else
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(second), "f"(first));
    return codes;
  }
#endif
#endif
  return F::round(first) | F::round(second) << F::kBits;
}

template <class F>
KVBM_INLINE void value_of_two(uint32_t codes, float& first, float& second) {
#ifdef __CUDA_ARCH__
  if constexpr (kSame<F, E5m2>) return value_of_two<F16>((codes & 0xff) << 8 | (codes & 0xff00) << 16, first, second);
#if __CUDA_ARCH__ >= 890
  if constexpr (kSame<F, E4m3>) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(codes)));
    return value_of_two<F16>(halves, first, second);
  }
#endif
  if constexpr (kSame<F, F16>) {
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(first), "=f"(second)
        : "r"(codes));
    return;
  }
#endif
  constexpr uint32_t kCode = (1u << F::kBits) - 1;
  first = F::value(codes & kCode);
  second = F::value(codes >> F::kBits & kCode);
}

// ---- eight values at a time, on the GPU ----------------------------------------------------------------------------

#ifdef __CUDACC__
// Four bytes of two words, by their numbers; the first is in the low bits.
__device__ __forceinline__ uint32_t four_bytes(uint32_t low, uint32_t high, uint32_t numbers) {
  return __byte_perm(low, high, numbers);
}
// The lowest byte of each of four words.
__device__ __forceinline__ uint32_t lowest_bytes(const uint32_t (&x)[4]) {
  return four_bytes(four_bytes(x[0], x[1], 0x0040), four_bytes(x[2], x[3], 0x0040), 0x5410);
}
// As four_bytes, but each byte is 0xff or 0, by its sign.
KVBM_INLINE uint32_t four_signs(uint32_t low, uint32_t high, uint32_t numbers) {
  uint32_t signs = 0;
#ifdef __CUDA_ARCH__
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(low), "r"(high), "r"(numbers | 0x8888));
#else
  const uint64_t bytes = uint64_t(high) << 32 | low;
  for (int i = 0; i < 4; ++i) signs |= uint32_t(bytes >> (8 * (numbers >> 4 * i & 7) + 7) & 1) * 0xff << 8 * i;
#endif
  return signs;
}

// A product, or a sum, limited to 0 .. 1; 0 for NaN.  A GPU has more units for these than for minima.
KVBM_INLINE float limited_product(float a, float b) {
#ifdef __CUDA_ARCH__
  float x;
  asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
#else
  const float x = a * b;
  return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f;
#endif
}
KVBM_INLINE float limited_sum(float a, float b) {
#ifdef __CUDA_ARCH__
  float x;
  asm("add.rn.sat.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
#else
  const float x = a + b;
  return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f;
#endif
}

// a + b, also where `a` is a product: nvcc would make one fused operation of both.
__device__ __forceinline__ float unfused_sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

template <class F>
struct Eight {
  static constexpr bool kValues = false;  // whether it has them
};

template <>
struct Eight<E2m1> {
  static constexpr bool kValues = true;

  // The codes of products by a positive factor.  `codes`: the numbers as codes of BITS bits, for their signs.  NaN, without a sign,
  // is 0.
  //
  // Where h is half of a product's size, its code is 4h limited to 4, plus 2(h - 1) limited to 0 .. 2, plus h - 2 limited to 0 .. 1,
  // rounded.  At most one of the three is not whole.  They are added to a number whose last bit is worth one.
  template <int BITS>
  static __device__ __forceinline__ void round(const uint32_t* codes, const float (&x)[8], float factor, uint32_t* made) {
    constexpr uint32_t kWhole = 0x4b400000;  // 1.5 * 2^23
    const float by = 0.5f * factor;
    uint32_t sums[8];
    KVBM_UNROLL
    for (int i = 0; i < 8; ++i) {
#ifdef __CUDA_ARCH__
      const float size = fabsf(x[i]), half = size * by;
      const float low = __fmaf_rn(limited_product(size, by), 4.0f, float_of(kWhole));
      const float middle = __fmaf_rn(limited_sum(half, -1.0f), 2.0f, low);
#else
      const float size = float_of(bits_of(x[i]) & ~kSign), half = size * by;
      const float low = __builtin_fmaf(limited_product(size, by), 4.0f, float_of(kWhole));
      const float middle = __builtin_fmaf(limited_sum(half, -1.0f), 2.0f, low);
#endif
      sums[i] = bits_of(unfused_sum(middle, limited_sum(half, -2.0f)));
    }
    KVBM_UNROLL
    for (int bits = 4; bits <= 16; bits *= 2) {  // two, then four, then eight codes in a word
      KVBM_UNROLL
      for (int i = 0; i < 16 / bits; ++i) sums[i] = sums[2 * i] + (sums[2 * i + 1] << bits);
    }
    made[0] = sums[0] - kWhole * 0x11111111u + (signs<BITS>(codes) & 0x88888888);
  }

  // Signs of eight codes, in all of their bits.
  template <int BITS>
  static __device__ __forceinline__ uint32_t signs(const uint32_t* codes) {
    uint32_t even, odd;
    if constexpr (BITS == 16) {
      const uint32_t low = four_signs(codes[0], codes[1], 0x7351), high = four_signs(codes[2], codes[3], 0x7351);
      even = four_bytes(low, high, 0x5410);
      odd = four_bytes(low, high, 0x7632);
    } else {
      even = four_bytes(four_signs(codes[0], codes[2], 0x7373), four_signs(codes[4], codes[6], 0x7373), 0x5410);
      odd = four_bytes(four_signs(codes[1], codes[3], 0x7373), four_signs(codes[5], codes[7], 0x7373), 0x5410);
    }
    return (even & 0x0f0f0f0f) | (odd & 0xf0f0f0f0);
  }

  // The high and low bytes of bfloat16 are looked up.
  static __device__ __forceinline__ void values(const uint32_t* codes, float (&x)[8]) {
    KVBM_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t four = codes[0] >> 16 * i, sizes = four & 0x7777;
      const uint32_t signs = four_bytes(four, four << 4, 0x1504) & 0x80808080;
      const uint32_t high = four_bytes(0x3f3f3f00, 0x40404040, sizes) | signs, low = four_bytes(0xc0800000, 0xc0804000, sizes);
      KVBM_UNROLL
      for (int k = 0; k < 2; ++k) {
        const uint32_t two = four_bytes(low, high, k ? 0x7362 : 0x5140);
        x[4 * i + 2 * k] = float_of(two << 16);
        x[4 * i + 2 * k + 1] = float_of(two & 0xffff0000);
      }
    }
  }
};

template <>
struct Eight<I8> {
  static constexpr bool kValues = true;
  static __device__ __forceinline__ float limited(float x) {
    const float most = x < 127.0f ? x : 127.0f, both = most > -127.0f ? most : -127.0f;
    return x == x ? both : 0.0f;
  }

  // The codes of values from -127 to 127: the lowest bytes after adding a number whose last bit is worth one.
  static __device__ __forceinline__ void round(const float (&x)[8], uint32_t* made) {
    KVBM_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t sums[4];
      KVBM_UNROLL
      for (int k = 0; k < 4; ++k) sums[k] = bits_of(unfused_sum(x[4 * i + k], 12582912.0f));  // 1.5 * 2^23
      made[i] = lowest_bytes(sums);
    }
  }
  // See I8::value.
  static __device__ __forceinline__ void values(const uint32_t* codes, float (&x)[8]) {
    KVBM_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t four = codes[i] ^ 0x80808080;
      KVBM_UNROLL
      for (int k = 0; k < 4; ++k) x[4 * i + k] = float_of(four_bytes(four, 0x4b400000, 0x7650 + k)) - 12583040.0f;
    }
  }
};

// Multiplies by a factor.
template <class FROM, class TO, bool LOOKS_UP = kSame<FROM, E2m1> && TO::kBits == 16>
struct Multiplier {
  static constexpr bool kLooksUp = false;
  float factor;
  __device__ __forceinline__ explicit Multiplier(float by) : factor(by) {}
};
// The low and the high bytes of the products of all sizes are looked up.
template <class TO>
struct Multiplier<E2m1, TO, true> {
  static constexpr bool kLooksUp = true;
  uint32_t low[2], high[2], signs;

  __device__ __forceinline__ explicit Multiplier(float by) : signs(by == by ? 0x80808080 : 0) {
    const uint32_t two[4] = {round_two<TO>(0.0f * by, 0.5f * by), round_two<TO>(by, 1.5f * by),
                             round_two<TO>(2.0f * by, 3.0f * by), round_two<TO>(4.0f * by, 6.0f * by)};
    KVBM_UNROLL
    for (int i = 0; i < 2; ++i) {
      low[i] = four_bytes(two[2 * i], two[2 * i + 1], 0x6420);
      high[i] = four_bytes(two[2 * i], two[2 * i + 1], 0x7531);
    }
  }
  // Eight products.
  __device__ __forceinline__ void look_up(const uint32_t* codes, uint32_t* made) const {
    KVBM_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t four = codes[0] >> 16 * i, sizes = four & 0x7777;
      const uint32_t of_low = four_bytes(low[0], low[1], sizes);
      const uint32_t of_high = four_bytes(high[0], high[1], sizes) ^ (four_bytes(four, four << 4, 0x1504) & signs);
      made[2 * i] = four_bytes(of_low, of_high, 0x5140);
      made[2 * i + 1] = four_bytes(of_low, of_high, 0x7362);
    }
  }
};
#endif

// ---- scales --------------------------------------------------------------------------------------------------------

// The largest value of a quantised format, its reciprocal, and its exponent.
struct Range {
  float most, reciprocal;
  int exponent;
};
template <class Q>
KVBM_INLINE constexpr Range range_of() {
  if constexpr (kSame<Q, E4m3>)
    return {448, 1.0f / 448, 8};
  else if constexpr (kSame<Q, E5m2>)
    return {57344, 1.0f / 57344, 15};
  else if constexpr (kSame<Q, I8>)
    return {127, 1.0f / 127, 6};
  else
    return {6, 1.0f / 6, 2};
}

// Rounds a positive value up.  LEAST, MOST: codes of the least normal and of the largest finite value.
template <class S>
KVBM_INLINE uint32_t round_up(float x, uint32_t least, uint32_t most) {
  uint32_t code = S::round(x);
  code += S::value(code) < x;
  return code < least ? least : code > most ? most : code;
}

// x / of.most, rounded once: the remainder is exact.  Quotients below 2^-127 may be rounded otherwise than by a division, but a
// scale that small becomes the least one of its format.
KVBM_INLINE float divide_by_most(float x, const Range& of) {
#ifdef __CUDA_ARCH__
  const float quotient = x * of.reciprocal;
  return __fmaf_rn(__fmaf_rn(-quotient, of.most, x), of.reciprocal, quotient);
#else
  return x / of.most;
#endif
}

// The scale of a group, as it is stored in the format S.  `largest`: bits of the largest finite |x|.  `given`: as for factor_of.
template <class S>
KVBM_INLINE uint32_t scale_of(uint32_t largest, const Range& of, float given) {
  const float scale = largest ? divide_by_most(float_of(largest), of) : 1.0f;
  if constexpr (kSame<S, F32>) {
    return bits_of(scale) < kLeastNormal ? kLeastNormal : bits_of(scale);
  } else if constexpr (kSame<S, Bf16>) {
    return round_up<Bf16>(scale, 0x80, 0x7f7f);
  } else if constexpr (kSame<S, F16>) {
    return round_up<F16>(scale, 0x400, 0x7bff);
  } else if constexpr (kSame<S, E4m3>) {
    if (largest == 0) return 0x38;  // 1
    const uint32_t code = round_two<E4m3>(given == 1.0f ? scale : scale / given, 0);
    return code < 1 ? 1 : code;
  } else {
    if (largest == 0) return 127;  // 1
    const int code = int(largest >> 23) - of.exponent;
    return uint32_t(code < 0 ? 0 : code);  // at most 254
  }
}

// The factor from an element's code to its value.  `given`: the scale of all groups if none is stored (None); the scale of the
// whole tensor, by which stored scales are multiplied (E4m3); not used by other formats.  The caller ensures that neither the
// factor nor its reciprocal is zero or infinite.
template <class S>
KVBM_INLINE float factor_of(uint32_t scale, float given) {
  if constexpr (kSame<S, None>) {
    return given;
  } else if constexpr (kSame<S, E4m3>) {
    float factor, none;
    value_of_two<E4m3>(scale, factor, none);
    return factor * given;
  } else {
    return S::value(scale);
  }
}

// The reciprocal of the factor of a scale of scale_of.
template <class S>
KVBM_INLINE float reciprocal_of(uint32_t scale, float given) {
  if constexpr (kSame<S, E8m0>) {
    return float_of(scale == 254 ? kLeastNormal >> 1 : (254 - scale) << 23);
  } else {
    const float factor = factor_of<S>(scale, given);
#ifdef __CUDA_ARCH__
    // What a division does, without its tests: the factor is from 2^-126 to 2^126.
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(factor));
    return __fmaf_rn(near, __fmaf_rn(-factor, near, 1.0f), near);
#else
    return 1.0f / factor;
#endif
  }
}

// ---- formats as numbers --------------------------------------------------------------------------------------------

// Numbers of the formats in the parameters of CastAny (kvbm._core has them by the same names).
enum { kNone = 0, kF32, kBf16, kF16, kE4m3, kE5m2, kI8, kE2m1, kE8m0 };

KVBM_INLINE uint32_t bits_of_format(uint32_t format) {
  return format == kF32 ? 32 : format <= kF16 ? 16 : format == kE2m1 ? 4 : 8;
}
KVBM_INLINE Range range_of_format(uint32_t format) {
  return format == kE4m3   ? range_of<E4m3>()
         : format == kE5m2 ? range_of<E5m2>()
         : format == kI8   ? range_of<I8>()
                           : range_of<E2m1>();
}
KVBM_INLINE float value_in(uint32_t format, uint32_t code) {
  switch (format) {
    case kF32:
      return F32::value(code);
    case kBf16:
      return Bf16::value(code);
    case kF16:
      return F16::value(code);
    case kE4m3:
      return E4m3::value(code);
    case kE5m2:
      return E5m2::value(code);
    case kI8:
      return I8::value(code);
    case kE2m1:
      return E2m1::value(code);
    default:
      return E8m0::value(code);
  }
}
KVBM_INLINE uint32_t round_in(uint32_t format, float x) {
  switch (format) {
    case kF32:
      return F32::round(x);
    case kBf16:
      return Bf16::round(x);
    case kF16:
      return F16::round(x);
    case kE4m3:
      return E4m3::round(x);
    case kE5m2:
      return E5m2::round(x);
    case kI8:
      return I8::round(x);
    default:
      return E2m1::round(x);
  }
}
KVBM_INLINE uint32_t scale_in(uint32_t format, uint32_t largest, const Range& of, float given) {
  switch (format) {
    case kF32:
      return scale_of<F32>(largest, of, given);
    case kBf16:
      return scale_of<Bf16>(largest, of, given);
    case kF16:
      return scale_of<F16>(largest, of, given);
    case kE4m3:
      return scale_of<E4m3>(largest, of, given);
    default:
      return scale_of<E8m0>(largest, of, given);
  }
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

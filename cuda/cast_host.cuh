// cast_host.cuh: runs of contiguous elements on the host, eight or sixteen at a time, for each instruction set.
#pragma once

#include "cells.cuh"
#include "formats.cuh"

#ifndef __CUDACC__
#include <limits>
#include <type_traits>

namespace kvbm {

template <class T, int N>
struct VectorOf {
  typedef T Type __attribute__((vector_size(sizeof(T) * N)));
};
template <class T, int N>
using Vector = typename VectorOf<T, N>::Type;

// Elements of a vector, by their numbers.  clang has no such function for numbers that are not constant.
#ifdef __clang__
constexpr bool kShuffles = false;
template <class V, class I>
KVBM_FORMAT V shuffled(const V& of, const I&) {
  return of;
}
#else
constexpr bool kShuffles = true;
template <class V, class I>
KVBM_FORMAT V shuffled(const V& of, const I& numbers) {
  return __builtin_shuffle(of, numbers);
}
#endif

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
    const Vector<uint8_t, N> bytes = __builtin_convertvector(F::kBits == 4 ? codes & 15 : codes, Vector<uint8_t, N>);
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

// 2 * N codes of a format of at most 16 bits: those of even and those of odd numbers.  Only the lowest bits are codes.
template <class F, int N>
using Pairs = Vector<std::conditional_t<F::kBits == 16, uint32_t, std::conditional_t<F::kBits == 8, uint16_t, uint8_t>>, N>;
template <class F, int N, class U>
KVBM_FORMAT void load_pairs(const char* from, U& even, U& odd) {
  if constexpr (F::kBits == 4) {  // GCC converts eight bytes one by one
    U shifts;
    for (int k = 0; k < N; ++k) {
      uint32_t word;
      std::memcpy(&word, from + k / 4 * 4, sizeof word);
      even[k] = word;
      shifts[k] = k % 4 * 8;
    }
    even >>= shifts;
  } else {
    Pairs<F, N> pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    even = __builtin_convertvector(pairs, U);
  }
  odd = even >> F::kBits;
}
template <class F, int N, class U>
KVBM_FORMAT void store_pairs(char* to, const U& even, const U& odd) {
  const auto pairs = __builtin_convertvector((even & ((1u << F::kBits) - 1)) | odd << F::kBits, Pairs<F, N>);
  std::memcpy(to, &pairs, sizeof pairs);
}

// F::round in fewer operations; only the lowest bits are the code.  NUMBERS: `x` is not NaN.
//
// Formats of 8 bits and fewer: adding a number whose last bit is worth the unit of a code rounds to that unit.  The number is
// 2^e * (2^23 + kRest), so the sum has the mantissa kRest + the value in units, and its bits above are a multiple of e: with
// kRest both add up to the code.  The product is exact.
// int8: the clamp also keeps GCC from fusing the sum with the product before it.
template <class F, bool NUMBERS, class X>
KVBM_FORMAT auto round_lanes(const X& x) {
  const auto bits = bits_of(x), size = bits & ~kSign;
  using U = Plain<decltype(bits)>;
  if constexpr (kSame<F, Bf16> && NUMBERS) {
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  } else if constexpr (F::kBits > 8) {
    return F::round(x);
  } else {
    constexpr float kMost = range_of<F>().most, kWhole = 12582912.0f;  // see I8::round
    const U most = bits_of(all<X>(kMost)), limited = size < most ? size : most;
    U code;
    if constexpr (kSame<F, I8>) {
      code = bits_of(float_of(limited | (bits & kSign)) + kWhole);
    } else {
      constexpr int kMantissa = 23 - F::kShift, kBias = 128 - int(F::kFirstNormal >> 23);
      constexpr uint32_t kRest = uint32_t((kBias - 151 + kMantissa) * (1 << kMantissa)) & ((1u << F::kBits) - 1);
      constexpr float kNumber = float(0x800000 + kRest) / (1 << kMantissa);
      const U least = all<U>(F::kFirstNormal), normal = limited > least ? limited : least;
      const U sum = bits_of(float_of(normal & kInfinity) * kNumber + float_of(limited));
      code = (sum + (sum >> F::kShift)) | (bits >> (32 - F::kBits) & (F::kCodes + 1));
    }
    return NUMBERS ? code : size > kInfinity ? F::round(all<X>(float_of(kInfinity | 1))) : code;
  }
}

// F::value where only the lowest bits are the code.
template <class F, class U>
KVBM_FORMAT auto value_lanes(const U& codes) {
  constexpr int kLanes = sizeof(U) / 4;
  if constexpr (kShuffles && kSame<F, E2m1> && kLanes >= 8) {  // looked up
    typename Lanes<kLanes>::Floats values;
    for (int k = 0; k < kLanes; ++k) values[k] = E2m1::value(uint32_t(k));
    const auto found = shuffled(values, codes);
    return kLanes == 16 ? found : float_of(bits_of(found) | (codes << 28 & kSign));
  } else if constexpr (F::kBits == 32 || kSame<F, Bf16>) {
    return F::value(codes);
  } else {
    return F::value(codes & ((1u << F::kBits) - 1));
  }
}

// Codes of values times a factor.  NUMBERS: the factor is between 2^-100 and 2^100, and values to quantise are finite.
template <class FROM, class TO, bool NUMBERS, class U>
KVBM_FORMAT U cast_lanes(const U& codes, float factor) {
  if constexpr (NUMBERS && kSame<FROM, E4m3>) {
    const U size = codes & FROM::kCodes, normal = (size << FROM::kShift) + (FROM::kFirstNormal - 0x800000);
    const U subnormal = bits_of(float_of(FROM::kUnit + size) - float_of(all<U>(FROM::kUnit)));
    const auto x = float_of((size > 7 ? normal : subnormal) | (codes << 24 & kSign));
    return size == FROM::kCodes ? TO::round(float_of(all<U>(kInfinity | 1))) : round_lanes<TO, NUMBERS>(x * factor);
  } else {
    constexpr bool kNumbers = NUMBERS && !kSame<FROM, E5m2>;
    return round_lanes<TO, kNumbers>(value_lanes<FROM>(codes) * factor);
  }
}

// Casts as many e4m3 codes as fill vectors to bfloat16.  A code of 16 or more is the one from 8 to 15 with the same mantissa
// times a power of two, and so is its product, as no product is subnormal or infinite.  Those of codes below 16 are looked up.
KVBM_FORMAT void cast_by_table(const char*& from, char*& to, uint64_t& elements, float factor) {
  using Halves = Vector<uint16_t, 32>;
  Lanes<16>::Bits first;
  for (int k = 0; k < 16; ++k) first[k] = k;
  const auto table = (Halves)cast_lanes<E4m3, Bf16, true>(first, factor);  // each in two lanes
  for (; elements >= 32; elements -= 32) {
    Vector<uint8_t, 32> bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const Halves codes = __builtin_convertvector(bytes, Halves) << 1, sizes = codes & 0xfe, last = (sizes & 14) | 16;
    const Halves found = sizes < last ? sizes : last;
    Halves made = (shuffled(table, found) + ((sizes - found) << 3)) ^ (codes << 7 & 0x8000);
    made = sizes == 0xfe ? Halves{} + 0x7fff : made;
    std::memcpy(to, &made, sizeof made);
    from += sizeof bytes;
    to += sizeof made;
  }
}

// Casts contiguous elements, a multiple of eight, N or 2 * N at a time.
template <class FROM, class TO, bool NUMBERS, int N>
KVBM_FORMAT void cast_run(const char* from, char* to, uint64_t elements, float factor) {
  constexpr bool kPairs = FROM::kBits <= 16 && TO::kBits <= 16;
  constexpr int kLanes = kPairs || N > 8 ? N : 8, kStep = kPairs ? 2 * N : kLanes;
  typename Lanes<kLanes>::Bits codes = {}, odd = {};
  if constexpr (kShuffles && NUMBERS && kSame<FROM, E4m3> && kSame<TO, Bf16> && N == 16)
    if (elements >= 64) cast_by_table(from, to, elements, factor);
  for (; elements >= kStep; elements -= kStep) {
    if constexpr (kPairs) {
      load_pairs<FROM, N>(from, codes, odd);
      store_pairs<TO, N>(to, cast_lanes<FROM, TO, NUMBERS>(codes, factor), cast_lanes<FROM, TO, NUMBERS>(odd, factor));
    } else {
      load_lanes<FROM, kLanes>(from, codes);
      store_lanes<TO, kLanes>(to, cast_lanes<FROM, TO, NUMBERS>(codes, factor));
    }
    from += kStep * FROM::kBits / 8;
    to += kStep * TO::kBits / 8;
  }
  if constexpr (kStep > 8)
    if (elements) cast_run<FROM, TO, NUMBERS, N / 2>(from, to, elements, factor);
}

// The largest of N lanes.
template <int N, class V>
KVBM_FORMAT auto largest_lane(const V& lanes) {
  if constexpr (N == 1) {
    return lanes[0];
  } else {
    Vector<Plain<std::remove_reference_t<decltype(lanes[0])>>, N / 2> low, high;
    std::memcpy(&low, &lanes, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&lanes) + sizeof low, sizeof high);
    return largest_lane<N / 2>(low > high ? low : high);
  }
}

// The largest code without sign among contiguous elements, a multiple of eight, N words at a time.  FILTERS: of finite ones.
template <class FROM, bool FILTERS, int N>
KVBM_FORMAT uint32_t largest_of_run(const char* from, uint64_t elements) {
  using Code = std::conditional_t<FROM::kBits == 16, int16_t, int32_t>;
  constexpr Code kCodes = std::numeric_limits<Code>::max();
  // Makes codes that are not finite negative.
  constexpr auto kOffset = std::make_unsigned_t<Code>(FILTERS ? kCodes - (FROM::kInfinite - 1) : 0);
  constexpr int kStep = 4 / sizeof(Code) * N;
  Vector<Code, kStep> codes, found = {};
  found += Code(kOffset);
  Code most = kOffset;
  if (elements >= kStep) {
    for (; elements >= kStep; elements -= kStep) {
      std::memcpy(&codes, from, sizeof codes);
      codes = (decltype(codes))((Vector<std::make_unsigned_t<Code>, kStep>)(codes & kCodes) + kOffset);
      found = codes > found ? codes : found;
      from += sizeof codes;
    }
    most = largest_lane<kStep>(found);
  }
  uint32_t largest = uint32_t(most) - kOffset;
  if constexpr (kStep > 8) {
    if (elements) {
      const uint32_t rest = largest_of_run<FROM, FILTERS, N / 2>(from, elements);
      largest = rest > largest ? rest : largest;
    }
  }
  return largest;
}

// Rounds elements of bfloat16 to TO, where the scale comes from the largest element of the group.  So its mantissa has 128 values,
// and there is a table for each.
//
// A code of TO grows by 2^m, if its mantissa has m bits, where the exponent of an element grows by one.  In between it grows by
// one, at mantissas that are more than four apart.  What a table has for four mantissas is added to the element's code.  Then the
// upper bits are the code of TO.
template <class TO>
struct RoundingTables {
  static constexpr int kShift = TO::kShift - 16;                   // bits of bfloat16's mantissa that TO does not have
  static constexpr uint32_t kExponent = 127 << 7;                  // of the largest element
  static constexpr uint32_t kBinades = kSame<TO, E4m3> ? 13 : 28;  // below it, in which all codes of TO are normal
  uint16_t added[128][32];

  RoundingTables() {
    constexpr uint32_t kElement = kExponent - (4 << 7);  // the exponent of elements, for example
    for (uint32_t largest = 0; largest < 128; ++largest) {
      const float scale = Bf16::value(kExponent | largest) / range_of<TO>().most, factor = 1.0f / scale;
      auto code = [&](uint32_t mantissa) { return TO::round(Bf16::value(kElement | mantissa) * factor); };
      for (uint32_t i = 0; i < 32; ++i) {
        const uint32_t first = code(4 * i);
        uint32_t greater = 0;
        for (uint32_t k = 1; k < 4; ++k) greater += code(4 * i + k) > first;
        const uint32_t made = (first << kShift) + (greater ? (1 << kShift) - 4 + greater : 0);
        added[largest][i] = uint16_t(made - 4 * i - kElement);
      }
    }
  }
};

// Codes without sign of contiguous elements: the largest, and how far the smallest one is from 0xffff.
struct Extremes {
  uint32_t largest, below;
};
KVBM_FORMAT Extremes extremes_of_run(const char* from, uint64_t elements) {
  using Halves = Vector<uint16_t, 32>;
  Halves codes, largest = {}, below = {};
  for (uint64_t i = 0; i < elements; i += 32) {
    std::memcpy(&codes, from + 2 * i, sizeof codes);
    codes &= 0x7fff;
    largest = codes > largest ? codes : largest;
    below = ~codes > below ? ~codes : below;
  }
  return {largest_lane<32>(largest), largest_lane<32>(below)};
}

// Casts contiguous elements, a multiple of 32, of a group with this largest element.
template <class TO>
KVBM_FORMAT void round_by_table(const char* from, char* to, uint64_t elements, uint32_t largest,
                                const RoundingTables<TO>& tables) {
  using Halves = Vector<uint16_t, 32>;
  Halves added, codes;
  std::memcpy(&added, tables.added[largest & 127], sizeof added);
  added += uint16_t(tables.kExponent - (largest & 0x7f80));
  for (uint64_t i = 0; i < elements; i += 32) {
    std::memcpy(&codes, from + 2 * i, sizeof codes);
    const Halves sizes = (codes + shuffled(added, codes >> 2)) >> tables.kShift;
    const auto bytes = __builtin_convertvector((sizes & 0x7f) | (codes >> 8 & 0x80), Vector<uint8_t, 32>);
    std::memcpy(to + i, &bytes, sizeof bytes);
  }
}

// The codes of scales.  `largest`: bits of the largest finite |x|.  See scale_of.
template <class S, class U, class X>
KVBM_FORMAT U scales_of(const U& largest, const Range& of, const X& given) {
  const X scale = float_of(largest) / of.most;
  U code, one;  // `one`: the code of 1
  if constexpr (kSame<S, F32>) {
    code = bits_of(scale) > kLeastNormal ? bits_of(scale) : all<U>(kLeastNormal);
    one = all<U>(0x3f800000u);
  } else if constexpr (kSame<S, E4m3>) {
    code = round_lanes<E4m3, false>(scale / given) & 0xff;
    code = code > 1 ? code : all<U>(1u);
    one = all<U>(0x38u);
  } else {
    const U exponent = largest >> 23, least = all<U>(uint32_t(of.exponent));
    code = (exponent > least ? exponent : least) - least;
    one = all<U>(127u);
  }
  return largest == 0 ? one : code;
}
// See factor_of.
template <class S, class U, class X>
KVBM_FORMAT X factors_of(const U& code, const X& given) {
  if constexpr (kSame<S, None>) {
    return given;
  } else if constexpr (kSame<S, E8m0>) {
    const U bits = code == 0 ? all<U>(kLeastNormal >> 1) : code << 23;
    return float_of(code == 0xff ? all<U>(kInfinity | 1) : bits);
  } else if constexpr (kSame<S, E4m3>) {
    return E4m3::value(code) * given;
  } else {
    return float_of(code);
  }
}

// Groups that are cast together.
struct HostGroups {
  static constexpr uint32_t kMost = 64;
  uint32_t count;
  const char* src[kMost];
  char *dst[kMost], *scale[kMost];
  float given[kMost];     // scales of the caller
  uint32_t codes[kMost];  // first of the largest elements, then of the scales
  float factor[kMost];
  uint32_t key[kMost], scale_key[kMost];  // digests: steps of the keys of elements and scale, in bytes of cells: each has 16
};

// What follows goes through runs of so many elements in two modes of a group.  `p`: the part of the elements.
template <class FROM, bool FILTERS, int N>
KVBM_FORMAT uint32_t largest_of_group(const char* from, const kvbm_part& p, uint64_t elements, uint32_t second,
                                      uint32_t third) {
  uint32_t most = 0;
  for (uint32_t j = 0; j < third; ++j)
    for (uint32_t i = 0; i < second; ++i) {
      const char* run = from + i * p.inner[1].src + j * p.inner[2].src;
      const uint32_t largest = largest_of_run<FROM, FILTERS, N>(run, elements);
      most = largest > most ? largest : most;
    }
  return most;
}
template <class FROM, class TO, bool NUMBERS, int N>
KVBM_FORMAT void cast_elements(const HostGroups& of, const kvbm_part& p, uint64_t elements, uint32_t second, uint32_t third) {
  for (uint32_t g = 0; g < of.count; ++g)
    for (uint32_t j = 0; j < third; ++j)
      for (uint32_t i = 0; i < second; ++i) {
        const char* from = of.src[g] + i * p.inner[1].src + j * p.inner[2].src;
        char* to = of.dst[g] + i * p.inner[1].dst + j * p.inner[2].dst;
        cast_run<FROM, TO, NUMBERS, N>(from, to, elements, of.factor[g]);
      }
}
// Makes or loads the scales of groups, and casts their elements if all are finite; false if they are not.
template <class FROM, class TO, class SCALE, int N>
KVBM_FORMAT bool cast_finite(HostGroups& of, const kvbm_part& p, uint64_t elements, uint32_t second, uint32_t third) {
  constexpr bool kQuantises = FROM::kBits >= 16, kComputes = kQuantises && SCALE::kBits;
  constexpr bool kByTable =
      kShuffles && N == 16 && kSame<FROM, Bf16> && kSame<SCALE, F32> && (kSame<TO, E4m3> || kSame<TO, E5m2>);
  const bool is_run = elements % 32 == 0 && second == 1 && third == 1;
  Extremes extremes[kByTable ? HostGroups::kMost : 1];
  bool finite = kComputes || !kQuantises;
  for (uint32_t g = 0; g < of.count; ++g) {
    uint32_t code = 0;
    if constexpr (kComputes) {
      if (kByTable && is_run) {
        extremes[g] = extremes_of_run(of.src[g], elements);
        code = extremes[g].largest;
      } else {
        code = largest_of_group<FROM, false, N>(of.src[g], p, elements, second, third);
      }
      if (code >= FROM::kInfinite) {
        code = largest_of_group<FROM, true, N>(of.src[g], p, elements, second, third);
        finite = false;
      }
    } else {
      std::memcpy(&code, of.scale[g], SCALE::kBits / 8);
    }
    of.codes[g] = code;
  }
  for (uint32_t g = of.count; g % N; ++g) {
    of.codes[g] = of.codes[g - 1];
    of.given[g] = of.given[g - 1];
  }
  typename Lanes<N>::Bits codes, wrong = {};
  for (uint32_t g = 0; g < of.count; g += N) {
    typename Lanes<N>::Floats given;
    std::memcpy(&codes, of.codes + g, sizeof codes);
    std::memcpy(&given, of.given + g, sizeof given);
    if constexpr (kComputes) {
      constexpr Range range = range_of<TO>();
      codes = scales_of<SCALE>(bits_of(FROM::value(codes)), range, given);
      std::memcpy(of.codes + g, &codes, sizeof codes);
    }
    const auto factors = factors_of<SCALE>(codes, given), factor = kQuantises ? 1.0f / factors : factors;
    std::memcpy(of.factor + g, &factor, sizeof factor);
    constexpr uint32_t kLeast = 27u << 23, kMost = 227u << 23;  // 2^-100 and 2^100
    wrong |= decltype(codes)((bits_of(factor) & ~kSign) - kLeast > kMost - kLeast);
  }
  if constexpr (kComputes)
    for (uint32_t g = 0; g < of.count; ++g) std::memcpy(of.scale[g], of.codes + g, SCALE::kBits / 8);
  finite &= !largest_lane<N>(wrong);
  if (!finite) return false;
  if (kByTable && is_run) {
    static const RoundingTables<std::conditional_t<kByTable, TO, E4m3>> tables;
    constexpr uint32_t kLess = tables.kBinades << 7;
    for (uint32_t g = 0; g < of.count; ++g) {
      const uint32_t exponent = extremes[g].largest & 0x7f80, smallest = 0xffff - extremes[g].below;
      if (exponent > kLess && smallest >= exponent - kLess)
        round_by_table(of.src[g], of.dst[g], elements, extremes[g].largest, tables);
      else  // zero, or codes that may be subnormal
        cast_run<FROM, TO, true, N>(of.src[g], of.dst[g], elements, of.factor[g]);
    }
    return true;
  }
  cast_elements<FROM, TO, true, N>(of, p, elements, second, third);
  return true;
}
template <class FROM, class TO, class SCALE, int N>
KVBM_FORMAT void cast_groups(HostGroups& of, const kvbm_part& p) {
  // Compiled for constants, where groups are as long as usual.
  constexpr uint32_t kUsual = kSame<SCALE, E4m3> ? 16 : kSame<SCALE, E8m0> ? 32 : 128;
  const uint32_t elements = p.inner[0].extent.n * 8, second = p.inner[1].extent.n, third = p.inner[2].extent.n;
  const bool is_usual = N >= 8 && elements == kUsual && second == 1 && third == 1;
  if (!(is_usual ? cast_finite<FROM, TO, SCALE, N>(of, p, kUsual, 1, 1)
                 : cast_finite<FROM, TO, SCALE, N>(of, p, elements, second, third)))
    cast_elements<FROM, TO, false, N>(of, p, elements, second, third);
}

// Digest of groups that were just cast: of their codes of 8 bits, and of their scales of 32 bits, if there are any (SCALES).  All
// groups of a cell are among these.  `mode`: the inner mode that goes from group to group, of which the first one has the index
// `index`.  `p`, `s`: the parts of elements and scales.  `first`: the keys of both in the chunk.
template <bool QUANTISES, bool SCALES>
uint64_t digest_groups(const HostGroups& of, const kvbm_inner& mode, uint32_t index, const kvbm_part& p, const kvbm_part& s,
                       const uint64_t* first) {
  const char* const* codes = QUANTISES ? of.dst : of.src;
  auto step = [](const kvbm_inner& along) { return QUANTISES ? along.dst : along.src; };
  const uint32_t run = p.inner[0].extent.n * 8;  // bytes
  uint64_t sum = 0;
  for (uint32_t g = 0, groups; g < of.count; g += groups, index = 0) {
    groups = mode.extent.n - index < of.count - g ? mode.extent.n - index : of.count - g;  // at equal steps
    for (uint32_t j = 0; j < p.inner[2].extent.n; ++j)
      for (uint32_t i = 0; i < p.inner[1].extent.n; ++i) {
        const uint64_t key = first[0] + (of.key[g] + i * p.inner[1].key + j * p.inner[2].key) / 16;
        const char* from = codes[g] + i * step(p.inner[1]) + j * step(p.inner[2]);
        const kvbm_cells cells = {from, nullptr, run / 16, groups, step(mode), 0, key, 1, mode.key / 16, 0};
        sum += kvbm_digest_cells(&cells);
      }
  }
  for (uint32_t g = 0; SCALES && g < of.count; g += s.cell_words) {
    Word16 cell = {};
    std::memcpy(&cell, of.codes + g, s.cell_words * sizeof of.codes[g]);
    sum += digest_of(first[1] + of.scale_key[g] / 16, cell);
  }
  return sum;
}

// The same for each instruction set.
using CastGroups = void (*)(HostGroups&, const kvbm_part&);
#define KVBM_HOST_CASTS(name, n, target)                                   \
  template <class FROM, class TO, class SCALE>                             \
  target void cast_groups_##name(HostGroups& groups, const kvbm_part& p) { \
    cast_groups<FROM, TO, SCALE, n>(groups, p);                            \
  }
#ifdef __x86_64__
KVBM_HOST_CASTS(avx2, 8, __attribute__((target("avx2"))))
KVBM_HOST_CASTS(avx512, 16, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))))
#endif
KVBM_HOST_CASTS(plain, 4, )

template <class FROM, class TO, class SCALE>
inline CastGroups host_casts() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return cast_groups_avx512<FROM, TO, SCALE>;
  if (__builtin_cpu_supports("avx2")) return cast_groups_avx2<FROM, TO, SCALE>;
#endif
  return cast_groups_plain<FROM, TO, SCALE>;
}

}  // namespace kvbm
#endif

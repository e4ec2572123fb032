// cast.cuh: Cast copies values and changes their format: it quantises groups of elements with a scale each, or the reverse.
//
// Part 0 is the loop nest of the elements, part 1 that of the scales.  Both have the same modes.  The first kGroup inner modes
// go through a group, in items; the others go from group to group, and only these have strides in the scales.
#pragma once

#include "address.cuh"
#include "formats.cuh"
#include "prepare.cuh"

namespace kvbm {

// OUTER, INNER: number of modes.  FROM, TO: formats of the elements.  SCALE: format of the scales, or None.  ITEM: elements that
// a thread moves at a time.  8: they are contiguous and aligned on both sides.  1, or 2 if two share a byte: anything else.
template <int OUTER, int INNER, class FROM, class TO, class SCALE, int ITEM>
struct Cast {
  static constexpr bool kQuantises = FROM::kBits >= 16, kHasScales = !kSame<SCALE, None>;
  static constexpr uint32_t kTeams = 1, kThreads = kRowThreads, kMinCtas = 8;
  static constexpr uint32_t kTogether = 2;  // groups whose elements are loaded before the first is cast

  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    if (!prepare_cast({OUTER, INNER, 0, 0, kThreads, kTeams}, *a, sms, ITEM * (FROM::kBits + TO::kBits) / 8))
      return KVBM_TOO_LARGE;
    grid->ctas = a->part[0].ctas;
    grid->threads_x = kThreads;
    grid->threads_y = 1;
    grid->shared_bytes = 0;
    return KVBM_OK;
  }

  // Offsets of an item of a group from the group's first.
  static KVBM_INLINE void step_item(const kvbm_part& p, uint32_t item, uint64_t& src, uint64_t& dst) {
    uint32_t c = item;
    if (p.inner[1].extent.n > 1 || p.inner[2].extent.n > 1) {  // the same for all threads
      c = take(item, p.inner[0].extent);
      const uint32_t second = take(item, p.inner[1].extent);
      src += uint64_t(second) * uint32_t(p.inner[1].src) + uint64_t(item) * uint32_t(p.inner[2].src);
      dst += uint64_t(second) * uint32_t(p.inner[1].dst) + uint64_t(item) * uint32_t(p.inner[2].dst);
    }
    src += uint64_t(c) * uint32_t(p.inner[0].src);
    dst += uint64_t(c) * uint32_t(p.inner[0].dst);
  }

  // The codes of an item, packed as in memory: 32 bits, or more for wide formats.
  template <class F>
  struct Codes {
    static constexpr int kWords = ITEM * F::kBits < 32 ? 1 : ITEM * F::kBits / 32;
    uint32_t x[kWords];
    // Two codes of F, for formats of at most 16 bits.
    KVBM_INLINE uint32_t two(int pair) const {
      constexpr int kPairs = 16 / F::kBits;  // in a word
      return x[pair / kPairs] >> pair % kPairs * 2 * F::kBits & (~0u >> (32 - 2 * F::kBits));
    }
    KVBM_INLINE void set_two(int pair, uint32_t codes) {
      constexpr int kPairs = 16 / F::kBits;
      if (pair % kPairs == 0) x[pair / kPairs] = 0;
      x[pair / kPairs] |= codes << pair % kPairs * 2 * F::kBits;
    }
  };

  // `p.element_step`: bytes from element to element of an item whose elements are not contiguous.  `p.narrow`: an item of eight
  // codes of 8 bits is only aligned to 4 bytes; other codes may lie at any address.
  template <class F>
  static KVBM_INLINE void load_item(const kvbm_part& p, const char* from, Codes<F>& codes) {
    if constexpr (ITEM == 8) {
      if (F::kBits == 8 && p.narrow) {
        load(codes.x[0], from);
        load(codes.x[F::kBits == 8], from + 4);
        return;
      }
      constexpr int kBytes = F::kBits < 16 ? F::kBits : 16;
      KVBM_UNROLL
      for (int w = 0; w < F::kBits / kBytes; ++w) {
        Word<kBytes> v;
        load(v, from + w * kBytes);
        if constexpr (kBytes == 4) {
          codes.x[0] = v;
        } else {
          KVBM_UNROLL
          for (int i = 0; i < kBytes / 4; ++i) codes.x[w * 4 + i] = v.x[i];
        }
      }
    } else if constexpr (F::kBits == 4) {
      uint8_t v;
      load(v, from);
      codes.x[0] = v;
    } else {
      codes.x[0] = 0;
      KVBM_UNROLL
      for (int i = 0; i < ITEM; ++i) {
        const uint32_t code = load_code<F::kBits / 8>(from + uint64_t(i) * p.element_step, p.narrow);
        if constexpr (F::kBits == 32)
          codes.x[i] = code;
        else
          codes.x[0] |= code << i * F::kBits;
      }
    }
  }
  template <class F>
  static KVBM_INLINE void store_item(const kvbm_part& p, char* to, const Codes<F>& codes) {
    if constexpr (ITEM == 8) {
      if (F::kBits == 8 && p.narrow) {
        store(to, codes.x[0]);
        store(to + 4, codes.x[F::kBits == 8]);
        return;
      }
      constexpr int kBytes = F::kBits < 16 ? F::kBits : 16;
      KVBM_UNROLL
      for (int w = 0; w < F::kBits / kBytes; ++w) {
        Word<kBytes> v;
        if constexpr (kBytes == 4) {
          v = codes.x[0];
        } else {
          KVBM_UNROLL
          for (int i = 0; i < kBytes / 4; ++i) v.x[i] = codes.x[w * 4 + i];
        }
        store(to + w * kBytes, v);
      }
    } else if constexpr (F::kBits == 4) {
      store(to, uint8_t(codes.x[0]));
    } else {
      KVBM_UNROLL
      for (int i = 0; i < ITEM; ++i) {
        const uint32_t code = F::kBits == 32 ? codes.x[i % Codes<F>::kWords] : codes.x[0] >> i * F::kBits % 32;
        store_code<F::kBits / 8>(to + uint64_t(i) * p.element_step, code & (~0u >> (32 - F::kBits)), p.narrow);
      }
    }
  }

  // One code of BYTES bytes.  `bytewise`: it may lie at any address.
  template <int BYTES>
  static KVBM_INLINE uint32_t load_code(const char* from, uint32_t bytewise) {
    if (BYTES == 1 || !bytewise) {
      Word<BYTES> v;
      load(v, from);
      return v;
    }
    uint32_t code = 0;
    KVBM_UNROLL
    for (int i = 0; i < BYTES; ++i) {
      uint8_t v;
      load(v, from + i);
      code |= uint32_t(v) << 8 * i;
    }
    return code;
  }
  template <int BYTES>
  static KVBM_INLINE void store_code(char* to, uint32_t code, uint32_t bytewise) {
    if (BYTES == 1 || !bytewise) return store(to, Word<BYTES>(code));
    KVBM_UNROLL
    for (int i = 0; i < BYTES; ++i) store(to + i, uint8_t(code >> 8 * i));
  }

  // The larger of `most` and the codes of an item, without signs.  Codes of larger values are larger.
  static KVBM_INLINE uint32_t largest_of(const Codes<FROM>& codes, uint32_t most) {
    if constexpr (FROM::kBits == 32) {
      KVBM_UNROLL
      for (int i = 0; i < ITEM; ++i) most = larger(most, codes.x[i] & ~kSign);
    } else if constexpr (ITEM == 1) {
      most = larger(most, codes.x[0] & 0x7fff);
    } else {
      uint32_t both = codes.x[0] & 0x7fff7fff;
      KVBM_UNROLL
      for (int i = 1; i < ITEM / 2; ++i) both = larger_halves(both, codes.x[i] & 0x7fff7fff);
      most = larger(most, larger(both & 0xffff, both >> 16));
    }
    return most;
  }
  // The same of finite values only.
  static KVBM_INLINE uint32_t largest_finite(const Codes<FROM>& codes, uint32_t most) {
    KVBM_UNROLL
    for (int i = 0; i < ITEM; ++i) {
      const uint32_t code = FROM::kBits == 32 ? codes.x[i % Codes<FROM>::kWords] & ~kSign
                                              : codes.x[i / 2 % Codes<FROM>::kWords] >> i % 2 * 16 & 0x7fff;
      if (code < FROM::kInfinite) most = larger(most, code);
    }
    return most;
  }
  static KVBM_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
  static KVBM_INLINE uint32_t larger_halves(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    return larger(a & 0xffff, b & 0xffff) | larger(a >> 16, b >> 16) << 16;
#endif
  }

  // FINITE: no element is infinite or NaN.
  template <bool FINITE = false>
  static KVBM_INLINE Codes<TO> cast(const Codes<FROM>& codes, float factor) {
    Codes<TO> made;
    if constexpr (ITEM == 1) {
      made.x[0] = TO::round(FROM::value(codes.x[0]) * factor);
    } else {
      KVBM_UNROLL
      for (int i = 0; i < ITEM / 2; ++i) {
        float first, second;
        if constexpr (FROM::kBits == 32) {
          first = float_of(codes.x[2 * i]);
          second = float_of(codes.x[2 * i + 1]);
        } else {
          value_of_two<FROM>(codes.two(i), first, second);
        }
        if constexpr (TO::kBits == 32) {
          made.x[2 * i] = TO::round(first * factor);
          made.x[2 * i + 1] = TO::round(second * factor);
        } else {
          made.set_two(i, FINITE ? round_two_finite<TO>(first * factor, second * factor)
                                 : round_two<TO>(first * factor, second * factor));
        }
      }
    }
    return made;
  }

  // Addresses of the first element of a group on both sides, and of its scale.
  struct Place {
    const char* src;
    char *dst, *scale;
  };
  // `s` is the part of the scales, `at` and `scales` are the first addresses of the chunk.
  static KVBM_INLINE Place find(const kvbm_part& p, const kvbm_part& s, const Bases& at, const Bases& scales, uint32_t group) {
    uint64_t src = 0, dst = 0, scale = 0;
    KVBM_UNROLL
    for (int k = kGroup; k < INNER; ++k) {
      const uint32_t c = k + 1 < INNER ? take(group, p.inner[k].extent) : group;
      src += uint64_t(c) * uint32_t(p.inner[k].src);
      dst += uint64_t(c) * uint32_t(p.inner[k].dst);
      if constexpr (kHasScales) scale += uint64_t(c) * uint32_t(kQuantises ? s.inner[k].dst : s.inner[k].src);
    }
    char* const of_scale = !kHasScales ? nullptr : (kQuantises ? scales.dst : const_cast<char*>(scales.src)) + scale;
    return {at.src + src, at.dst + dst, of_scale};
  }
  static KVBM_INLINE uint32_t largest_of_item(const kvbm_part& p, const Place& at, uint32_t item, uint32_t most) {
    uint64_t src = 0, dst = 0;
    step_item(p, item, src, dst);
    Codes<FROM> codes;
    load_item(p, at.src + src, codes);
    return largest_finite(codes, most);
  }
  static KVBM_INLINE void cast_item(const kvbm_part& p, const Place& at, uint32_t item, float factor) {
    uint64_t src = 0, dst = 0;
    step_item(p, item, src, dst);
    Codes<FROM> codes;
    load_item(p, at.src + src, codes);
    store_item(p, at.dst + dst, cast(codes, factor));
  }
  // Stores the scale of a group, and returns the factor for its elements.
  static KVBM_INLINE float put_scale(const kvbm_part& p, const kvbm_part& s, uint32_t largest, char* scale) {
    const uint32_t code = Scale<SCALE, TO>::of(bits_of(FROM::value(largest)), p.given_scale);
    if (scale) store_code<SCALE::kBits / 8>(scale, code, s.narrow);
    return 1.0f / factor_of<SCALE>(code, p.given_scale);
  }
  static KVBM_INLINE float stored_factor(const kvbm_part& p, const kvbm_part& s, const char* scale) {
    if constexpr (kHasScales)
      return factor_of<SCALE>(load_code<SCALE::kBits / 8>(scale, s.narrow), p.given_scale);
    else
      return kQuantises ? 1.0f / p.given_scale : p.given_scale;
  }

#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, char*) {
    __shared__ struct {
      Bases at;
      bool copies;
    } found[2];
    const kvbm_part &p = a.part[0], &s = a.part[1];
    uint32_t place = blockIdx.x;
    const uint32_t tile = take(place, p.tiles);
    if (threadIdx.x % 32 == 0 && threadIdx.x < (kHasScales ? 64 : 32)) {  // two warps, at the same time
      const uint32_t part = threadIdx.x / 32;
      Bases at;
      found[part].copies = locate<OUTER>(a, a.part[part], place, at);
      found[part].at = at;
    }
    __syncthreads();
    if (!found[0].copies) return;
    const uint32_t width = p.tile[0].n, items = p.tile[1].n, lane = threadIdx.x % width;
    const uint32_t mask = (width == 32 ? ~0u : (1u << width) - 1) << (threadIdx.x % 32 & ~(width - 1));
    const uint32_t last = min((tile + 1) * p.tile_words, p.words), teams = kThreads / width;
    const uint32_t first = tile * p.tile_words + threadIdx.x / width;
    if (items > width) {
      for (uint32_t group = first; group < last; group += teams) run_long(p, s, found[0].at, found[1].at, group, lane, mask);
      return;
    }
    for (uint32_t group = first; group < last; group += kTogether * teams) {
      Codes<FROM> codes[kTogether];
      char *to[kTogether], *scale[kTogether];
      KVBM_UNROLL
      for (uint32_t u = 0; u < kTogether; ++u) {
        const Place at = find(p, s, found[0].at, found[1].at, group + u * teams);
        uint64_t src = 0, dst = 0;
        step_item(p, lane, src, dst);
        to[u] = at.dst + dst;
        scale[u] = at.scale;
        if (group + u * teams < last && lane < items) load_item(p, at.src + src, codes[u]);
      }
      KVBM_UNROLL
      for (uint32_t u = 0; u < kTogether; ++u) {
        if (group + u * teams >= last) break;  // the same for all threads of a group
        float factor;
        if constexpr (kQuantises && kHasScales) {
          uint32_t largest = largest_in_group(lane < items ? largest_of(codes[u], 0) : 0, width, mask);
          const bool finite = largest < FROM::kInfinite;
          if (!finite) largest = largest_in_group(lane < items ? largest_finite(codes[u], 0) : 0, width, mask);
          factor = put_scale(p, s, largest, lane == 0 ? scale[u] : nullptr);
          if (finite) {
            if (lane < items) store_item(p, to[u], cast<true>(codes[u], factor));
            continue;
          }
        } else {
          factor = stored_factor(p, s, scale[u]);
        }
        if (lane < items) store_item(p, to[u], cast(codes[u], factor));
      }
    }
  }

  // A group with more items than threads.  Its elements are read once for the scale, and once more to be cast.
  static __device__ __noinline__ void run_long(const kvbm_part& p, const kvbm_part& s, const Bases& at, const Bases& scales,
                                               uint32_t group, uint32_t lane, uint32_t mask) {
    const uint32_t width = p.tile[0].n, items = p.tile[1].n;
    const Place place = find(p, s, at, scales, group);
    float factor;
    if constexpr (kQuantises && kHasScales) {
      uint32_t largest = 0;
      for (uint32_t i = lane; i < items; i += width) largest = largest_of_item(p, place, i, largest);
      factor = put_scale(p, s, largest_in_group(largest, width, mask), lane == 0 ? place.scale : nullptr);
    } else {
      factor = stored_factor(p, s, place.scale);
    }
    for (uint32_t i = lane; i < items; i += width) cast_item(p, place, i, factor);
  }

  static __device__ __forceinline__ uint32_t largest_in_group(uint32_t largest, uint32_t width, uint32_t mask) {
    for (uint32_t other = width / 2; other; other /= 2) largest = larger(largest, __shfl_xor_sync(mask, largest, other));
    return largest;
  }
#else
  static void run_host(const kvbm_args* a, uint32_t, uint32_t first, uint32_t last, int) {
    const DefaultArithmetic arithmetic;
    run_jobs(*a, first, last);
  }
  // Not inlined: no arithmetic moves out of the life of `arithmetic`.
  __attribute__((noinline)) static void run_jobs(const kvbm_args& a, uint32_t first, uint32_t last) {
    const kvbm_part &p = a.part[0], &s = a.part[1];
    const uint32_t items = p.tile[1].n;
    for (uint32_t job = first; job < last; ++job) {
      uint32_t place = job;
      const uint32_t tile = take(place, p.tiles);
      Bases at, scales = {};
      if (!locate<OUTER>(a, p, place, at)) continue;
      if (kHasScales) locate<OUTER>(a, s, place, scales);
      const uint32_t end = (tile + 1) * p.tile_words < p.words ? (tile + 1) * p.tile_words : p.words;
      for (uint32_t group = tile * p.tile_words; group < end; ++group) {
        const Place place = find(p, s, at, scales, group);
        float factor;
        if constexpr (kQuantises && kHasScales) {
          uint32_t largest = 0;
          for (uint32_t i = 0; i < items; ++i) largest = largest_of_item(p, place, i, largest);
          factor = put_scale(p, s, largest, place.scale);
        } else {
          factor = stored_factor(p, s, place.scale);
        }
        for (uint32_t i = 0; i < items; ++i) cast_item(p, place, i, factor);
      }
    }
  }
  static constexpr decltype(&run_host) host() { return run_host; }
#endif
};

}  // namespace kvbm

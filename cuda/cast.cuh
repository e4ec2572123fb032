// cast.cuh: Cast copies values and changes their format: it quantises groups of elements with a scale each, or the reverse.
//
// Part 0 is the loop nest of the elements, part 1 that of the scales.  Both have the same modes.  The first kGroup inner modes
// go through a group, in items; the others go from group to group, and only these have strides in the scales.
#pragma once

#include "address.cuh"
#include "cast_host.cuh"
#include "formats.cuh"
#include "prepare.cuh"

namespace kvbm {

// What all casts share.
template <int OUTER, int INNER>
struct CastNest {
  static constexpr uint32_t kTeams = 1, kThreads = kRowThreads, kMinCtas = 8;

  static int prepare(kvbm_args* a, uint32_t sms, uint32_t item_bytes, kvbm_grid* grid) {
    if (!prepare_cast({OUTER, INNER, 0, 0, kThreads, kTeams}, *a, sms, item_bytes)) return KVBM_TOO_LARGE;
    grid->ctas = a->part[0].ctas;
    grid->threads_x = kThreads;
    grid->threads_y = 1;
    grid->shared_bytes = 0;
    return KVBM_OK;
  }

  // Addresses of the first element of a group on both sides, and of its scale.
  struct Place {
    const char* src;
    char *dst, *scale;
  };
  // `s` is the part of the scales, `at` and `scales` are the first addresses of the chunk.
  template <bool QUANTISES>
  static KVBM_INLINE Place find(const kvbm_part& p, const kvbm_part& s, const Bases& at, const Bases& scales, uint32_t group) {
    uint64_t src = 0, dst = 0, scale = 0;
    KVBM_UNROLL
    for (int k = kGroup; k < INNER; ++k) {
      const uint32_t c = k + 1 < INNER ? take(group, p.inner[k].extent) : group;
      src += uint64_t(c) * uint32_t(p.inner[k].src);
      dst += uint64_t(c) * uint32_t(p.inner[k].dst);
      scale += uint64_t(c) * uint32_t(QUANTISES ? s.inner[k].dst : s.inner[k].src);
    }
    return {at.src + src, at.dst + dst, (QUANTISES ? scales.dst : const_cast<char*>(scales.src)) + scale};
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

  // The scale of the caller for a group.  `place`: the number of its job without the tile.
  static KVBM_INLINE float given_scale(const kvbm_args& a, const kvbm_part& p, uint32_t place, uint32_t group) {
    if (!p.given_scales) return p.given_scale;
    uint32_t chunk = take(place, p.faster), number = 0;
    if (p.pairs_first) chunk = place;
    KVBM_UNROLL
    for (int k = 0; k < OUTER; ++k) number += (k + 1 < OUTER ? take(chunk, p.outer[k].extent) : chunk) * p.outer[k].key;
    KVBM_UNROLL
    for (int k = kGroup; k < INNER; ++k) number += (k + 1 < INNER ? take(group, p.inner[k].extent) : group) * p.inner[k].key;
    return reinterpret_cast<const float*>(a.payload)[KVBM_INLINE_BYTES / sizeof(float) - p.given_scales + number];
  }

  // One code of so many bits.  `narrow`: it may lie at any address.
  static KVBM_INLINE uint32_t load_code(uint32_t bits, const char* from, uint32_t narrow) {
    if (bits <= 8) return load_word<1>(from);
    if (narrow) {
      uint32_t code = 0;
      for (uint32_t i = 0; i < bits / 8; ++i) code |= load_word<1>(from + i) << 8 * i;
      return code;
    }
    return bits == 16 ? load_word<2>(from) : load_word<4>(from);
  }
  static KVBM_INLINE void store_code(uint32_t bits, char* to, uint32_t code, uint32_t narrow) {
    if (bits <= 8) return store(to, uint8_t(code));
    if (narrow) {
      for (uint32_t i = 0; i < bits / 8; ++i) store(to + i, uint8_t(code >> 8 * i));
      return;
    }
    bits == 16 ? store(to, uint16_t(code)) : store(to, code);
  }
  template <int BYTES>
  static KVBM_INLINE uint32_t load_word(const char* from) {
    Word<BYTES> v;
    load(v, from);
    return v;
  }
  static KVBM_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

#ifdef __CUDACC__
  // The first thread of the CTA and that of the next warp find the first addresses of the chunk, for elements and scales.
  struct Found {
    Bases at;
    bool copies;
  };
  static __device__ __forceinline__ bool find_chunk(const kvbm_args& a, uint32_t place, Found (&found)[2]) {
    const uint32_t part = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0 && part < a.num_parts) {
      Bases at;
      found[part].copies = locate<OUTER>(a, a.part[part], place, at);
      found[part].at = at;
    }
    __syncthreads();
    return found[0].copies;
  }
  // The lanes of this thread's group.
  static __device__ __forceinline__ uint32_t mask_of(uint32_t width) {
    return (width == 32 ? ~0u : (1u << width) - 1) << (threadIdx.x % 32 & ~(width - 1));
  }
  static __device__ __forceinline__ uint32_t largest_in_group(uint32_t largest, uint32_t width, uint32_t mask) {
    for (uint32_t other = width / 2; other; other /= 2) largest = larger(largest, __shfl_xor_sync(mask, largest, other));
    return largest;
  }
#else
  // Calls turn(place, scale of the caller) for each group of the jobs [first, last).
  template <bool QUANTISES, class TURN>
  static inline void for_groups(const kvbm_args& a, uint32_t first, uint32_t last, TURN turn) {
    const kvbm_part &p = a.part[0], &s = a.part[a.num_parts - 1];
    for (uint32_t job = first; job < last; ++job) {
      uint32_t chunk = job;
      const uint32_t tile = take(chunk, p.tiles);
      Bases at;
      if (!locate<OUTER>(a, p, chunk, at)) continue;
      Bases scales = at;  // without scales nothing reads them, and `s` is `p`
      if (a.num_parts > 1) locate<OUTER>(a, s, chunk, scales);
      const uint32_t end = (tile + 1) * p.tile_words < p.words ? (tile + 1) * p.tile_words : p.words;
      for (uint32_t group = tile * p.tile_words; group < end; ++group)
        turn(find<QUANTISES>(p, s, at, scales, group), given_scale(a, p, chunk, group));
    }
  }
#endif
};

// FROM, TO: formats of the elements.  SCALE: format of the scales, or None.  A thread moves eight contiguous and aligned elements
// at a time, an item.
template <int OUTER, int INNER, class FROM, class TO, class SCALE>
struct Cast : CastNest<OUTER, INNER> {
  using Nest = CastNest<OUTER, INNER>;
  using Place = typename Nest::Place;
  using Nest::kThreads;
  using Nest::larger;
  static constexpr bool kQuantises = FROM::kBits >= 16, kHasScales = !kSame<SCALE, None>, kComputes = kQuantises && kHasScales;
  static constexpr uint32_t kTogether = 2;  // groups whose elements are loaded before the first is cast
  static constexpr int ITEM = 8;

  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    return Nest::prepare(a, sms, FROM::kBits + TO::kBits, grid);
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

  // `p.narrow`: codes of 8 bits are only aligned to 4 bytes.
  template <class F>
  static KVBM_INLINE void load_item(const kvbm_part& p, const char* from, Codes<F>& codes) {
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
  }
  template <class F>
  static KVBM_INLINE void store_item(const kvbm_part& p, char* to, const Codes<F>& codes) {
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
  }

  // The larger of `most` and the codes of an item, without signs.  Codes of larger values are larger.
  static KVBM_INLINE uint32_t largest_of(const Codes<FROM>& codes, uint32_t most) {
    if constexpr (FROM::kBits == 32) {
      KVBM_UNROLL
      for (int i = 0; i < ITEM; ++i) most = larger(most, codes.x[i] & ~kSign);
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
        made.set_two(
            i, FINITE ? round_two_finite<TO>(first * factor, second * factor) : round_two<TO>(first * factor, second * factor));
      }
    }
    return made;
  }

  // Stores the scale of a group, and returns the factor for its elements.
  static KVBM_INLINE float put_scale(const kvbm_part& s, uint32_t largest, char* scale, float given) {
    const uint32_t code = scale_of<SCALE>(bits_of(FROM::value(largest)), range_of<TO>(), given);
    if (scale) Nest::store_code(SCALE::kBits, scale, code, s.narrow);
    return 1.0f / factor_of<SCALE>(code, given);
  }
  static KVBM_INLINE float stored_factor(const kvbm_part& s, const char* scale, float given) {
    if constexpr (kHasScales)
      return factor_of<SCALE>(Nest::load_code(SCALE::kBits, scale, s.narrow), given);
    else
      return kQuantises ? 1.0f / given : given;
  }

#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, char*) {
    __shared__ typename Nest::Found found[2];
    const kvbm_part &p = a.part[0], &s = a.part[a.num_parts - 1];
    uint32_t chunk = blockIdx.x;
    const uint32_t tile = take(chunk, p.tiles);
    if (!Nest::find_chunk(a, chunk, found)) return;
    const uint32_t width = p.tile[0].n, items = p.tile[1].n, lane = threadIdx.x % width, mask = Nest::mask_of(width);
    const uint32_t last = min((tile + 1) * p.tile_words, p.words), teams = kThreads / width;
    const uint32_t first = tile * p.tile_words + threadIdx.x / width;
    if (items > width) {
      for (uint32_t group = first; group < last; group += teams)
        run_long(p, s, found[0].at, found[1].at, group, lane, mask, Nest::given_scale(a, p, chunk, group));
      return;
    }
    for (uint32_t group = first; group < last; group += kTogether * teams) {
      Codes<FROM> codes[kTogether];
      char *to[kTogether], *scale[kTogether];
      KVBM_UNROLL
      for (uint32_t u = 0; u < kTogether; ++u) {
        const Place at = Nest::template find<kQuantises>(p, s, found[0].at, found[1].at, group + u * teams);
        uint64_t src = 0, dst = 0;
        Nest::step_item(p, lane, src, dst);
        to[u] = at.dst + dst;
        scale[u] = at.scale;
        if (group + u * teams < last && lane < items) load_item(p, at.src + src, codes[u]);
      }
      KVBM_UNROLL
      for (uint32_t u = 0; u < kTogether; ++u) {
        if (group + u * teams >= last) break;  // the same for all threads of a group
        const float given = Nest::given_scale(a, p, chunk, group + u * teams);
        float factor;
        if constexpr (kComputes) {
          uint32_t largest = Nest::largest_in_group(lane < items ? largest_of(codes[u], 0) : 0, width, mask);
          const bool finite = largest < FROM::kInfinite;
          if (!finite) largest = Nest::largest_in_group(lane < items ? largest_finite(codes[u], 0) : 0, width, mask);
          factor = put_scale(s, largest, lane == 0 ? scale[u] : nullptr, given);
          if (finite) {
            if (lane < items) store_item(p, to[u], cast<true>(codes[u], factor));
            continue;
          }
        } else {
          factor = stored_factor(s, scale[u], given);
        }
        if (lane < items) store_item(p, to[u], cast(codes[u], factor));
      }
    }
  }

  // A group with more items than threads.  Its elements are read once for the scale, and once more to be cast.
  static __device__ __noinline__ void run_long(const kvbm_part& p, const kvbm_part& s, const Bases& at, const Bases& scales,
                                               uint32_t group, uint32_t lane, uint32_t mask, float given) {
    const uint32_t width = p.tile[0].n, items = p.tile[1].n;
    const Place place = Nest::template find<kQuantises>(p, s, at, scales, group);
    float factor;
    if constexpr (kComputes) {
      uint32_t largest = 0;
      for (uint32_t i = lane; i < items; i += width) {
        Codes<FROM> codes;
        uint64_t src = 0, dst = 0;
        Nest::step_item(p, i, src, dst);
        load_item(p, place.src + src, codes);
        largest = largest_finite(codes, largest);
      }
      factor = put_scale(s, Nest::largest_in_group(largest, width, mask), lane == 0 ? place.scale : nullptr, given);
    } else {
      factor = stored_factor(s, place.scale, given);
    }
    for (uint32_t i = lane; i < items; i += width) {
      Codes<FROM> codes;
      uint64_t src = 0, dst = 0;
      Nest::step_item(p, i, src, dst);
      load_item(p, place.src + src, codes);
      store_item(p, place.dst + dst, cast(codes, factor));
    }
  }
#else
  static void run_host(const kvbm_args* a, uint32_t, uint32_t first, uint32_t last, int) {
    const DefaultArithmetic arithmetic;
    run_jobs(*a, first, last);
  }
  // Not inlined: no arithmetic moves out of the life of `arithmetic`.
  __attribute__((noinline)) static void run_jobs(const kvbm_args& a, uint32_t first, uint32_t last) {
    static const HostRuns<FROM, TO> runs = host_runs<FROM, TO>();
    const kvbm_part &p = a.part[0], &s = a.part[a.num_parts - 1];
    const uint64_t run = uint64_t{p.inner[0].extent.n} * ITEM;
    const auto for_runs = [&](auto turn) {  // the contiguous runs of a group
      for (uint32_t j = 0; j < p.inner[2].extent.n; ++j)
        for (uint32_t i = 0; i < p.inner[1].extent.n; ++i)
          turn(i * p.inner[1].src + j * p.inner[2].src, i * p.inner[1].dst + j * p.inner[2].dst);
    };
    Nest::template for_groups<kQuantises>(a, first, last, [&](const Place& at, float given) {
      float factor;
      if constexpr (kComputes) {
        uint32_t largest = 0;
        for_runs([&](int64_t src, int64_t) { largest = larger(largest, runs.largest(at.src + src, run)); });
        factor = put_scale(s, largest, at.scale, given);
      } else {
        factor = stored_factor(s, at.scale, given);
      }
      for_runs([&](int64_t src, int64_t dst) { runs.cast(at.src + src, at.dst + dst, run, factor); });
    });
  }
  static constexpr decltype(&run_host) host() { return run_host; }
#endif
};

// Any formats, and elements at any strides, one or two (PAIR: two share a byte on one side) at a time.
template <int OUTER, int INNER, bool QUANTISES, int PAIR>
struct CastAny : CastNest<OUTER, INNER> {
  using Nest = CastNest<OUTER, INNER>;
  using Place = typename Nest::Place;
  using Nest::kThreads;

  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) { return Nest::prepare(a, sms, PAIR * 3, grid); }

  struct Formats {
    uint32_t from, to, scale;
  };
  static KVBM_INLINE Formats formats_of(const kvbm_part& p) { return {p.formats & 15, p.formats >> 4 & 15, p.formats >> 8}; }

  // Code i of an item in memory.
  static KVBM_INLINE uint32_t code_of(const kvbm_part& p, uint32_t format, const char* from, int i) {
    const uint32_t bits = bits_of_format(format);
    if (PAIR == 2 && bits == 4) return Nest::load_code(8, from, 0) >> 4 * i & 15;
    return Nest::load_code(bits, from + uint64_t(i) * p.element_step, p.narrow);
  }
  static KVBM_INLINE uint32_t largest_of_item(const kvbm_part& p, const Formats& of, const Place& at, uint32_t item,
                                              uint32_t most) {
    uint64_t src = 0, dst = 0;
    Nest::step_item(p, item, src, dst);
    for (int i = 0; i < PAIR; ++i) {
      const uint32_t size = bits_of(value_in(of.from, code_of(p, of.from, at.src + src, i))) & ~kSign;
      most = Nest::larger(most, size < kInfinity ? size : 0);
    }
    return most;
  }
  static KVBM_INLINE void cast_item(const kvbm_part& p, const Formats& of, const Place& at, uint32_t item, float factor) {
    uint64_t src = 0, dst = 0;
    Nest::step_item(p, item, src, dst);
    uint32_t pair = 0;
    for (int i = 0; i < PAIR; ++i) {
      const uint32_t code = round_in(of.to, value_in(of.from, code_of(p, of.from, at.src + src, i)) * factor);
      if (PAIR == 2 && of.to == kE2m1)
        pair |= code << 4 * i;
      else
        Nest::store_code(bits_of_format(of.to), at.dst + dst + uint64_t(i) * p.element_step, code, p.narrow);
    }
    if (PAIR == 2 && of.to == kE2m1) store(at.dst + dst, uint8_t(pair));
  }
  static KVBM_INLINE float factor_in(const Formats& of, uint32_t code, float given) {
    return of.scale == kE4m3 ? E4m3::value(code) * given : value_in(of.scale, code);
  }
  static KVBM_INLINE float put_scale(const kvbm_part& s, const Formats& of, uint32_t largest, char* scale, float given) {
    const uint32_t code = scale_in(of.scale, largest, range_of_format(of.to), given);
    if (scale) Nest::store_code(bits_of_format(of.scale), scale, code, s.narrow);
    return 1.0f / factor_in(of, code, given);
  }
  static KVBM_INLINE float stored_factor(const kvbm_part& s, const Formats& of, const char* scale, float given) {
    if (of.scale == kNone) return QUANTISES ? 1.0f / given : given;
    return factor_in(of, Nest::load_code(bits_of_format(of.scale), scale, s.narrow), given);
  }

#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, char*) {
    __shared__ typename Nest::Found found[2];
    const kvbm_part &p = a.part[0], &s = a.part[a.num_parts - 1];
    uint32_t chunk = blockIdx.x;
    const uint32_t tile = take(chunk, p.tiles);
    if (!Nest::find_chunk(a, chunk, found)) return;
    const Formats of = formats_of(p);
    const uint32_t width = p.tile[0].n, items = p.tile[1].n, lane = threadIdx.x % width, mask = Nest::mask_of(width);
    const uint32_t last = min((tile + 1) * p.tile_words, p.words);
    for (uint32_t group = tile * p.tile_words + threadIdx.x / width; group < last; group += kThreads / width) {
      const Place at = Nest::template find<QUANTISES>(p, s, found[0].at, found[1].at, group);
      const float given = Nest::given_scale(a, p, chunk, group);
      float factor;
      if (QUANTISES && of.scale != kNone) {
        uint32_t largest = 0;
        for (uint32_t i = lane; i < items; i += width) largest = largest_of_item(p, of, at, i, largest);
        factor = put_scale(s, of, Nest::largest_in_group(largest, width, mask), lane == 0 ? at.scale : nullptr, given);
      } else {
        factor = stored_factor(s, of, at.scale, given);
      }
      for (uint32_t i = lane; i < items; i += width) cast_item(p, of, at, i, factor);
    }
  }
#else
  static void run_host(const kvbm_args* a, uint32_t, uint32_t first, uint32_t last, int) {
    const DefaultArithmetic arithmetic;
    run_jobs(*a, first, last);
  }
  __attribute__((noinline)) static void run_jobs(const kvbm_args& a, uint32_t first, uint32_t last) {
    const kvbm_part &p = a.part[0], &s = a.part[a.num_parts - 1];
    const Formats of = formats_of(p);
    const uint32_t items = p.tile[1].n;
    Nest::template for_groups<QUANTISES>(a, first, last, [&](const Place& at, float given) {
      float factor;
      if (QUANTISES && of.scale != kNone) {
        uint32_t largest = 0;
        for (uint32_t i = 0; i < items; ++i) largest = largest_of_item(p, of, at, i, largest);
        factor = put_scale(s, of, largest, at.scale, given);
      } else {
        factor = stored_factor(s, of, at.scale, given);
      }
      for (uint32_t i = 0; i < items; ++i) cast_item(p, of, at, i, factor);
    });
  }
  static constexpr decltype(&run_host) host() { return run_host; }
#endif
};

}  // namespace kvbm

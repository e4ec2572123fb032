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
  static constexpr uint32_t kTeams = 1, kThreads = kRowThreads, kMinCtas = 10;
  
  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    if (!prepare_cast({OUTER, INNER, 0, 0, kThreads, kTeams}, *a, sms, ITEM * (FROM::kBits + TO::kBits) / 8)) return KVBM_TOO_LARGE;
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

  // The codes of an item.  `p.element_step`: bytes from element to element of an item whose elements are not contiguous.
  template <class F>
  static KVBM_INLINE void load_item(const kvbm_part& p, const char* from, uint32_t (&code)[ITEM]) {
    if constexpr (ITEM == 8) {
      constexpr int kBytes = F::kBits < 16 ? F::kBits : 16;
      KVBM_UNROLL
      for (int w = 0; w < F::kBits / kBytes; ++w) {
        Word<kBytes> v;
        load(v, from + w * kBytes);
        unpack<F::kBits, kBytes>(v, code + w * (8 * kBytes / F::kBits));
      }
    } else if constexpr (F::kBits == 4) {
      uint8_t v;
      load(v, from);
      code[0] = v & 15;
      code[1] = v >> 4;
    } else {
      KVBM_UNROLL
      for (int i = 0; i < ITEM; ++i) code[i] = load_code<F::kBits / 8>(from + uint64_t(i) * p.element_step, p.bytewise);
    }
  }
  template <class F>
  static KVBM_INLINE void store_item(const kvbm_part& p, char* to, const uint32_t (&code)[ITEM]) {
    if constexpr (ITEM == 8) {
      constexpr int kBytes = F::kBits < 16 ? F::kBits : 16;
      KVBM_UNROLL
      for (int w = 0; w < F::kBits / kBytes; ++w) {
        Word<kBytes> v;
        pack<F::kBits, kBytes>(v, code + w * (8 * kBytes / F::kBits));
        store(to + w * kBytes, v);
      }
    } else if constexpr (F::kBits == 4) {
      store(to, uint8_t(code[0] | code[1] << 4));
    } else {
      KVBM_UNROLL
      for (int i = 0; i < ITEM; ++i) store_code<F::kBits / 8>(to + uint64_t(i) * p.element_step, code[i], p.bytewise);
    }
  }

  template <int BITS, int BYTES, class W>
  static KVBM_INLINE void unpack(const W& word, uint32_t* code) {
    constexpr int kEach = 32 / BITS;
    KVBM_UNROLL
    for (int i = 0; i < BYTES / 4; ++i) {
      uint32_t x;
      if constexpr (BYTES == 4)
        x = word;
      else
        x = word.x[i];
      KVBM_UNROLL
      for (int k = 0; k < kEach; ++k) code[i * kEach + k] = BITS == 32 ? x : x >> (k * BITS % 32) & ((1u << BITS % 32) - 1);
    }
  }
  template <int BITS, int BYTES, class W>
  static KVBM_INLINE void pack(W& word, const uint32_t* code) {
    constexpr int kEach = 32 / BITS;
    KVBM_UNROLL
    for (int i = 0; i < BYTES / 4; ++i) {
      uint32_t x = 0;
      KVBM_UNROLL
      for (int k = 0; k < kEach; ++k) x |= code[i * kEach + k] << (k * BITS % 32);
      if constexpr (BYTES == 4)
        word = x;
      else
        word.x[i] = x;
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

  // The larger of `most` and the finite |x| of an item, as bits.
  static KVBM_INLINE uint32_t largest_of(const uint32_t (&code)[ITEM], uint32_t most) {
    KVBM_UNROLL
    for (int i = 0; i < ITEM; ++i) {
      const uint32_t size = bits_of(FROM::value(code[i])) & ~kSign, finite = size < kInfinity ? size : 0;
      most = finite > most ? finite : most;
    }
    return most;
  }
  static KVBM_INLINE void cast(uint32_t (&code)[ITEM], float factor) {
    KVBM_UNROLL
    for (int i = 0; i < ITEM; ++i) code[i] = TO::round(FROM::value(code[i]) * factor);
  }
  static KVBM_INLINE void cast_item(const kvbm_part& p, const char* from, char* to, float factor) {
    uint32_t code[ITEM];
    load_item<FROM>(p, from, code);
    cast(code, factor);
    store_item<TO>(p, to, code);
  }

  // The factor of a group that is read; `s` is the part of the scales.
  static KVBM_INLINE float stored_factor(const kvbm_part& p, const kvbm_part& s, const char* scale) {
    if constexpr (kHasScales)
      return factor_of<SCALE>(load_code<SCALE::kBits / 8>(scale, s.bytewise), p.given_scale);
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
    const uint32_t last = min((tile + 1) * p.tile_words, p.words);
    for (uint32_t group = tile * p.tile_words + threadIdx.x / width; group < last; group += kThreads / width) {
      uint64_t src = 0, dst = 0, scale_src = 0, scale_dst = 0;
      step<kGroup, INNER - kGroup>(p, group, src, dst);
      const char* const from = found[0].at.src + src;
      char* const to = found[0].at.dst + dst;
      if constexpr (kHasScales) step<kGroup, INNER - kGroup>(s, group, scale_src, scale_dst);
      if constexpr (!kQuantises || !kHasScales) {
        const float factor = stored_factor(p, s, found[1].at.src + scale_src);
        for (uint32_t i = lane; i < items; i += width) {
          uint64_t x = 0, q = 0;
          step_item(p, i, x, q);
          cast_item(p, from + x, to + q, factor);
        }
      } else {
        uint32_t code[ITEM];  // of the thread's last item; most groups have one item per thread
        uint64_t x = 0, q = 0;
        uint32_t largest = 0, i = lane;
        for (; i < items; i += width) {
          x = q = 0;
          step_item(p, i, x, q);
          load_item<FROM>(p, from + x, code);
          largest = largest_of(code, largest);
        }
        for (uint32_t other = width / 2; other; other /= 2) {
          const uint32_t theirs = __shfl_xor_sync(mask, largest, other);
          largest = theirs > largest ? theirs : largest;
        }
        const uint32_t scale = Scale<SCALE, TO>::of(largest, p.given_scale);
        if (lane == 0) store_code<SCALE::kBits / 8>(found[1].at.dst + scale_dst, scale, s.bytewise);
        const float factor = 1.0f / factor_of<SCALE>(scale, p.given_scale);
        if (i == lane) continue;  // a thread without an item
        cast(code, factor);
        store_item<TO>(p, to + q, code);
        for (i -= 2 * width; i < items; i -= width) {  // below 0 it is above all items
          x = q = 0;
          step_item(p, i, x, q);
          cast_item(p, from + x, to + q, factor);
        }
      }
    }
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
        uint64_t src = 0, dst = 0, scale_src = 0, scale_dst = 0;
        step<kGroup, INNER - kGroup>(p, group, src, dst);
        if constexpr (kHasScales) step<kGroup, INNER - kGroup>(s, group, scale_src, scale_dst);
        float factor;
        if constexpr (kQuantises && kHasScales) {
          uint32_t largest = 0;
          for (uint32_t i = 0; i < items; ++i) {
            uint64_t x = src, q = dst;
            step_item(p, i, x, q);
            uint32_t code[ITEM];
            load_item<FROM>(p, at.src + x, code);
            largest = largest_of(code, largest);
          }
          const uint32_t scale = Scale<SCALE, TO>::of(largest, p.given_scale);
          store_code<SCALE::kBits / 8>(scales.dst + scale_dst, scale, s.bytewise);
          factor = 1.0f / factor_of<SCALE>(scale, p.given_scale);
        } else {
          factor = stored_factor(p, s, scales.src + scale_src);
        }
        for (uint32_t i = 0; i < items; ++i) {
          uint64_t x = src, q = dst;
          step_item(p, i, x, q);
          cast_item(p, at.src + x, at.dst + q, factor);
        }
      }
    }
  }
  static constexpr decltype(&run_host) host() { return run_host; }
#endif
};

}  // namespace kvbm

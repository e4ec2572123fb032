// planes.cuh: kernels that copy all planes of a block (such as data and scales) in one launch, one plane a part.
//
//   Record<OUTER, INNER, SUMS>      each part is copied as by Rows, with a word of its own
//   Page<OUTER, INNER, GATHERS>     one side is staged in shared memory, because its rows are not whole words or sectors
#pragma once

#include "rows.cuh"

namespace kvbm {

// All planes of a page are copied before the next page, so that memory sectors which hold several planes are read once and
// written whole.  The word of a part is an argument: data may move in words of 16 bytes and scales in words of 4.
template <int OUTER, int INNER, bool SUMS = false>
struct Record {
  template <int WORD>
  using Plane = Rows<OUTER, INNER, WORD, kRowThreads, SUMS>;
  static constexpr uint32_t kTeams = 1, kThreads = kRowThreads, kMinCtas = Plane<16>::kMinCtas, kWords = Plane<16>::kWords;

  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    uint64_t ctas = 0, tiles = 0;
    uint32_t no_shared = 0;
    bool page_by_page = true;  // the parts have the same order of jobs, so they can be interleaved
    kvbm_part& first = a->part[0];
    for (uint32_t i = 0; i < a->num_parts; ++i) {
      kvbm_part& p = a->part[i];
      if (!prepare_rows({OUTER, INNER, 0, p.word, kThreads, kTeams, kWords}, *a, p, sms, no_shared, kThreads))
        return KVBM_TOO_LARGE;
      ctas += p.ctas;
      tiles += p.tiles.n;
      page_by_page = page_by_page && p.pairs_first == first.pairs_first && p.faster.n == first.faster.n &&
                     p.jobs / p.tiles.n == first.jobs / first.tiles.n;
    }
    if (ctas >= (1u << 31)) return KVBM_TOO_LARGE;
    first.tile[2] = kvbm_make_div(uint32_t(tiles));
    first.tile[3].n = page_by_page;
    grid->ctas = uint32_t(ctas);
    grid->threads_x = kThreads;
    grid->threads_y = 1;
    grid->shared_bytes = no_shared;
    return KVBM_OK;
  }

#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, char* shared) {
    uint32_t part = 0, cta = blockIdx.x;
    if (a.part[0].tile[3].n) {
      uint32_t page = cta, tile = take(page, a.part[0].tile[2]);
      for (; tile >= a.part[part].tiles.n; ++part) tile -= a.part[part].tiles.n;
      cta = page * a.part[part].tiles.n + tile;
    } else {
      for (; cta >= a.part[part].ctas; ++part) cta -= a.part[part].ctas;
    }
    const kvbm_part& p = a.part[part];
    if (p.word == 16)
      Plane<16>::run(a, p, cta, shared);
    else if (p.word == 8)
      Plane<8>::run(a, p, cta, shared);
    else if (p.word == 4)
      Plane<4>::run(a, p, cta, shared);
    else if (p.word == 2)
      Plane<2>::run(a, p, cta, shared);
    else
      Plane<1>::run(a, p, cta, shared);
  }
#else
  static void run_host(const kvbm_args* a, uint32_t part, uint32_t first, uint32_t last, int streaming) {
    const kvbm_part& p = a->part[part];
    switch (p.word) {
      case 16:
        return Plane<16>::host(*a, p, first, last, streaming != 0);
      case 8:
        return Plane<8>::host(*a, p, first, last, streaming != 0);
      case 4:
        return Plane<4>::host(*a, p, first, last, streaming != 0);
      case 2:
        return Plane<2>::host(*a, p, first, last, streaming != 0);
      default:
        return Plane<1>::host(*a, p, first, last, streaming != 0);
    }
  }
  static constexpr decltype(&run_host) host() { return run_host; }
#endif
};

// For rows of one side that are not whole words, such as records of 132 bytes, or scales of one byte.  That side is contiguous
// over all planes of a few tokens (a segment).  It is read, or written, in 16-byte words through shared memory, where the
// planes are separated, or put together.  The last inner mode of every part steps from one such segment of a page to the next.
// GATHERS: the source is staged; otherwise the destination is.
template <int OUTER, int INNER, bool GATHERS>
struct Page {
  static constexpr uint32_t kTeams = 1, kThreads = kTileThreads, kMinCtas = 16;
  static constexpr int kSegmentMode = KVBM_MAX_INNER - 1;
  static_assert(INNER <= kSegmentMode, "the last inner mode steps from segment to segment");

  static int prepare(kvbm_args* a, uint32_t, kvbm_grid* grid) {
    uint64_t shared = 0;
    for (uint32_t i = 0; i < a->num_parts; ++i) {
      kvbm_part& p = a->part[i];
      uint64_t chunks, items;
      if (!set_divisors(p, OUTER, INNER, 0, chunks, items)) return KVBM_TOO_LARGE;
      p.words = uint32_t(items);
      if (!set_jobs(*a, p, OUTER, chunks, p.inner[kSegmentMode].extent.n)) return KVBM_TOO_LARGE;
      p.ctas = p.jobs;
      shared += p.segment_bytes;
    }
    grid->ctas = a->part[0].ctas;  // all parts have the same number of segments
    grid->threads_x = kThreads;
    grid->threads_y = 1;
    grid->shared_bytes = uint32_t(shared);
    return KVBM_OK;
  }

#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, char* shared) {
    __shared__ struct {
      Bases at;
      bool copies;
    } found[KVBM_MAX_PARTS];
    if (threadIdx.x < a.num_parts) {
      const kvbm_part& p = a.part[threadIdx.x];
      uint32_t place = blockIdx.x;
      const uint32_t segment = take(place, p.tiles);
      Bases at;
      found[threadIdx.x].copies = locate<OUTER>(a, p, place, at);
      at.src += uint64_t(segment) * p.inner[kSegmentMode].src;
      at.dst += uint64_t(segment) * p.inner[kSegmentMode].dst;
      found[threadIdx.x].at = at;
    }
    __syncthreads();
    if (!found[0].copies) return;
    if constexpr (GATHERS) {
      for (uint32_t i = 0; i < a.num_parts; ++i)
        for (uint32_t w = threadIdx.x; w < a.part[i].segment_bytes / 16; w += kThreads)
          fetch<16>(shared + a.part[i].segment_offset + w * 16, found[i].at.src + w * 16);
      wait_for_fetches<0>();
      __syncthreads();
      for (uint32_t i = 0; i < a.num_parts; ++i) move(a.part[i], shared + a.part[i].segment_offset, found[i].at.dst);
    } else {
      // Asynchronous copies are issued first, and waited for after the parts that pass through registers.
      for (uint32_t i = 0; i < a.num_parts; ++i) fetch_items(a.part[i], shared + a.part[i].segment_offset, found[i].at.src);
      for (uint32_t i = 0; i < a.num_parts; ++i)
        if (!is_fetched(a.part[i])) move(a.part[i], shared + a.part[i].segment_offset, const_cast<char*>(found[i].at.src));
      wait_for_fetches<0>();
      __syncthreads();
      for (uint32_t i = 0; i < a.num_parts; ++i) {
        const Word16* words = reinterpret_cast<const Word16*>(shared + a.part[i].segment_offset);
        KVBM_UNROLL_4
        for (uint32_t w = threadIdx.x; w < a.part[i].segment_bytes / 16; w += kThreads)
          store(found[i].at.dst + w * 16, words[w]);
      }
    }
  }

  // Whether a part can use asynchronous copies: its items are whole words on both sides.
  static KVBM_INLINE bool is_fetched(const kvbm_part& p) { return p.word == p.item && p.word >= 4; }

  static __device__ __forceinline__ void fetch_items(const kvbm_part& p, char* staged, const char* direct) {
    if (!is_fetched(p)) return;
    KVBM_UNROLL_4
    for (uint32_t index = threadIdx.x; index < p.words; index += kThreads) {
      uint64_t src = 0, dst = 0;
      step<0, INNER>(p, index, src, dst);
      if (p.word == 16)
        fetch<16>(staged + dst, direct + src);
      else if (p.word == 8)
        fetch<8>(staged + dst, direct + src);
      else
        fetch<4>(staged + dst, direct + src);
    }
  }

  static __device__ __forceinline__ void move(const kvbm_part& p, char* staged, char* direct) {
    if (GATHERS && p.word == 16)
      items<16, 16>(p, staged, direct);
    else if (p.item == 16)
      p.word >= 4 ? items<16, 4>(p, staged, direct) : items<16, 1>(p, staged, direct);
    else if (p.item == 8)
      p.word >= 4 ? items<8, 4>(p, staged, direct) : items<8, 1>(p, staged, direct);
    else if (p.item == 4)
      p.word >= 4 ? items<4, 4>(p, staged, direct) : items<4, 1>(p, staged, direct);
    else if (p.item == 2)
      items<2, 1>(p, staged, direct);
    else
      items<1, 1>(p, staged, direct);
  }

  // Moves the items of a part between shared memory (WORD bytes at a time, `word_stride` bytes from word to word) and memory
  // (whole items).
  template <int ITEM, int WORD>
  static __device__ __forceinline__ void items(const kvbm_part& p, char* staged, char* direct) {
    constexpr uint32_t kInFlight = GATHERS ? 2 : 4;  // reads of shared memory take less time than reads of memory
    const uint32_t word_stride = p.word_stride;
    for (uint32_t first = threadIdx.x; first < p.words; first += kThreads * kInFlight) {
      Word<ITEM> v[kInFlight];
      uint32_t inside[kInFlight];
      KVBM_UNROLL
      for (uint32_t u = 0; u < kInFlight; ++u) {
        const uint32_t index = first + u * kThreads;
        uint64_t src = 0, dst = 0;
        step<0, INNER>(p, index, src, dst);
        inside[u] = uint32_t(GATHERS ? src : dst);
        if (index >= p.words) continue;
        if constexpr (GATHERS) {
          pick<WORD>(v[u], staged + inside[u], word_stride);
          store(direct + dst, v[u]);
        } else {
          load(v[u], direct + src);
        }
      }
      if constexpr (!GATHERS) {
        KVBM_UNROLL
        for (uint32_t u = 0; u < kInFlight; ++u)
          if (first + u * kThreads < p.words) put<WORD>(staged + inside[u], v[u], word_stride);
      }
    }
  }

  // Reads an item from shared memory, and writes it there.
  template <int WORD, class ITEM>
  static __device__ __forceinline__ void pick(ITEM& v, const char* from, uint32_t word_stride) {
    if constexpr (WORD == sizeof(ITEM)) {
      v = *reinterpret_cast<const ITEM*>(from);
    } else if constexpr (sizeof(ITEM) > 4) {
      KVBM_UNROLL
      for (uint32_t k = 0; k < sizeof(ITEM) / 4; ++k) pick<WORD>(v.x[k], from + 4 / WORD * k * word_stride, word_stride);
    } else {
      v = 0;
      KVBM_UNROLL
      for (uint32_t k = 0; k < sizeof(ITEM); ++k) v |= ITEM(uint32_t(uint8_t(from[k * word_stride])) << 8 * k);
    }
  }
  template <int WORD, class ITEM>
  static __device__ __forceinline__ void put(char* to, const ITEM& v, uint32_t word_stride) {
    if constexpr (WORD == sizeof(ITEM)) {
      *reinterpret_cast<ITEM*>(to) = v;
    } else if constexpr (sizeof(ITEM) > 4) {
      KVBM_UNROLL
      for (uint32_t k = 0; k < sizeof(ITEM) / 4; ++k) put<WORD>(to + 4 / WORD * k * word_stride, v.x[k], word_stride);
    } else {
      KVBM_UNROLL
      for (uint32_t k = 0; k < sizeof(ITEM); ++k) to[k * word_stride] = char(v >> 8 * k);
    }
  }
#else
  // The host has caches, so it copies the planes as rows.
  static constexpr decltype(kvbm_kernel::host) host() { return nullptr; }
#endif
};

}  // namespace kvbm

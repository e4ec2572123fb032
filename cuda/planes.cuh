// planes.cuh: the planes of a block in one launch.
//
//   Record<OUTER, INNER, SUMS>      rows of several parts, each with a word of its own; digested as they pass
//   Page<OUTER, INNER, GATHERS>     the same by way of shared memory, where one side's rows are no whole words or sectors
#pragma once

#include "rows.cuh"

namespace kvbm {

// Of a page all planes are copied before the next page's: what they have in common,
// sectors and lines of memory, is then read once and written whole.  A part's word is an argument: data moves in words of
// 16 bytes, and a scale of 4 beside it.
template <int OUTER, int INNER, bool SUMS = false>
struct Record {
  template <int WORD>
  using Plane = Rows<OUTER, INNER, WORD, kRowThreads, 1, SUMS>;
  static constexpr uint32_t kTeams = 1, kThreads = kRowThreads, kMinCtas = Plane<16>::kMinCtas, kWords = Plane<16>::kWords;

  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    uint64_t ctas = 0, tiles = 0;
    uint32_t none = 0;  // of shared memory
    bool together = true;
    kvbm_part& first = a->part[0];
    for (uint32_t i = 0; i < a->num_parts; ++i) {
      kvbm_part& p = a->part[i];
      if (!prepare_rows({OUTER, INNER, 0, p.word, kThreads, kTeams, kWords}, *a, p, sms, none, kThreads)) return KVBM_TOO_LARGE;
      ctas += p.ctas;
      tiles += p.tiles.n;
      together = together && p.pairs_first == first.pairs_first && p.faster.n == first.faster.n &&
                 p.jobs / p.tiles.n == first.jobs / first.tiles.n;
    }
    if (ctas >= (1u << 31)) return KVBM_TOO_LARGE;
    first.tile[2] = kvbm_make_div(uint32_t(tiles));
    first.tile[3].n = together;
    grid->ctas = uint32_t(ctas);
    grid->threads_x = kThreads;
    grid->threads_y = 1;
    grid->shared_bytes = none;
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
    const bool around = streaming != 0;
    switch (p.word) {
      case 16:
        return Plane<16>::host(*a, p, first, last, around);
      case 8:
        return Plane<8>::host(*a, p, first, last, around);
      case 4:
        return Plane<4>::host(*a, p, first, last, around);
      case 2:
        return Plane<2>::host(*a, p, first, last, around);
      default:
        return Plane<1>::host(*a, p, first, last, around);
    }
  }
  static constexpr decltype(&run_host) host() { return run_host; }
#endif
};

// The same where the rows of one side are no whole words: records of 132 bytes, scales byte by byte.  That side is dense over
// all planes of a few tokens, so it is read, or written, as one stream of 16-byte words by way of shared memory, and the
// planes are taken apart there.  The last inner mode of every part steps from one such piece of a page to the next.
template <int OUTER, int INNER, bool GATHERS>
struct Page {
  // A source is staged without registers, a destination by way of some.
  static constexpr uint32_t kTeams = 1, kThreads = kTileThreads, kMinCtas = 16;
  static constexpr int kPiece = KVBM_MAX_INNER - 1;
  static_assert(INNER <= kPiece, "the last inner mode steps through a page");

  static int prepare(kvbm_args* a, uint32_t, kvbm_grid* grid) {
    uint64_t shared = 0;
    for (uint32_t i = 0; i < a->num_parts; ++i) {
      kvbm_part& p = a->part[i];
      uint64_t chunks, items;
      if (!set_divisors(p, OUTER, INNER, 0, chunks, items)) return KVBM_TOO_LARGE;
      p.words = uint32_t(items);
      if (!set_jobs(*a, p, OUTER, chunks, p.inner[kPiece].extent.n)) return KVBM_TOO_LARGE;
      p.ctas = p.jobs;
      shared += p.held;
    }
    grid->ctas = a->part[0].ctas;  // all parts have the same pieces
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
      const uint32_t piece = take(place, p.tiles);
      Bases at;
      found[threadIdx.x].copies = locate<OUTER>(a, p, place, at);
      at.src += uint64_t(piece) * p.inner[kPiece].src;
      at.dst += uint64_t(piece) * p.inner[kPiece].dst;
      found[threadIdx.x].at = at;
    }
    __syncthreads();
    if (!found[0].copies) return;
    if constexpr (GATHERS) {
      for (uint32_t i = 0; i < a.num_parts; ++i)
        for (uint32_t w = threadIdx.x; w < a.part[i].held / 16; w += kThreads)
          fetch<16>(shared + a.part[i].place + w * 16, found[i].at.src + w * 16);
      arrive();
      for (uint32_t i = 0; i < a.num_parts; ++i) move(a.part[i], shared + a.part[i].place, found[i].at.dst);
    } else {
      // What needs no register is asked for first, and waited for with the rest.
      for (uint32_t i = 0; i < a.num_parts; ++i) fetch_items(a.part[i], shared + a.part[i].place, found[i].at.src);
      for (uint32_t i = 0; i < a.num_parts; ++i)
        if (!is_fetched(a.part[i])) move(a.part[i], shared + a.part[i].place, const_cast<char*>(found[i].at.src));
      arrive();
      for (uint32_t i = 0; i < a.num_parts; ++i) {
        const Word16* words = reinterpret_cast<const Word16*>(shared + a.part[i].place);
        KVBM_UNROLL_4
        for (uint32_t w = threadIdx.x; w < a.part[i].held / 16; w += kThreads) store(found[i].at.dst + w * 16, words[w]);
      }
    }
  }

  // From memory into shared memory, by way of no register.
  template <int BYTES>
  static __device__ __forceinline__ void fetch(char* shared, const char* src) {
    const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
    if constexpr (BYTES == 16)
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(src), "l"(kept_last())
                   : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(src), "n"(BYTES) : "memory");
  }
  static __device__ __forceinline__ void arrive() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
  }

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

  // Items of a part between shared memory (words of WORD bytes there, `apart`) and memory (whole).
  template <int ITEM, int WORD>
  static __device__ __forceinline__ void items(const kvbm_part& p, char* staged, char* direct) {
    constexpr uint32_t kAtOnce = GATHERS ? 2 : 4;  // shared memory answers at once
    const uint32_t apart = p.apart;
    for (uint32_t first = threadIdx.x; first < p.words; first += kThreads * kAtOnce) {
      Word<ITEM> v[kAtOnce];
      uint32_t inside[kAtOnce];
      KVBM_UNROLL
      for (uint32_t u = 0; u < kAtOnce; ++u) {
        const uint32_t index = first + u * kThreads;
        uint64_t src = 0, dst = 0;
        step<0, INNER>(p, index, src, dst);
        inside[u] = uint32_t(GATHERS ? src : dst);
        if (index >= p.words) continue;
        if constexpr (GATHERS) {
          pick<WORD>(v[u], staged + inside[u], apart);
          store(direct + dst, v[u]);
        } else {
          load(v[u], direct + src);
        }
      }
      if constexpr (!GATHERS) {
        KVBM_UNROLL
        for (uint32_t u = 0; u < kAtOnce; ++u)
          if (first + u * kThreads < p.words) put<WORD>(staged + inside[u], v[u], apart);
      }
    }
  }

  // An item from and to shared memory.
  template <int WORD, class ITEM>
  static __device__ __forceinline__ void pick(ITEM& v, const char* from, uint32_t apart) {
    if constexpr (WORD == sizeof(ITEM)) {
      v = *reinterpret_cast<const ITEM*>(from);
    } else if constexpr (sizeof(ITEM) > 4) {
      KVBM_UNROLL
      for (uint32_t k = 0; k < sizeof(ITEM) / 4; ++k) pick<WORD>(v.x[k], from + 4 / WORD * k * apart, apart);
    } else {
      v = 0;
      KVBM_UNROLL
      for (uint32_t k = 0; k < sizeof(ITEM); ++k) v |= ITEM(uint32_t(uint8_t(from[k * apart])) << 8 * k);
    }
  }
  template <int WORD, class ITEM>
  static __device__ __forceinline__ void put(char* to, const ITEM& v, uint32_t apart) {
    if constexpr (WORD == sizeof(ITEM)) {
      *reinterpret_cast<ITEM*>(to) = v;
    } else if constexpr (sizeof(ITEM) > 4) {
      KVBM_UNROLL
      for (uint32_t k = 0; k < sizeof(ITEM) / 4; ++k) put<WORD>(to + 4 / WORD * k * apart, v.x[k], apart);
    } else {
      KVBM_UNROLL
      for (uint32_t k = 0; k < sizeof(ITEM); ++k) to[k * apart] = char(v >> 8 * k);
    }
  }
#else
  // The host has caches for this: there the planes are rows.
  static constexpr decltype(kvbm_kernel::host) host() { return nullptr; }
#endif
};

}  // namespace kvbm

// few.cuh: FewRows copies rows as Rows does, on few multiprocessors, and digests them if the launch has keys.
#pragma once

#include "cells.cuh"
#include "prepare.cuh"

namespace kvbm {

// OUTER, INNER: number of modes.  WORD: bytes of a load and store.
//
// tile[0] threads of a warp are a row, and each row loops over jobs of its own: tiles of a chunk.  In a turn each thread of a row
// has one word, and kFewUnroll turns are a step.  The loads of the next kFewAhead steps are in flight: asynchronous copies into
// shared memory, which take no registers, so one CTA keeps as much in flight as a multiprocessor full of CTAs.  A multiprocessor
// also has few instructions.  So the threads of a row compute the addresses of as many segments at a time, and exchange them.  A
// segment is tile[1] consecutive words of a run: as many as divide it, at most a row.
template <int OUTER, int INNER, int WORD>
struct FewRows {
  static constexpr uint32_t kTeams = kFewWarps, kThreads = 32 * kFewWarps, kMinCtas = 1;

  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    if (!prepare_few({OUTER, INNER, 0, WORD, kThreads, kTeams}, *a, a->part[0], sms)) return KVBM_TOO_LARGE;
    grid->ctas = a->part[0].ctas;
    grid->threads_x = kThreads;
    grid->threads_y = 1;
    grid->shared_bytes = kFewAhead * kFewUnroll * kThreads * WORD;
    return KVBM_OK;
  }

#ifdef __CUDACC__
  // The words of a row on one side, step by step.
  template <bool STORES>
  struct Walk {
    const kvbm_args& a;
    const kvbm_part& p;
    uint32_t width, lane, rows;
    uint32_t job;            // of the next step
    uint32_t turn = 0;       // of the job
    uint32_t first = 0;      // word of the job's tile
    uint32_t words = 0;      // of the tile; 0: there is no such job, or its pair is skipped
    uint64_t base = 0;       // address of its chunk
    uint64_t chunk_key = 0;  // scaled
    uint64_t offset = 0;     // of the segment that this thread has computed
    uint32_t segment_key = 0;

    __device__ __forceinline__ Walk(const kvbm_args& a, const kvbm_part& p)
        : a(a),
          p(p),
          width(p.tile[0].n),
          lane(threadIdx.x & (width - 1)),
          rows(gridDim.x * quotient(kThreads, p.tile[0])),
          job(blockIdx.x * quotient(kThreads, p.tile[0]) + quotient(threadIdx.x, p.tile[0])) {}

    __device__ __forceinline__ bool digests() const { return STORES && a.inline_mask & KVBM_DIGEST; }
    __device__ __forceinline__ bool is_at_job() const { return turn == 0; }

    __device__ __forceinline__ void open_job() {
      uint32_t place = job;
      first = take(place, p.tiles) * p.tile_words;
      words = 0;
      Bases at = {};
      if (job < p.jobs && locate<OUTER>(a, p, place, at)) words = min(p.tile_words, p.words - first);
      base = STORES ? reinterpret_cast<uint64_t>(at.dst) : reinterpret_cast<uint64_t>(at.src);
      if (digests() && job < p.jobs) chunk_key = scaled_key(first_key<OUTER>(a, p, place));
    }

    // Offset and key of a word of the tile.
    __device__ __forceinline__ void find(uint32_t word) {
      uint64_t src = 0, dst = 0;
      segment_key = 0;
      step_key<0, INNER>(p, first + word, src, dst, segment_key);
      offset = STORES ? dst : src;
    }

    // Calls `move(u, address, key)` for each word of this thread in the next step.  All threads of a warp must call it.
    template <class MOVE>
    __device__ __forceinline__ void step(const MOVE& move) {
      if (is_at_job()) open_job();
      const uint32_t segment = p.tile[1].n, log = p.tile[1].shift, word = turn * width + lane;
      if (segment >= kFewUnroll) {
        const uint32_t inside = turn & (segment - 1);  // of as many turns as the computed segments last for
        if (inside == 0) find(turn * width + lane * segment);
        const uint32_t from = (threadIdx.x % 32 - lane) + ((inside * width + lane) >> log), rest = lane & (segment - 1);
        const uint64_t start = base + rest * WORD;
        const uint32_t start_key = rest * p.inner[0].key;
        KVBM_UNROLL
        for (uint32_t u = 0; u < kFewUnroll; ++u) {
          const uint32_t lane_of = from + u * (width >> log);
          const uint64_t address = start + __shfl_sync(~0u, (unsigned long long)offset, lane_of);
          const uint32_t key = digests() ? start_key + __shfl_sync(~0u, segment_key, lane_of) : 0;
          if (word + u * width < words) move(u, address, key);
        }
      } else {
        KVBM_NO_UNROLL
        for (uint32_t u = 0; u < kFewUnroll; ++u) {
          find(word + u * width);
          if (word + u * width < words) move(u, base + offset, segment_key);
        }
      }
      turn += kFewUnroll;
      if (turn == p.tile[2].n) {
        turn = 0;
        job += rows;
      }
    }
  };

  static __device__ __forceinline__ void run(const kvbm_args& a, char* shared) {
    const kvbm_part& p = a.part[0];
    Walk<false> loads(a, p);
    Walk<true> stores(a, p);
    Word<WORD>* const mine = reinterpret_cast<Word<WORD>*>(shared) + threadIdx.x;
    const uint32_t steps = (p.jobs + loads.rows - 1) / loads.rows * (p.tile[2].n / kFewUnroll);
    uint32_t in = 0, out = 0;  // steps in the ring
    uint64_t sum = 0;
    for (uint32_t step = 0; step < steps + kFewAhead - 1; ++step) {
      if (step < steps) {
        loads.step([&](uint32_t u, uint64_t src, uint32_t) {
          fetch<WORD>(reinterpret_cast<char*>(mine + (in * kFewUnroll + u) * kThreads), reinterpret_cast<const char*>(src));
        });
        in = in + 1 == kFewAhead ? 0 : in + 1;
      }
      close_fetches();
      if (step < kFewAhead - 1) continue;
      wait_for_fetches<kFewAhead - 1>();
      const uint32_t job = stores.job;
      stores.step([&](uint32_t u, uint64_t dst, uint32_t key) {
        const Word<WORD> v = mine[(out * kFewUnroll + u) * kThreads];
        store(reinterpret_cast<char*>(dst), v);
        if (stores.digests()) sum += digest_of(stores.chunk_key, key, as_cell(v));
      });
      out = out + 1 == kFewAhead ? 0 : out + 1;
      if (stores.digests() && stores.is_at_job()) {
        sum = sum_of_row(stores.width, sum);
        if (stores.lane == 0 && job < p.jobs) put_digest(a, p, job, sum);
        sum = 0;
      }
    }
  }
#else
  static constexpr void (*host())(const kvbm_args*, uint32_t, uint32_t, uint32_t, int) { return nullptr; }
#endif
};

}  // namespace kvbm

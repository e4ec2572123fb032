// rows.cuh: Rows copies whole runs of bytes: each thread loads several words, and then stores them.
#pragma once

#include "address.cuh"
#include "cells.cuh"
#include "prepare.cuh"

namespace kvbm {

// OUTER, INNER: number of modes.  WORD: bytes of a load and store.  SUMS: each word is a cell, and is digested too.
template <int OUTER, int INNER, int WORD, int THREADS = kRowThreads, bool SUMS = false>
struct Rows {
  static constexpr uint32_t kThreads = THREADS, kTeams = 1;
  static constexpr uint32_t kMinCtas =
      (SUMS ? 1024 : 2048) / THREADS;  // as many warps as a multiprocessor can hold; with digests as its registers allow
  static constexpr uint32_t kLoads = SUMS ? 4 : kRowLoads;

  // Words per thread and tile.  With digests more words share the row's lookup and the sum at its end.
  static constexpr uint32_t kWords = SUMS ? 2 * kLoads : kLoads;

  static bool prepare(const kvbm_args& a, kvbm_part& p, uint32_t sms, uint32_t& shared_bytes) {
    return prepare_rows({OUTER, INNER, 0, WORD, THREADS, kTeams, kWords}, a, p, sms, shared_bytes);
  }

#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, const kvbm_part& p, uint32_t cta, char*) {
    // The first thread of each row reads ids and tables, while the others compute the offsets of their words.
    __shared__ struct {
      Bases at;
      bool copies;
    } found[kThreads / kMinWidth];
    __shared__ uint64_t keys[SUMS ? kThreads / kMinWidth : 1];
    const uint32_t width = p.tile[0].n;
    uint32_t row = threadIdx.x;
    const uint32_t lane = take(row, p.tile[0]);
    auto& here = found[row];
    const uint32_t job = cta * p.tile[1].n + row;
    uint32_t chunk = job;
    const uint32_t tile = take(chunk, p.tiles);
    if (lane == 0) {
      Bases at;  // a local: a store to shared memory between the two table loads would delay the second
      here.copies = job < p.jobs && locate<OUTER>(a, p, chunk, at);
      here.at = at;
      if constexpr (SUMS) keys[row] = job < p.jobs ? scaled_key(first_key<OUTER>(a, p, chunk)) : 0;
    }
    const uint32_t first = tile * p.tile_words + lane, last = min(tile * p.tile_words + p.tile_words, p.words);
    uint64_t from[kLoads], to[kLoads];
    uint32_t key[kLoads];
    find(p, first, width, from, to, key);
    __syncthreads();
    const bool copies = here.copies;
    const Bases at = here.at;
    if (!SUMS && !copies) return;
    Word<WORD> v[kLoads];
    if constexpr (!SUMS) {
      move(at, first, last, width, from, to, v);
    } else {
      uint64_t sum = 0;
      for (uint32_t i = first; copies && i < last;) {
        move(at, i, last, width, from, to, v);
        KVBM_UNROLL
        for (uint32_t u = 0; u < kLoads; ++u)
          if (i + u * width < last) sum += digest_of(keys[row], key[u], as_cell(v[u]));
        i += kLoads * width;
        if (i < last) find(p, i, width, from, to, key);
      }
      add_to_digest<kThreads>(a, p, job, lane, width, sum);
    }
  }

  // Offsets, and keys, of a thread's words from the first ones of the chunk.
  static __device__ __forceinline__ void find(const kvbm_part& p, uint32_t index, uint32_t width, uint64_t (&from)[kLoads],
                                              uint64_t (&to)[kLoads], uint32_t (&key)[kLoads]) {
    KVBM_UNROLL
    for (uint32_t u = 0; u < kLoads; ++u) {
      from[u] = to[u] = key[u] = 0;
      if constexpr (SUMS)
        step_key<0, INNER>(p, index + u * width, from[u], to[u], key[u]);
      else
        step<0, INNER>(p, index + u * width, from[u], to[u]);
    }
  }

  static __device__ __forceinline__ void move(const Bases& at, uint32_t index, uint32_t last, uint32_t width,
                                              const uint64_t (&from)[kLoads], const uint64_t (&to)[kLoads],
                                              Word<WORD> (&v)[kLoads]) {
    KVBM_UNROLL
    for (uint32_t u = 0; u < kLoads; ++u)
      if (index + u * width < last) load(v[u], at.src + from[u]);
    KVBM_UNROLL
    for (uint32_t u = 0; u < kLoads; ++u)
      if (index + u * width < last) store(at.dst + to[u], v[u]);
  }
#else
  // Iterates over the pieces of a range of jobs.  A piece is part of one run, at most kPieceBytes, or several whole short runs
  // at equal distances.  A row is all runs along the second inner mode.
  struct Walk {
    const kvbm_args& a;
    const kvbm_part& p;
    uint32_t job, last_job;
    uint64_t next_run = 0, end = 0;                                    // runs of the current job that are not in a row yet
    Bases at = {};                                                     // the job's chunk
    Bases row = {};                                                    // the next run of the row
    uint64_t runs = 0;                                                 // number of runs left in the row
    Bases rest = {};                                                   // the next piece of the run
    uint64_t left = 0;                                                 // bytes left in the run
    Bases piece = {};                                                  // the current piece, or the first of its runs
    uint64_t piece_runs = 1;                                           // number of runs in it
    uint32_t pair = 0;                                                 // of the current job
    uint64_t chunk_key = 0, row_key = 0, rest_key = 0, piece_key = 0;  // keys of the first cells of these, with SUMS

    uint64_t run_words() const { return INNER == 1 ? p.tile_words : p.inner[0].extent.n; }

    // Goes to the next row; false behind the last one.
    bool open() {
      while (next_run == end) {
        if (job == last_job) return false;
        uint32_t place = job++;
        const uint32_t tile = take(place, p.tiles);
        if (!locate<OUTER>(a, p, place, at)) continue;
        if constexpr (SUMS) {
          chunk_key = first_key<OUTER>(a, p, place);
          pair = pair_of(p, place);
        }
        const uint64_t first = uint64_t{tile} * p.tile_words;
        const uint64_t last = first + p.tile_words < p.words ? first + p.tile_words : p.words;
        if constexpr (INNER == 1) {
          row = {at.src + first * WORD, at.dst + first * WORD};
          row_key = chunk_key + first * p.inner[0].key;
          left = (last - first) * WORD;
          runs = 1;
          return true;
        }
        next_run = first / run_words();
        end = last / run_words();
      }
      if constexpr (INNER > 1) {
        uint32_t slow = uint32_t(next_run);
        const uint32_t c = take(slow, p.inner[1].extent);
        uint64_t src = 0, dst = 0;
        step<2, INNER - 2>(p, slow, src, dst);
        row = {at.src + src + int64_t(c) * p.inner[1].src, at.dst + dst + int64_t(c) * p.inner[1].dst};
        if constexpr (SUMS) {
          uint32_t key = c * p.inner[1].key;
          step_key<2, INNER - 2>(p, slow, src, dst, key);
          row_key = chunk_key + key;
        }
        runs = p.inner[1].extent.n - c < end - next_run ? p.inner[1].extent.n - c : end - next_run;
        next_run += runs;
      }
      return true;
    }

    // Makes the next `count` runs of the row the current piece.
    void take_runs(uint64_t count) {
      piece = row;
      piece_key = row_key;
      piece_runs = count;
      runs -= count;
      if constexpr (INNER > 1) {
        row = {row.src + int64_t(count) * p.inner[1].src, row.dst + int64_t(count) * p.inner[1].dst};
        if constexpr (SUMS) row_key += count * p.inner[1].key;
      }
    }

    // Goes to the next piece and returns the bytes of each of its runs; 0 behind the last one.
    uint64_t next() {
      if (left == 0) {
        if (runs == 0 && !open()) return 0;
        const uint64_t run = run_words() * WORD, most = kPieceBytes / run;
        take_runs(INNER == 1 || most < 2 ? 1 : most < runs ? most : runs);
        if (INNER > 1 && most > 1) return run;
        rest = piece;
        rest_key = piece_key;
        if constexpr (INNER > 1) left = run;
      }
      const uint64_t bytes = left < kPieceBytes ? left : kPieceBytes;
      piece = rest;
      rest = {rest.src + bytes, rest.dst + bytes};
      if constexpr (SUMS) {
        piece_key = rest_key;
        rest_key += bytes / WORD * p.inner[0].key;
      }
      left -= bytes;
      return bytes;
    }
  };

  // The digest so far of the pair that is being copied.
  struct Sum {
    const kvbm_args& a;
    uint32_t pair = 0;
    uint64_t value = 0;
    void put() {
      if constexpr (SUMS) add_to_digest(a, pair, value);
    }
  };

  // Copies the current piece of the walk; with SUMS also digests it.
  static void move(const Walk& walk, uint64_t bytes, bool streaming, Sum& sum) {
    const kvbm_inner &cells = walk.p.inner[0], &runs = walk.p.inner[1];
    const Bases& at = walk.piece;
    if constexpr (!SUMS) {
      for (uint64_t i = 0; i < walk.piece_runs; ++i)
        copy_run<WORD>(at.dst + int64_t(i) * runs.dst, at.src + int64_t(i) * runs.src, bytes, streaming);
    } else {
      if (walk.pair != sum.pair) {
        sum.put();
        sum.pair = walk.pair;
        sum.value = 0;
      }
      sum.value += digest_cells<WORD>(
          {at.src, at.dst, bytes / WORD, walk.piece_runs, runs.src, runs.dst, walk.piece_key, cells.key, runs.key, streaming});
    }
  }

  static uint64_t prefetch_next(Walk& walk) {
    const uint64_t bytes = walk.next();
    for (uint64_t i = 0; bytes && i < walk.piece_runs; ++i)
      prefetch(walk.piece.src + int64_t(i) * walk.p.inner[1].src, uint32_t(bytes));
    return bytes * walk.piece_runs;
  }

  static void host(const kvbm_args& a, const kvbm_part& p, uint32_t first_job, uint32_t last_job, bool streaming) {
    Walk here = {a, p, first_job, last_job}, soon = here;
    Sum sum = {a};
    const uint64_t run = here.run_words() * WORD;
    if (INNER > 1 && run < kCacheLine) {  // prefetching would cost more than it saves
      while (here.open()) {
        here.take_runs(here.runs);
        move(here, run, streaming, sum);
      }
    } else {
      const uint64_t most = streaming ? kPrefetchBytes : kPrefetchCached;
      for (uint64_t ahead = 0, bytes = 1; bytes && ahead < most; ahead += bytes) bytes = prefetch_next(soon);
      while (const uint64_t bytes = here.next()) {
        prefetch_next(soon);
        move(here, bytes, streaming, sum);
      }
    }
    sum.put();
    fence_streaming_stores(streaming);
  }
#endif
};

}  // namespace kvbm

// tile.cuh: Tile<OUTER, REST, ELEMENT, WORD>: single elements move; a tile of the two axes along which source and destination go on
// is turned in shared memory (and in registers where a word holds several elements).
#pragma once

#include "address.cuh"
#include "cells.cuh"
#include "prepare.cuh"
#include "square.cuh"
#include "team.cuh"

namespace kvbm {

// inner[0] = A, along which the source goes on; inner[1] = B, along which the destination does; then REST other modes.
// A sub-block is SIDE x SIDE elements, SIDE words on either side.  A tile holds `rest` indices of the other modes times
// tile[1] sub-blocks along B times tile[0] along A.
// SUMS: the words of one side are cells, along A (`cell_words` 1) or along B (0), and are digested on their way in, or out.
template <int OUTER, int REST, int ELEMENT, int WORD, int TEAMS = 1, bool SUMS = false>
struct Tile {
  using Mine = Team<kTileThreads, TEAMS>;
  static constexpr uint32_t kThreads = kTileThreads, kTeams = TEAMS;
  static constexpr uint32_t kMinCtas = ELEMENT == 1 ? 8 : 12;  // more warps are worth more than their registers
  static constexpr uint32_t kSide = WORD / ELEMENT;
  static constexpr uint32_t kWords = words_of_tile(WORD);          // a tile's words
  static constexpr uint32_t kLoads = kSide >= 8 ? 1 : 8 / kSide;   // sub-blocks a thread has in flight
  static constexpr bool kCanTurnBehind = kSide > 1 && TEAMS == 1;  // teams lack the registers

  static bool prepare(const kvbm_args& a, kvbm_part& p, uint32_t sms, uint32_t& shared_bytes) {
    return prepare_tile({OUTER, REST, ELEMENT, WORD, kTileThreads, TEAMS}, a, p, sms, shared_bytes);
  }

  static KVBM_INLINE uint32_t pitch(const kvbm_part& p) { return pitch_of_tile(p, kSide); }
  static KVBM_INLINE uint32_t team_bytes(const kvbm_part& p) { return bytes_of_tile(p, kSide, WORD); }

  struct Corner {
    uint32_t rest, rests, a, b, na, nb;  // first index and count along the rest, A and B (in sub-blocks)
  };

  static KVBM_INLINE Corner corner(const kvbm_part& p, uint32_t tile) {
    Corner at;
    at.a = take(tile, p.tile[2]) * p.tile[0].n;
    at.b = take(tile, p.tile[3]) * p.tile[1].n;
    at.rest = tile * p.tile_words;
    const uint32_t left_a = quotient_side(p.inner[0].extent.n) - at.a, left_b = quotient_side(p.inner[1].extent.n) - at.b;
    at.rests = p.words - at.rest < p.tile_words ? p.words - at.rest : p.tile_words;
    at.na = left_a < p.tile[0].n ? left_a : p.tile[0].n;
    at.nb = left_b < p.tile[1].n ? left_b : p.tile[1].n;
    return at;
  }
  static KVBM_INLINE uint32_t quotient_side(uint32_t extent) { return extent / kSide; }  // a shift

  // What a tile's words sum up to.  Along the side of the cells a key is a word's, along the other an element's.
  struct Sum {
    uint64_t first, value;  // scaled
    KVBM_INLINE void add(uint32_t key, const Word<WORD>& v) { value += digest_of(first, key, cell_of(v)); }
  };
  static KVBM_INLINE void step_tile(const kvbm_part& p, uint32_t rest, uint32_t a, uint32_t b, uint64_t& src, uint64_t& dst,
                                    uint32_t& key) {
    if constexpr (SUMS) {
      key = a * p.inner[0].key + b * p.inner[1].key;
      step_key<2, REST>(p, rest, src, dst, key);
    } else {
      step<2, REST>(p, rest, src, dst);
    }
  }

#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, const kvbm_part& p, uint32_t cta, char* shared) {
    Bases at;
    uint32_t place = cta;
    const uint32_t tile = take(place, p.tiles);
    const bool copies = locate<OUTER>(a, p, place, at);
    if (TEAMS == 1 && !SUMS && !copies) return;  // the same for the whole CTA
    Corner from = corner(p, tile);
    if (!copies) from.rests = 0;  // a team passes its barriers whatever happens to the ids meanwhile
    Word<WORD>* words = reinterpret_cast<Word<WORD>*>(shared);
    Sum sum = {SUMS ? scaled_key(first_key<OUTER>(a, p, place)) : 0, 0};
    if (kCanTurnBehind && p.turns_behind)
      turn_behind(p, at, from, words, sum);
    else
      turn_ahead(p, at, from, words, sum);
    Mine::sync_turn();
    if constexpr (SUMS) put_sum<kThreads>(a, p, cta, threadIdx.x, kThreads, sum.value);
  }

  // Squares are turned on the way into shared memory: neighbouring threads read along A, and write along B whatever B's length.
  static __device__ __forceinline__ void turn_ahead(const kvbm_part& p, const Bases& at, const Corner& from, Word<WORD>* words,
                                                    Sum& sum) {
    const uint32_t ta = p.tile[0].n, tb = p.tile[1].n, turned = pitch(p);
    const uint32_t loads = from.rests * ta * tb;
    for (uint32_t i = Mine::thread(); i < loads; i += kThreads * kLoads) {
      Word<WORD> v[kLoads][kSide];
      uint32_t slot[kLoads], key[kLoads];
      KVBM_UNROLL
      for (uint32_t u = 0; u < kLoads; ++u) {
        uint32_t c = i + u * kThreads;
        const bool inside = c < loads;
        const uint32_t ia = take(c, p.tile[0]), ib = take(c, p.tile[1]);
        slot[u] = (inside && ia < from.na && ib < from.nb) ? (c * ta + ia) * turned + ib : ~0u;
        if (slot[u] == ~0u) continue;
        uint64_t src = 0, dst = 0;
        step_tile(p, from.rest + c, from.a + ia, (from.b + ib) * kSide, src, dst, key[u]);
        src += (from.a + ia) * WORD + uint64_t((from.b + ib) * kSide) * uint32_t(p.inner[1].src);
        KVBM_UNROLL
        for (uint32_t j = 0; j < kSide; ++j) load(v[u][j], at.src + src + j * p.inner[1].src);
      }
      if (SUMS && p.cell_words) {
        KVBM_UNROLL
        for (uint32_t u = 0; u < kLoads; ++u) {
          if (slot[u] == ~0u) continue;
          KVBM_UNROLL
          for (uint32_t j = 0; j < kSide; ++j) sum.add(key[u] + j * p.inner[1].key, v[u][j]);
        }
      }
      KVBM_UNROLL
      for (uint32_t u = 0; u < kLoads; ++u) {
        if (slot[u] == ~0u) continue;
        if constexpr (kSide > 1) Square<ELEMENT>::turn(v[u]);
        KVBM_UNROLL
        for (uint32_t j = 0; j < kSide; ++j) words[slot[u] + j * tb] = v[u][j];
      }
    }
    Mine::sync();

    const uint32_t stores = from.rests * ta * kSide * tb;
    for (uint32_t i = Mine::thread(); i < stores; i += kThreads) {
      uint32_t c = i;
      const uint32_t ib = take(c, p.tile[1]);
      const uint32_t j = c % kSide;
      c /= kSide;
      const uint32_t ia = take(c, p.tile[0]);
      if (ia >= from.na || ib >= from.nb) continue;
      uint64_t src = 0, dst = 0;
      uint32_t key;
      step_tile(p, from.rest + c, (from.a + ia) * kSide + j, from.b + ib, src, dst, key);
      dst += uint64_t((from.a + ia) * kSide + j) * uint32_t(p.inner[0].dst) + (from.b + ib) * WORD;
      const Word<WORD> v = words[(c * ta + ia) * turned + j * tb + ib];
      store(at.dst + dst, v);
      if (SUMS && !p.cell_words) sum.add(key, v);
    }
  }

  // Squares are turned on the way out of it, where A is the shorter side: neighbouring threads read along A and then on to
  // the next rows, whose words would otherwise be read a sector here and a sector there, and write along B.
  static __device__ __forceinline__ void turn_behind(const kvbm_part& p, const Bases& at, const Corner& from, Word<WORD>* words,
                                                     Sum& sum) {
    constexpr uint32_t kAtOnce = 8;  // words a thread has in flight
    const uint32_t ta = p.tile[0].n, tb = p.tile[1].n, turned = pitch(p);
    const uint32_t loads = from.rests * tb * kSide * ta;
    for (uint32_t i = Mine::thread(); i < loads; i += kThreads * kAtOnce) {
      Word<WORD> v[kAtOnce];
      uint32_t slot[kAtOnce], key[kAtOnce];
      KVBM_UNROLL
      for (uint32_t u = 0; u < kAtOnce; ++u) {
        uint32_t c = i + u * kThreads;
        const bool inside = c < loads;
        const uint32_t ia = take(c, p.tile[0]), j = c % kSide;
        c /= kSide;
        const uint32_t ib = take(c, p.tile[1]);
        slot[u] = (inside && ia < from.na && ib < from.nb) ? (c * tb + ib) * turned + j * ta + ia : ~0u;
        if (slot[u] == ~0u) continue;
        uint64_t src = 0, dst = 0;
        step_tile(p, from.rest + c, from.a + ia, (from.b + ib) * kSide + j, src, dst, key[u]);
        src += (from.a + ia) * WORD + uint64_t((from.b + ib) * kSide + j) * uint32_t(p.inner[1].src);
        load(v[u], at.src + src);
      }
      if (SUMS && p.cell_words) {
        KVBM_UNROLL
        for (uint32_t u = 0; u < kAtOnce; ++u)
          if (slot[u] != ~0u) sum.add(key[u], v[u]);
      }
      KVBM_UNROLL
      for (uint32_t u = 0; u < kAtOnce; ++u)
        if (slot[u] != ~0u) words[slot[u]] = v[u];
    }
    Mine::sync();

    const uint32_t squares = from.rests * ta * tb;
    for (uint32_t i = Mine::thread(); i < squares; i += kThreads) {
      uint32_t c = i;
      const uint32_t ib = take(c, p.tile[1]), ia = take(c, p.tile[0]);
      if (ia >= from.na || ib >= from.nb) continue;
      Word<WORD> v[kSide];
      KVBM_UNROLL
      for (uint32_t j = 0; j < kSide; ++j) v[j] = words[(c * tb + ib) * turned + j * ta + ia];
      if constexpr (kSide > 1) Square<ELEMENT>::turn(v);
      uint64_t src = 0, dst = 0;
      uint32_t key;
      step_tile(p, from.rest + c, (from.a + ia) * kSide, from.b + ib, src, dst, key);
      dst += uint64_t((from.a + ia) * kSide) * uint32_t(p.inner[0].dst) + (from.b + ib) * WORD;
      KVBM_UNROLL
      for (uint32_t j = 0; j < kSide; ++j) {
        store(at.dst + dst + j * p.inner[0].dst, v[j]);
        if (SUMS && !p.cell_words) sum.add(key + j * p.inner[0].key, v[j]);
      }
    }
  }
#else
  struct Place {
    Bases at;
    Corner from;
    bool skipped;
    uint32_t pair;
    uint64_t key;
    const char* source(const kvbm_part& p) const {
      return at.src + int64_t(from.a) * WORD + int64_t(from.b * kSide) * p.inner[1].src;
    }
  };
  static Place place(const kvbm_args& a, const kvbm_part& p, uint32_t job) {
    Place found = {};
    const uint32_t tile = take(job, p.tiles);
    found.skipped = !locate<OUTER>(a, p, job, found.at);
    if (found.skipped) return found;
    found.from = corner(p, tile);
    if constexpr (SUMS) {
      found.key = first_key<OUTER>(a, p, job);
      found.pair = pair_of(p, job);
    }
    return found;
  }

  // The same two phases, the tile in this thread's cache.  While a tile is read, the next job's is prefetched.
  static void host(const kvbm_args& a, const kvbm_part& p, uint32_t first_job, uint32_t last_job, bool streaming) {
    alignas(64) Word<WORD> words[kHostTimes * kWords];
    const kvbm_inner &along_a = p.inner[0], &along_b = p.inner[1];
    Place next = place(a, p, first_job);
    for (uint32_t job = first_job; job < last_job; ++job) {
      const Place now = next;
      if (job + 1 < last_job) next = place(a, p, job + 1);
      if (now.skipped) continue;
      const Corner& from = now.from;
      uint64_t sum = 0;
      // Between two allocations, perhaps: a distance of addresses, not of pointers.
      const uint64_t ahead =
          next.skipped ? 0 : reinterpret_cast<uint64_t>(next.source(p)) - reinterpret_cast<uint64_t>(now.source(p));
      for (uint32_t c = 0; c < from.rests; ++c) {
        uint64_t src = 0, dst = 0;
        uint32_t key = 0;
        const bool cells_in = kSide == 1 || p.cell_words;  // cells are the words that are read, or else those that are written
        step_tile(p, from.rest + c, from.a * (cells_in ? 1 : kSide), from.b * (cells_in ? kSide : 1), src, dst, key);
        const char* in = now.source(p) + src;
        char* out = now.at.dst + dst + int64_t(from.a * kSide) * along_a.dst + int64_t(from.b) * WORD;
        if (SUMS && cells_in)
          sum += digest_cells<WORD>(
              {in, nullptr, from.na, from.nb * kSide, along_b.src, 0, now.key + key, along_a.key, along_b.key, 0});
        if constexpr (kSide == 1) {
          // Whole words need no turning: straight to the destination, in its order.  The prefetches of a line's words are
          // spread over its rows, or they would all be waited for at once.
          for (uint32_t ia = 0; ia < from.na; ++ia, in += WORD, out += along_a.dst) {
            for (uint32_t ib = 0; ib < from.nb; ++ib) {
              const char* word = in + int64_t(ib) * along_b.src;
              if ((ia + ib) * WORD % kLine == 0) __builtin_prefetch(word + ahead);
              copy_run<WORD>(out + ib * WORD, word, WORD, streaming);
            }
          }
          continue;
        }
        for (uint32_t ib = 0; ib < from.nb; ++ib) {
          const char* row = in + int64_t(ib * kSide) * along_b.src;
          for (uint32_t ia = 0; ia < from.na; ++ia, row += WORD) {
            if (ia * WORD % kLine == 0)
              for (uint32_t j = 0; j < kSide; ++j) __builtin_prefetch(row + j * along_b.src + ahead);
            Word<WORD> v[kSide];
            for (uint32_t j = 0; j < kSide; ++j) load(v[j], row + j * along_b.src);
            if constexpr (kSide > 1) Square<ELEMENT>::turn(v);
            for (uint32_t j = 0; j < kSide; ++j) words[(ia * kSide + j) * from.nb + ib] = v[j];
          }
        }
        uint64_t bytes = uint64_t{from.nb} * WORD;
        uint32_t rows = from.na * kSide;
        if (SUMS && !cells_in)
          sum += digest_cells<WORD>({reinterpret_cast<const char*>(words), nullptr, from.nb, rows, int64_t(bytes), 0,
                                     now.key + key, along_b.key, along_a.key, 0});
        if (along_a.dst == int64_t(bytes)) {  // the turned tile is one run
          bytes *= rows;
          rows = 1;
        }
        for (uint32_t r = 0; r < rows; ++r)
          copy_run<WORD>(out + int64_t(r) * along_a.dst, reinterpret_cast<const char*>(words) + r * bytes, bytes, streaming);
      }
      if constexpr (SUMS) put_sum(a, now.pair, sum);
    }
    fence_streaming_stores(streaming);
  }
#endif
};

}  // namespace kvbm

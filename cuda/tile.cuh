// tile.cuh: Tile transposes: it copies where source and destination are contiguous along different axes.
#pragma once

#include "address.cuh"
#include "cells.cuh"
#include "prepare.cuh"
#include "square.cuh"
#include "team.cuh"

namespace kvbm {

// inner[0] is A: the source is contiguous along it.  inner[1] is B: the destination is contiguous along it.  REST other modes
// follow. A square has kSide x kSide elements, which are kSide words on each side.  A tile has tile_words indices of the other
// modes times tile[1] squares along B times tile[0] squares along A.  It passes through shared memory, and each square is
// transposed in registers (if a word holds several elements), after its loads or before its stores. SUMS: the words of one side
// are cells, along A (`cell_words` 1: what is loaded) or along B (0: what is stored), and are digested.
template <int OUTER, int REST, int ELEMENT, int WORD, int TEAMS = 1, bool SUMS = false>
struct Tile {
  using Mine = Team<kTileThreads, TEAMS>;
  static constexpr uint32_t kThreads = kTileThreads, kTeams = TEAMS;
  static constexpr uint32_t kMinCtas = ELEMENT == 1 ? 8 : 12;  // more warps are faster than more registers for each
  static constexpr uint32_t kSide = WORD / ELEMENT;
  static constexpr uint32_t kWords = words_of_tile(WORD);                // a tile's words
  static constexpr uint32_t kLoads = kSide >= 8 ? 1 : 8 / kSide;         // squares a thread has in flight
  static constexpr bool kCanTransposeOnStore = kSide > 1 && TEAMS == 1;  // teams have too few registers for it

  static bool prepare(const kvbm_args& a, kvbm_part& p, uint32_t sms, uint32_t& shared_bytes) {
    return prepare_tile({OUTER, REST, ELEMENT, WORD, kTileThreads, TEAMS}, a, p, sms, shared_bytes);
  }

  static KVBM_INLINE uint32_t pitch(const kvbm_part& p) { return pitch_of_tile(p, kSide); }
  static KVBM_INLINE uint32_t team_bytes(const kvbm_part& p) { return bytes_of_tile(p, kSide, WORD); }

  // First index and count of a tile: `rest` and `rests` along the other modes; a, b and na, nb along A and B, in squares.
  struct Corner {
    uint32_t rest, rests, a, b, na, nb;
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
  static KVBM_INLINE uint32_t quotient_side(uint32_t extent) { return extent / kSide; }  // compiles to a shift

  // The digest of a tile.  Along the axis of the cells a key belongs to a word, along the other axis to an element.
  struct Sum {
    uint64_t first, value;  // the scaled first key; the sum
    KVBM_INLINE void add(uint32_t key, const Word<WORD>& v) { value += digest_of(first, key, as_cell(v)); }
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
    if (TEAMS == 1 && !SUMS && !copies) return;  // all threads of the CTA return
    Corner from = corner(p, tile);
    if (!copies) from.rests = 0;  // do nothing, but reach all barriers
    Word<WORD>* words = reinterpret_cast<Word<WORD>*>(shared);
    Sum sum = {SUMS ? scaled_key(first_key<OUTER>(a, p, place)) : 0, 0};
    if (kCanTransposeOnStore && p.transposes_on_store)
      transpose_on_store(p, at, from, words, sum);
    else
      transpose_on_load(p, at, from, words, sum);
    Mine::sync_turn();
    if constexpr (SUMS) add_to_digest<kThreads>(a, p, cta, threadIdx.x, kThreads, sum.value);
  }

  // Transposes the squares between load and shared memory.  Neighbouring threads load along A and store along B.
  static __device__ __forceinline__ void transpose_on_load(const kvbm_part& p, const Bases& at, const Corner& from,
                                                           Word<WORD>* words, Sum& sum) {
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
        if constexpr (kSide > 1) Square<ELEMENT>::transpose(v[u]);
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

  // Transposes the squares between shared memory and store; for an A that is shorter than B.  Neighbouring threads load along A
  // and go on with the next rows, so that short rows of the source fill whole sectors.  They store along B.
  static __device__ __forceinline__ void transpose_on_store(const kvbm_part& p, const Bases& at, const Corner& from,
                                                            Word<WORD>* words, Sum& sum) {
    constexpr uint32_t kInFlight = 8;  // words a thread loads before it stores them
    const uint32_t ta = p.tile[0].n, tb = p.tile[1].n, turned = pitch(p);
    const uint32_t loads = from.rests * tb * kSide * ta;
    for (uint32_t i = Mine::thread(); i < loads; i += kThreads * kInFlight) {
      Word<WORD> v[kInFlight];
      uint32_t slot[kInFlight], key[kInFlight];
      KVBM_UNROLL
      for (uint32_t u = 0; u < kInFlight; ++u) {
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
        for (uint32_t u = 0; u < kInFlight; ++u)
          if (slot[u] != ~0u) sum.add(key[u], v[u]);
      }
      KVBM_UNROLL
      for (uint32_t u = 0; u < kInFlight; ++u)
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
      if constexpr (kSide > 1) Square<ELEMENT>::transpose(v);
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

  // The same two phases, with the tile on the stack.  While a tile is read, the tile of the next job is prefetched.
  static void host(const kvbm_args& a, const kvbm_part& p, uint32_t first_job, uint32_t last_job, bool streaming) {
    alignas(64) Word<WORD> words[kHostTileFactor * kWords];
    const kvbm_inner &along_a = p.inner[0], &along_b = p.inner[1];
    Place next = place(a, p, first_job);
    for (uint32_t job = first_job; job < last_job; ++job) {
      const Place now = next;
      if (job + 1 < last_job) next = place(a, p, job + 1);
      if (now.skipped) continue;
      const Corner& from = now.from;
      uint64_t sum = 0;
      // The two may lie in different allocations, so this subtracts addresses, not pointers.
      const uint64_t ahead =
          next.skipped ? 0 : reinterpret_cast<uint64_t>(next.source(p)) - reinterpret_cast<uint64_t>(now.source(p));
      for (uint32_t c = 0; c < from.rests; ++c) {
        uint64_t src = 0, dst = 0;
        uint32_t key = 0;
        const bool cells_in = kSide == 1 || p.cell_words;  // cells are the words that are loaded, else those that are stored
        step_tile(p, from.rest + c, from.a * (cells_in ? 1 : kSide), from.b * (cells_in ? kSide : 1), src, dst, key);
        const char* in = now.source(p) + src;
        char* out = now.at.dst + dst + int64_t(from.a * kSide) * along_a.dst + int64_t(from.b) * WORD;
        if (SUMS && cells_in)
          sum += digest_cells<WORD>(
              {in, nullptr, from.na, from.nb * kSide, along_b.src, 0, now.key + key, along_a.key, along_b.key, 0});
        if constexpr (kSide == 1) {
          // Whole words need no transposition: they go straight to the destination, in its order.  Each word prefetches one
          // line of the next tile, so that the prefetches are spread over the loop.
          for (uint32_t ia = 0; ia < from.na; ++ia, in += WORD, out += along_a.dst) {
            for (uint32_t ib = 0; ib < from.nb; ++ib) {
              const char* word = in + int64_t(ib) * along_b.src;
              if ((ia + ib) * WORD % kCacheLine == 0) __builtin_prefetch(word + ahead);
              copy_run<WORD>(out + ib * WORD, word, WORD, streaming);
            }
          }
          continue;
        }
        for (uint32_t ib = 0; ib < from.nb; ++ib) {
          const char* row = in + int64_t(ib * kSide) * along_b.src;
          for (uint32_t ia = 0; ia < from.na; ++ia, row += WORD) {
            if (ia * WORD % kCacheLine == 0)
              for (uint32_t j = 0; j < kSide; ++j) __builtin_prefetch(row + j * along_b.src + ahead);
            Word<WORD> v[kSide];
            for (uint32_t j = 0; j < kSide; ++j) load(v[j], row + j * along_b.src);
            if constexpr (kSide > 1) Square<ELEMENT>::transpose(v);
            for (uint32_t j = 0; j < kSide; ++j) words[(ia * kSide + j) * from.nb + ib] = v[j];
          }
        }
        uint64_t bytes = uint64_t{from.nb} * WORD;
        uint32_t rows = from.na * kSide;
        if (SUMS && !cells_in)
          sum += digest_cells<WORD>({reinterpret_cast<const char*>(words), nullptr, from.nb, rows, int64_t(bytes), 0,
                                     now.key + key, along_b.key, along_a.key, 0});
        if (along_a.dst == int64_t(bytes)) {  // the transposed tile is one run
          bytes *= rows;
          rows = 1;
        }
        for (uint32_t r = 0; r < rows; ++r)
          copy_run<WORD>(out + int64_t(r) * along_a.dst, reinterpret_cast<const char*>(words) + r * bytes, bytes, streaming);
      }
      if constexpr (SUMS) add_to_digest(a, now.pair, sum);
    }
    fence_streaming_stores(streaming);
  }
#endif
};

}  // namespace kvbm

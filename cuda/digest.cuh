// digest.cuh: Digest computes digests and copies nothing.
//
//   Digest<OUTER, INNER, WORD>            reads cells; their number of words and the steps between words are arguments
//   Digest<OUTER, INNER, 16, ELEMENT>     reads words that hold one element of each of several cells, and transposes them
#pragma once

#include "cells.cuh"
#include "prepare.cuh"
#include "square.cuh"

namespace kvbm {

// Byte offset of a word from the first word of its cell.
KVBM_INLINE uint64_t offset_in_cell(const kvbm_part& p, uint32_t word) {
  uint64_t offset = 0;
  KVBM_UNROLL
  for (uint32_t bit = 0; bit < 4; ++bit) offset += word >> bit & 1 ? uint64_t(p.cell[bit]) : 0;
  return offset;
}

// Loads the `cell_words` words of a cell.
template <int WORD>
KVBM_INLINE Word16 gather_cell(const kvbm_part& p, const char* at) {
  if constexpr (WORD == 16) {
    Word16 v;
    load(v, at);
    return v;
  } else {
    uint32_t x[4] = {0, 0, 0, 0};
    KVBM_UNROLL
    for (uint32_t j = 0; j < 16 / WORD; ++j) {
      if (j >= p.cell_words) break;
      Word<WORD> v;
      load(v, at + offset_in_cell(p, j));
      const Word16 whole = as_cell(v);
      x[j * WORD / 4] |= whole.x[0] << j * WORD % 4 * 8;
      if constexpr (WORD == 8) x[j * 2 + 1] = whole.x[1];
    }
    return {{x[0], x[1], x[2], x[3]}};
  }
}

// The inner modes count cells.  With ELEMENT they count squares: 16/ELEMENT words of 16 bytes that hold 16/ELEMENT cells with
// consecutive keys.  Then the first mode goes from square to square, and its key step is that of 16/ELEMENT cells.
template <int OUTER, int INNER, int WORD, int ELEMENT = 0>
struct Digest {
  static_assert(ELEMENT == 0 || WORD == 16, "elements are turned in words of 16 bytes");
  static constexpr uint32_t kSide = ELEMENT ? 16 / ELEMENT : 1;  // cells of a square
  static constexpr uint32_t kTeams = 1, kThreads = kRowThreads;
  static constexpr uint32_t kMinCtas = ELEMENT == 1 ? 3 : ELEMENT == 2 ? 7 : 10;  // a thread has a whole square in registers
  static constexpr uint32_t kLoads = ELEMENT ? 1 : 4;                             // cells, or squares, a thread has in flight
  static constexpr uint32_t kCells = 16 / kSide;  // cells, or squares, per thread and tile: they share one lookup

  static bool prepare(const kvbm_args& a, kvbm_part& p, uint32_t sms, uint32_t& shared_bytes) {
    // The order of a sum does not matter, so the host reads in the order of memory.
    if (sms == 0 && ELEMENT == 0) order_modes(&p, 1, 0, INNER, false);
    return prepare_rows({OUTER, INNER, 0, 16, kThreads, kTeams, kCells}, a, p, sms, shared_bytes);
  }

  static KVBM_INLINE uint32_t team_bytes(const kvbm_part&) { return 0; }

  static KVBM_INLINE uint64_t digest_square(const kvbm_part& p, const char* at, uint64_t scaled, uint32_t key) {
    Word16 v[kSide];
    KVBM_UNROLL
    for (uint32_t j = 0; j < kSide; ++j) load(v[j], at + offset_in_cell(p, j));
    if constexpr (ELEMENT != 0) Square<ELEMENT>::transpose(v);
    uint64_t sum = 0;
    KVBM_UNROLL
    for (uint32_t j = 0; j < kSide; ++j) sum += digest_of(scaled, key + j * (p.inner[0].key / kSide), v[j]);
    return sum;
  }

#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, const kvbm_part& p, uint32_t cta, char*) {
    __shared__ struct {
      const char* src;
      uint64_t key;
      bool reads;
    } found[kThreads / kMinWidth];
    const uint32_t width = p.tile[0].n;
    uint32_t row = threadIdx.x;
    const uint32_t lane = take(row, p.tile[0]);
    const uint32_t job = cta * p.tile[1].n + row;
    uint32_t place = job;
    const uint32_t tile = take(place, p.tiles);
    if (lane == 0) {
      Bases at;
      found[row].reads = job < p.jobs && locate<OUTER>(a, p, place, at);
      found[row].src = at.src;
      found[row].key = job < p.jobs ? scaled_key(first_key<OUTER>(a, p, place)) : 0;  // other jobs have no position
    }
    const uint32_t first = tile * p.tile_words + lane, last = min(tile * p.tile_words + p.tile_words, p.words);
    __syncthreads();
    uint64_t sum = 0;
    if (found[row].reads) {
      const char* src = found[row].src;
      const uint64_t base = found[row].key;
      for (uint32_t i = first; i < last; i += kLoads * width) {
        Word16 v[kLoads];
        uint32_t key[kLoads];
        KVBM_UNROLL
        for (uint32_t u = 0; u < kLoads; ++u) {
          uint64_t from = 0, none = 0;
          key[u] = 0;
          step_key<0, INNER>(p, i + u * width, from, none, key[u]);
          if constexpr (ELEMENT != 0)
            sum += digest_square(p, src + from, base, key[u]);
          else if (i + u * width < last)
            v[u] = gather_cell<WORD>(p, src + from);
        }
        if (ELEMENT) continue;
        KVBM_UNROLL
        for (uint32_t u = 0; u < kLoads; ++u)
          if (i + u * width < last) sum += digest_of(base, key[u], v[u]);
      }
    }
    add_to_digest<kThreads>(a, p, job, lane, width, sum);
  }
#else
  static constexpr uint32_t kGathered = 64;  // cells that are gathered at a time

  // Gathers cells at a stride of `cell_stride` bytes.  If the first words of the cells are adjacent, loads 16 bytes of several.
  static void gather_cells(const kvbm_part& p, const char* at, int64_t cell_stride, uint32_t count, Word16* cells) {
    constexpr uint32_t kSide = 16 / WORD;
    uint32_t i = 0;
    if constexpr (WORD < 16) {
      for (; cell_stride == WORD && i + kSide <= count; i += kSide) {
        for (uint32_t j = 0; j < kSide; ++j) {
          cells[i + j] = {};
          if (j < p.cell_words) load(cells[i + j], at + i * WORD + offset_in_cell(p, j));
        }
        Square<WORD>::transpose(reinterpret_cast<Word16(&)[kSide]>(cells[i]));
      }
    }
    for (; i < count; ++i) cells[i] = gather_cell<WORD>(p, at + int64_t(i) * cell_stride);
  }

  // Digests rows of cells that are not contiguous: the first mode's stride is the one from cell to cell.
  static uint64_t digest_gathered(const kvbm_part& p, const kvbm_cells& cells) {
    Word16 some[kGathered];
    uint64_t sum = 0;
    for (uint64_t row = 0; row < cells.rows; ++row) {
      for (uint64_t i = 0; i < cells.count; i += kGathered) {
        const uint64_t count = cells.count - i < kGathered ? cells.count - i : kGathered;
        gather_cells(p, cells.src + int64_t(row) * cells.src_row + int64_t(i) * p.inner[0].src, p.inner[0].src, uint32_t(count),
                     some);
        kvbm_cells whole = cells;
        whole.src = reinterpret_cast<const char*>(some);
        whole.count = count;
        whole.rows = 1;
        whole.key += row * cells.key_row + i * cells.key_step;
        sum += kvbm_digest_cells(&whole);
      }
    }
    return sum;
  }

  static void host(const kvbm_args& a, const kvbm_part& p, uint32_t first_job, uint32_t last_job, bool) {
    const kvbm_inner &run = p.inner[0], &rows = p.inner[INNER > 1 ? 1 : 0];
    for (uint32_t job = first_job; job < last_job; ++job) {
      uint32_t place = job;
      const uint32_t tile = take(place, p.tiles);
      Bases at;
      if (!locate<OUTER>(a, p, place, at)) continue;
      const uint64_t base = first_key<OUTER>(a, p, place);
      const uint32_t first = tile * p.tile_words, last = first + p.tile_words < p.words ? first + p.tile_words : p.words;
      uint64_t sum = 0;
      for (uint32_t index = first; ELEMENT && index < last; ++index) {
        uint64_t src = 0, none = 0;
        uint32_t key = 0;
        step_key<0, INNER>(p, index, src, none, key);
        sum += digest_square(p, at.src + src, scaled_key(base), key);
      }
      for (uint32_t index = first; !ELEMENT && index < last;) {  // one run, or all whole runs of a row
        uint64_t src = 0, none = 0;
        uint32_t step = 0, row = index;
        step_key<0, INNER>(p, index, src, none, step);
        kvbm_cells cells = {at.src + src, nullptr, last - index, 1, int64_t(rows.src), 0, base + step, run.key, rows.key, 0};
        if constexpr (INNER > 1) {
          take(row, run.extent);
          const uint32_t left = rows.extent.n - take(row, rows.extent), runs = (last - index) / run.extent.n;
          cells.count = run.extent.n;
          cells.rows = left < runs ? left : runs;
        }
        index += uint32_t(cells.count * cells.rows);
        sum += WORD == 16 && run.src == 16 ? kvbm_digest_cells(&cells) : digest_gathered(p, cells);
      }
      add_to_digest(a, pair_of(p, place), sum);
    }
  }
#endif
};

}  // namespace kvbm

// prepare.cuh: how a batch is cut into jobs, tiles and CTAs, for the templates and for kernels compiled at run time.
#pragma once

#include "words.cuh"

namespace kvbm {

// Small CTAs: what a CTA holds is what the last wave waits for (benchmarks/NOTES.md).
constexpr uint32_t kRowThreads = 128;
constexpr uint32_t kTileThreads = 64;
constexpr uint32_t kFewTeams = 8;        // named barriers 1 to 8; what they hold together fits the shared memory of every GPU
constexpr uint32_t kSharedBytes = 8192;  // payload of a tile; padding comes on top, half as much at most

inline uint32_t divide_up(uint64_t n, uint64_t by) { return uint32_t((n + by - 1) / by); }

// Extents become divisors; false where an index would not fit 31 bits, or an inner stride 32.
inline bool set_divisors(kvbm_part& p, int outer, int inner, int first_index_mode, uint64_t& chunks, uint64_t& words) {
  chunks = words = 1;
  for (int k = 0; k < outer; ++k) {
    p.outer[k].extent = kvbm_make_div(p.outer[k].extent.n);
    chunks *= p.outer[k].extent.n;
  }
  for (int k = 0; k < inner; ++k) {
    p.inner[k].extent = kvbm_make_div(p.inner[k].extent.n);
    if (k >= first_index_mode) words *= p.inner[k].extent.n;
    if (uint64_t(p.inner[k].src | p.inner[k].dst) >> 32) return false;
  }
  return chunks < (1u << 31) && words < (1u << 31);
}

// Whether a step leads farther on one side than to the next block: out of the block's own memory.
inline bool leads_away(int64_t step, int32_t table_step, int64_t id_step) {
  return table_step != 0 || (id_step != 0 && (step < 0 ? -step : step) > (id_step < 0 ? -id_step : id_step));
}

// Which goes faster, chunks or pairs, decides how many memory pages are touched at a time.  Where a chunk leads away from its
// block on both sides (layer by layer), all pairs of one chunk come first; else a block is whole on one side, and all
// chunks of one pair do.
inline bool set_jobs(const kvbm_args& a, kvbm_part& p, int outer, uint64_t chunks, uint64_t tiles) {
  const uint64_t pairs = a.num_pairs, jobs = pairs * chunks * tiles;
  if (tiles >= (1u << 31) || jobs >= (1u << 31)) return false;
  p.pairs_first = 0;
  for (int k = 0; k < outer; ++k) {
    const kvbm_outer& mode = p.outer[k];
    p.pairs_first |= mode.extent.n > 1 && leads_away(mode.src, mode.src_table, p.src_id_stride) &&
                     leads_away(mode.dst, mode.dst_table, p.dst_id_stride);
  }
  p.faster = kvbm_make_div(uint32_t(p.pairs_first ? pairs : chunks));
  p.tiles = kvbm_make_div(uint32_t(tiles));
  p.jobs = uint32_t(jobs);
  return true;
}

// The numbers that the templates below are made for: what preparing a batch needs to know of a kernel.  Kernels that were
// compiled at run time have no template on the host, and prepare with the same text.
struct Structure {
  int outer, inner;  // tiles: the modes besides A and B
  uint32_t element, word, threads, teams;
  uint32_t loads = 0;  // words a thread has in flight at most; 0: what copies have
};

constexpr uint32_t kMinWidth = 8;          // rows: threads a row at least
constexpr uint64_t kHostTile = 128 << 10;  // rows: bytes a host job moves at least
constexpr uint32_t kHostTimes = 2;         // tiles: a core's cache holds larger ones, and longer rows go to memory faster
constexpr uint32_t loads_of_rows(uint32_t teams) {
  return teams > 1 ? 4 : 2;
}  // words a thread has in flight; few CTAs need more each
constexpr uint32_t kMostLoads = 4;  // more than these are moved in turns
constexpr uint32_t words_of_tile(uint32_t word) { return kSharedBytes / word < 4096 ? kSharedBytes / word : 4096; }

// GPU: a row of `tile[0]` threads takes a tile of a chunk; where chunks are short, tile[1] rows share a CTA.
inline bool prepare_rows(const Structure& s, const kvbm_args& a, kvbm_part& p, uint32_t sms, uint32_t& shared_bytes,
                         uint32_t min_width = kMinWidth) {
  uint64_t chunks, words;
  if (!set_divisors(p, s.outer, s.inner, 0, chunks, words)) return false;
  shared_bytes = 0;
  p.words = uint32_t(words);
  if (sms == 0) {
    // Whole runs, so that the host copies run by run.
    const uint64_t run = s.inner == 1 ? 1 : p.inner[0].extent.n;
    p.tile_words = uint32_t(divide_up(divide_up(kHostTile, s.word), run) * run);
    return set_jobs(a, p, s.outer, chunks, divide_up(words, p.tile_words));
  }
  uint32_t loads = s.loads ? s.loads : loads_of_rows(s.teams), width = s.threads;
  while (width > min_width && width / 2 * loads >= words) width /= 2;
  // Small batches: more, smaller tiles, until every multiprocessor has some.  Those of several turns are worth it only where
  // there are many: the last ones are waited for.
  for (; loads > 1; loads /= 2) {
    const uint64_t busy = s.teams > 1 ? s.teams : loads > kMostLoads ? 12 : 4;  // pieces of work a multiprocessor should have
    if (a.num_pairs * chunks * divide_up(words, width * loads) * width >= busy * sms * s.threads) break;
  }
  const uint32_t tiles = divide_up(words, width * loads);
  p.tile_words = divide_up(words, uint64_t{tiles} * width) * width;  // tiles of one size
  p.tile[0] = kvbm_make_div(width);
  p.tile[1].n = s.threads / width;
  if (!set_jobs(a, p, s.outer, chunks, divide_up(words, p.tile_words))) return false;
  p.ctas = divide_up(p.jobs, s.threads / width);
  return true;
}

// Words in shared memory from one sub-block of `side` words to the next along A (turned ahead) or B (turned behind): odd, so
// that neither phase meets one bank twice.
KVBM_INLINE uint32_t pitch_of_tile(const kvbm_part& p, uint32_t side) { return side * p.tile[p.turns_behind ? 0 : 1].n | 1; }

// Shared memory that a team's tile takes.
KVBM_INLINE uint32_t bytes_of_tile(const kvbm_part& p, uint32_t side, uint32_t word) {
  return p.tile_words * p.tile[p.turns_behind ? 1 : 0].n * pitch_of_tile(p, side) * word;
}

inline bool prepare_tile(const Structure& s, const kvbm_args& a, kvbm_part& p, uint32_t sms, uint32_t& shared_bytes) {
  uint64_t chunks, rest;
  if (!set_divisors(p, s.outer, s.inner + 2, 2, chunks, rest)) return false;
  const uint32_t side = s.word / s.element, sub_blocks = words_of_tile(s.word) / side;
  const uint32_t most = sms ? sub_blocks : kHostTimes * sub_blocks;
  const uint32_t along_a = p.inner[0].extent.n / side, along_b = p.inner[1].extent.n / side;
  uint32_t ta = along_a, tb = along_b, together = 1;
  if (uint64_t{along_a} * along_b <= most) {
    together = uint32_t(rest < most / (ta * tb) ? rest : most / (ta * tb));
  } else {
    uint32_t square = 1;
    while (square * square * 4 <= most) square *= 2;
    tb = along_b < square ? along_b : square;
    ta = along_a < most / tb ? along_a : most / tb;
    tb = along_b < most / ta ? along_b : most / ta;
  }
  p.turns_behind = side > 1 && s.teams == 1 && along_a < along_b;  // teams lack the registers
  p.words = uint32_t(rest);
  p.tile_words = together;
  p.tile[0] = kvbm_make_div(ta);
  p.tile[1] = kvbm_make_div(tb);
  p.tile[2] = kvbm_make_div(divide_up(along_a, ta));
  p.tile[3] = kvbm_make_div(divide_up(along_b, tb));
  shared_bytes = bytes_of_tile(p, side, s.word);
  if (!set_jobs(a, p, s.outer, chunks, uint64_t{divide_up(rest, together)} * p.tile[2].n * p.tile[3].n)) return false;
  p.ctas = p.jobs;
  return true;
}

}  // namespace kvbm

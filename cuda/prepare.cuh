// prepare.cuh: cuts a batch into jobs, tiles and CTAs; runs on the host, also for kernels compiled at run time.
#pragma once

#include "words.cuh"

namespace kvbm {

// CTAs are small, because a multiprocessor waits for the last CTA of a launch (benchmarks/NOTES.md).
constexpr uint32_t kRowThreads = 128;
constexpr uint32_t kTileThreads = 64;
constexpr uint32_t kSharedBytes = 8192;  // of a tile's words; padding adds at most half as much
// Teams in a CTA of a few_ kernel.  They use the named barriers 1 to 8, and their tiles fit the shared memory of every GPU.
constexpr uint32_t kFewTeams = 8;
// FewRows: warps in a CTA, words of a thread in a step, and steps in flight: 96 KiB of words of 16 bytes, which every GPU has.
constexpr uint32_t kFewWarps = 16, kFewUnroll = 4, kFewAhead = 3;

inline uint32_t divide_up(uint64_t n, uint64_t by) { return uint32_t((n + by - 1) / by); }

// Turns extents into divisors.  False if an index does not fit 31 bits, or an inner stride does not fit 32.
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

// Whether a step is larger than the stride of blocks, so that it leaves the block's own memory.
inline bool leaves_block(int64_t step, int32_t table_step, int64_t id_step) {
  return table_step != 0 || (id_step != 0 && (step < 0 ? -step : step) > (id_step < 0 ? -id_step : id_step));
}

// Sets the order of jobs.  It decides how many memory pages are in use at a time.  If the steps between chunks leave the block
// on both sides (layers in separate allocations), pairs go fastest: all pairs of one chunk, then the next chunk.  Otherwise a
// block is contiguous on one side, and chunks go fastest.
inline bool set_jobs(const kvbm_args& a, kvbm_part& p, int outer, uint64_t chunks, uint64_t tiles) {
  const uint64_t pairs = a.num_pairs, jobs = pairs * chunks * tiles;
  if (tiles >= (1u << 31) || jobs >= (1u << 31)) return false;
  p.pairs_first = 0;
  for (int k = 0; k < outer; ++k) {
    const kvbm_outer& mode = p.outer[k];
    p.pairs_first |= mode.extent.n > 1 && leaves_block(mode.src, mode.src_table, p.src_id_stride) &&
                     leaves_block(mode.dst, mode.dst_table, p.dst_id_stride);
  }
  p.faster = kvbm_make_div(uint32_t(p.pairs_first ? pairs : chunks));
  p.tiles = kvbm_make_div(uint32_t(tiles));
  p.jobs = uint32_t(jobs);
  return true;
}

// The template arguments of a kernel, as far as `prepare` needs them.  Kernels that were compiled at run time have no template
// on the host, so they pass the same numbers as values.
struct Structure {
  int outer, inner;  // number of modes; tiles: inner ones without A and B
  uint32_t element, word, threads, teams;
  uint32_t loads = 0;  // words per thread at most; 0: kRowLoads
};

constexpr uint32_t kMinWidth = 8;          // rows: fewest threads of a row
constexpr uint64_t kHostTile = 128 << 10;  // rows: fewest bytes of a job on the host
constexpr uint32_t kHostTileFactor = 2;  // tiles: on the host they are larger, as a core's cache is, and rows of stores longer
constexpr uint32_t kFewTurns = 32;       // few_ rows: most words of a thread in a tile
constexpr uint32_t kMostLoads = 4;       // rows: words that a thread loads before it stores; it moves more in several turns
constexpr uint32_t kRowLoads = 2;        // rows: words of a thread in flight
constexpr uint32_t words_of_tile(uint32_t word) { return kSharedBytes / word < 4096 ? kSharedBytes / word : 4096; }

// On the GPU a row of tile[0] threads takes a tile of a chunk.  tile[1] rows share a CTA: several, if chunks are short.
inline bool prepare_rows(const Structure& s, const kvbm_args& a, kvbm_part& p, uint32_t sms, uint32_t& shared_bytes,
                         uint32_t min_width = kMinWidth) {
  uint64_t chunks, words;
  if (!set_divisors(p, s.outer, s.inner, 0, chunks, words)) return false;
  shared_bytes = 0;
  p.words = uint32_t(words);
  if (sms == 0) {
    // A tile is a number of whole runs, so that the host copies run by run.
    const uint64_t run = s.inner == 1 ? 1 : p.inner[0].extent.n;
    p.tile_words = uint32_t(divide_up(divide_up(kHostTile, s.word), run) * run);
    return set_jobs(a, p, s.outer, chunks, divide_up(words, p.tile_words));
  }
  uint32_t loads = s.loads ? s.loads : kRowLoads, width = s.threads;
  while (width > min_width && width / 2 * loads >= words) width /= 2;
  // Small batches take smaller tiles, until every multiprocessor has enough of them.  Tiles of several turns need many per
  // multiprocessor, because the launch waits for the last one.
  for (; loads > 1; loads /= 2) {
    const uint64_t busy = loads > kMostLoads ? 12 : 4;  // CTAs that a multiprocessor should have
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

// A row of tile[0] threads takes a tile of a chunk: tile[2] turns of a word a thread.  tile[1]: words of a segment.  Tiles are
// small only if there are few of them.
inline bool prepare_few(const Structure& s, const kvbm_args& a, kvbm_part& p, uint32_t sms) {
  uint64_t chunks, words;
  if (!set_divisors(p, s.outer, s.inner, 0, chunks, words)) return false;
  uint32_t width = 32, segment = 1, log = 0, turns = kFewTurns;
  while (width > kMinWidth && width / 2 >= words) width /= 2;
  for (; segment < width && p.inner[0].extent.n % (2 * segment) == 0; ++log) segment *= 2;
  while (turns > kFewUnroll && a.num_pairs * chunks * divide_up(words, turns * width) < 4ull * sms * (s.threads / width))
    turns /= 2;
  const uint32_t step = kFewUnroll * width;
  turns = divide_up(divide_up(words, divide_up(words, turns * width)), step) * kFewUnroll;  // tiles of one size, whole steps
  p.words = uint32_t(words);
  p.tile_words = turns * width;
  p.tile[0] = kvbm_make_div(width);
  p.tile[1] = {segment, 0, log};
  p.tile[2].n = turns;
  if (!set_jobs(a, p, s.outer, chunks, divide_up(words, p.tile_words))) return false;
  p.ctas = divide_up(p.jobs, s.threads / width);
  return true;
}

// Words in shared memory from one square to the next along A (transposed on load) or B (transposed on store).  It is odd, so
// that neither phase has bank conflicts.  `side`: elements, and words, of a square's side.
KVBM_INLINE uint32_t pitch_of_tile(const kvbm_part& p, uint32_t side) {
  return side * p.tile[p.transposes_on_store ? 0 : 1].n | 1;
}

// Bytes of shared memory of a team's tile.
KVBM_INLINE uint32_t bytes_of_tile(const kvbm_part& p, uint32_t side, uint32_t word) {
  return p.tile_words * p.tile[p.transposes_on_store ? 1 : 0].n * pitch_of_tile(p, side) * word;
}

// The stride of an inner or outer mode on one side.
template <class MODE>
inline int64_t stride_of(const MODE& mode, bool of_dst) {
  return of_dst ? mode.dst : mode.src;
}

// Sorts the inner modes FIRST .. LAST-1, those of all parts alike, by the strides of the first part on one side: smallest first,
// modes of extent 1 last.
inline void order_modes(kvbm_part* parts, uint32_t count, int first, int last, bool by_dst) {
  auto stride = [&](int k) {
    const kvbm_inner& mode = parts[0].inner[k];
    return mode.extent.n > 1 ? uint64_t(stride_of(mode, by_dst)) : ~UINT64_C(0);
  };
  for (int i = first + 1; i < last; ++i)
    for (int k = i; k > first && stride(k) < stride(k - 1); --k)
      for (uint32_t part = 0; part < count; ++part) {
        const kvbm_inner slower = parts[part].inner[k - 1];
        parts[part].inner[k - 1] = parts[part].inner[k];
        parts[part].inner[k] = slower;
      }
}

constexpr int kGroup = 3;             // casts: inner modes of a group
constexpr uint32_t kCastTurns = 4;    // casts: most pairs of groups that a thread takes, one after the other
constexpr int64_t kNearBytes = 1024;  // casts: rows of K and of V whose codes lie closer than this are groups of one chunk
constexpr uint32_t kCastCtas = 12;    // casts: CTAs that a multiprocessor should have before a thread takes more of them

inline uint64_t items_of_group(const kvbm_part& p) {
  uint64_t items = 1;
  for (int k = 0; k < kGroup; ++k) items *= p.inner[k].extent.n;
  return items;
}

// Whether an outer mode can become an inner one of a cast: the offsets and keys of a chunk still fit 32 bits.
inline bool fits_chunk(const kvbm_args& a, int outer, int inner, uint32_t key_unit) {
  for (uint32_t i = 0; i < a.num_parts; ++i) {
    const kvbm_part& p = a.part[i];
    const kvbm_outer& mode = p.outer[outer];
    if (p.inner[inner - 1].extent.n > 1 || mode.src_table || mode.dst_table || (mode.src | mode.dst) >> 32) return false;
    const uint64_t last = mode.extent.n - 1;
    uint64_t src = last * uint64_t(mode.src), dst = last * uint64_t(mode.dst), key = last * mode.key * key_unit;
    for (int k = 0; k < inner; ++k) {
      const uint64_t steps = p.inner[k].extent.n - 1;
      src += steps * uint64_t(p.inner[k].src);
      dst += steps * uint64_t(p.inner[k].dst);
      key += steps * p.inner[k].key;
    }
    if ((src | dst | key) >> 32) return false;
  }
  return true;
}

// Rows of K and of V may alternate on the side of the codes (`in_dst`), and share sectors.  Then the outer mode from one to the other
// becomes the last inner one, so that a warp can have both.  Outer keys count units of `key_unit` inner ones.
inline void join_alternating(kvbm_args& a, int outer, int inner, bool in_dst, uint32_t key_unit) {
  int64_t longest = 0;
  for (int k = kGroup; k < inner; ++k) {
    const kvbm_inner& mode = a.part[0].inner[k];
    if (mode.extent.n > 1 && stride_of(mode, in_dst) > longest) longest = stride_of(mode, in_dst);
  }
  if (longest > kNearBytes) longest = kNearBytes;
  for (int k = 0; k < outer; ++k) {
    const int64_t stride = stride_of(a.part[0].outer[k], in_dst);
    if (a.part[0].outer[k].extent.n != 2 || stride <= 0 || stride >= longest || !fits_chunk(a, k, inner, key_unit)) continue;
    for (uint32_t i = 0; i < a.num_parts; ++i) {
      kvbm_outer& mode = a.part[i].outer[k];
      a.part[i].inner[inner - 1] = {mode.extent, mode.key * key_unit, mode.src, mode.dst};
      mode = {kvbm_make_div(1), 0, 0, 0, 0, 0};
    }
    return;
  }
}

// The items of a cast: bytes of one on both sides, how many a thread takes of a group, and the fewest threads of a group.  turns:
// the most pairs of groups that a thread takes.
struct CastItems {
  uint32_t bytes, of_thread, least_width, turns = kCastTurns;
};

// Parts 0 and 1 have the same modes.  On the GPU tile[0] threads take a group, tile[1] of them have items, and a CTA takes tile[2]
// groups at a time.
inline bool prepare_cast(const Structure& s, kvbm_args& a, uint32_t sms, const CastItems& item) {
  kvbm_part& p = a.part[0];
  const uint64_t items = divide_up(items_of_group(p), item.of_thread);
  uint64_t chunks = 1, groups = 1;
  for (uint32_t i = 0; i < a.num_parts; ++i)
    if (!set_divisors(a.part[i], s.outer, s.inner, kGroup, chunks, groups)) return false;
  if (items_of_group(p) >= (1u << 31)) return false;
  for (uint32_t i = 0; i < a.num_parts; ++i) {  // kernels add the offsets inside a chunk with 32 bits
    uint64_t src = 0, dst = 0;
    for (int k = 0; k < s.inner; ++k) {
      src += uint64_t{a.part[i].inner[k].extent.n - 1} * uint64_t(a.part[i].inner[k].src);
      dst += uint64_t{a.part[i].inner[k].extent.n - 1} * uint64_t(a.part[i].inner[k].dst);
    }
    if ((src | dst) >> 32) return false;
  }
  p.words = uint32_t(groups);
  uint32_t width = item.least_width;
  if (sms == 0) {
    p.tile_words =
        16 * divide_up(divide_up(kHostTile, items_of_group(p) * item.bytes), 16);  // no cell has scales of more groups
  } else {
    while (width < 32 && width < items) width *= 2;
    const uint32_t pairs = 2 * (s.threads / width);  // groups of a turn
    p.tile_words = pairs * item.turns;
    while (p.tile_words > pairs &&
           a.num_pairs * chunks * divide_up(groups, p.tile_words) * s.threads < uint64_t{kCastCtas} * sms * kRowThreads)
      p.tile_words /= 2;
  }
  p.tile[0] = kvbm_make_div(width);
  p.tile[1] = kvbm_make_div(uint32_t(items));
  p.tile[2].n = s.threads / width;
  if (!set_jobs(a, p, s.outer, chunks, divide_up(groups, p.tile_words))) return false;
  p.ctas = p.jobs;
  for (uint32_t i = 1; i < a.num_parts; ++i) {  // the scales: the same order of jobs, which are those of part 0
    a.part[i].faster = p.faster;
    a.part[i].pairs_first = p.pairs_first;
    a.part[i].jobs = a.part[i].ctas = 0;
  }
  return true;
}

inline bool prepare_tile(const Structure& s, const kvbm_args& a, kvbm_part& p, uint32_t sms, uint32_t& shared_bytes) {
  uint64_t chunks, rest;
  if (!set_divisors(p, s.outer, s.inner + 2, 2, chunks, rest)) return false;
  const uint32_t side = s.word / s.element, squares = words_of_tile(s.word) / side;
  const uint32_t most = sms ? squares : kHostTileFactor * squares;
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
  p.transposes_on_store = side > 1 && s.teams == 1 && along_a < along_b;  // teams have too few registers for it
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

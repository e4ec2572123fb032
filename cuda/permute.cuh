// permute.cuh: the copies.  Address arithmetic, rows and tiles, for the GPU and for the host from one text.
//
// A copy is a loop nest over bytes (kvbm.h).  Two templates walk it:
//
//   Rows<OUTER, INNER, WORD>        runs stay whole; each thread moves words, several independent loads before the first store
//   Tile<OUTER, REST, ELEMENT, WORD> single elements move; a tile of the two axes along which source and destination go on
//                                    is turned in shared memory (and in registers where a word holds several elements)
// and pages.cuh has those of the planes of a block; digest.cuh has what may be summed up beside a copy, and by itself.
//
// Structure is a template parameter, sizes and strides are arguments: one multiply-high a mode and word, and any model's
// shape runs at full speed.  Kernel<P> and Kernel<P, Q> make kernels of one part and of two (K and V in one launch).
// With TEAMS a kernel keeps to few multiprocessors: its CTAs hold so many teams, each of which does what a CTA does
// otherwise, turn after turn.
// Everything is correct for any sizes; alignment only decides which instantiation the planner may ask for.
#pragma once

#include "kvbm.h"

#ifdef __CUDACC__
#define KVBM_INLINE __host__ __device__ __forceinline__
#define KVBM_UNROLL _Pragma("unroll")
#define KVBM_UNROLL_4 _Pragma("unroll 4")
#else
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#define KVBM_INLINE inline
#define KVBM_UNROLL
#endif

namespace kvbm {

// Small CTAs: what a CTA holds is what the last wave waits for (benchmarks/NOTES.md).
constexpr uint32_t kRowThreads = 128;
constexpr uint32_t kTileThreads = 64;
constexpr uint32_t kFewTeams = 8;        // named barriers 1 to 8; what they hold together fits the shared memory of every GPU
constexpr uint32_t kSharedBytes = 8192;  // payload of a tile; padding comes on top, half as much at most

// ---- division ------------------------------------------------------------------------------------------------------

// A 31-bit index over the divisor that kvbm_make_div made.
KVBM_INLINE uint32_t quotient(uint32_t index, const kvbm_div& by) {
#ifdef __CUDA_ARCH__
  return (__umulhi(index, by.magic) + index) >> by.shift;
#else
  return uint32_t(((uint64_t(index) * by.magic >> 32) + index) >> by.shift);
#endif
}

// Takes the fastest coordinate out of a mixed-radix index.
KVBM_INLINE uint32_t take(uint32_t& index, const kvbm_div& extent) {
  const uint32_t rest = quotient(index, extent);
  const uint32_t coordinate = index - rest * extent.n;
  index = rest;
  return coordinate;
}

// ---- words ---------------------------------------------------------------------------------------------------------

struct alignas(16) Word16 {
  uint32_t x[4];
};
struct alignas(8) Word8 {
  uint32_t x[2];
};

template <int BYTES>
KVBM_INLINE auto word_of() {
  if constexpr (BYTES == 16)
    return Word16{};
  else if constexpr (BYTES == 8)
    return Word8{};
  else if constexpr (BYTES == 4)
    return uint32_t{};
  else if constexpr (BYTES == 2)
    return uint16_t{};
  else
    return uint8_t{};
}
template <int BYTES>
using Word = decltype(word_of<BYTES>());

#ifdef __CUDACC__
// Every byte is read once and written once.  The L2 is asked to keep what was read rather than what was written: written lines
// then leave for memory early, which is worth 5 %, and nothing lasts: the next kernels' lines replace the read ones within
// two passes (benchmarks/NOTES.md).
// Not `ld.global.nc`, though sources are not written during the kernel: ptxas moves those past stores, and then a thread has
// one load in flight instead of all.
__device__ __forceinline__ uint64_t kept_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void load(Word16& v, const char* p) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
               : "l"(p), "l"(kept_last()));
}
__device__ __forceinline__ void load(Word8& v, const char* p) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.x[0]), "=r"(v.x[1])
               : "l"(p), "l"(kept_last()));
}
// Narrow words share their sectors with their neighbours, so these may stay in the L1.
__device__ __forceinline__ void load(uint32_t& v, const char* p) { asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p)); }
__device__ __forceinline__ void load(uint16_t& v, const char* p) { asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p)); }
__device__ __forceinline__ void load(uint8_t& v, const char* p) {
  uint16_t wide;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(wide) : "l"(p));
  v = uint8_t(wide);
}
__device__ __forceinline__ void store(char* p, const Word16& v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x[0]), "r"(v.x[1]), "r"(v.x[2]), "r"(v.x[3])
               : "memory");
}
__device__ __forceinline__ void store(char* p, const Word8& v) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x[0]), "r"(v.x[1]) : "memory");
}
__device__ __forceinline__ void store(char* p, uint32_t v) { *reinterpret_cast<uint32_t*>(p) = v; }
__device__ __forceinline__ void store(char* p, uint16_t v) { *reinterpret_cast<uint16_t*>(p) = v; }
__device__ __forceinline__ void store(char* p, uint8_t v) { *reinterpret_cast<uint8_t*>(p) = v; }
#else
template <class W>
inline void load(W& v, const char* p) {
  std::memcpy(&v, p, sizeof v);
}
template <class W>
inline void store(char* p, const W& v) {
  std::memcpy(p, &v, sizeof v);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // a sanitizer sees neither stores around the cache nor every memcpy: word by word
#else
constexpr bool kSanitized = false;
#endif

// A run on the host.  With `streaming`, words of 16 bytes go around the cache, as a large memcpy's do: a destination line
// would otherwise be read before it is written, and half as many bytes again would cross the bus.
template <int WORD>
inline void copy_run(char* dst, const char* src, uint64_t bytes, bool streaming) {
#ifdef __SSE2__
  if (WORD == 16 && streaming && !kSanitized) {
    for (uint64_t i = 0; i < bytes; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
    return;
  }
#endif
  if (bytes >= 64 && !kSanitized) {
    std::memcpy(dst, src, bytes);
    return;
  }
  for (uint64_t i = 0; i < bytes; i += WORD) {
    Word<WORD> v;
    load(v, src + i);
    store(dst + i, v);
  }
}

// Pieces that lie apart are too short for the processor to see the next one coming: it is asked for by hand, some of them ahead.
// Never faults, whatever the address.
constexpr uint32_t kLine = 64;
constexpr uint64_t kPiece = 1024;              // bytes that are copied at a time
constexpr uint64_t kPrefetchAhead = 12 << 10;  // bytes; less measured behind, up to 24 KiB no better
constexpr uint64_t kPrefetchCached = 8 << 10;  // where stores go through the cache, too
inline void prefetch(const char* src, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += kLine) __builtin_prefetch(src + i);
}

inline void fence_streaming_stores(bool streaming) {
#ifdef __SSE2__
  if (streaming) _mm_sfence();
#endif
}
#endif

// ---- where a job reads and writes ----------------------------------------------------------------------------------

struct Bases {
  const char* src;
  char* dst;
};

// Entry i of ids or of a table, which lie in the parameters (the field is then an offset into the payload) or in memory.
// Parameters are named, not pointed at: the constant cache is nearer than memory.
template <class T>
KVBM_INLINE T entry_of(const kvbm_args& a, uint32_t field_bit, uint64_t field, uint32_t i) {
  if (a.inline_mask & field_bit) return reinterpret_cast<const T*>(a.payload)[uint32_t(field) / sizeof(T) + i];
  return reinterpret_cast<const T*>(field)[i];
}

// One side's id of a pair, in halves as it lies in memory.  To use one is to wait for it, so they are made whole only when
// both sides' have been asked for.
struct Id {
  uint32_t low, high;  // high: of 8 bytes, else 0
};
KVBM_INLINE Id read_id(const kvbm_args& a, uint32_t field_bit, uint64_t field, uint32_t pair) {
  Id id = {pair, 0};
  if (a.inline_mask & field_bit << 4) return id;
  if (a.id_bytes == 8) {
    const uint64_t whole = entry_of<uint64_t>(a, field_bit, field, pair);
    id.low = uint32_t(whole);
    id.high = uint32_t(whole >> 32);
  } else {
    id.low = entry_of<uint32_t>(a, field_bit, field, pair);
  }
  return id;
}
KVBM_INLINE int64_t whole(const kvbm_args& a, Id id) {
  return a.id_bytes == 8 ? int64_t(uint64_t(id.high) << 32 | id.low) : int32_t(id.low);
}

// Takes the digits of a unit out of an id, which then is a block's, and returns where the unit begins in the block.
KVBM_INLINE uint64_t unit_of(uint32_t& id, const kvbm_div* digits, const int64_t* strides) {
  uint64_t bytes = 0;
  KVBM_UNROLL
  for (int k = 0; k < KVBM_UNIT_DIGITS; ++k) bytes += uint64_t(take(id, digits[k])) * strides[k];
  return bytes;
}

// Splits a job's place (the job without its tile) into pair and chunk, and follows ids, tables and outer modes.  False: the
// pair is skipped (id -1), or an id is out of range, which is noted: ids on the device are seen by nobody before they are
// followed here.
// Indices are 32 bits wide and strides 64, which is what one wide multiply-add takes.
template <int OUTER>
KVBM_INLINE bool locate(const kvbm_args& a, const kvbm_part& p, uint32_t place, Bases& at) {
  uint32_t chunk = take(place, p.faster), pair = place;
  if (p.pairs_first) {
    pair = chunk;
    chunk = place;
  }
  uint32_t src_id = pair, dst_id = pair;
  if (a.id_bytes) {
    const Id from = read_id(a, 1, a.src_ids, pair), to = read_id(a, 2, a.dst_ids, pair);
    const int64_t src_wide = whole(a, from), dst_wide = whole(a, to);
    if (uint64_t(src_wide) >= a.src_blocks || uint64_t(dst_wide) >= a.dst_blocks) {
      // Any one of the faults will do: nothing orders the stores.
      if (a.fault && src_wide != -1 && dst_wide != -1) *reinterpret_cast<volatile uint32_t*>(a.fault) = 1 + pair;
      return false;
    }
    src_id = uint32_t(src_wide);
    dst_id = uint32_t(dst_wide);
  }
  uint64_t src = p.src_offset, dst = p.dst_offset;
  if (a.inline_mask & (KVBM_SRC_UNITS | KVBM_DST_UNITS)) {
    const kvbm_units& units = reinterpret_cast<const kvbm_units&>(a.payload[a.num_parts * (sizeof(kvbm_part) / 8)]);
    const kvbm_unit_strides& stride = units.part[&p - a.part];
    if (a.inline_mask & KVBM_SRC_UNITS) src += unit_of(src_id, units.src, stride.src);
    if (a.inline_mask & KVBM_DST_UNITS) dst += unit_of(dst_id, units.dst, stride.dst);
  }
  src += uint64_t(src_id) * p.src_id_stride;
  dst += uint64_t(dst_id) * p.dst_id_stride;
  uint32_t src_entry = p.src_table_offset + src_id * uint32_t(a.src_id_table);
  uint32_t dst_entry = p.dst_table_offset + dst_id * uint32_t(a.dst_id_table);
  KVBM_UNROLL
  for (int k = 0; k < OUTER; ++k) {
    const uint32_t c = k + 1 < OUTER ? take(chunk, p.outer[k].extent) : chunk;
    src += uint64_t(c) * p.outer[k].src;
    dst += uint64_t(c) * p.outer[k].dst;
    src_entry += c * p.outer[k].src_table;
    dst_entry += c * p.outer[k].dst_table;
  }
  const uint64_t src_base = entry_of<uint64_t>(a, 4, a.src_table, src_entry);  // both are asked for before one is waited for
  const uint64_t dst_base = entry_of<uint64_t>(a, 8, a.dst_table, dst_entry);
  at.src = reinterpret_cast<const char*>(src_base + src);
  at.dst = reinterpret_cast<char*>(dst_base + dst);
  return true;
}

// Offsets of an index over the inner modes FIRST .. FIRST+COUNT-1; the slowest needs no division.  Inner strides fit 32 bits
// (`set_divisors` sees to it): one multiply-add a mode and side.
template <int FIRST, int COUNT>
KVBM_INLINE void step(const kvbm_part& p, uint32_t index, uint64_t& src, uint64_t& dst) {
  KVBM_UNROLL
  for (int k = FIRST; k < FIRST + COUNT; ++k) {
    const uint32_t c = k + 1 < FIRST + COUNT ? take(index, p.inner[k].extent) : index;
    src += uint64_t(c) * uint32_t(p.inner[k].src);
    dst += uint64_t(c) * uint32_t(p.inner[k].dst);
  }
}

// ---- preparing a batch (host) --------------------------------------------------------------------------------------

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

// ---- teams ---------------------------------------------------------------------------------------------------------

// The threads that work on one piece: a CTA's, or with TEAMS those of one of the teams that share it.  Teams know nothing of
// each other; within one, every thread takes the same turns and meets the same barriers.
template <uint32_t THREADS, uint32_t TEAMS>
struct Team {
#ifdef __CUDACC__
  static __device__ __forceinline__ uint32_t number() { return TEAMS == 1 ? 0 : threadIdx.x / THREADS; }
  static __device__ __forceinline__ uint32_t thread() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % THREADS; }
  static __device__ __forceinline__ void sync() {
    static_assert(TEAMS < 16 && THREADS % 32 == 0, "a CTA has 16 barriers, on which whole warps wait");
    if constexpr (TEAMS == 1)
      __syncthreads();
    else
      asm volatile("bar.sync %0, %1;" ::"r"(1 + number()), "n"(THREADS) : "memory");
  }
  // Before the next turn overwrites what this one left in shared memory.
  static __device__ __forceinline__ void sync_turn() {
    if constexpr (TEAMS > 1) sync();
  }
#endif
};

template <class... PARTS>
struct Kernel;

}  // namespace kvbm

#include "digest.cuh"

namespace kvbm {

// ---- rows ----------------------------------------------------------------------------------------------------------

// SUMS: each word is a cell, which is digested as it passes.
template <int OUTER, int INNER, int WORD, int THREADS = kRowThreads, int TEAMS = 1, bool SUMS = false>
struct Rows {
  using Mine = Team<THREADS, TEAMS>;
  static constexpr uint32_t kThreads = THREADS, kTeams = TEAMS;
  static constexpr uint32_t kMinCtas =
      (SUMS ? 1024 : 2048) / THREADS;  // every warp that a multiprocessor can hold, or its registers
  static constexpr uint32_t kLoads = SUMS ? 4 : loads_of_rows(TEAMS);

  // What a row looks up, and its sum, is worth more words where these are digested, too.
  static constexpr uint32_t kWords = SUMS ? 2 * kLoads : kLoads;

  static bool prepare(const kvbm_args& a, kvbm_part& p, uint32_t sms, uint32_t& shared_bytes) {
    return prepare_rows({OUTER, INNER, 0, WORD, THREADS, TEAMS, kWords}, a, p, sms, shared_bytes);
  }

  // Of the shared memory that is asked for at the launch: none.
  static KVBM_INLINE uint32_t team_bytes(const kvbm_part&) { return 0; }

#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, const kvbm_part& p, uint32_t cta, char*) {
    // Ids and tables are followed once a row of threads, by its first one, while the others find their words.
    __shared__ struct {
      Bases at;
      bool copies;
    } found[TEAMS][kThreads / kMinWidth];
    __shared__ uint64_t keys[SUMS ? kThreads / kMinWidth : 1];
    const uint32_t width = p.tile[0].n;
    uint32_t row = Mine::thread();
    const uint32_t lane = take(row, p.tile[0]);
    auto& here = found[Mine::number()][row];
    const uint32_t job = cta * p.tile[1].n + row;
    uint32_t chunk = job;
    const uint32_t tile = take(chunk, p.tiles);
    if (lane == 0) {
      Bases at;  // a store to shared memory between the reads of the two tables would make the second wait
      here.copies = job < p.jobs && locate<OUTER>(a, p, chunk, at);
      here.at = at;
      if constexpr (SUMS) keys[row] = job < p.jobs ? scaled_key(first_key<OUTER>(a, p, chunk)) : 0;
    }
    const uint32_t first = tile * p.tile_words + lane, last = min(tile * p.tile_words + p.tile_words, p.words);
    uint64_t from[kLoads], to[kLoads];
    uint32_t key[kLoads];
    find(p, first, width, from, to, key);
    Mine::sync();
    const bool copies = here.copies;
    const Bases at = here.at;
    Mine::sync_turn();
    if (!SUMS && !copies) return;
    Word<WORD> v[kLoads];
    if constexpr (!SUMS) {
      move(at, first, last, width, from, to, v);
    } else {
      static_assert(TEAMS == 1, "teams take turns in which not all threads of a warp meet");
      uint64_t sum = 0;
      for (uint32_t i = first; copies && i < last;) {
        move(at, i, last, width, from, to, v);
        KVBM_UNROLL
        for (uint32_t u = 0; u < kLoads; ++u)
          if (i + u * width < last) sum += digest_of(keys[row], key[u], cell_of(v[u]));
        i += kLoads * width;
        if (i < last) find(p, i, width, from, to, key);
      }
      put_sum<kThreads>(a, p, job, lane, width, sum);
    }
  }

  // Where a thread's words lie from the chunk's first ones.
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
  // Goes through a range of jobs: by runs at equal distances, or piece by piece, at most `kPiece` bytes of a run.
  struct Walk {
    const kvbm_args& a;
    const kvbm_part& p;
    uint32_t job, last_job;
    uint64_t next_run = 0, end = 0;  // of the job
    Bases at = {};                   // the job's chunk
    Bases row = {};                  // the next run of the row
    uint64_t runs = 0;               // of the row that are left
    Bases rest = {};                 // of the run: where its next piece begins
    uint64_t left = 0;               // of the run, in bytes
    Bases piece = {};                // or several whole runs, of which this is the first
    uint64_t piece_runs = 1;
    uint32_t pair = 0;                                                 // of the job
    uint64_t chunk_key = 0, row_key = 0, rest_key = 0, piece_key = 0;  // of their first cells, where they are digested

    uint64_t run_words() const { return INNER == 1 ? p.tile_words : p.inner[0].extent.n; }

    // Finds the next row, if there is one.
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

    // Takes runs of a row, of which there are so many.
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

    // Bytes of each run of the next piece, 0 behind the last.
    uint64_t next() {
      if (left == 0) {
        if (runs == 0 && !open()) return 0;
        const uint64_t run = run_words() * WORD, most = kPiece / run;
        take_runs(INNER == 1 || most < 2 ? 1 : most < runs ? most : runs);
        if (INNER > 1 && most > 1) return run;
        rest = piece;
        rest_key = piece_key;
        if constexpr (INNER > 1) left = run;
      }
      const uint64_t bytes = left < kPiece ? left : kPiece;
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

  // What was found of the pair that is being copied.
  struct Sum {
    const kvbm_args& a;
    uint32_t pair = 0;
    uint64_t value = 0;
    void put() {
      if constexpr (SUMS) put_sum(a, pair, value);
    }
  };

  // Copies a piece, and digests it.
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
    if (INNER > 1 && run < kLine) {  // to look ahead would cost more than it saves
      while (here.open()) {
        here.take_runs(here.runs);
        move(here, run, streaming, sum);
      }
    } else {
      const uint64_t most = streaming ? kPrefetchAhead : kPrefetchCached;
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

// ---- tiles ---------------------------------------------------------------------------------------------------------

// Turns a square of 16/ELEMENT x 16/ELEMENT elements, one word a row.
template <int ELEMENT>
struct Square {
  static constexpr int N = 16 / ELEMENT;
#ifdef __CUDACC__
  static __device__ __forceinline__ void turn(Word16 (&v)[N]) {
    Word16 out[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (ELEMENT == 8) {
          out[j].x[k] = v[k / 2].x[2 * j + k % 2];
        } else if constexpr (ELEMENT == 4) {
          out[j].x[k] = v[k].x[j];
        } else if constexpr (ELEMENT == 2) {
          out[j].x[k] = __byte_perm(v[2 * k].x[j / 2], v[2 * k + 1].x[j / 2], j % 2 ? 0x7632 : 0x5410);
        } else {
          const uint32_t spread = j % 4 < 2 ? 0x5140 : 0x7362;  // bytes 0 and 1, or 2 and 3, of two rows side by side
          const uint32_t ab = __byte_perm(v[4 * k].x[j / 4], v[4 * k + 1].x[j / 4], spread);
          const uint32_t cd = __byte_perm(v[4 * k + 2].x[j / 4], v[4 * k + 3].x[j / 4], spread);
          out[j].x[k] = __byte_perm(ab, cd, j % 2 ? 0x7632 : 0x5410);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = out[j];
  }
#elif defined(__SSE2__)
  static __m128i low(__m128i a, __m128i b) {
    return ELEMENT == 1   ? _mm_unpacklo_epi8(a, b)
           : ELEMENT == 2 ? _mm_unpacklo_epi16(a, b)
           : ELEMENT == 4 ? _mm_unpacklo_epi32(a, b)
                          : _mm_unpacklo_epi64(a, b);
  }
  static __m128i high(__m128i a, __m128i b) {
    return ELEMENT == 1   ? _mm_unpackhi_epi8(a, b)
           : ELEMENT == 2 ? _mm_unpackhi_epi16(a, b)
           : ELEMENT == 4 ? _mm_unpackhi_epi32(a, b)
                          : _mm_unpackhi_epi64(a, b);
  }
  // Interleaving the first half of the rows with the second, log2(N) times, is a transposition.
  static void turn(Word16 (&v)[N]) {
    __m128i rows[N], next[N];
    for (int i = 0; i < N; ++i) rows[i] = _mm_load_si128(reinterpret_cast<const __m128i*>(&v[i]));
    for (int round = 1; round < N; round *= 2) {
      for (int i = 0; i < N / 2; ++i) {
        next[2 * i] = low(rows[i], rows[i + N / 2]);
        next[2 * i + 1] = high(rows[i], rows[i + N / 2]);
      }
      for (int i = 0; i < N; ++i) rows[i] = next[i];
    }
    for (int i = 0; i < N; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(&v[i]), rows[i]);
  }
#else
  static void turn(Word16 (&v)[N]) {
    Word16 out[N];
    for (int j = 0; j < N; ++j)
      for (int i = 0; i < N; ++i)
        std::memcpy(reinterpret_cast<char*>(&out[j]) + i * ELEMENT, reinterpret_cast<const char*>(&v[i]) + j * ELEMENT,
                    ELEMENT);
    std::memcpy(v, out, sizeof v);
  }
#endif
};

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

// ---- kernels -------------------------------------------------------------------------------------------------------

template <class P>
struct Kernel<P> {
  static constexpr uint32_t kTeams = P::kTeams, kThreads = P::kThreads * kTeams, kMinCtas = kTeams > 1 ? 1 : P::kMinCtas;
  // grid->ctas is what would take all the work at once: with teams any number of CTAs gets through it.
  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    if (!P::prepare(*a, a->part[0], sms, grid->shared_bytes)) return KVBM_TOO_LARGE;
    grid->ctas = divide_up(a->part[0].ctas, kTeams);
    grid->threads_x = kThreads;
    grid->threads_y = 1;
    grid->shared_bytes *= kTeams;
    return KVBM_OK;
  }
#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, char* shared) {
    const kvbm_part& p = a.part[0];
    if constexpr (kTeams == 1) {
      P::run(a, p, blockIdx.x, shared);
    } else {
      const uint32_t team = P::Mine::number();
      shared += team * P::team_bytes(p);
      for (uint32_t cta = blockIdx.x * kTeams + team; cta < p.ctas; cta += gridDim.x * kTeams) P::run(a, p, cta, shared);
    }
  }
#else
  static void run_host(const kvbm_args* a, uint32_t, uint32_t first, uint32_t last, int streaming) {
    P::host(*a, a->part[0], first, last, streaming != 0);
  }
  static constexpr decltype(&run_host) host() {
    if constexpr (kTeams == 1)
      return run_host;
    else
      return nullptr;
  }
#endif
};

template <class P, class Q>
struct Kernel<P, Q> {
  static_assert(P::kThreads == Q::kThreads, "the parts of one launch have CTAs of one size");
  static_assert(P::kTeams == 1 && Q::kTeams == 1, "teams take one part after the other, a launch each");
  static constexpr uint32_t kTeams = 1, kThreads = P::kThreads,
                            kMinCtas = P::kMinCtas < Q::kMinCtas ? P::kMinCtas : Q::kMinCtas;
  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    uint32_t shared[2];
    if (!P::prepare(*a, a->part[0], sms, shared[0]) || !Q::prepare(*a, a->part[1], sms, shared[1])) return KVBM_TOO_LARGE;
    if (uint64_t{a->part[0].ctas} + a->part[1].ctas >= (1u << 31)) return KVBM_TOO_LARGE;
    grid->ctas = a->part[0].ctas + a->part[1].ctas;
    grid->threads_x = kThreads;
    grid->threads_y = 1;
    grid->shared_bytes = shared[0] > shared[1] ? shared[0] : shared[1];
    return KVBM_OK;
  }
#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, char* shared) {
    if (blockIdx.x < a.part[0].ctas)
      P::run(a, a.part[0], blockIdx.x, shared);
    else
      Q::run(a, a.part[1], blockIdx.x - a.part[0].ctas, shared);
  }
#else
  static void run_host(const kvbm_args* a, uint32_t part, uint32_t first, uint32_t last, int streaming) {
    part == 0 ? P::host(*a, a->part[0], first, last, streaming != 0) : Q::host(*a, a->part[1], first, last, streaming != 0);
  }
  static constexpr decltype(&run_host) host() { return run_host; }
#endif
};

}  // namespace kvbm

#include "pages.cuh"

// One line a kernel: what the generated files consist of.
#ifdef __CUDACC__
#define KVBM_KERNEL(name, ...)                                                                                           \
  extern "C" __global__ void __launch_bounds__(kvbm::Kernel<__VA_ARGS__>::kThreads, kvbm::Kernel<__VA_ARGS__>::kMinCtas) \
      name(const __grid_constant__ kvbm_args args) {                                                                     \
    extern __shared__ __align__(16) char shared[];                                                                       \
    kvbm::Kernel<__VA_ARGS__>::run(args, shared);                                                                        \
  }
#else
#define KVBM_KERNEL(name, image, parts, ...) \
  {#name,                                    \
   image,                                    \
   parts,                                    \
   kvbm::Kernel<__VA_ARGS__>::kTeams,        \
   kvbm::Kernel<__VA_ARGS__>::prepare,       \
   kvbm::Kernel<__VA_ARGS__>::host()},
#endif

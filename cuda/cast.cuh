// cast.cuh: Cast copies values and changes their format: it quantises groups of elements with a scale each, or the reverse.
//
// Part 0 is the loop nest of the elements, part 1 that of the scales.  Both have the same modes.  The first kGroup inner modes
// go through a group, in items; the others go from group to group, and only these have strides in the scales.  A value is rounded in
// formats.cuh, and on the host in cast_host.cuh.
#pragma once

#include "address.cuh"
#include "cast_digest.cuh"
#include "cast_host.cuh"
#include "formats.cuh"
#include "prepare.cuh"

namespace kvbm {

// What all casts share.  CTAs are small, or as large as possible in a launch with a limit of multiprocessors.  They take jobs until
// there are none.
template <int OUTER, int INNER>
struct CastNest {
  static constexpr uint32_t kTeams = 1, kThreads = kFewTeams * kRowThreads, kMinCtas = 1;

  static int prepare(kvbm_args* a, uint32_t sms, const CastItems& item, kvbm_grid* grid, uint32_t most_threads = kThreads) {
    const uint32_t threads = a->inline_mask & KVBM_SM_LIMITED ? most_threads : kRowThreads;
    if (!prepare_cast({OUTER, INNER, 0, 0, threads, kTeams}, *a, sms, item)) return KVBM_TOO_LARGE;
    grid->ctas = a->part[0].ctas;
    grid->threads_x = threads;
    grid->threads_y = 1;
    grid->shared_bytes = 0;
    return KVBM_OK;
  }

  // Addresses of the first element of a group on both sides, and of its scale.  Offsets inside a chunk fit 32 bits.
  struct Place {
    const char* src;
    char *dst, *scale;
  };
  // Steps of the keys of a group's elements and of its scale from those of the chunk, in bytes of cells: each has 16.
  struct Keys {
    uint32_t item, scale;
  };
  // `s` is the part of the scales, `at` and `scales` are the first addresses of the chunk.
  template <bool QUANTISES>
  static KVBM_INLINE Place find(const kvbm_part& p, const kvbm_part& s, const Bases& at, const Bases& scales, uint32_t group,
                                Keys* keys = nullptr) {
    uint32_t src = 0, dst = 0, scale = 0;
    KVBM_UNROLL
    for (int k = kGroup; k < INNER; ++k) {
      const uint32_t c = k + 1 < INNER ? take(group, p.inner[k].extent) : group;
      src += c * uint32_t(p.inner[k].src);
      dst += c * uint32_t(p.inner[k].dst);
      scale += c * uint32_t(QUANTISES ? s.inner[k].dst : s.inner[k].src);
      if (!keys) continue;
      keys->item += c * p.inner[k].key;
      keys->scale += c * s.inner[k].key;
    }
    return {at.src + src, at.dst + dst, (QUANTISES ? scales.dst : const_cast<char*>(scales.src)) + scale};
  }

  // The next group's, if both have the same coordinates in all modes but the first.
  template <bool QUANTISES>
  static KVBM_INLINE Place next(const kvbm_part& p, const kvbm_part& s, const Place& at) {
    const kvbm_inner &mode = p.inner[kGroup], &of_scale = s.inner[kGroup];
    return {at.src + uint32_t(mode.src), at.dst + uint32_t(mode.dst),
            at.scale + uint32_t(QUANTISES ? of_scale.dst : of_scale.src)};
  }

  // Adds the offsets of an item of a group from the group's first.
  static KVBM_INLINE void step_item(const kvbm_part& p, uint32_t item, uint32_t& src, uint32_t& dst) {
    uint32_t c = item;
    if (p.inner[1].extent.n > 1 || p.inner[2].extent.n > 1) {  // the same for all threads
      c = take(item, p.inner[0].extent);
      const uint32_t second = take(item, p.inner[1].extent);
      src += second * uint32_t(p.inner[1].src) + item * uint32_t(p.inner[2].src);
      dst += second * uint32_t(p.inner[1].dst) + item * uint32_t(p.inner[2].dst);
    }
    src += c * uint32_t(p.inner[0].src);
    dst += c * uint32_t(p.inner[0].dst);
  }

  // The step of an item from the key of its group.
  static KVBM_INLINE uint32_t key_of_item(const kvbm_part& p, uint32_t item) {
    uint32_t c = item, key = 0;
    if (p.inner[1].extent.n > 1 || p.inner[2].extent.n > 1) {  // the same for all threads
      c = take(item, p.inner[0].extent);
      key = take(item, p.inner[1].extent) * p.inner[1].key;
      key += item * p.inner[2].key;
    }
    return key + c * p.inner[0].key;
  }

  // The scale of the caller for a group.  `place`: the number of its job without the tile.
  static KVBM_INLINE float given_scale(const kvbm_args& a, const kvbm_part& p, uint32_t place, uint32_t group) {
    return p.given_scales ? given_scale_of(a, p, given_scale_of_chunk(p, place), group) : p.given_scale;
  }
  // Those of a group and the next one.
  static KVBM_INLINE void given_scales(const kvbm_args& a, const kvbm_part& p, uint32_t place, uint32_t group,
                                       float (&given)[2]) {
    given[0] = given[1] = p.given_scale;
    if (!p.given_scales) return;
    const uint32_t first = given_scale_of_chunk(p, place);
    KVBM_UNROLL
    for (uint32_t u = 0; u < 2; ++u) given[u] = given_scale_of(a, p, first, group + u);
  }
  static KVBM_INLINE uint32_t given_scale_of_chunk(const kvbm_part& p, uint32_t place) {
    uint32_t chunk = take(place, p.faster), number = 0;
    if (p.pairs_first) chunk = place;
    KVBM_UNROLL
    for (int k = 0; k < OUTER; ++k) number += (k + 1 < OUTER ? take(chunk, p.outer[k].extent) : chunk) * p.outer[k].key;
    return number;
  }
  static KVBM_INLINE float given_scale_of(const kvbm_args& a, const kvbm_part& p, uint32_t number, uint32_t group) {
    KVBM_UNROLL
    for (int k = kGroup; k < INNER; ++k) number += (k + 1 < INNER ? take(group, p.inner[k].extent) : group) * p.inner[k].key;
    return reinterpret_cast<const float*>(a.payload)[KVBM_INLINE_BYTES / sizeof(float) - p.given_scales + number];
  }

  // One code of so many bits.  `narrow`: it may lie at any address.
  static KVBM_INLINE uint32_t load_code(uint32_t bits, const char* from, uint32_t narrow) {
    if (bits <= 8) return load_word<1>(from);
    if (narrow) {
      uint32_t code = 0;
      for (uint32_t i = 0; i < bits / 8; ++i) code |= load_word<1>(from + i) << 8 * i;
      return code;
    }
    return bits == 16 ? load_word<2>(from) : load_word<4>(from);
  }
  static KVBM_INLINE void store_code(uint32_t bits, char* to, uint32_t code, uint32_t narrow) {
    if (bits <= 8) return store(to, uint8_t(code));
    if (narrow) {
      for (uint32_t i = 0; i < bits / 8; ++i) store(to + i, uint8_t(code >> 8 * i));
      return;
    }
    bits == 16 ? store(to, uint16_t(code)) : store(to, code);
  }
  template <int BYTES>
  static KVBM_INLINE uint32_t load_word(const char* from) {
    Word<BYTES> v;
    load(v, from);
    return v;
  }
  static KVBM_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

  // The bytes that several words have in memory, which are at least aligned to 4.
  template <int WORDS>
  static KVBM_INLINE void load_words(const char* from, uint32_t* words) {
    if (uint32_t(uint64_t(from)) % (4 * WORDS) == 0) {
      Word<4 * WORDS> v;
      load(v, from);
      KVBM_UNROLL
      for (int i = 0; i < WORDS; ++i) words[i] = v.x[i];
    } else {
      KVBM_UNROLL
      for (int i = 0; i < WORDS; ++i) load(words[i], from + 4 * i);
    }
  }
  template <int WORDS>
  static KVBM_INLINE void store_words(char* to, const uint32_t* words) {
    if (uint32_t(uint64_t(to)) % (4 * WORDS) == 0) {
      Word<4 * WORDS> v;
      KVBM_UNROLL
      for (int i = 0; i < WORDS; ++i) v.x[i] = words[i];
      store(to, v);
    } else {
      KVBM_UNROLL
      for (int i = 0; i < WORDS; ++i) store(to + 4 * i, words[i]);
    }
  }

#ifdef __CUDACC__
  // The place of a thread in its group, and the groups that a CTA takes at a time.
  struct Lane {
    uint32_t width, lane, row, rows;
    __device__ __forceinline__ explicit Lane(const kvbm_part& p) : width(p.tile[0].n), row(threadIdx.x), rows(p.tile[2].n) {
      lane = take(row, p.tile[0]);
    }
  };

  // Groups of a chunk: its first addresses, the number of its jobs without their tile, and the numbers of the groups.
  struct Tile {
    Bases at, scales;
    const uint64_t* keys;  // digests: scaled keys of the first cell of the elements, and of the scales; in shared memory
    uint32_t chunk, first, last;
  };

  // Calls turn(tile) for each job of the CTA.  All threads take the same turns.  SUMS: with the keys of the tile.
  template <bool SUMS, class TURN>
  static __device__ __forceinline__ void for_tiles(const kvbm_args& a, TURN turn) {
    // Two, in turns: a thread may still read the last one while the next one is found.
    __shared__ struct {
      Bases at[2];
      bool copies;
    } found[2];
    __shared__ uint64_t keys[2][SUMS ? 2 : 1];
    const kvbm_part& p = a.part[0];
    const uint32_t part = threadIdx.x;
    uint32_t next = 0;
    for (uint32_t job = blockIdx.x; job < p.jobs; job += gridDim.x, next ^= 1) {
      auto& here = found[next];
      uint32_t chunk = job;
      const uint32_t tile = take(chunk, p.tiles);
      if (part < a.num_parts) {  // one thread for the elements, one for the scales
        Bases at;
        const bool copies = locate<OUTER>(a, a.part[part], chunk, at);
        here.at[part] = at;
        if constexpr (SUMS) keys[next][part] = scaled_key(first_key<OUTER>(a, a.part[part], chunk));
        if (part == 0) here.copies = copies;
        if (part + 1 == a.num_parts) here.at[1] = at;  // without scales nothing reads it
      }
      __syncthreads();
      const Tile of = {here.at[0], here.at[1], keys[next], chunk, tile * p.tile_words, min((tile + 1) * p.tile_words, p.words)};
      if (here.copies) turn(of);
    }
  }

  static __device__ __forceinline__ uint32_t largest_in_group(uint32_t largest, uint32_t width) {
    for (uint32_t other = 1; other < width; other *= 2) largest = larger(largest, __shfl_xor_sync(~0u, largest, other));
    return largest;
  }
#else
  // Groups of a chunk: its first addresses, the number of its job without the tile, and the numbers of the groups.
  struct Tile {
    Bases at, scales;
    uint32_t chunk, first, last;
  };

  // Calls turn(tile) for each of the jobs [first, last).
  template <class TURN>
  static inline void for_tiles(const kvbm_args& a, uint32_t first, uint32_t last, TURN turn) {
    const kvbm_part &p = a.part[0], &s = a.part[a.num_parts - 1];
    for (uint32_t job = first; job < last; ++job) {
      uint32_t chunk = job;
      const uint32_t tile = take(chunk, p.tiles);
      Bases at;
      if (!locate<OUTER>(a, p, chunk, at)) continue;
      Bases scales = at;  // without scales nothing reads them, and `s` is `p`
      if (a.num_parts > 1) locate<OUTER>(a, s, chunk, scales);
      const uint32_t end = (tile + 1) * p.tile_words < p.words ? (tile + 1) * p.tile_words : p.words;
      turn(Tile{at, scales, chunk, tile * p.tile_words, end});
    }
  }

  // Calls turn(place, keys, scale of the caller) for each group of a tile.  KEYS: with the keys.
  template <bool QUANTISES, bool KEYS = false, class TURN>
  static inline void for_groups(const kvbm_args& a, const Tile& tile, TURN turn) {
    const kvbm_part &p = a.part[0], &s = a.part[a.num_parts - 1];
    Place place = {};
    Keys keys = {};
    uint32_t line = 0;  // groups that follow in the first mode
    for (uint32_t group = tile.first; group < tile.last; ++group) {
      if (line) {
        place = next<QUANTISES>(p, s, place);
        if (KEYS) keys = {keys.item + p.inner[kGroup].key, keys.scale + s.inner[kGroup].key};
      } else {
        uint32_t rest = group;
        keys = {};
        place = find<QUANTISES>(p, s, tile.at, tile.scales, group, KEYS ? &keys : nullptr);
        line = p.inner[kGroup].extent.n - take(rest, p.inner[kGroup].extent);
      }
      --line;
      turn(place, keys, given_scale(a, p, tile.chunk, group));
    }
  }
#endif
};

// FROM, TO: formats of the elements.  SCALE: format of the scales, or None.  Eight contiguous and aligned elements are an item.  A
// thread has two items of each of two groups: 64 bytes of bfloat16 a turn.  Groups with more than 64 items are cast one by one.
//
// SUMS: the quantised side is digested too.  Then the two items are neighbours, half a cell of codes of 4 bits or a whole one, and a
// group has an even number of items, at most as many as a warp has threads.
template <int OUTER, int INNER, class FROM, class TO, class SCALE, bool SUMS = false>
struct Cast : CastNest<OUTER, INNER> {
  using Nest = CastNest<OUTER, INNER>;
  using Place = typename Nest::Place;
  using Nest::larger;
  static constexpr bool kIsNarrow = FROM::kBits == 4 || TO::kBits == 4;
  // A thread has 128, 80, 64 or 72 registers.  E2m1 is bound by instructions, and more warps issue more of them.
  static constexpr uint32_t kThreads = FROM::kBits == 32 ? 512 : TO::kBits == 32 ? 768 : kIsNarrow && !SUMS ? 1024 : 896;
  static constexpr bool kQuantises = FROM::kBits >= 16, kHasScales = !kSame<SCALE, None>, kComputes = kQuantises && kHasScales;
  static constexpr int ITEM = 8;

  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    if (SUMS && items_of_group(a->part[0]) > 32) return KVBM_TOO_LARGE;
    if (sms) order_groups(*a);
    const CastItems items = {FROM::kBits + TO::kBits, 2, kIsNarrow ? 1 : 2, SUMS || kIsNarrow ? kCastTurns : kCastTurns / 2};
    return Nest::prepare(a, sms, items, grid, kThreads);
  }

  // A GPU takes groups in the order in which the codes lie: their rows are the shorter ones.  Digests: groups that share a cell stay
  // neighbours.
  static void order_groups(kvbm_args& a) {
    const bool shares_cells = SUMS && (kIsNarrow || (kHasScales && a.part[1].cell_words > 1));
    join_alternating(a, OUTER, INNER, kQuantises, SUMS ? 16 : 1);
    order_modes(a.part, a.num_parts, kGroup + shares_cells, INNER, kQuantises);
  }

  // The codes of an item, packed as in memory: 32 bits, or more for wide formats.
  template <class F>
  struct Codes {
    static constexpr int kWords = ITEM * F::kBits < 32 ? 1 : ITEM * F::kBits / 32;
    uint32_t x[kWords];
    // Two codes of F, for formats of at most 16 bits.
    KVBM_INLINE uint32_t two(int pair) const {
      constexpr int kPairs = 16 / F::kBits;  // in a word
      return x[pair / kPairs] >> pair % kPairs * 2 * F::kBits & (~0u >> (32 - 2 * F::kBits));
    }
    KVBM_INLINE void set_two(int pair, uint32_t codes) {
      constexpr int kPairs = 16 / F::kBits;
      if (pair % kPairs == 0) x[pair / kPairs] = 0;
      x[pair / kPairs] |= codes << pair % kPairs * 2 * F::kBits;
    }
  };

  // `p.word`: codes of 8 bits may be aligned to 4 bytes only, such as every other row of 132 bytes.
  template <class F>
  static KVBM_INLINE bool is_split(const kvbm_part& p, const char* at) {
    return F::kBits == 8 && p.word && uint32_t(uint64_t(at)) % 8;
  }
  template <class F>
  static KVBM_INLINE void load_item(const kvbm_part& p, const char* from, Codes<F>& codes) {
    if (is_split<F>(p, from)) {
      load(codes.x[0], from);
      load(codes.x[F::kBits == 8], from + 4);
      return;
    }
    constexpr int kBytes = F::kBits < 16 ? F::kBits : 16;
    KVBM_UNROLL
    for (int w = 0; w < F::kBits / kBytes; ++w) {
      Word<kBytes> v;
      if constexpr (kBytes == 8)
        load_half(v, from);
      else
        load(v, from + w * kBytes);
      if constexpr (kBytes == 4) {
        codes.x[0] = v;
      } else {
        KVBM_UNROLL
        for (int i = 0; i < kBytes / 4; ++i) codes.x[w * 4 + i] = v.x[i];
      }
    }
  }
  template <class F>
  static KVBM_INLINE void store_item(const kvbm_part& p, char* to, const Codes<F>& codes) {
    if (is_split<F>(p, to)) {
      store(to, codes.x[0]);
      store(to + 4, codes.x[F::kBits == 8]);
      return;
    }
    constexpr int kBytes = F::kBits < 16 ? F::kBits : 16;
    KVBM_UNROLL
    for (int w = 0; w < F::kBits / kBytes; ++w) {
      Word<kBytes> v;
      if constexpr (kBytes == 4) {
        v = codes.x[0];
      } else {
        KVBM_UNROLL
        for (int i = 0; i < kBytes / 4; ++i) v.x[i] = codes.x[w * 4 + i];
      }
      store(to + w * kBytes, v);
    }
  }

  // The larger of `most` and the codes of an item, without signs.  Codes of larger values are larger.
  static KVBM_INLINE uint32_t largest_of(const Codes<FROM>& codes, uint32_t most) {
    static_assert(FROM::kBits == 32, "of shorter codes two are compared at a time");
    KVBM_UNROLL
    for (int i = 0; i < ITEM; ++i) most = larger(most, codes.x[i] & ~kSign);
    return most;
  }
  // The same of finite values only.
  static KVBM_INLINE uint32_t largest_finite(const Codes<FROM>& codes, uint32_t most) {
    KVBM_UNROLL
    for (int i = 0; i < ITEM; ++i) {
      const uint32_t code = FROM::kBits == 32 ? codes.x[i % Codes<FROM>::kWords] & ~kSign
                                              : codes.x[i / 2 % Codes<FROM>::kWords] >> i % 2 * 16 & 0x7fff;
      if (code < FROM::kInfinite) most = larger(most, code);
    }
    return most;
  }
  static KVBM_INLINE uint32_t larger_signed_halves(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    return __vmaxs2(a, b);
#else
    return larger_halves(a ^ 0x80008000, b ^ 0x80008000) ^ 0x80008000;
#endif
  }
  static KVBM_INLINE uint32_t larger_halves(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    return larger(a & 0xffff, b & 0xffff) | larger(a >> 16, b >> 16) << 16;
#endif
  }

#ifdef __CUDACC__
  // FINITE: no element is infinite or NaN (E2m1: NaN, with a sign); `finite`: the same, but not known before.
  template <bool FINITE = false>
  static __device__ __forceinline__ Codes<TO> cast(const Codes<FROM>& codes, float factor, bool finite = true) {
    float x[ITEM];
    if constexpr (Eight<FROM>::kValues) {
      Eight<FROM>::values(codes.x, x);
    } else {
      KVBM_UNROLL
      for (int i = 0; i < ITEM; i += 2) {
        if constexpr (FROM::kBits == 32) {
          x[i] = float_of(codes.x[i]);
          x[i + 1] = float_of(codes.x[i + 1]);
        } else {
          value_of_two<FROM>(codes.two(i / 2), x[i], x[i + 1]);
        }
      }
    }
    Codes<TO> made;
    if constexpr (FINITE && kSame<TO, E2m1>) {
      Eight<E2m1>::template round<FROM::kBits>(codes.x, x, factor, made.x);
      return made;
    }
    KVBM_UNROLL
    for (int i = 0; i < ITEM; ++i) x[i] *= factor;
    if constexpr (FINITE && kSame<TO, I8>) {
      if (!finite) {
        KVBM_UNROLL
        for (int i = 0; i < ITEM; ++i) x[i] = Eight<I8>::limited(x[i]);
      }
    }
    if constexpr (FINITE && kSame<TO, I8>) {
      static_assert(kSame<SCALE, F32>, "with a scale of float32 all codes are from -127 to 127");
      Eight<I8>::round(x, made.x);
    } else {
      KVBM_UNROLL
      for (int i = 0; i < ITEM; i += 2) {
        if constexpr (TO::kBits == 32) {
          made.x[i] = TO::round(x[i]);
          made.x[i + 1] = TO::round(x[i + 1]);
        } else {
          made.set_two(i / 2, round_two<TO>(x[i], x[i + 1]));
        }
      }
    }
    return made;
  }

  static __device__ __forceinline__ Codes<TO> multiplied(const Codes<FROM>& codes, const Multiplier<FROM, TO>& by) {
    if constexpr (Multiplier<FROM, TO>::kLooksUp) {
      Codes<TO> made;
      by.look_up(codes.x, made.x);
      return made;
    } else {
      return cast(codes, by.factor);
    }
  }
#endif

  // The scale of the caller for a group, if these formats use it.
  static KVBM_INLINE float given_scale(const kvbm_args& a, uint32_t chunk, uint32_t group) {
    if constexpr (kHasScales && !kSame<SCALE, E4m3>)
      return 1.0f;
    else if constexpr (SUMS)
      return a.part[0].given_scale;  // one for all, where casts digest
    else
      return Nest::given_scale(a, a.part[0], chunk, group);
  }
  static KVBM_INLINE void given_scales(const kvbm_args& a, uint32_t chunk, uint32_t group, float (&given)[2]) {
    if constexpr (SUMS || (kHasScales && !kSame<SCALE, E4m3>))
      given[0] = given[1] = given_scale(a, chunk, group);
    else
      Nest::given_scales(a, a.part[0], chunk, group, given);
  }
  // Stores the scale of a group, and returns its code.
  static KVBM_INLINE uint32_t put_scale(const kvbm_part& s, uint32_t largest, char* scale, float given) {
    const uint32_t code = scale_of<SCALE>(bits_of(FROM::value(largest)), range_of<TO>(), given);
    if (scale) Nest::store_code(SCALE::kBits, scale, code, s.word);
    return code;
  }
  // `scale`: its code.
  static KVBM_INLINE float stored_factor(uint32_t scale, float given) {
    if constexpr (kHasScales)
      return factor_of<SCALE>(scale, given);
    else
      return kQuantises ? 1.0f / given : given;
  }

#ifdef __CUDACC__
  using Lane = typename Nest::Lane;
  using Tile = typename Nest::Tile;
  using Keys = typename Nest::Keys;
  using Sums = CellSums<SUMS, kQuantises ? TO::kBits : FROM::kBits, SCALE::kBits>;
  // Codes of 4 bits may have a scale every 16 elements.  Then a thread makes or loads both scales of its groups.
  static constexpr bool kHasBoth = (kQuantises ? TO::kBits : FROM::kBits) == 4;

  static __device__ __forceinline__ void run(const kvbm_args& a, char*) {
    const kvbm_part& p = a.part[0];
    const Lane mine(p);
    Sums sums(p, a.part[kHasScales], mine.lane, mine.width, mine.row, SUMS ? Nest::key_of_item(p, 2 * mine.lane) : 0);
    Nest::template for_tiles<SUMS>(a, [&](const Tile& found) {
      if (!SUMS && p.tile[1].n > mine.width) {
        for (uint32_t group = found.first; group < found.last; group += mine.rows) run_long(a, found, group + mine.row, mine);
        return;
      }
      Tile tile = found;
      const Items items(p, mine);
      tile.at.src += items.src;
      tile.at.dst += items.dst;
      for (uint32_t first = tile.first; first < tile.last; first += 2 * mine.rows)
        run_two(a, tile, items, first + 2 * mine.row, mine, first + 2 * mine.rows >= tile.last, sums);
      if constexpr (SUMS)
        add_to_digest<kThreads>(a, p, tile.chunk * p.tiles.n, threadIdx.x, mine.width * mine.rows, sums.take());
    });
  }

  // Offsets of the first item of a thread in its group, and of the second from the first.
  struct Items {
    uint32_t src = 0, dst = 0;
    int64_t second_src = ITEM * FROM::kBits / 8, second_dst = ITEM * TO::kBits / 8;  // below 0 where the sides differ in order

    __device__ __forceinline__ Items(const kvbm_part& p, const Lane& mine) {
      if constexpr (SUMS) {
        Nest::step_item(p, 2 * mine.lane, src, dst);
      } else {
        // A warp's threads have neighbouring items.  If there is no second item, it is the first once more.
        uint32_t item = mine.lane + p.tile[1].n;
        if (item >= items_of(p)) item = mine.lane;
        _Pragma("unroll 1") for (int k = 0; k < 2; ++k) {
          second_src = src;
          second_dst = dst;
          src = dst = 0;
          Nest::step_item(p, item, src, dst);
          item = mine.lane;
        }
        second_src -= src;
        second_dst -= dst;
      }
      if (!kQuantises && exchanges(p, mine)) {
        const uint32_t stored = stored_item(mine);
        uint32_t none = 0, second = 0;
        dst = 0;
        Nest::step_item(p, stored, none, dst);
        Nest::step_item(p, stored + 2, none, second);
        second_dst = int64_t{second} - int64_t{dst};
      }
    }
  };
  static __device__ __forceinline__ uint32_t items_of(const kvbm_part& p) {
    return p.inner[0].extent.n * p.inner[1].extent.n * p.inner[2].extent.n;
  }
  // Whether a thread has all of two neighbouring groups.
  static __device__ __forceinline__ bool has_pair(const kvbm_part& p, const Lane& mine) {
    return kHasBoth && mine.width == 1 && (SUMS || (p.inner[0].extent.n == 2 && p.inner[kGroup].extent.n % 2 == 0));
  }
  // Whether two threads exchange items before they store them.
  static __device__ __forceinline__ bool exchanges(const kvbm_part& p, const Lane& mine) {
    return SUMS || (TO::kBits == 16 && has_pair(p, mine));
  }

  // A group, which has an even number, and the next one; each has at most twice as many items as threads.  All is loaded before it
  // is cast.
  static __device__ __forceinline__ void run_two(const kvbm_args& a, const Tile& tile, const Items& items, uint32_t group,
                                                 const Lane& mine, bool is_last, Sums& sums) {
    const kvbm_part &p = a.part[0], &s = a.part[kHasScales];
    Place place[2];
    Keys key[2] = {};
    place[0] = Nest::template find<kQuantises>(p, s, tile.at, tile.scales, group, SUMS ? &key[0] : nullptr);
    if (p.inner[kGroup].extent.n % 2) {
      place[1] = Nest::template find<kQuantises>(p, s, tile.at, tile.scales, group + 1, SUMS ? &key[1] : nullptr);
    } else {
      place[1] = Nest::template next<kQuantises>(p, s, place[0]);
      key[1] = {key[0].item + p.inner[kGroup].key, key[0].scale + s.inner[kGroup].key};
    }
    bool has_group[2], has[2];
    KVBM_UNROLL
    for (uint32_t u = 0; u < 2; ++u) {
      has_group[u] = group + u < tile.last;
      has[u] = has_group[u] && mine.lane < p.tile[1].n;
    }
    uint32_t words[4 * kWords], scale[2] = {};
    float factor[2], given[2];
    if constexpr (kQuantises) {
      Codes<FROM> codes[2][2];
      KVBM_UNROLL
      for (uint32_t u = 0; u < 2; ++u) {
        if (!has[u]) continue;
        load_source(place[u].src, codes[u][0]);
        load_source(place[u].src + items.second_src, codes[u][1]);
      }
      given_scales(a, tile.chunk, group, given);
      bool finite = true;
      if constexpr (kComputes) {
        uint32_t most[2];
        finite = find_largest(codes, has, mine.width, most);
        if constexpr (kHasBoth) {
          KVBM_UNROLL
          for (uint32_t u = 0; u < 2; ++u) {
            scale[u] = put_scale(s, most[u], mine.lane == 0 && has_group[u] ? place[u].scale : nullptr, given[u]);
            factor[u] = reciprocal_of<SCALE>(scale[u], given[u]);
          }
        } else {  // a lane makes the scale of one of the groups, and its neighbour that of the other; the caller's is 1
          const bool odd = mine.lane & 1, stores = mine.lane < 2 && (odd ? has_group[1] : has_group[0]);
          const uint32_t code =
              put_scale(s, odd ? most[1] : most[0], stores ? (odd ? place[1].scale : place[0].scale) : nullptr, given[0]);
          const float own = reciprocal_of<SCALE>(code, given[0]), other = float_of(__shfl_xor_sync(~0u, bits_of(own), 1));
          factor[0] = odd ? other : own;
          factor[1] = odd ? own : other;
          scale[0] = scale[1] = code;
        }
      } else {
        KVBM_UNROLL
        for (uint32_t u = 0; u < 2; ++u) factor[u] = stored_factor(0, given[u]);
      }
      KVBM_UNROLL
      for (uint32_t u = 0; u < 2; ++u) {
        if (!has[u]) continue;
        KVBM_UNROLL
        for (uint32_t h = 0; h < 2; ++h) {
          const Codes<TO> made = cast<kComputes>(codes[u][h], factor[u], finite);
          KVBM_UNROLL
          for (int i = 0; i < kWords; ++i) words[(2 * u + h) * kWords + i] = made.x[i];
          if (!SUMS && !is_joined(p, mine)) store_item(p, place[u].dst + h * items.second_dst, made);
        }
        if constexpr (SUMS)
          if (!is_joined(p, mine)) Nest::template store_words<2 * kWords>(place[u].dst, words + 2 * u * kWords);
      }
      if (is_joined(p, mine) && has[0]) Nest::template store_words<4>(place[0].dst, words);
    } else {
      if (is_joined(p, mine)) {
        if (has[0]) Nest::template load_words<4>(place[0].src, words);
      } else {
        KVBM_UNROLL
        for (uint32_t u = 0; u < 2; ++u) {
          if (!has[u]) continue;
          if constexpr (SUMS) {
            Nest::template load_words<2 * kWords>(place[u].src, words + 2 * u * kWords);
          } else {
            KVBM_UNROLL
            for (uint32_t h = 0; h < 2; ++h) {
              Codes<FROM> codes;
              load_item(p, place[u].src + h * items.second_src, codes);
              KVBM_UNROLL
              for (int i = 0; i < kWords; ++i) words[(2 * u + h) * kWords + i] = codes.x[i];
            }
          }
        }
      }
      KVBM_UNROLL
      for (uint32_t u = 0; u < 2; ++u)
        if (kHasScales && has_group[u]) scale[u] = Nest::load_code(SCALE::kBits, place[u].scale, s.word);
      given_scales(a, tile.chunk, group, given);
      KVBM_UNROLL
      for (uint32_t u = 0; u < 2; ++u) factor[u] = stored_factor(scale[u], given[u]);
      put_items(p, tile, items, group, mine, has_group, has, place, factor, words);
    }
    if constexpr (SUMS) sums.add(words, has, has_group, key, scale, tile.keys, is_last);
  }

  // 32-bit words of an item of quantised codes.
  static constexpr int kWords = kQuantises ? Codes<TO>::kWords : Codes<FROM>::kWords;
  // Whether two groups are one cell whose bytes follow each other.
  static __device__ __forceinline__ bool is_joined(const kvbm_part& p, const Lane& mine) {
    return has_pair(p, mine) && (kQuantises ? p.inner[kGroup].dst : p.inner[kGroup].src) == 8 * kWords;
  }
  // An item that is not quantised.  A thread may load the other half of a sector next: the L1 keeps it.
  static __device__ __forceinline__ void load_source(const char* from, Codes<FROM>& codes) {
    KVBM_UNROLL
    for (int w = 0; w < FROM::kBits / 16; ++w) {
      Word16 v;
      load_half(v, from + 16 * w);
      KVBM_UNROLL
      for (int i = 0; i < 4; ++i) codes.x[w * 4 + i] = v.x[i];
    }
  }

  // The largest finite codes of two groups; true if all are finite.
  static __device__ __forceinline__ bool find_largest(Codes<FROM> (&codes)[2][2], const bool (&has)[2], uint32_t width,
                                                      uint32_t (&most)[2]) {
    find_largest<false>(codes, has, width, most);
    const bool finite = !__any_sync(~0u, larger(most[0], most[1]) >= FROM::kInfinite);
    if (!finite) {
      find_largest<true>(codes, has, width, most);
      if constexpr (kSame<TO, E2m1>) {
        KVBM_UNROLL
        for (int i = 0; i < 4; ++i) drop_signs_of_nan(codes[i / 2][i % 2]);
      }
    }
    return finite;
  }
  static __device__ __forceinline__ void drop_signs_of_nan(Codes<FROM>& codes) {
    constexpr uint32_t kSignOf = 1u << (FROM::kBits % 32 ? 15 : 31), kAll = FROM::kBits == 32 ? ~0u : 0xffff;
    KVBM_UNROLL
    for (int i = 0; i < ITEM; ++i) {
      const int shift = FROM::kBits == 32 ? 0 : i % 2 * 16;
      uint32_t& word = codes.x[FROM::kBits == 32 ? i : i / 2];
      if ((word >> shift & kAll & ~kSignOf) > FROM::kInfinite) word &= ~(kSignOf << shift);
    }
  }
  // FILTERS: of the finite ones.
  template <bool FILTERS>
  static __device__ __forceinline__ void find_largest(Codes<FROM> (&codes)[2][2], const bool (&has)[2], uint32_t width,
                                                      uint32_t (&most)[2]) {
    if constexpr (FROM::kBits == 16) {  // of both groups in one word
      // What is added makes codes that are not finite negative.
      constexpr uint32_t kAdded = FILTERS ? (0x8000 - FROM::kInfinite) * 0x10001 : 0;
      uint32_t both[2];
      KVBM_UNROLL
      for (int u = 0; u < 2; ++u) {
        both[u] = kAdded;
        KVBM_UNROLL
        for (int i = 0; i < ITEM; ++i) {
          const uint32_t two = (codes[u][i / 4].x[i % 4] & 0x7fff7fff) + kAdded;
          both[u] = FILTERS ? larger_signed_halves(both[u], two) : larger_halves(both[u], two);
        }
        if (!has[u]) both[u] = kAdded;
      }
      uint32_t of_two = larger_halves(__byte_perm(both[0], both[1], 0x5410), __byte_perm(both[0], both[1], 0x7632)) - kAdded;
      for (uint32_t other = 1; other < width; other *= 2) of_two = larger_halves(of_two, __shfl_xor_sync(~0u, of_two, other));
      most[0] = of_two & 0xffff;
      most[1] = of_two >> 16;
    } else {
      KVBM_UNROLL
      for (int u = 0; u < 2; ++u) {
        const auto& item = codes[u];
        const uint32_t mine =
            FILTERS ? largest_finite(item[1], largest_finite(item[0], 0)) : largest_of(item[1], largest_of(item[0], 0));
        most[u] = Nest::largest_in_group(has[u] ? mine : 0, width);
      }
    }
  }

  // Where threads exchange items, a warp stores whole sectors: of two items a thread with an even number has the first, the next
  // thread the second.  `stored_item`: the first that a thread has in its group.
  static __device__ __forceinline__ uint32_t stored_item(const Lane& mine) {
    return mine.width == 1 ? threadIdx.x & 1 : 2 * (mine.lane & ~1u) + (mine.lane & 1);
  }
  // `first` and `second` of an even thread become the firsts, those of the next thread the seconds of both.
  static __device__ __forceinline__ void exchange(uint32_t& first, uint32_t& second) {
    const bool odd = threadIdx.x & 1;
    const uint32_t got = __shfl_xor_sync(~0u, odd ? first : second, 1);
    first = odd ? got : first;
    second = odd ? second : got;
  }
  // Casts and stores the items of two groups.
  static __device__ __forceinline__ void put_items(const kvbm_part& p, const Tile& tile, const Items& items, uint32_t group,
                                                   const Lane& mine, const bool (&has_group)[2], const bool (&has)[2],
                                                   const Place (&place)[2], const float (&factor)[2], const uint32_t* words) {
    const bool both = has_pair(p, mine) && exchanges(p, mine);  // the items of an even thread, then those of the next one
    const uint32_t odd = threadIdx.x & 1, own = uint32_t(place[0].dst - tile.at.dst);
    const uint32_t other = both ? __shfl_xor_sync(~0u, own, 1) : 0;
    KVBM_UNROLL
    for (int u = 0; u < 2; ++u) {
      Codes<FROM> codes[2];
      KVBM_UNROLL
      for (int i = 0; i < kWords; ++i) {
        codes[0].x[i] = words[2 * u * kWords + i];
        codes[1].x[i] = words[(2 * u + 1) * kWords + i];
        if (SUMS && !both) exchange(codes[0].x[i], codes[1].x[i]);
      }
      const Multiplier<FROM, TO> by(factor[u]);
      Codes<TO> made[2] = {multiplied(codes[0], by), multiplied(codes[1], by)};
      if (both) {
        KVBM_UNROLL
        for (int i = 0; i < Codes<TO>::kWords; ++i) exchange(made[0].x[i], made[1].x[i]);
      }
      KVBM_UNROLL
      for (uint32_t k = 0; k < 2; ++k) {
        char* to = place[u].dst + k * items.second_dst;
        bool stores = SUMS ? has_group[u] && stored_item(mine) + 2 * k < 2 * p.tile[1].n : has[u];
        if (both) {
          to = tile.at.dst + (odd == k ? own : other) + u * uint32_t(p.inner[kGroup].dst);
          stores = group - 2 * odd + 2 * k < tile.last;
        }
        if (stores) store_item(p, to, made[k]);
      }
    }
  }

  // A group with more items than threads.  Its elements are read once for the scale, and once more to be cast.  The arguments are
  // values, because what a call gets by reference lies in memory all the time.
  static __device__ __noinline__ void run_long(const kvbm_args& a, Tile tile, uint32_t group, Lane mine) {
    const kvbm_part &p = a.part[0], &s = a.part[kHasScales];
    const uint32_t items = group < tile.last ? items_of(p) : 0;
    const Place place = Nest::template find<kQuantises>(p, s, tile.at, tile.scales, group);
    const float given = given_scale(a, tile.chunk, group);
    float factor = 0;
    if constexpr (kComputes) {
      uint32_t largest = 0;
      for (uint32_t i = mine.lane; i < items; i += mine.width) {
        Codes<FROM> codes;
        uint32_t src = 0, dst = 0;
        Nest::step_item(p, i, src, dst);
        load_item(p, place.src + src, codes);
        largest = largest_finite(codes, largest);
      }
      largest = Nest::largest_in_group(largest, mine.width);
      factor = reciprocal_of<SCALE>(put_scale(s, largest, items && mine.lane == 0 ? place.scale : nullptr, given), given);
    } else if (items) {
      factor = stored_factor(kHasScales ? Nest::load_code(SCALE::kBits, place.scale, s.word) : 0, given);
    }
    const Multiplier<FROM, TO> by(factor);
    for (uint32_t i = mine.lane; i < items; i += mine.width) {
      Codes<FROM> codes;
      uint32_t src = 0, dst = 0;
      Nest::step_item(p, i, src, dst);
      load_item(p, place.src + src, codes);
      store_item(p, place.dst + dst, multiplied(codes, by));
    }
  }
#else
  // Of many small cells, those of codes of 4 bits and of scales of 8, a digest of its own is faster.
  static constexpr bool kRuns = !SUMS || ((kQuantises ? TO::kBits : FROM::kBits) == 8 && SCALE::kBits != 8);
  static void run_host(const kvbm_args* a, uint32_t, uint32_t first, uint32_t last, int) {
    const DefaultArithmetic arithmetic;
    run_jobs(*a, first, last);
  }
  // Not inlined: no arithmetic moves out of the life of `arithmetic`.
  __attribute__((noinline)) static void run_jobs(const kvbm_args& a, uint32_t first, uint32_t last) {
    static const CastGroups cast_groups = host_casts<FROM, TO, SCALE>();
    HostGroups groups = {};
    const kvbm_part &p = a.part[0], &s = a.part[a.num_parts - 1];
    Nest::for_tiles(a, first, last, [&](const typename Nest::Tile& tile) {
      uint64_t sum = 0;
      const uint64_t keys[2] = {SUMS ? first_key<OUTER>(a, p, tile.chunk) : 0, SUMS ? first_key<OUTER>(a, s, tile.chunk) : 0};
      uint32_t index = tile.first;  // of the first of `groups`
      auto cast_all = [&] {
        cast_groups(groups, p);
        if constexpr (SUMS) {
          uint32_t rest = index;
          const uint32_t in_line = take(rest, p.inner[kGroup].extent);
          sum += digest_groups<kQuantises, kHasScales>(groups, p.inner[kGroup], in_line, p, s, keys);
        }
        index += groups.count;
        groups.count = 0;
      };
      Nest::template for_groups<kQuantises, SUMS>(a, tile, [&](const Place& at, const typename Nest::Keys& key, float given) {
        const uint32_t i = groups.count++;
        groups.src[i] = at.src;
        groups.dst[i] = at.dst;
        groups.scale[i] = at.scale;
        groups.given[i] = given;
        if constexpr (SUMS) {
          groups.key[i] = key.item;
          groups.scale_key[i] = key.scale;
        }
        if (groups.count == HostGroups::kMost) cast_all();
      });
      if constexpr (SUMS) {
        cast_all();
        uint32_t place = tile.chunk;
        add_to_digest(a, pair_of(p, place), sum);
      }
    });
    cast_groups(groups, p);
  }
  static constexpr decltype(&run_host) host() {
    if constexpr (kRuns)
      return run_host;
    else
      return nullptr;
  }
#endif
};

// Any formats, and elements at any strides, one or two (PAIR: two share a byte on one side) at a time.
template <int OUTER, int INNER, bool QUANTISES, int PAIR>
struct CastAny : CastNest<OUTER, INNER> {
  using Nest = CastNest<OUTER, INNER>;
  using Place = typename Nest::Place;
  using Nest::kThreads;

  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) { return Nest::prepare(a, sms, {PAIR * 3, 1, 2}, grid); }

  struct Formats {
    uint32_t from, to, scale;
  };
  static KVBM_INLINE Formats formats_of(const kvbm_part& p) { return {p.formats & 15, p.formats >> 4 & 15, p.formats >> 8}; }

  // Code i of an item in memory.
  static KVBM_INLINE uint32_t code_of(const kvbm_part& p, uint32_t format, const char* from, int i) {
    const uint32_t bits = bits_of_format(format);
    if (PAIR == 2 && bits == 4) return Nest::load_code(8, from, 0) >> 4 * i & 15;
    return Nest::load_code(bits, from + uint64_t(i) * p.element_step, p.word);
  }
  static KVBM_INLINE uint32_t largest_of_item(const kvbm_part& p, const Formats& of, const Place& at, uint32_t item,
                                              uint32_t most) {
    uint32_t src = 0, dst = 0;
    Nest::step_item(p, item, src, dst);
    for (int i = 0; i < PAIR; ++i) {
      const uint32_t size = bits_of(value_in(of.from, code_of(p, of.from, at.src + src, i))) & ~kSign;
      most = Nest::larger(most, size < kInfinity ? size : 0);
    }
    return most;
  }
  static KVBM_INLINE void cast_item(const kvbm_part& p, const Formats& of, const Place& at, uint32_t item, float factor) {
    uint32_t src = 0, dst = 0;
    Nest::step_item(p, item, src, dst);
    uint32_t pair = 0;
    for (int i = 0; i < PAIR; ++i) {
      const uint32_t code = round_in(of.to, value_in(of.from, code_of(p, of.from, at.src + src, i)) * factor);
      if (PAIR == 2 && of.to == kE2m1)
        pair |= code << 4 * i;
      else
        Nest::store_code(bits_of_format(of.to), at.dst + dst + uint64_t(i) * p.element_step, code, p.word);
    }
    if (PAIR == 2 && of.to == kE2m1) store(at.dst + dst, uint8_t(pair));
  }
  static KVBM_INLINE float factor_in(const Formats& of, uint32_t code, float given) {
    return of.scale == kE4m3 ? E4m3::value(code) * given : value_in(of.scale, code);
  }
  static KVBM_INLINE float put_scale(const kvbm_part& s, const Formats& of, uint32_t largest, char* scale, float given) {
    const uint32_t code = scale_in(of.scale, largest, range_of_format(of.to), given);
    if (scale) Nest::store_code(bits_of_format(of.scale), scale, code, s.word);
    return 1.0f / factor_in(of, code, given);
  }
  static KVBM_INLINE float stored_factor(const kvbm_part& s, const Formats& of, const char* scale, float given) {
    if (of.scale == kNone) return QUANTISES ? 1.0f / given : given;
    return factor_in(of, Nest::load_code(bits_of_format(of.scale), scale, s.word), given);
  }

#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, char*) {
    const kvbm_part &p = a.part[0], &s = a.part[a.num_parts - 1];
    const Formats of = formats_of(p);
    const typename Nest::Lane mine(p);
    Nest::template for_tiles<false>(a, [&](const typename Nest::Tile& tile) {
      for (uint32_t first = tile.first; first < tile.last; first += mine.rows) {
        const uint32_t group = first + mine.row, items = group < tile.last ? p.tile[1].n : 0;
        const Place at = Nest::template find<QUANTISES>(p, s, tile.at, tile.scales, group);
        const float given = Nest::given_scale(a, p, tile.chunk, group);
        float factor = 0;
        if (QUANTISES && of.scale != kNone) {
          uint32_t largest = 0;
          for (uint32_t i = mine.lane; i < items; i += mine.width) largest = largest_of_item(p, of, at, i, largest);
          largest = Nest::largest_in_group(largest, mine.width);
          factor = put_scale(s, of, largest, items && mine.lane == 0 ? at.scale : nullptr, given);
        } else if (items) {
          factor = stored_factor(s, of, at.scale, given);
        }
        for (uint32_t i = mine.lane; i < items; i += mine.width) cast_item(p, of, at, i, factor);
      }
    });
  }
#else
  static void run_host(const kvbm_args* a, uint32_t, uint32_t first, uint32_t last, int) {
    const DefaultArithmetic arithmetic;
    run_jobs(*a, first, last);
  }
  __attribute__((noinline)) static void run_jobs(const kvbm_args& a, uint32_t first, uint32_t last) {
    const kvbm_part &p = a.part[0], &s = a.part[a.num_parts - 1];
    const Formats of = formats_of(p);
    const uint32_t items = p.tile[1].n;
    auto cast_group = [&](const Place& at, const typename Nest::Keys&, float given) {
      float factor;
      if (QUANTISES && of.scale != kNone) {
        uint32_t largest = 0;
        for (uint32_t i = 0; i < items; ++i) largest = largest_of_item(p, of, at, i, largest);
        factor = put_scale(s, of, largest, at.scale, given);
      } else {
        factor = stored_factor(s, of, at.scale, given);
      }
      for (uint32_t i = 0; i < items; ++i) cast_item(p, of, at, i, factor);
    };
    Nest::for_tiles(a, first, last,
                    [&](const typename Nest::Tile& tile) { Nest::template for_groups<QUANTISES>(a, tile, cast_group); });
  }
  static constexpr decltype(&run_host) host() { return run_host; }
#endif
};

}  // namespace kvbm

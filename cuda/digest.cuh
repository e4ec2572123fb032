// digest.cuh: sums over cells that no layout changes, beside a copy and by themselves.  docs/digest.md defines them.
//
//   Digest<OUTER, INNER, WORD>            reads cells; how many words one has, and where they lie, are arguments
//   Digest<OUTER, INNER, 16, ELEMENT>     reads words of elements that belong to as many cells, side by side, and turns them
//
// permute.cuh includes it between what finds a job's addresses and what copies.
#pragma once

namespace kvbm {

template <int ELEMENT>
struct Square;  // of elements, which it turns (permute.cuh)

// Of version 1.  The four of the words are the best of 20,000 sets; tools/digest_constants.py finds them again.
constexpr uint64_t kOfWord0 = UINT64_C(0xa55c9364d6777aa3), kOfWord1 = UINT64_C(0xb78448c894e972e3),
                   kOfWord2 = UINT64_C(0x1e2754521961ffbb), kOfWord3 = UINT64_C(0x055ccea021bda7a7),
                   kOfCell = UINT64_C(0xa0761d6478bd642f);
constexpr uint64_t kOfKey0 = UINT64_C(0xbf58476d1ce4e5b9), kOfKey1 = UINT64_C(0x94d049bb133111eb);

KVBM_INLINE uint64_t folded(uint64_t x) { return x ^ (x >> 32); }
KVBM_INLINE uint64_t weight_of_scaled(uint64_t scaled) { return folded(folded(scaled) * kOfKey1) | 1; }
KVBM_INLINE uint64_t weight(uint64_t key) { return weight_of_scaled(key * kOfKey0); }
KVBM_INLINE uint64_t content(const Word16& v) {
  return folded(kOfCell + v.x[0] * kOfWord0 + v.x[1] * kOfWord1 + v.x[2] * kOfWord2 + v.x[3] * kOfWord3);
}
KVBM_INLINE uint64_t digest_of(uint64_t key, const Word16& v) { return weight(key) * content(v); }
// The same where the first key of many is scaled once: key = first + step.
KVBM_INLINE uint64_t scaled_key(uint64_t first) { return first * kOfKey0; }
KVBM_INLINE uint64_t digest_of(uint64_t scaled, uint32_t step, const Word16& v) {
  return weight_of_scaled(scaled + step * kOfKey0) * content(v);
}

// A word as the cell that it is: what is missing is zero.
KVBM_INLINE Word16 cell_of(const Word16& v) { return v; }
KVBM_INLINE Word16 cell_of(const Word8& v) { return {{v.x[0], v.x[1], 0, 0}}; }
KVBM_INLINE Word16 cell_of(uint32_t v) { return {{v, 0, 0, 0}}; }
KVBM_INLINE Word16 cell_of(uint16_t v) { return {{v, 0, 0, 0}}; }
KVBM_INLINE Word16 cell_of(uint8_t v) { return {{v, 0, 0, 0}}; }

// ---- keys ----------------------------------------------------------------------------------------------------------

KVBM_INLINE uint64_t position_of(const kvbm_args& a, uint32_t pair) {
  const kvbm_digest& d = a.digest;
  if (d.position_bytes == 0) return 0;
  if (a.inline_mask & KVBM_POSITIONS_INLINE) return a.payload[d.positions / 8 + pair];
  if (d.position_bytes == 8) return reinterpret_cast<const uint64_t*>(d.positions)[pair];
  return uint64_t(int64_t(reinterpret_cast<const int32_t*>(d.positions)[pair]));
}

KVBM_INLINE uint32_t pair_of(const kvbm_part& p, uint32_t& place) {
  uint32_t chunk = take(place, p.faster), pair = place;
  place = chunk;
  if (p.pairs_first) {
    place = pair;
    pair = chunk;
  }
  return pair;
}

// Key of the first cell of a job's place.
template <int OUTER>
KVBM_INLINE uint64_t first_key(const kvbm_args& a, const kvbm_part& p, uint32_t place) {
  uint32_t chunk = place;
  const uint32_t pair = pair_of(p, chunk);
  uint64_t key = a.digest.first[&p - a.part] + position_of(a, pair) * a.digest.lanes;
  KVBM_UNROLL
  for (int k = 0; k < OUTER; ++k) {
    const uint32_t c = k + 1 < OUTER ? take(chunk, p.outer[k].extent) : chunk;
    key += uint64_t(c) * p.outer[k].key;
  }
  return key;
}

// Bytes of both sides and keys that an index over the inner modes FIRST .. FIRST+COUNT-1 steps: inside a chunk keys fit 32 bits.
template <int FIRST, int COUNT>
KVBM_INLINE void step_key(const kvbm_part& p, uint32_t index, uint64_t& src, uint64_t& dst, uint32_t& key) {
  KVBM_UNROLL
  for (int k = FIRST; k < FIRST + COUNT; ++k) {
    const uint32_t c = k + 1 < FIRST + COUNT ? take(index, p.inner[k].extent) : index;
    src += uint64_t(c) * uint32_t(p.inner[k].src);
    dst += uint64_t(c) * uint32_t(p.inner[k].dst);
    key += c * p.inner[k].key;
  }
}

// ---- sums ----------------------------------------------------------------------------------------------------------

#ifdef __CUDACC__
// Returns when the digests are zero: the launch need not wait for the kernel that clears them (launch.cpp).
__device__ __forceinline__ void wait_for_clear() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Adds the sum of a row's threads, which all take part whatever they have found, to the digest of their pair: once a row, as what
// is added at one address stands in line there.
template <uint32_t THREADS>
__device__ __forceinline__ void put_sum(const kvbm_args& a, const kvbm_part& p, uint32_t job, uint32_t lane, uint32_t width,
                                        uint64_t sum) {
  if (width < 32) {
    for (uint32_t apart = width / 2; apart; apart /= 2) sum += __shfl_xor_sync(~0u, (unsigned long long)sum, apart);
  } else {
    // Three limbs, each of which 32 times fits a 32-bit sum.
    const uint32_t low = __reduce_add_sync(~0u, uint32_t(sum) & 0x3fffffu),
                   middle = __reduce_add_sync(~0u, uint32_t(sum >> 22) & 0x1fffffu),
                   high = __reduce_add_sync(~0u, uint32_t(sum >> 43));
    sum = low + (uint64_t(middle) << 22) + (uint64_t(high) << 43);
    if (width > 32) {
      __shared__ uint64_t of_warp[THREADS / 32];
      const uint32_t warp = threadIdx.x / 32;
      if (threadIdx.x % 32 == 0) of_warp[warp] = sum;
      __syncthreads();
      if (lane == 0)
        for (uint32_t i = 1; i < width / 32; ++i) sum += of_warp[warp + i];
    }
  }
  if (lane == 0 && job < p.jobs) {
    wait_for_clear();
    uint32_t place = quotient(job, p.tiles);
    atomicAdd(reinterpret_cast<unsigned long long*>(a.digest.out) + pair_of(p, place), (unsigned long long)sum);
  }
}
#else
inline void put_sum(const kvbm_args& a, uint32_t pair, uint64_t sum) {
  __atomic_fetch_add(reinterpret_cast<uint64_t*>(a.digest.out) + pair, sum, __ATOMIC_RELAXED);
}

// Words of WORD bytes that are cells, and may be copied, too.
template <int WORD>
uint64_t digest_cells(const kvbm_cells& c) {
  if constexpr (WORD == 16) return kvbm_digest_cells(&c);
  uint64_t sum = 0;
  for (uint64_t row = 0; row < c.rows; ++row) {
    const char* src = c.src + int64_t(row) * c.src_row;
    if (c.dst) copy_run<WORD>(c.dst + int64_t(row) * c.dst_row, src, c.count * WORD, c.streaming);
    for (uint64_t i = 0; i < c.count; ++i) {
      Word<WORD> v;
      load(v, src + i * WORD);
      sum += digest_of(c.key + row * c.key_row + i * c.key_step, cell_of(v));
    }
  }
  return sum;
}
#endif

// ---- digests alone -------------------------------------------------------------------------------------------------

// Bytes from the first word of a cell to another one.
KVBM_INLINE uint64_t offset_in_cell(const kvbm_part& p, uint32_t word) {
  uint64_t offset = 0;
  KVBM_UNROLL
  for (uint32_t bit = 0; bit < 4; ++bit) offset += word >> bit & 1 ? uint64_t(p.cell[bit]) : 0;
  return offset;
}

// A cell of `cell_words` words that lie where the layout has them.
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
      const Word16 whole = cell_of(v);
      x[j * WORD / 4] |= whole.x[0] << j * WORD % 4 * 8;
      if constexpr (WORD == 8) x[j * 2 + 1] = whole.x[1];
    }
    return {{x[0], x[1], x[2], x[3]}};
  }
}

// Cells are what is counted here: their number and steps are a row's words.
// With ELEMENT it is squares of cells: words of 16 bytes, of which each has one element of as many cells that follow each other.
// The first mode goes from square to square, and its key is that many cells'.
template <int OUTER, int INNER, int WORD, int ELEMENT = 0>
struct Digest {
  static_assert(ELEMENT == 0 || WORD == 16, "elements are turned in words of 16 bytes");
  static constexpr uint32_t kSide = ELEMENT ? 16 / ELEMENT : 1;  // cells of a square
  static constexpr uint32_t kTeams = 1, kThreads = kRowThreads;
  static constexpr uint32_t kMinCtas = ELEMENT == 1 ? 3 : ELEMENT == 2 ? 7 : 10;  // a square is held in registers
  static constexpr uint32_t kLoads = ELEMENT ? 1 : 4;                             // cells, or squares, a thread has in flight
  static constexpr uint32_t kCells = 16 / kSide;  // that a thread digests at most: what is looked up once is worth that many

  // A sum may be taken in any order; the host reads as memory goes on.  Modes of one step lead nowhere.
  static void order_modes(kvbm_part& p) {
    auto step = [&](int mode) { return p.inner[mode].extent.n > 1 ? uint64_t(p.inner[mode].src) : ~UINT64_C(0); };
    for (int i = 1; i < INNER; ++i)
      for (int k = i; k > 0 && step(k) < step(k - 1); --k) {
        const kvbm_inner slower = p.inner[k - 1];
        p.inner[k - 1] = p.inner[k];
        p.inner[k] = slower;
      }
  }

  static bool prepare(const kvbm_args& a, kvbm_part& p, uint32_t sms, uint32_t& shared_bytes) {
    if (sms == 0 && ELEMENT == 0) order_modes(p);
    return prepare_rows({OUTER, INNER, 0, 16, kThreads, kTeams, kCells}, a, p, sms, shared_bytes);
  }

  static KVBM_INLINE uint32_t team_bytes(const kvbm_part&) { return 0; }

  static KVBM_INLINE uint64_t digest_square(const kvbm_part& p, const char* at, uint64_t scaled, uint32_t key) {
    Word16 v[kSide];
    KVBM_UNROLL
    for (uint32_t j = 0; j < kSide; ++j) load(v[j], at + offset_in_cell(p, j));
    if constexpr (ELEMENT != 0) Square<ELEMENT>::turn(v);
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
      found[row].key = job < p.jobs ? scaled_key(first_key<OUTER>(a, p, place)) : 0;  // beyond them is no position
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
    put_sum<kThreads>(a, p, job, lane, width, sum);
  }
#else
  static constexpr uint32_t kGathered = 64;  // cells that are made whole at a time

  // Cells at a step of `apart` bytes, into memory.  Where words lie side by side, those of some cells are read at once.
  static void gather_cells(const kvbm_part& p, const char* at, int64_t apart, uint32_t count, Word16* cells) {
    constexpr uint32_t kSide = 16 / WORD;
    uint32_t i = 0;
    if constexpr (WORD < 16) {
      for (; apart == WORD && i + kSide <= count; i += kSide) {
        for (uint32_t j = 0; j < kSide; ++j) {
          cells[i + j] = {};
          if (j < p.cell_words) load(cells[i + j], at + i * WORD + offset_in_cell(p, j));
        }
        Square<WORD>::turn(reinterpret_cast<Word16(&)[kSide]>(cells[i]));
      }
    }
    for (; i < count; ++i) cells[i] = gather_cell<WORD>(p, at + int64_t(i) * apart);
  }

  // Rows of cells that lie anywhere: the steps from cell to cell are the first mode's.
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
      for (uint32_t index = first; !ELEMENT && index < last;) {  // by whole runs, where there are several
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
      put_sum(a, pair_of(p, place), sum);
    }
  }
#endif
};

}  // namespace kvbm

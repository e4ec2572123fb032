// cells.cuh: digests of what kernels read: cells, their keys, and the sums over them (docs/reference/digest.md defines them).
#pragma once

#include "address.cuh"

namespace kvbm {

// The constants of version 1.  Those of the words are the best of 20,000 sets (tools/digest_constants.py).
constexpr uint64_t kWordFactor0 = UINT64_C(0xa55c9364d6777aa3), kWordFactor1 = UINT64_C(0xb78448c894e972e3),
                   kWordFactor2 = UINT64_C(0x1e2754521961ffbb), kWordFactor3 = UINT64_C(0x055ccea021bda7a7),
                   kCellOffset = UINT64_C(0xa0761d6478bd642f);
constexpr uint64_t kKeyFactor0 = UINT64_C(0xbf58476d1ce4e5b9), kKeyFactor1 = UINT64_C(0x94d049bb133111eb);

KVBM_INLINE uint64_t fold(uint64_t x) { return x ^ (x >> 32); }
KVBM_INLINE uint64_t weight_of_scaled(uint64_t scaled) { return fold(fold(scaled) * kKeyFactor1) | 1; }
KVBM_INLINE uint64_t weight(uint64_t key) { return weight_of_scaled(key * kKeyFactor0); }
KVBM_INLINE uint64_t content(const Word16& v) {
  return fold(kCellOffset + v.x[0] * kWordFactor0 + v.x[1] * kWordFactor1 + v.x[2] * kWordFactor2 + v.x[3] * kWordFactor3);
}
KVBM_INLINE uint64_t digest_of(uint64_t key, const Word16& v) { return weight(key) * content(v); }
// The same for key = first + step, where `scaled` is scaled_key(first).
KVBM_INLINE uint64_t scaled_key(uint64_t first) { return first * kKeyFactor0; }
KVBM_INLINE uint64_t digest_of(uint64_t scaled, uint32_t step, const Word16& v) {
  return weight_of_scaled(scaled + step * kKeyFactor0) * content(v);
}

// A word as a cell; the missing bytes are zero.
KVBM_INLINE Word16 as_cell(const Word16& v) { return v; }
KVBM_INLINE Word16 as_cell(const Word8& v) { return {{v.x[0], v.x[1], 0, 0}}; }
KVBM_INLINE Word16 as_cell(uint32_t v) { return {{v, 0, 0, 0}}; }
KVBM_INLINE Word16 as_cell(uint16_t v) { return {{v, 0, 0, 0}}; }
KVBM_INLINE Word16 as_cell(uint8_t v) { return {{v, 0, 0, 0}}; }

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

// Key of the first cell of a place (the number of a job without its tile).
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

// Adds the byte offsets and the keys of an index over the inner modes FIRST .. FIRST+COUNT-1.  Inside a chunk keys fit 32 bits.
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
// Waits until kvbm_clear has set the digests to zero.  The kernel itself may start before that (launch.cpp).
__device__ __forceinline__ void wait_for_clear() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The sum over the threads of a row, which are a warp or a part of one.  All threads must call it.
__device__ __forceinline__ uint64_t sum_of_row(uint32_t width, uint64_t sum) {
  if (width < 32) {
    for (uint32_t distance = width / 2; distance; distance /= 2) sum += __shfl_xor_sync(~0u, (unsigned long long)sum, distance);
    return sum;
  }
  // Three limbs of 21 or 22 bits: the sum of 32 of each fits 32 bits.
  const uint32_t low = __reduce_add_sync(~0u, uint32_t(sum) & 0x3fffffu),
                 middle = __reduce_add_sync(~0u, uint32_t(sum >> 22) & 0x1fffffu),
                 high = __reduce_add_sync(~0u, uint32_t(sum >> 43));
  return low + (uint64_t(middle) << 22) + (uint64_t(high) << 43);
}

// Adds to the digest of a job's pair.
__device__ __forceinline__ void put_digest(const kvbm_args& a, const kvbm_part& p, uint32_t job, uint64_t sum) {
  wait_for_clear();
  uint32_t place = quotient(job, p.tiles);
  atomicAdd(reinterpret_cast<unsigned long long*>(a.digest.out) + pair_of(p, place), (unsigned long long)sum);
}

// Adds the sum of the threads of a row to the digest of their pair.  All threads must call it.  One atomic addition per row,
// because additions at one address are serialised.
template <uint32_t THREADS>
__device__ __forceinline__ void add_to_digest(const kvbm_args& a, const kvbm_part& p, uint32_t job, uint32_t lane,
                                              uint32_t width, uint64_t sum) {
  sum = sum_of_row(width, sum);
  if (width > 32) {
    __shared__ uint64_t of_warp[THREADS / 32];
    const uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) of_warp[warp] = sum;
    __syncthreads();
    if (lane == 0)
      for (uint32_t i = 1; i < width / 32; ++i) sum += of_warp[warp + i];
  }
  if (lane == 0 && job < p.jobs) put_digest(a, p, job, sum);
}
#else
inline void add_to_digest(const kvbm_args& a, uint32_t pair, uint64_t sum) {
  __atomic_fetch_add(reinterpret_cast<uint64_t*>(a.digest.out) + pair, sum, __ATOMIC_RELAXED);
}

// Digests words of WORD bytes that are cells; copies them if `c.dst` is given.
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
      sum += digest_of(c.key + row * c.key_row + i * c.key_step, as_cell(v));
    }
  }
  return sum;
}
#endif

}  // namespace kvbm

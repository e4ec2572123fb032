// address.cuh: from the number of a job to the addresses that it reads and writes, by ids, tables and modes.
#pragma once

#include "words.cuh"

namespace kvbm {

// ---- division ------------------------------------------------------------------------------------------------------

// Divides a 31-bit index by a divisor of kvbm_make_div.
KVBM_INLINE uint32_t quotient(uint32_t index, const kvbm_div& by) {
#ifdef __CUDA_ARCH__
  return (__umulhi(index, by.magic) + index) >> by.shift;
#else
  return uint32_t(((uint64_t(index) * by.magic >> 32) + index) >> by.shift);
#endif
}

// Returns the fastest coordinate of a mixed-radix index, and removes it from the index.
KVBM_INLINE uint32_t take(uint32_t& index, const kvbm_div& extent) {
  const uint32_t rest = quotient(index, extent);
  const uint32_t coordinate = index - rest * extent.n;
  index = rest;
  return coordinate;
}

// ---- addresses -----------------------------------------------------------------------------------------------------

struct Bases {
  const char* src;
  char* dst;
};

// Entry i of ids or of a table.  They lie in the kernel's parameters (then `field` is an offset into the payload) or in memory
// (then it is an address).  The parameters are read through `a`, not through a pointer, so that the loads use the constant
// cache.
template <class T>
KVBM_INLINE T entry_of(const kvbm_args& a, uint32_t field_bit, uint64_t field, uint32_t i) {
  if (a.inline_mask & field_bit) return reinterpret_cast<const T*>(a.payload)[uint32_t(field) / sizeof(T) + i];
  return reinterpret_cast<const T*>(field)[i];
}

// One side's id of a pair, as two loaded halves.  The first use of a loaded value waits for the load.  So the halves are joined
// only after the loads of both sides have been issued.
struct Id {
  uint32_t low, high;  // high: 0 for ids of 4 bytes
};
KVBM_INLINE Id read_id(const kvbm_args& a, uint32_t field_bit, uint64_t field, uint32_t pair) {
  Id id = {pair, 0};
  if (a.inline_mask & field_bit << 4) return id;
  if (a.id_bytes == 8) {
    const uint64_t wide = entry_of<uint64_t>(a, field_bit, field, pair);
    id.low = uint32_t(wide);
    id.high = uint32_t(wide >> 32);
  } else {
    id.low = entry_of<uint32_t>(a, field_bit, field, pair);
  }
  return id;
}
KVBM_INLINE int64_t join_halves(const kvbm_args& a, Id id) {
  return a.id_bytes == 8 ? int64_t(uint64_t(id.high) << 32 | id.low) : int32_t(id.low);
}

// Splits an id of a unit: `id` becomes the block's, and the result is the offset of the unit in the block, in bytes.
KVBM_INLINE uint64_t split_unit(uint32_t& id, const kvbm_div* digits, const int64_t* strides) {
  uint64_t bytes = 0;
  KVBM_UNROLL
  for (int k = 0; k < KVBM_UNIT_DIGITS; ++k) bytes += uint64_t(take(id, digits[k])) * strides[k];
  return bytes;
}

// Splits `place` (the number of a job without its tile) into pair and chunk, and computes the addresses from the ids, tables
// and outer modes.  Returns false if the pair is skipped (id -1) or an id is out of range.  The latter is reported through
// `fault`: ids on the GPU are not checked before they are used here. A 32-bit index times a 64-bit stride compiles to one wide
// multiply-add.
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
    const int64_t src_wide = join_halves(a, from), dst_wide = join_halves(a, to);
    if (uint64_t(src_wide) >= a.src_blocks || uint64_t(dst_wide) >= a.dst_blocks) {
      // Several threads may store here in any order: reporting one of the faults is enough.
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
    if (a.inline_mask & KVBM_SRC_UNITS) src += split_unit(src_id, units.src, stride.src);
    if (a.inline_mask & KVBM_DST_UNITS) dst += split_unit(dst_id, units.dst, stride.dst);
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
  const uint64_t src_base = entry_of<uint64_t>(a, 4, a.src_table, src_entry);  // both loads are issued before one is used
  const uint64_t dst_base = entry_of<uint64_t>(a, 8, a.dst_table, dst_entry);
  at.src = reinterpret_cast<const char*>(src_base + src);
  at.dst = reinterpret_cast<char*>(dst_base + dst);
  return true;
}

// Adds the byte offsets of an index over the inner modes FIRST .. FIRST+COUNT-1.  The slowest mode needs no division.  Inner
// strides fit 32 bits (`set_divisors` checks it), so each mode and side takes one multiply-add.
template <int FIRST, int COUNT>
KVBM_INLINE void step(const kvbm_part& p, uint32_t index, uint64_t& src, uint64_t& dst) {
  KVBM_UNROLL
  for (int k = FIRST; k < FIRST + COUNT; ++k) {
    const uint32_t c = k + 1 < FIRST + COUNT ? take(index, p.inner[k].extent) : index;
    src += uint64_t(c) * uint32_t(p.inner[k].src);
    dst += uint64_t(c) * uint32_t(p.inner[k].dst);
  }
}

}  // namespace kvbm

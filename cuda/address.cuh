// address.cuh: where a job reads and writes: ids, tables and modes, followed to addresses.
#pragma once

#include "words.cuh"

namespace kvbm {

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

}  // namespace kvbm

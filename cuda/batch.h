// batch.h: descriptions and ids of a batch, for launches and for runs on the host.
#pragma once

#include <string.h>

#include <cstddef>
#include <cstdint>

#include "kvbm.h"

namespace kvbm_driver {

static_assert(sizeof(kvbm_args) == 4096, "the parameters of a kernel have 4,096 bytes");

constexpr int32_t kSkip = -1;  // the id of a pair that is skipped

// Bytes of the payload that the parts and the units of ids take.  Ids and tables go behind them.
inline size_t described_bytes(uint32_t num_parts, uint32_t mask) {
  const bool has_units = mask & (KVBM_SRC_UNITS | KVBM_DST_UNITS);
  return num_parts * sizeof(kvbm_part) + (has_units ? offsetof(kvbm_units, part) + num_parts * sizeof(kvbm_unit_strides) : 0);
}
// Bits of inline_mask that the caller sets.
constexpr uint32_t kDescribed = KVBM_SRC_UNITS | KVBM_DST_UNITS | KVBM_DIGEST | KVBM_SM_LIMITED | KVBM_SCALES;

// Bytes of the payload behind ids and tables, at its end.
inline size_t tail_bytes(const kvbm_args& args) {
  if (args.inline_mask & KVBM_DIGEST) return sizeof(kvbm_digest);
  return args.inline_mask & KVBM_SCALES ? args.part[0].given_scales * sizeof(float) : 0;
}

// Copies the description of a copy.  Each batch sets the other parameters.
inline void copy_description(kvbm_args* to, const kvbm_args& from) {
  memcpy(to, &from, offsetof(kvbm_args, part) + described_bytes(from.num_parts, from.inline_mask));
  const size_t tail = tail_bytes(from), start = sizeof(kvbm_args) - tail;
  memcpy(reinterpret_cast<char*>(to) + start, reinterpret_cast<const char*>(&from) + start, tail);
}
inline const kvbm_units& units_of(const kvbm_args& args) {
  return reinterpret_cast<const kvbm_units&>(args.payload[args.num_parts * (sizeof(kvbm_part) / 8)]);
}

inline bool is_kernel(int kernel) { return kernel >= 0 && kernel < kvbm_num_kernels; }

inline int64_t id_at(const kvbm_side& side, uint32_t i) { return side.ids ? side.ids[i] : int64_t{i}; }

inline bool is_skipped(const kvbm_batch& batch, uint32_t i) {
  return id_at(batch.src, i) == kSkip || id_at(batch.dst, i) == kSkip;
}

// Splits an id of a unit: *id becomes the block's, and the result is the offset of the unit in the block, in bytes.
inline int64_t split_unit(int64_t* id, const kvbm_div* digits, const int64_t* strides) {
  int64_t bytes = 0;
  for (int k = 0; k < KVBM_UNIT_DIGITS; ++k) {
    bytes += *id % digits[k].n * strides[k];
    *id /= digits[k].n;
  }
  return bytes;
}

// Offset of a block, or a unit, of one part from its base address, in bytes; *id becomes the block's.
inline int64_t src_start(const kvbm_args& args, uint32_t part, int64_t* id) {
  const kvbm_units& units = units_of(args);
  const int64_t unit = args.inline_mask & KVBM_SRC_UNITS ? split_unit(id, units.src, units.part[part].src) : 0;
  return unit + *id * args.part[part].src_id_stride;
}
inline int64_t dst_start(const kvbm_args& args, uint32_t part, int64_t* id) {
  const kvbm_units& units = units_of(args);
  const int64_t unit = args.inline_mask & KVBM_DST_UNITS ? split_unit(id, units.dst, units.part[part].dst) : 0;
  return unit + *id * args.part[part].dst_id_stride;
}

inline bool has_ids(const kvbm_side& side) { return side.ids || side.ids_device; }

}  // namespace kvbm_driver

// batch.h: what launches and host runs both ask of a batch and its ids.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvbm.h"

namespace kvbm_driver {

enum : int32_t { kSkip = -1 };  // the id of a pair that is left out

// Bytes of a copy's parameters that its caller has set; behind them ids and tables may travel.
inline size_t inline_start(const kvbm_args& args) { return offsetof(kvbm_args, part) + args.num_parts * sizeof(kvbm_part); }

inline bool is_kernel(int kernel) { return kernel >= 0 && kernel < kvbm_num_kernels; }

inline int64_t id_at(const kvbm_side& side, uint32_t i) { return side.ids ? side.ids[i] : int64_t{i}; }

inline bool is_skipped(const kvbm_batch& batch, uint32_t i) {
  return id_at(batch.src, i) == kSkip || id_at(batch.dst, i) == kSkip;
}

// Bits of kvbm_args.inline_mask that are the caller's: ids that count units.
enum : uint32_t { kSrcUnits = 1u << 6, kDstUnits = 1u << 7 };

// Takes the digits of a unit out of an id, which then is a block's, and returns where the unit begins in the block.
inline int64_t unit_of(int64_t* id, const kvbm_div* digits, const int64_t* strides) {
  int64_t bytes = 0;
  for (int k = 0; k < KVBM_UNIT_DIGITS; ++k) {
    bytes += *id % digits[k].n * strides[k];
    *id /= digits[k].n;
  }
  return bytes;
}

// Where a block, or a unit, of one part begins behind its allocation's address; *id becomes the block's.
inline int64_t src_start(const kvbm_args& args, const kvbm_part& part, int64_t* id) {
  const int64_t unit = args.inline_mask & kSrcUnits ? unit_of(id, args.src_units, part.src_unit_stride) : 0;
  return unit + *id * part.src_id_stride;
}
inline int64_t dst_start(const kvbm_args& args, const kvbm_part& part, int64_t* id) {
  const int64_t unit = args.inline_mask & kDstUnits ? unit_of(id, args.dst_units, part.dst_unit_stride) : 0;
  return unit + *id * part.dst_id_stride;
}

inline bool has_ids(const kvbm_side& side) { return side.ids || side.ids_device; }

}  // namespace kvbm_driver

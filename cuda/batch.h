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

inline bool has_ids(const kvbm_side& side) { return side.ids || side.ids_device; }

}  // namespace kvbm_driver

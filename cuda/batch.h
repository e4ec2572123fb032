// batch.h: what launches and host runs both ask of a batch and its ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvbm.h"

namespace kvbm_driver {

enum : int64_t { kSkip = -1 };  // the id of a pair that is left out

// Bytes of a copy's parameters that its caller has set; behind them ids and tables may travel.
inline size_t inline_start(const kvbm_args& args) { return offsetof(kvbm_args, part) + args.num_parts * sizeof(kvbm_part); }

inline bool is_kernel(int kernel) { return kernel >= 0 && kernel < kvbm_num_kernels; }

inline int64_t id_at(const void* ids, uint32_t id_bytes, int64_t i) {
  if (!ids) return i;
  return id_bytes == 4 ? static_cast<const int32_t*>(ids)[i] : static_cast<const int64_t*>(ids)[i];
}

// Writes ids with `to` bytes each; no ids stand for 0, 1, 2, ….
inline void write_ids(void* out, uint32_t to, const void* ids, uint32_t from, uint32_t count) {
  if (ids && from == to) {
    memcpy(out, ids, static_cast<size_t>(count) * to);
  } else if (ids && from == 8) {
    for (uint32_t i = 0; i < count; ++i)
      static_cast<int32_t*>(out)[i] = static_cast<int32_t>(static_cast<const int64_t*>(ids)[i]);
  } else if (to == 4) {
    for (uint32_t i = 0; i < count; ++i) static_cast<int32_t*>(out)[i] = static_cast<int32_t>(id_at(ids, from, i));
  } else {
    for (uint32_t i = 0; i < count; ++i) static_cast<int64_t*>(out)[i] = id_at(ids, from, i);
  }
}

inline bool is_batch(const kvbm_batch* batch) { return batch->id_bytes == 0 || batch->id_bytes == 4 || batch->id_bytes == 8; }

// Pairs that are not skipped; of ids on the device nothing is known here (host.cpp).
uint32_t count_pairs(const kvbm_batch& batch);

}  // namespace kvbm_driver

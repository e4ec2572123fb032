// copy_engine.cpp: runs a loop nest with the copy engine: walks it on the host, and submits its runs and rows.
#include <algorithm>
#include <vector>

#include "batch.h"
#include "submission.h"
#include "transfer.h"

namespace kvbm_driver {

namespace {

struct Loop {
  uint64_t extent;
  int64_t src, dst;              // strides, bytes
  int64_t src_entry, dst_entry;  // strides, table entries
};

// A part of a copy: runs of bytes, and the loops around a run, fastest first.
struct Nest {
  uint64_t run;
  int depth = 0;
  Loop loops[KVBM_MAX_INNER + KVBM_MAX_OUTER];

  explicit Nest(const kvbm_part& part) : run(part.inner[0].extent.n) {
    for (int k = 1; k < KVBM_MAX_INNER; ++k)
      if (part.inner[k].extent.n > 1) loops[depth++] = {part.inner[k].extent.n, part.inner[k].src, part.inner[k].dst, 0, 0};
    for (const kvbm_outer& mode : part.outer)
      if (mode.extent.n > 1) loops[depth++] = {mode.extent.n, mode.src, mode.dst, mode.src_table, mode.dst_table};
  }
};

struct Spot {
  int64_t src = 0, dst = 0, src_entry = 0, dst_entry = 0;
  void step(const Loop& loop, int64_t times) {
    src += loop.src * times;
    dst += loop.dst * times;
    src_entry += loop.src_entry * times;
    dst_entry += loop.dst_entry * times;
  }
};

// Calls `emit` for every iteration of the loops from `first` on.
template <class Emit>
int walk(const Nest& nest, int first, Spot at, Emit&& emit) {
  uint64_t turn[KVBM_MAX_INNER + KVBM_MAX_OUTER] = {};
  for (;;) {
    RETURN_IF_FAILED(emit(at));
    int k = first;
    for (; k < nest.depth; ++k) {
      at.step(nest.loops[k], 1);
      if (++turn[k] < nest.loops[k].extent) break;
      at.step(nest.loops[k], -static_cast<int64_t>(turn[k]));
      turn[k] = 0;
    }
    if (k == nest.depth) return KVBM_OK;
  }
}

// Copies a batch by one description.  Ids and tables are in host memory.
int copy_nest(const kvbm_args& args, const kvbm_batch& batch, Submission* out) {
  for (uint32_t p = 0; p < args.num_parts; ++p) {
    const kvbm_part& part = args.part[p];
    const Nest nest(part);
    // If adjacent blocks are one range, visit them in the order of their ids.
    const bool blocks_touch = part.src_id_stride == static_cast<int64_t>(nest.run) &&
                              part.src_id_stride == part.dst_id_stride && args.src_id_table == 0 && args.dst_id_table == 0 &&
                              !(args.inline_mask & (KVBM_SRC_UNITS | KVBM_DST_UNITS));
    const int rows = !blocks_touch && nest.depth > 0 && nest.loops[0].src_entry == 0 && nest.loops[0].dst_entry == 0;
    auto start = [&](uint32_t pair, Spot* at) {
      int64_t src = id_at(batch.src, pair), dst = id_at(batch.dst, pair);
      if (src == kSkip || dst == kSkip) return false;
      at->src = part.src_offset + src_start(args, p, &src);
      at->dst = part.dst_offset + dst_start(args, p, &dst);
      at->src_entry = part.src_table_offset + src * args.src_id_table;
      at->dst_entry = part.dst_table_offset + dst * args.dst_id_table;
      return true;
    };
    auto emit = [&](const Spot& at) {
      const Address src = batch.src.table[at.src_entry] + at.src, dst = batch.dst.table[at.dst_entry] + at.dst;
      if (!rows) return out->range(dst, src, nest.run);
      const Loop& row = nest.loops[0];
      return out->rows(dst, src, nest.run, row.extent, row.dst, row.src);
    };
    Spot at;
    if (!blocks_touch) {
      for (uint32_t pair = 0; pair < batch.num_pairs; ++pair)
        if (start(pair, &at)) RETURN_IF_FAILED(walk(nest, rows, at, emit));
      continue;
    }
    // In the order of the source ids, so that adjacent blocks are merged whatever the order of the batch.
    static thread_local std::vector<uint32_t> order;
    order.resize(batch.num_pairs);
    for (uint32_t i = 0; i < batch.num_pairs; ++i) order[i] = i;
    auto before = [&](uint32_t a, uint32_t b) { return id_at(batch.src, a) < id_at(batch.src, b); };
    if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
    RETURN_IF_FAILED(walk(nest, 0, Spot(), [&](const Spot& chunk) {
      for (const uint32_t pair : order) {
        Spot here;
        if (!start(pair, &here)) continue;
        here.src += chunk.src;
        here.dst += chunk.dst;
        here.src_entry += chunk.src_entry;
        here.dst_entry += chunk.dst_entry;
        RETURN_IF_FAILED(emit(here));
      }
      return static_cast<int>(KVBM_OK);
    }));
  }
  return out->flush();
}

}  // namespace

int copy_nests(const kvbm_route& route, const kvbm_args* const* nests, uint32_t count, const kvbm_batch& batch, Device* device,
               Stream stream, uint64_t* submissions) {
  Submission::Mode mode;
  RETURN_IF_FAILED(mode_for(stream, route.by_peer, &mode));
  Submission out(device, stream, mode, true, route.cuts, route.num_cuts);
  int status = KVBM_OK;
  for (uint32_t i = 0; i < count && status == KVBM_OK; ++i) status = copy_nest(*nests[i], batch, &out);
  *submissions += out.submissions;
  return out.join(status);
}

}  // namespace kvbm_driver

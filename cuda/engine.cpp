// engine.cpp: transfers: by the copy engine, through a ring on the device, or by one kernel.
#include <algorithm>
#include <climits>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "batch.h"
#include "driver.h"

using namespace kvbm_driver;

namespace {

// ---- submissions ---------------------------------------------------------------------------------------------------

enum : size_t { kCopiesASubmission = 4096 };  // very large batches have crashed drivers
enum : uint64_t { kLargestPitch = INT32_MAX };
// Rows at a stride beat as many copies of a batch (benchmarks/NOTES.md), but each such call costs 2 us between copies.
enum : uint64_t { kRowsWorthACall = 512 << 10 };

bool can_batch() { return driver.MemcpyBatchAsyncV2 || driver.MemcpyBatchAsyncV1; }

// The context of the GPU that an address lies on, or null: host memory.
int context_of(Address address, Handle* context) {
  *context = nullptr;
  int ordinal = -1;
  RETURN_IF_FAILED(kvbm_pointer_device(address, &ordinal));
  if (ordinal < 0) return KVBM_OK;
  Current current;
  RETURN_IF_FAILED(current.open(ordinal));
  *context = current.device->context;
  return KVBM_OK;
}

// Ranges on their way to the driver: neighbours are merged, and as many as may be go in one call.  After the last of them `join`.
class Submission {
 public:
  enum Mode { kOneByOne, kBatched, kByPeer };
  Submission(Device* device, Stream stream, Mode mode, bool merges, const uint64_t* cuts = nullptr, uint32_t num_cuts = 0)
      : device_(device), callers_(stream), stream_(stream), mode_(mode), merges_(merges), cuts_(cuts), num_cuts_(num_cuts) {}

  int range(Address dst, Address src, uint64_t bytes) {
    while (uint64_t first = before_cut(dst, src, bytes)) {
      RETURN_IF_FAILED(whole(dst, src, first));
      dst += first;
      src += first;
      bytes -= first;
    }
    return whole(dst, src, bytes);
  }

  int rows(Address dst, Address src, uint64_t width, uint64_t count, uint64_t dst_pitch, uint64_t src_pitch) {
    const uint64_t steps = count - 1;
    const bool is_cut = before_cut(dst, src, steps * dst_pitch + width) || before_cut(dst, src, steps * src_pitch + width);
    if (is_cut || mode_ == kByPeer || count * width < kRowsWorthACall || dst_pitch > kLargestPitch ||
        src_pitch > kLargestPitch || dst_pitch < width || src_pitch < width) {
      for (uint64_t i = 0; i < count; ++i) RETURN_IF_FAILED(range(dst + i * dst_pitch, src + i * src_pitch, width));
      return KVBM_OK;
    }
    Copy2D copy = {};
    copy.src_type = copy.dst_type = kUnified;
    copy.src_device = src;
    copy.dst_device = dst;
    copy.src_pitch = src_pitch;
    copy.dst_pitch = dst_pitch;
    copy.width = width;
    copy.height = count;
    ++submissions;
    return CU(Memcpy2DAsync, &copy, stream_);
  }

  int flush() {
    const size_t n = count_;
    count_ = 0;
    if (n == 0) return KVBM_OK;
    if (mode_ != kBatched || n == 1) {
      for (size_t i = 0; i < n; ++i) RETURN_IF_FAILED(one(lists_.dst[i], lists_.src[i], lists_.bytes[i]));
      return KVBM_OK;
    }
    if (is_legacy(stream_)) {  // which the batched call refuses
      RETURN_IF_FAILED(order_streams(device_, callers_, device_->side_stream));
      stream_ = device_->side_stream;
    }
    CopyAttributes attributes = {1, {0, 0}, {0, 0}, 0};
    size_t attributes_from = 0, failed = 0;  // one entry an attribute, not one a copy
    ++submissions;
    const int status =
        driver.MemcpyBatchAsyncV2
            ? driver.MemcpyBatchAsyncV2(lists_.dst, lists_.src, lists_.bytes, n, &attributes, &attributes_from, 1, stream_)
            : driver.MemcpyBatchAsyncV1(lists_.dst, lists_.src, lists_.bytes, n, &attributes, &attributes_from, 1, &failed,
                                        stream_);
    return check("cuMemcpyBatchAsync", status);
  }

  // The caller's stream goes on after the copies, also after those before a failure.
  int join(int status) {
    if (stream_ == callers_) return status;
    const int joined = order_streams(device_, stream_, callers_);
    return status == KVBM_OK ? joined : status;
  }

  uint64_t submissions = 0;

 private:
  enum : int { kUnified = 4 };  // CUmemorytype: whatever the address says

  // Bytes up to the first cut inside the range, on either side; 0: there is none.
  uint64_t before_cut(Address dst, Address src, uint64_t bytes) const {
    uint64_t first = 0;
    if (num_cuts_ == 0) return 0;
    for (const Address start : {dst, src}) {
      const uint64_t* cut = std::upper_bound(cuts_, cuts_ + num_cuts_, start);
      if (cut != cuts_ + num_cuts_ && *cut < start + bytes && (first == 0 || *cut - start < first)) first = *cut - start;
    }
    return first;
  }

  int one(Address dst, Address src, uint64_t bytes) {
    ++submissions;
    Handle to = nullptr, from = nullptr;
    if (mode_ == kByPeer) {
      RETURN_IF_FAILED(context_of(dst, &to));
      RETURN_IF_FAILED(context_of(src, &from));
      if (to && from) return CU(MemcpyPeerAsync, dst, to, src, from, bytes, stream_);
      if ((to ? to : from) != device_->context) return check("cuMemcpyAsync", KVBM_NOT_GRANTED);
    }
    return CU(MemcpyAsync, dst, src, bytes, stream_);
  }

  int whole(Address dst, Address src, uint64_t bytes) {
    if (bytes == 0) return KVBM_OK;  // the driver takes no copies of nothing
    if (merges_ && count_ > 0) {
      const size_t last = count_ - 1;
      const uint64_t held = lists_.bytes[last];
      if (lists_.dst[last] + held == dst && lists_.src[last] + held == src && !is_cut_at(dst, src)) {
        lists_.bytes[last] += bytes;
        return KVBM_OK;
      }
    }
    if (count_ == kCopiesASubmission) RETURN_IF_FAILED(flush());
    lists_.dst[count_] = dst;
    lists_.src[count_] = src;
    lists_.bytes[count_++] = bytes;
    return KVBM_OK;
  }

  bool is_cut_at(Address dst, Address src) const {
    return num_cuts_ &&
           (std::binary_search(cuts_, cuts_ + num_cuts_, dst) || std::binary_search(cuts_, cuts_ + num_cuts_, src));
  }

  struct Lists {
    Address dst[kCopiesASubmission], src[kCopiesASubmission];
    size_t bytes[kCopiesASubmission];
  };
  static thread_local Lists lists_;  // the driver takes no const arrays; between two calls of a thread nothing is in them
  Device* device_;
  Stream callers_, stream_;  // given, and what takes the copies
  Mode mode_;
  bool merges_;
  const uint64_t* cuts_;
  uint32_t num_cuts_;
  size_t count_ = 0;
};

thread_local Submission::Lists Submission::lists_;

// The batched call is refused by a capture.
int mode_for(Stream stream, bool by_peer, Submission::Mode* mode) {
  *mode = by_peer ? Submission::kByPeer : Submission::kOneByOne;
  if (by_peer || !can_batch()) return KVBM_OK;
  Handle graph = nullptr;
  RETURN_IF_FAILED(capturing_graph(stream, &graph));
  if (!graph) *mode = Submission::kBatched;
  return KVBM_OK;
}

// ---- loop nests ----------------------------------------------------------------------------------------------------

struct Loop {
  uint64_t extent;
  int64_t src, dst;              // bytes a step
  int64_t src_entry, dst_entry;  // table entries a step
};

// A part of a copy as runs of bytes: the loops around a run, fastest first.
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

// Calls `emit` at every turn of the loops from `first` on.
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

// Copies a batch of host ids by its loop nest.  Tables are the host's.
int copy_nest(const kvbm_args& args, const kvbm_batch& batch, Submission* out) {
  for (uint32_t p = 0; p < args.num_parts; ++p) {
    const kvbm_part& part = args.part[p];
    const Nest nest(part);
    // Blocks that follow each other with nothing between are one range, if they are met one after the other.
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
    // In the order of the source's ids, so that neighbours meet whatever order they were given in.
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

// ---- the staging ring ----------------------------------------------------------------------------------------------

}  // namespace

struct kvbm_ring {
  struct Slot {
    Address memory;
    Handle filled, emptied;  // recorded where the one who fills, or empties, the slot is done
    bool used;               // emptied has been recorded
  };
  std::mutex mutex;  // one copy at a time enqueues
  Device* device = nullptr;
  Stream engine = nullptr;   // what the copy engine does
  Stream kernels = nullptr;  // where the caller's stream is another GPU's
  Handle forked = nullptr, joined = nullptr;
  uint64_t slot_bytes = 0;
  uint32_t count = 0, next = 0;
  bool captured = false;  // of a ring that graphs use: one does
  Slot slots[8] = {};
};

namespace {

void destroy_ring(kvbm_ring* ring) {
  for (const Stream stream : {ring->engine, ring->kernels})
    if (stream) driver.StreamSynchronize(stream);
  for (kvbm_ring::Slot& slot : ring->slots) {
    if (slot.used) driver.EventSynchronize(slot.emptied);
    if (slot.memory) driver.MemFree(slot.memory);
    for (const Handle event : {slot.filled, slot.emptied})
      if (event) driver.EventDestroy(event);
  }
  for (const Stream stream : {ring->engine, ring->kernels})
    if (stream) driver.StreamDestroy(stream);
  for (const Handle event : {ring->forked, ring->joined})
    if (event) driver.EventDestroy(event);
  delete ring;
}

int make_ring(Device* device, uint64_t slot_bytes, uint32_t slots, kvbm_ring** out) {
  std::unique_ptr<kvbm_ring, void (*)(kvbm_ring*)> ring(new (std::nothrow) kvbm_ring, destroy_ring);
  if (!ring) return check("malloc", KVBM_NO_MEMORY);
  if (slots > sizeof ring->slots / sizeof ring->slots[0]) return check("kvbm_ring_create", kInvalidValue);
  ring->device = device;
  ring->slot_bytes = slot_bytes;
  ring->count = slots;
  RETURN_IF_FAILED(CU(StreamCreate, &ring->engine, kStreamNonBlocking));
  RETURN_IF_FAILED(CU(StreamCreate, &ring->kernels, kStreamNonBlocking));
  RETURN_IF_FAILED(CU(EventCreate, &ring->forked, kEventNoTiming));
  RETURN_IF_FAILED(CU(EventCreate, &ring->joined, kEventNoTiming));
  for (uint32_t i = 0; i < slots; ++i) {
    RETURN_IF_FAILED(CU(MemAlloc, &ring->slots[i].memory, slot_bytes));
    RETURN_IF_FAILED(CU(EventCreate, &ring->slots[i].filled, kEventNoTiming));
    RETURN_IF_FAILED(CU(EventCreate, &ring->slots[i].emptied, kEventNoTiming));
  }
  *out = ring.release();
  return KVBM_OK;
}

// Rings that graphs use.  A captured copy replays on its own ring, at any time and beside any other copy; when its last
// graph is gone the ring serves the next capture.
std::mutex captured_mutex;
std::vector<kvbm_ring*>& captured_rings = *new std::vector<kvbm_ring*>;

void release_captured_ring(void* ring) {  // called by the driver, on any thread
  std::lock_guard<std::mutex> lock(captured_mutex);
  static_cast<kvbm_ring*>(ring)->captured = false;
}

int take_captured_ring(Device* device, Handle graph, uint64_t slot_bytes, uint32_t slots, kvbm_ring** out) {
  kvbm_ring* ring = nullptr;
  {
    std::lock_guard<std::mutex> lock(captured_mutex);
    for (kvbm_ring* free : captured_rings)
      if (!free->captured && free->device == device && free->slot_bytes >= slot_bytes && free->count >= slots &&
          (!ring || free->slot_bytes * free->count < ring->slot_bytes * ring->count))
        ring = free;
    if (ring) ring->captured = true;
  }
  if (!ring) {
    RelaxedCapture relaxed;
    RETURN_IF_FAILED(make_ring(device, slot_bytes, slots, &ring));
    ring->captured = true;
    try {
      std::lock_guard<std::mutex> lock(captured_mutex);
      captured_rings.push_back(ring);
    } catch (...) {
      destroy_ring(ring);
      return check("malloc", KVBM_NO_MEMORY);
    }
  }
  // What was recorded outside this graph, or in an earlier one, says nothing here.
  for (kvbm_ring::Slot& slot : ring->slots) slot.used = false;
  ring->next = 0;
  *out = ring;
  const int given = give_to_graph(graph, ring, release_captured_ring);
  if (given != KVBM_OK) release_captured_ring(ring);
  return given;
}

// ---- staged copies -------------------------------------------------------------------------------------------------

enum : uint64_t { kSmallGroupBytes = 2 << 20 };  // large enough to hide the events between it and the next group

// How many blocks go through the ring at a time.  While the first group is packed, or the last one unpacked, the copy
// engine has nothing to do: that group is small.
void group_sizes(uint64_t pairs, uint64_t block_bytes, uint64_t most, bool small_first, std::vector<uint32_t>* sizes) {
  sizes->clear();
  uint64_t size = std::min(most, std::max<uint64_t>(kSmallGroupBytes / block_bytes, 1));
  for (; pairs > 0; size = most) {
    const uint64_t n = std::min(size, pairs);
    sizes->push_back(static_cast<uint32_t>(n));
    pairs -= n;
  }
  if (!small_first) std::reverse(sizes->begin(), sizes->end());
}

// Ids of one side each.
struct IdLists {
  std::vector<int32_t> src, dst;
};

// Leaves out the skipped pairs, and writes out the ids that are only counted: groups of the batch start anywhere in it.
void write_out(kvbm_batch* batch, IdLists* lists) {
  // The ids on the device stay where they are, and so must those of the other side, the skipped ones too.
  const bool on_device = batch->src.ids_device || batch->dst.ids_device;
  if (has_ids(batch->src) && has_ids(batch->dst) && (on_device || batch->kept == batch->num_pairs)) return;
  lists->src.clear();
  lists->dst.clear();
  for (uint32_t i = 0; i < batch->num_pairs; ++i) {
    if (!on_device && is_skipped(*batch, i)) continue;
    lists->src.push_back(static_cast<int32_t>(id_at(batch->src, i)));
    lists->dst.push_back(static_cast<int32_t>(id_at(batch->dst, i)));
  }
  batch->num_pairs = batch->kept = static_cast<uint32_t>(lists->src.size());
  if (!batch->src.ids_device) batch->src.ids = lists->src.data();
  if (!batch->dst.ids_device) batch->dst.ids = lists->dst.data();
}

class Staged {
 public:
  Staged(const kvbm_route& route, const kvbm_batch& batch, kvbm_ring* ring, Stream stream)
      : route_(route), batch_(batch), ring_(ring), stream_(stream) {}

  // One group, packed and taken on the caller's own stream: nothing to overlap, and no event between.
  int gather_at_once() {
    kvbm_ring::Slot* slot = nullptr;
    RETURN_IF_FAILED(take(stream_, &slot));
    RETURN_IF_FAILED(permute(0, batch_.num_pairs, slot, stream_));
    RETURN_IF_FAILED(move(0, batch_.num_pairs, slot, stream_));
    return leave(slot, stream_);
  }

  int gather(const std::vector<uint32_t>& groups) {
    uint64_t first = 0;
    for (const uint32_t n : groups) {
      kvbm_ring::Slot* slot = nullptr;
      RETURN_IF_FAILED(take(stream_, &slot));
      RETURN_IF_FAILED(permute(first, n, slot, stream_));
      RETURN_IF_FAILED(pass(slot->filled, stream_, ring_->engine));
      RETURN_IF_FAILED(move(first, n, slot, ring_->engine));
      RETURN_IF_FAILED(leave(slot, ring_->engine));
      first += n;
    }
    return KVBM_OK;
  }

  int scatter(const std::vector<uint32_t>& groups) {
    uint64_t first = 0;
    RETURN_IF_FAILED(pass(ring_->forked, stream_, ring_->engine));
    for (const uint32_t n : groups) {
      kvbm_ring::Slot* slot = nullptr;
      RETURN_IF_FAILED(take(ring_->engine, &slot));
      RETURN_IF_FAILED(move(first, n, slot, ring_->engine));
      RETURN_IF_FAILED(pass(slot->filled, ring_->engine, stream_));
      RETURN_IF_FAILED(permute(first, n, slot, stream_));
      RETURN_IF_FAILED(leave(slot, stream_));
      first += n;
    }
    return KVBM_OK;
  }

  // The caller's stream goes on when the engine is done; also after a failure, so that a capture stays whole.
  int join() { return pass(ring_->joined, ring_->engine, stream_); }

  uint64_t submissions = 0;

 private:
  static int pass(Handle event, Stream from, Stream to) {
    RETURN_IF_FAILED(CU(EventRecord, event, from));
    return CU(StreamWaitEvent, to, event, 0);
  }
  int take(Stream stream, kvbm_ring::Slot** slot) {
    *slot = &ring_->slots[ring_->next];
    ring_->next = (ring_->next + 1) % ring_->count;
    return (*slot)->used ? CU(StreamWaitEvent, stream, (*slot)->emptied, 0) : KVBM_OK;
  }
  int leave(kvbm_ring::Slot* slot, Stream stream) {
    slot->used = true;
    return CU(EventRecord, slot->emptied, stream);
  }

  // Pairs of the batch, from pool to pool.
  kvbm_batch group(uint64_t first, uint32_t n) const {
    kvbm_batch part = batch_;
    part.num_pairs = part.kept = n;
    for (kvbm_side* side : {&part.src, &part.dst}) {
      if (side->ids) side->ids += first;
      if (side->ids_device) side->ids_device += first * batch_.id_bytes;
    }
    if (part.positions) part.positions += first;
    if (part.positions_device) part.positions_device += first * part.position_bytes;
    if (part.digests) part.digests += first * sizeof(uint64_t);
    return part;
  }

  // The slot's side: the blocks of one group, one after the other in one allocation.
  static kvbm_side blocks_of(const uint64_t* memory, uint32_t n) { return {nullptr, 0, memory, 0, 1, n}; }

  int permute(uint64_t first, uint32_t n, const kvbm_ring::Slot* slot, Stream stream) {
    kvbm_batch part = group(first, n);
    kvbm_side& far = route_.gathers ? part.dst : part.src;
    const int32_t* const given = far.ids;
    const uint64_t memory = slot->memory;
    far = blocks_of(&memory, n);
    if (part.dst.ids_device) {  // pairs that are skipped on the host's side are still here
      lists_.src.resize(n);
      for (uint32_t i = 0; i < n; ++i) lists_.src[i] = given[i] == kSkip ? int32_t{kSkip} : static_cast<int32_t>(i);
      far.ids = lists_.src.data();
    }
    const bool sums = part.digests != 0;
    const uint32_t count = sums ? route_.num_sum_permute : route_.num_permute;
    const int* kernels = sums ? route_.sum_permute_kernel : route_.permute_kernel;
    const kvbm_args** args = sums ? route_.sum_permute : route_.permute;
    for (uint32_t i = 0; i < count; ++i) {
      ++submissions;
      part.adds = i > 0;
      RETURN_IF_FAILED(launch_batch(ring_->device, kernels[i], args[i], &part, stream));
    }
    return KVBM_OK;
  }

  int move(uint64_t first, uint32_t n, const kvbm_ring::Slot* slot, Stream stream) {
    kvbm_batch part = group(first, n);
    const uint64_t memory = slot->memory;
    (route_.gathers ? part.src : part.dst) = blocks_of(&memory, n);
    (route_.gathers ? part.dst.table : part.src.table) = route_.gathers ? route_.dst_bases : route_.src_bases;
    Submission::Mode mode;
    RETURN_IF_FAILED(mode_for(stream, route_.by_peer, &mode));
    Submission out(ring_->device, stream, mode, true, route_.cuts, route_.num_cuts);
    int status = KVBM_OK;
    for (uint32_t i = 0; i < route_.num_moves && status == KVBM_OK; ++i) status = copy_nest(*route_.moves[i], part, &out);
    submissions += out.submissions;
    return out.join(status);
  }

  const kvbm_route& route_;
  const kvbm_batch& batch_;
  kvbm_ring* ring_;
  Stream stream_;
  IdLists lists_;
};

int copy_staged(const kvbm_route& route, const kvbm_batch& given, Stream stream, uint64_t* submissions) {
  static thread_local IdLists lists;
  static thread_local std::vector<uint32_t> groups;
  kvbm_batch batch = given;
  write_out(&batch, &lists);
  if (batch.num_pairs == 0) return KVBM_OK;
  Handle graph = nullptr;
  RETURN_IF_FAILED(capturing_graph(stream, &graph));
  kvbm_ring* ring = route.ring;
  const uint64_t most = std::max<uint64_t>(ring->slot_bytes / route.slot_block_bytes, 1);
  const bool at_once =
      route.gathers && batch.num_pairs <= most && batch.num_pairs * route.slot_block_bytes <= 4 * kSmallGroupBytes;
  group_sizes(at_once ? 0 : batch.num_pairs, route.slot_block_bytes, most, route.gathers != 0, &groups);
  if (graph) {
    const auto slots = static_cast<uint32_t>(std::min<uint64_t>(std::max<uint64_t>(groups.size(), 1), ring->count));
    const uint64_t blocks = at_once ? batch.num_pairs : *std::max_element(groups.begin(), groups.end());
    RETURN_IF_FAILED(take_captured_ring(ring->device, graph, blocks * route.slot_block_bytes, slots, &ring));
  }
  std::lock_guard<std::mutex> lock(ring->mutex);
  Staged staged(route, batch, ring, stream);
  int status = at_once ? staged.gather_at_once() : route.gathers ? staged.gather(groups) : staged.scatter(groups);
  if (!at_once) {
    const int joined = staged.join();
    if (status == KVBM_OK) status = joined;
  }
  *submissions = staged.submissions;
  return status;
}

// ---- transfers -----------------------------------------------------------------------------------------------------

// One launch after the other, on the device or on the host (null).
int launch_all(uint32_t count, const int* kernels, const kvbm_args** args, kvbm_batch batch, Device* device, Stream stream,
               uint64_t* submissions) {
  for (uint32_t i = 0; i < count; ++i) {
    ++*submissions;
    batch.adds = i > 0;  // digests
    RETURN_IF_FAILED(device ? launch_batch(device, kernels[i], args[i], &batch, stream)
                            : kvbm_run_host(kernels[i], args[i], &batch, 0));
  }
  return KVBM_OK;
}

int copy_direct(const kvbm_route& route, const kvbm_batch& batch, Device* device, Stream stream, uint64_t* submissions) {
  if (batch.digests)
    return launch_all(route.num_sum_direct, route.sum_direct_kernel, route.sum_direct, batch, device, stream, submissions);
  return launch_all(route.num_direct, route.direct_kernel, route.direct, batch, device, stream, submissions);
}

enum { kOfSrc, kOfDst };

// Digests of one side's blocks, 0 where the pair is skipped.
int digest_side(const kvbm_route& route, const kvbm_batch& given, int side, uint64_t out, Device* device, Stream stream,
                uint64_t* submissions) {
  kvbm_batch batch = given;
  if (side == kOfDst) std::swap(batch.src, batch.dst);
  // The other side's ids tell which pairs are skipped; its memory is not touched, and any table will do for it.
  batch.dst.table = batch.src.table;
  batch.dst.table_device = batch.src.table_device;
  batch.dst.entries = 1;
  batch.digests = out;
  return launch_all(route.num_digests[side], route.digest_kernel[side], route.digest[side], batch, device, stream, submissions);
}

int copy_engine(const kvbm_route& route, const kvbm_batch& given, Device* device, Stream stream, uint64_t* submissions) {
  kvbm_batch batch = given;
  batch.src.table = route.src_bases;
  batch.dst.table = route.dst_bases;
  Submission::Mode mode;
  RETURN_IF_FAILED(mode_for(stream, route.by_peer, &mode));
  Submission out(device, stream, mode, true, route.cuts, route.num_cuts);
  int status = KVBM_OK;
  for (uint32_t i = 0; i < route.num_runs && status == KVBM_OK; ++i) status = copy_nest(*route.runs[i], batch, &out);
  *submissions = out.submissions;
  return out.join(status);
}

// Whether the kernels of a strategy digest what they copy.
bool is_fused(int strategy, const kvbm_route& route, const kvbm_batch& batch) {
  if (strategy == KVBM_DIRECT) return route.num_sum_direct > 0;
  // A staged copy leaves out what is skipped, and with it the places of digests.
  return strategy == KVBM_STAGED && route.num_sum_permute > 0 && batch.kept == batch.num_pairs;
}

int copy_only(int strategy, const kvbm_route& route, const kvbm_batch& batch, Device* device, Stream stream,
              uint64_t* submissions) {
  if (!batch.kept || strategy == KVBM_NO_COPY) return KVBM_OK;
  if (strategy == KVBM_STAGED) return copy_staged(route, batch, stream, submissions);
  if (strategy == KVBM_ENGINE) return copy_engine(route, batch, device, stream, submissions);
  return copy_direct(route, batch, device, stream, submissions);
}

// The copy, and the digests that are asked for: fused, or before and after it.
int copy_and_digest(int strategy, const kvbm_route& route, const kvbm_batch& given, Device* device, Stream stream,
                    uint64_t* submissions) {
  kvbm_batch batch = given;
  const uint64_t apart = is_fused(strategy, route, batch) && batch.kept ? 0 : batch.digests;
  if (apart) batch.digests = 0;
  if (batch.num_pairs == 0) return KVBM_OK;
  if (batch.both[kOfSrc]) RETURN_IF_FAILED(digest_side(route, given, kOfSrc, batch.both[kOfSrc], device, stream, submissions));
  if (apart && !route.digests_dst) RETURN_IF_FAILED(digest_side(route, given, kOfSrc, apart, device, stream, submissions));
  RETURN_IF_FAILED(copy_only(strategy, route, batch, device, stream, submissions));
  if (apart && route.digests_dst) RETURN_IF_FAILED(digest_side(route, given, kOfDst, apart, device, stream, submissions));
  if (batch.both[kOfDst]) RETURN_IF_FAILED(digest_side(route, given, kOfDst, batch.both[kOfDst], device, stream, submissions));
  return KVBM_OK;
}

// Digests for pinned memory: kernels add to memory of the device, and what they made is copied.
class FarDigests : public Cargo {
 public:
  FarDigests(int strategy, const kvbm_route& route, const kvbm_batch& batch, Device* device, Stream stream,
             uint64_t* submissions)
      : strategy_(strategy), route_(route), batch_(batch), device_(device), stream_(stream), submissions_(submissions) {
    if (batch_.digests_far && batch_.digests) far_[count_++] = &batch_.digests;
    for (uint64_t& out : batch_.both)
      if (batch_.both_far && out) far_[count_++] = &out;
  }
  size_t bytes() const { return count_ * each(); }
  void write(void*, Address scratch) override {
    for (int i = 0; i < count_; ++i) {
      out_[i] = *far_[i];
      *far_[i] = scratch_[i] = scratch + i * each();
    }
  }
  int launch() override {
    RETURN_IF_FAILED(copy_and_digest(strategy_, route_, batch_, device_, stream_, submissions_));
    for (int i = 0; i < count_; ++i)
      RETURN_IF_FAILED(CU(MemcpyAsync, out_[i], scratch_[i], sizeof(uint64_t) * batch_.num_pairs, stream_));
    return KVBM_OK;
  }

 private:
  size_t each() const { return (sizeof(uint64_t) * batch_.num_pairs + 15) & ~size_t{15}; }
  int strategy_;
  const kvbm_route& route_;
  kvbm_batch batch_;
  Device* device_;
  Stream stream_;
  uint64_t* submissions_;
  int count_ = 0;
  uint64_t* far_[3];
  Address out_[3], scratch_[3];
};

int copy_by(int strategy, const kvbm_route& route, const kvbm_batch& batch, Device* device, Stream stream,
            uint64_t* submissions) noexcept {
  try {
    if (!device || !(batch.digests_far || batch.both_far) || batch.num_pairs == 0)
      return copy_and_digest(strategy, route, batch, device, stream, submissions);
    FarDigests far(strategy, route, batch, device, stream, submissions);
    return carry(device, 0, far.bytes(), stream, &far);
  } catch (...) {  // the lists of ids
    return check("malloc", KVBM_NO_MEMORY);
  }
}

// A stream of the route's GPU, in place of the caller's.  Under capture it is the graph's: a stream stays in a capture until that
// ends, and other copies that came on it meanwhile would be captured instead of done.
int stream_beside(const kvbm_route& route, Device* device, Stream callers, Stream* mine) {
  Handle graph = nullptr;
  RETURN_IF_FAILED(capturing_graph(callers, &graph));
  kvbm_ring* ring = route.ring;
  if (graph) RETURN_IF_FAILED(take_captured_ring(device, graph, 0, 0, &ring));
  *mine = ring ? ring->kernels : device->side_stream;
  return KVBM_OK;
}

// ---- fault words ---------------------------------------------------------------------------------------------------

// A word is of one copy, until its event is done and no graph reads it: what another copy finds is not mixed up with it.
std::mutex faults_mutex;
std::vector<kvbm_fault*>& free_faults = *new std::vector<kvbm_fault*>;  // has room for all there are
Retired& retired_faults = *new Retired;
size_t num_faults = 0;

enum : size_t { kFaultsAtOnce = 512 };  // a page of them
enum : int { kMostFaultQueries = 4 };

// Also called by the driver, on any thread, when a graph is gone.
void leave_fault(void* left) {
  auto* const fault = static_cast<kvbm_fault*>(left);
  std::lock_guard<std::mutex> lock(faults_mutex);
  if (--fault->users == 0) free_faults.push_back(fault);
}

// Not with faults_mutex held: the driver may wait for a thread of its own that is in leave_fault.
int make_faults() {
  void* memory = nullptr;
  RETURN_IF_FAILED(CU(MemHostAlloc, &memory, kFaultsAtOnce * sizeof(kvbm_fault), kHostPortable | kHostMapped));
  std::lock_guard<std::mutex> lock(faults_mutex);
  free_faults.reserve(num_faults + kFaultsAtOnce);
  for (size_t i = 0; i < kFaultsAtOnce; ++i) free_faults.push_back(static_cast<kvbm_fault*>(memory) + i);
  num_faults += kFaultsAtOnce;
  return KVBM_OK;
}

kvbm_fault* take_fault() {
  std::lock_guard<std::mutex> lock(faults_mutex);
  if (free_faults.empty()) return nullptr;
  kvbm_fault* const fault = free_faults.back();
  free_faults.pop_back();
  *fault = {0, 1};
  return fault;
}

// The word of a captured copy is written by every replay.
int give_fault_to_graph(const kvbm_batch& batch, Stream stream, int* captured) {
  Handle graph = nullptr;
  RETURN_IF_FAILED(capturing_graph(stream, &graph));
  if (!graph) return KVBM_OK;
  auto* const fault = reinterpret_cast<kvbm_fault*>(batch.fault);  // its pair is its first member
  *captured = 1;
  {
    std::lock_guard<std::mutex> lock(faults_mutex);
    ++fault->users;
  }
  const int given = give_to_graph(graph, fault, leave_fault);
  if (given != KVBM_OK) leave_fault(fault);
  return given;
}

}  // namespace

extern "C" {

int kvbm_has_memcpy_batch(void) { return load() == KVBM_OK && can_batch(); }

int kvbm_memcpy_batch(const uint64_t* dst, const uint64_t* src, const uint64_t* sizes, uint64_t size, uint64_t count, int mode,
                      int merge, int by_peer, int device, uint64_t stream, int* used) {
  enum { kAuto, kOneByOne, kBatched };
  *used = mode == kBatched ? kBatched : kOneByOne;
  if (mode < kAuto || mode > kBatched) return check("kvbm_memcpy_batch", kInvalidValue);
  if (count == 0) return KVBM_OK;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  auto* handle = reinterpret_cast<Stream>(stream);
  if (mode == kBatched && !can_batch()) return check("cuMemcpyBatchAsync", KVBM_NO_FUNCTION);
  Submission::Mode how;
  RETURN_IF_FAILED(mode_for(handle, by_peer, &how));
  if (mode == kBatched && how != Submission::kBatched)  // refused here: by the driver it would be the end of the capture
    return by_peer ? check("cuMemcpyBatchAsync", KVBM_NOT_GRANTED) : check("cuMemcpyBatchAsync", kCaptureUnsupported);
  if (mode == kOneByOne && how == Submission::kBatched) how = Submission::kOneByOne;
  *used = how == Submission::kBatched ? kBatched : kOneByOne;
  auto submit = [&](Submission* out) {
    int failed = KVBM_OK;
    for (uint64_t i = 0; i < count && !failed; ++i) failed = out->range(dst[i], src[i], sizes ? sizes[i] : size);
    return out->join(failed ? failed : out->flush());
  };
  Submission first(current.device, handle, how, merge);
  int status = submit(&first);
  uint64_t submissions = first.submissions;
  if (status == kInvalidValue && merge) {
    // Neighbours may be two allocations, and the driver takes no copy across their border.  Whatever went in before the
    // refusal is only copied once more.
    merge = false;
    Submission apart(current.device, handle, how, false);
    status = submit(&apart);
    submissions = apart.submissions;
  }
  const bool refused = status == kInvalidValue || status == kNotSupported || status == kCaptureUnsupported;
  if (mode != kAuto || how != Submission::kBatched || !refused || submissions > 1) return status;
  *used = kOneByOne;
  Submission again(current.device, handle, Submission::kOneByOne, merge);
  return submit(&again);
}

int kvbm_fault_take(int device, kvbm_fault** fault) {
  *fault = nullptr;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  RelaxedCapture relaxed;
  try {
    retired_faults.collect(kMostFaultQueries);
    while (!(*fault = take_fault())) RETURN_IF_FAILED(make_faults());
  } catch (...) {
    return check("malloc", KVBM_NO_MEMORY);
  }
  return KVBM_OK;
}

void kvbm_fault_give(kvbm_fault* fault, int device, uint64_t event) {
  if (!fault || start() != KVBM_OK) return;  // after a fork it is the parent's
  if (event)
    retired_faults.add(device, reinterpret_cast<Handle>(event), fault, [](int, void* left) { leave_fault(left); });
  else
    leave_fault(fault);
}

int kvbm_ring_create(int device, uint64_t slot_bytes, uint32_t slots, kvbm_ring** ring) {
  *ring = nullptr;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  retired_memory.collect(SIZE_MAX);
  RelaxedCapture relaxed;
  return make_ring(current.device, slot_bytes, slots, ring);
}

void kvbm_ring_retire(kvbm_ring* ring) {
  if (!ring || start() != KVBM_OK) return;
  // One event for all that uses it; where none is to be had, it is waited for.
  Device* const device = ring->device;
  Handle event = nullptr;
  Current current;
  int status = current.enter(device->context);
  if (status == KVBM_OK) status = order_streams(device, ring->kernels, ring->engine);
  for (const kvbm_ring::Slot& slot : ring->slots)
    if (status == KVBM_OK && slot.used) status = CU(StreamWaitEvent, ring->engine, slot.emptied, 0);
  if (status == KVBM_OK) status = mark(device, ring->engine, &event);
  if (status != KVBM_OK) return kvbm_ring_destroy(ring);
  retired_memory.add(static_cast<int>(device - devices), event, ring,
                     [](int, void* old) { kvbm_ring_destroy(static_cast<kvbm_ring*>(old)); });
}

void kvbm_ring_destroy(kvbm_ring* ring) {
  if (!ring || start() != KVBM_OK) return;  // after a fork it is the parent's
  Current current;
  if (current.enter(ring->device->context) != KVBM_OK) return;
  RelaxedCapture relaxed;
  destroy_ring(ring);
}

int kvbm_transfer(const kvbm_route* route, const kvbm_batch* batch, int strategy, uint64_t stream, const uint64_t* waits,
                  uint32_t num_waits, uint64_t done, kvbm_outcome* outcome) {
  *outcome = {};
  if (route->device < 0) return copy_by(strategy, *route, *batch, nullptr, nullptr, &outcome->submissions);
  Current current;
  RETURN_IF_FAILED(current.open(route->device));
  Device* const device = current.device;
  auto* callers = reinterpret_cast<Stream>(stream);
  for (uint32_t i = 0; i < num_waits; ++i)
    RETURN_IF_FAILED(CU(StreamWaitEvent, callers, reinterpret_cast<Handle>(waits[i]), 0));

  // A kernel runs on a stream of its own GPU: where the caller's is another's, both are tied by events.
  Stream mine = callers;
  int home = route->device;
  if (route->crosses) RETURN_IF_FAILED(kvbm_stream_device(stream, &home));
  const bool foreign = home >= 0 && home != route->device;
  if (foreign) {
    RETURN_IF_FAILED(stream_beside(*route, device, callers, &mine));
    RETURN_IF_FAILED(order_streams(&devices[home], callers, mine));
  }

  int status = batch->fault ? give_fault_to_graph(*batch, mine, &outcome->captured) : KVBM_OK;
  if (status == KVBM_OK && (batch->digests || batch->both[kOfSrc])) {
    Handle graph = nullptr;
    status = capturing_graph(mine, &graph);
    outcome->captured |= graph != nullptr;  // its digests are written at every replay
  }
  if (status == KVBM_OK) status = copy_by(strategy, *route, *batch, device, mine, &outcome->submissions);
  if (foreign) {
    const int joined = order_streams(device, mine, callers);
    if (status == KVBM_OK) status = joined;
  }
  // Also after a failure: some of it may have been enqueued, and uses what is given back once the event is done.
  const int marked = done ? CU(EventRecord, reinterpret_cast<Handle>(done), callers) : KVBM_OK;
  return status == KVBM_OK ? marked : status;
}

int kvbm_digest_blocks(const kvbm_route* route, const kvbm_batch* batch, uint64_t stream, const uint64_t* waits,
                       uint32_t num_waits, uint64_t done, kvbm_outcome* outcome) {
  return kvbm_transfer(route, batch, KVBM_NO_COPY, stream, waits, num_waits, done, outcome);
}

}  // extern "C"

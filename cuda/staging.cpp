// staging.cpp: staged copies: a kernel packs or unpacks blocks in slots of device memory, and the copy engine, or another kernel,
// moves the slots.
#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "batch.h"
#include "transfer.h"

using namespace kvbm_driver;

// ---- the ring ------------------------------------------------------------------------------------------------------

struct kvbm_ring {
  struct Slot {
    Address memory;
    Handle filled, emptied;  // events: the slot has been filled, and emptied
    bool used;               // `emptied` has been recorded
  };
  std::mutex mutex;  // one copy enqueues at a time
  Device* device = nullptr;
  Stream engine = nullptr;   // of what moves the slots
  Stream kernels = nullptr;  // of kernels, if the caller's stream belongs to another GPU
  Handle forked = nullptr, joined = nullptr;
  uint64_t slot_bytes = 0;
  uint32_t count = 0, next = 0;
  bool captured = false;  // for rings of graphs: a graph uses it now
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

// Rings of graphs.  A captured copy has a ring of its own, because it may be replayed at any time, beside other copies.  When
// the graph is destroyed, the ring serves the next capture.
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
  // Events that were recorded outside this graph cannot be waited for in it.
  for (kvbm_ring::Slot& slot : ring->slots) slot.used = false;
  ring->next = 0;
  *out = ring;
  const int given = give_to_graph(graph, ring, release_captured_ring);
  if (given != KVBM_OK) release_captured_ring(ring);
  return given;
}

// ---- copies --------------------------------------------------------------------------------------------------------

constexpr uint64_t kSmallGroupBytes = 2 << 20;  // large enough to hide the latency of the events between two groups

// Splits a batch into groups: the blocks that share a slot.  The copy engine is idle while the first group is packed, or the
// last one unpacked, so this group is small.
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

// The ids of both sides.
struct IdLists {
  std::vector<int32_t> src, dst;
};

// Removes the skipped pairs, and replaces missing lists of ids by 0, 1, 2, ..., because a group may start at any pair.
void write_out(kvbm_batch* batch, IdLists* lists) {
  // If ids are on the GPU, no pair can be removed: the ids of the other side must keep their positions.
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

  // One group, packed and copied on the caller's stream: nothing overlaps, so no events are needed.
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

  // Makes the caller's stream wait for the engine; also after a failure, so that a capture remains valid.
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

  // Pairs [first, first + n) of the batch.
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

  // A slot as one side of a batch: the n blocks of a group, one after the other.
  static kvbm_side blocks_of(const uint64_t* memory, uint32_t n) { return {nullptr, 0, memory, 0, 1, n}; }

  int permute(uint64_t first, uint32_t n, const kvbm_ring::Slot* slot, Stream stream) {
    kvbm_batch part = group(first, n);
    kvbm_side& far = route_.gathers ? part.dst : part.src;
    const int32_t* const given = far.ids;
    const uint64_t memory = slot->memory;
    far = blocks_of(&memory, n);
    if (part.dst.ids_device) {  // then pairs that the host's ids skip have not been removed
      lists_.src.resize(n);
      for (uint32_t i = 0; i < n; ++i) lists_.src[i] = given[i] == kSkip ? int32_t{kSkip} : static_cast<int32_t>(i);
      far.ids = lists_.src.data();
    }
    const bool sums = part.digests && route_.num_sum_permute;
    kvbm_batch slots = part;
    if (part.digests && !sums) {
      // The ids of the other side are needed, because they may skip pairs.  Its memory is not accessed.
      slots.src = blocks_of(&memory, n);
      slots.dst = route_.gathers ? part.src : part.dst;
      slots.dst.table = &memory;
      slots.dst.table_device = 0;
      slots.dst.entries = 1;
      part.digests = 0;
    }
    if (slots.digests && !sums && !route_.gathers) RETURN_IF_FAILED(digest(&slots, stream));
    const uint32_t count = sums ? route_.num_sum_permute : route_.num_permute;
    const int* kernels = sums ? route_.sum_permute_kernel : route_.permute_kernel;
    const kvbm_args** args = sums ? route_.sum_permute : route_.permute;
    for (uint32_t i = 0; i < count; ++i) {
      ++submissions;
      part.adds = i > 0;
      RETURN_IF_FAILED(launch_batch(ring_->device, kernels[i], args[i], &part, stream));
    }
    return slots.digests && !sums && route_.gathers ? digest(&slots, stream) : KVBM_OK;
  }

  // Digests the blocks of a slot, the source of this batch.
  int digest(kvbm_batch* slots, Stream stream) {
    for (uint32_t i = 0; i < route_.num_slot_digests; ++i) {
      ++submissions;
      slots->adds = i > 0;
      RETURN_IF_FAILED(launch_batch(ring_->device, route_.slot_digest_kernel[i], route_.slot_digests[i], slots, stream));
    }
    return KVBM_OK;
  }

  int move(uint64_t first, uint32_t n, const kvbm_ring::Slot* slot, Stream stream) {
    kvbm_batch part = group(first, n);
    const uint64_t memory = slot->memory;
    (route_.gathers ? part.src : part.dst) = blocks_of(&memory, n);
    if (route_.move_kernel[0] >= 0) {
      part.digests = 0;
      for (uint32_t i = 0; i < route_.num_moves; ++i) {
        ++submissions;
        RETURN_IF_FAILED(launch_batch(ring_->device, route_.move_kernel[i], route_.moves[i], &part, stream));
      }
      return KVBM_OK;
    }
    (route_.gathers ? part.dst.table : part.src.table) = route_.gathers ? route_.dst_bases : route_.src_bases;
    return copy_nests(route_, route_.moves, route_.num_moves, part, ring_->device, stream, &submissions);
  }

  const kvbm_route& route_;
  const kvbm_batch& batch_;
  kvbm_ring* ring_;
  Stream stream_;
  IdLists lists_;
};

}  // namespace

namespace kvbm_driver {

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

// During a capture the stream is one that only this graph uses.  A stream belongs to a capture until its end, so that other
// copies on it would be captured too.
int stream_beside(const kvbm_route& route, Device* device, Stream callers, Stream* mine) {
  Handle graph = nullptr;
  RETURN_IF_FAILED(capturing_graph(callers, &graph));
  kvbm_ring* ring = route.ring;
  if (graph) RETURN_IF_FAILED(take_captured_ring(device, graph, 0, 0, &ring));
  *mine = ring ? ring->kernels : device->side_stream;
  return KVBM_OK;
}

}  // namespace kvbm_driver

extern "C" {

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
  // One event for all work that uses the ring.  If that fails, wait.
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

}  // extern "C"

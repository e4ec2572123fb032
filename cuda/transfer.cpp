// transfer.cpp: copies a batch by a strategy (direct, staged, engine), with digests, and in the order of streams and events.
#include <utility>

#include "batch.h"
#include "transfer.h"

using namespace kvbm_driver;

namespace {

// Launches several kernels, on the device or (null) on the host.
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
  // The ids of the other side are needed, because they may skip pairs.  Its memory is not accessed, so any table will do.
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
  *submissions = 0;
  return copy_nests(route, route.runs, route.num_runs, batch, device, stream, submissions);
}

// Whether a strategy digests what it copies, while it copies.
bool is_fused(int strategy, const kvbm_route& route, const kvbm_batch& batch) {
  if (strategy == KVBM_DIRECT) return route.num_sum_direct > 0;
  // A staged copy removes skipped pairs, so its kernels would write digests to wrong places.
  return strategy == KVBM_STAGED && (route.num_sum_permute > 0 || route.num_slot_digests > 0) && batch.kept == batch.num_pairs;
}

int copy_only(int strategy, const kvbm_route& route, const kvbm_batch& batch, Device* device, Stream stream,
              uint64_t* submissions) {
  if (!batch.kept || strategy == KVBM_NO_COPY) return KVBM_OK;
  if (strategy == KVBM_STAGED) return copy_staged(route, batch, stream, submissions);
  if (strategy == KVBM_ENGINE) return copy_engine(route, batch, device, stream, submissions);
  return copy_direct(route, batch, device, stream, submissions);
}

// Copies and digests.  Digests of what is copied are fused with the copy, or computed before or after it.
int copy_and_digest(int strategy, const kvbm_route& route, const kvbm_batch& given, Device* device, Stream stream,
                    uint64_t* submissions) {
  kvbm_batch batch = given;
  const uint64_t separate = is_fused(strategy, route, batch) && batch.kept ? 0 : batch.digests;
  if (separate) batch.digests = 0;
  if (batch.num_pairs == 0) return KVBM_OK;
  if (batch.both[kOfSrc]) RETURN_IF_FAILED(digest_side(route, given, kOfSrc, batch.both[kOfSrc], device, stream, submissions));
  if (separate && !route.digests_dst)
    RETURN_IF_FAILED(digest_side(route, given, kOfSrc, separate, device, stream, submissions));
  RETURN_IF_FAILED(copy_only(strategy, route, batch, device, stream, submissions));
  if (separate && route.digests_dst) RETURN_IF_FAILED(digest_side(route, given, kOfDst, separate, device, stream, submissions));
  if (batch.both[kOfDst]) RETURN_IF_FAILED(digest_side(route, given, kOfDst, batch.both[kOfDst], device, stream, submissions));
  return KVBM_OK;
}

// Digests in pinned memory: kernels add to scratch memory on the device, which is then copied there.
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

}  // namespace

extern "C" {

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

  // A kernel needs a stream of its own GPU.  If the caller's belongs to another GPU, events order the two.
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
    outcome->captured |= graph != nullptr;  // every replay writes the digests
  }
  if (status == KVBM_OK) status = copy_by(strategy, *route, *batch, device, mine, &outcome->submissions);
  if (foreign) {
    const int joined = order_streams(device, mine, callers);
    if (status == KVBM_OK) status = joined;
  }
  // Also after a failure: some work may have been enqueued, and what it uses is returned when the event is done.
  const int marked = done ? CU(EventRecord, reinterpret_cast<Handle>(done), callers) : KVBM_OK;
  return status == KVBM_OK ? marked : status;
}

}  // extern "C"

// submission.cpp: copies of lists of ranges by the copy engine.
#include "submission.h"

using namespace kvbm_driver;

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
  if (mode == kBatched && how != Submission::kBatched)  // refused here, because the driver would invalidate the capture
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
    // Adjacent ranges may be in two allocations, and the driver refuses a copy across their border.  Copies that were submitted
    // before the refusal are repeated, which does no harm.
    merge = false;
    Submission unmerged(current.device, handle, how, false);
    status = submit(&unmerged);
    submissions = unmerged.submissions;
  }
  const bool refused = status == kInvalidValue || status == kNotSupported || status == kCaptureUnsupported;
  if (mode != kAuto || how != Submission::kBatched || !refused || submissions > 1) return status;
  *used = kOneByOne;
  Submission again(current.device, handle, Submission::kOneByOne, merge);
  return submit(&again);
}

}  // extern "C"

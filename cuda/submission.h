// submission.h: submits copies of byte ranges to the driver: merged, and in batches where the driver has them.
#pragma once

#include <algorithm>
#include <climits>

#include "driver.h"

namespace kvbm_driver {

constexpr size_t kCopiesASubmission = 4096;  // very large batches have crashed drivers
constexpr uint64_t kLargestPitch = INT32_MAX;
// A 2D copy is faster than as many copies of a batch (benchmarks/NOTES.md), but each such call costs 2 us between copies.
constexpr uint64_t kRowsWorthACall = 512 << 10;  // bytes

inline bool can_batch() { return driver.MemcpyBatchAsyncV2 || driver.MemcpyBatchAsyncV1; }

// The context of the GPU of an address; null: it is in host memory.
inline int context_of(Address address, Handle* context) {
  *context = nullptr;
  int ordinal = -1;
  RETURN_IF_FAILED(kvbm_pointer_device(address, &ordinal));
  if (ordinal < 0) return KVBM_OK;
  Current current;
  RETURN_IF_FAILED(current.open(ordinal));
  *context = current.device->context;
  return KVBM_OK;
}

// Collects ranges, merges adjacent ones, and submits as many as possible in one call.  Call `flush` after the last range, and
// `join` at the end.  No copy crosses a cut (a border of allocations).
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
    if (is_legacy(stream_)) {  // the batched call refuses it
      RETURN_IF_FAILED(order_streams(device_, callers_, device_->side_stream));
      stream_ = device_->side_stream;
    }
    CopyAttributes attributes = {1, {0, 0}, {0, 0}, 0};
    size_t attributes_from = 0, failed = 0;  // the attributes apply from copy 0 on
    ++submissions;
    const int status =
        driver.MemcpyBatchAsyncV2
            ? driver.MemcpyBatchAsyncV2(lists_.dst, lists_.src, lists_.bytes, n, &attributes, &attributes_from, 1, stream_)
            : driver.MemcpyBatchAsyncV1(lists_.dst, lists_.src, lists_.bytes, n, &attributes, &attributes_from, 1, &failed,
                                        stream_);
    return check("cuMemcpyBatchAsync", status);
  }

  // Makes the caller's stream wait for the copies; also after a failure, for the earlier copies.
  int join(int status) {
    if (stream_ == callers_) return status;
    const int joined = order_streams(device_, stream_, callers_);
    return status == KVBM_OK ? joined : status;
  }

  uint64_t submissions = 0;

 private:
  static constexpr int kUnified = 4;  // CUmemorytype: the address tells

  // Bytes before the first cut inside the range, on either side; 0: there is none.
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
    if (bytes == 0) return KVBM_OK;  // the driver refuses copies of 0 bytes
    if (merges_ && count_ > 0) {
      const size_t last = count_ - 1;
      const uint64_t before = lists_.bytes[last];
      if (lists_.dst[last] + before == dst && lists_.src[last] + before == src && !is_cut_at(dst, src)) {
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
  // Not const, because the driver takes no const arrays.  It is empty between two calls of a thread.
  static inline thread_local Lists lists_;
  Device* device_;
  Stream callers_, stream_;  // the caller's stream, and the stream of the copies
  Mode mode_;
  bool merges_;
  const uint64_t* cuts_;
  uint32_t num_cuts_;
  size_t count_ = 0;
};

// The best mode for a stream.  The batched call cannot be captured.
inline int mode_for(Stream stream, bool by_peer, Submission::Mode* mode) {
  *mode = by_peer ? Submission::kByPeer : Submission::kOneByOne;
  if (by_peer || !can_batch()) return KVBM_OK;
  Handle graph = nullptr;
  RETURN_IF_FAILED(capturing_graph(stream, &graph));
  if (!graph) *mode = Submission::kBatched;
  return KVBM_OK;
}

}  // namespace kvbm_driver

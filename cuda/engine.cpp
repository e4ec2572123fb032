// engine.cpp: the driver's copy engines.
#include <algorithm>
#include <array>
#include <memory>
#include <new>

#include "driver.h"

using namespace kvbm_driver;

namespace {

// ---- batched copies ------------------------------------------------------------------------------------------------

enum : uint64_t { kCopiesASubmission = 4096 };  // very large batches have crashed drivers

int copy_one_by_one(const uint64_t* dst, const uint64_t* src, const uint64_t* sizes, uint64_t size, uint64_t count,
                    Stream stream) {
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t bytes = sizes ? sizes[i] : size;
    if (bytes) RETURN_IF_FAILED(CU(MemcpyAsync, dst[i], src[i], bytes, stream));
  }
  return KVBM_OK;
}

// *submitted tells whether anything went in before a failure.
int copy_batched(const uint64_t* dst, const uint64_t* src, const uint64_t* sizes, uint64_t size, uint64_t count, Stream stream,
                 bool* submitted) {
  // The driver takes no const arrays and no copies of nothing, so a submission is gathered here.
  struct Submission {
    std::array<Address, kCopiesASubmission> dst, src;
    std::array<size_t, kCopiesASubmission> sizes;
  };
  std::unique_ptr<Submission> batch(new (std::nothrow) Submission);
  if (!batch) return check("malloc", KVBM_NO_MEMORY);
  CopyAttributes attributes = {1, {0, 0}, {0, 0}, 0};
  size_t attributes_from = 0;  // one entry an attribute, not one a copy
  for (uint64_t i = 0; i < count;) {
    size_t n = 0;
    for (; i < count && n < kCopiesASubmission; ++i) {
      const uint64_t bytes = sizes ? sizes[i] : size;
      if (!bytes) continue;
      batch->dst[n] = dst[i];
      batch->src[n] = src[i];
      batch->sizes[n++] = bytes;
    }
    if (n == 0) break;
    size_t failed = 0;
    const int status = driver.MemcpyBatchAsyncV2
                           ? driver.MemcpyBatchAsyncV2(batch->dst.data(), batch->src.data(), batch->sizes.data(), n,
                                                       &attributes, &attributes_from, 1, stream)
                           : driver.MemcpyBatchAsyncV1(batch->dst.data(), batch->src.data(), batch->sizes.data(), n,
                                                       &attributes, &attributes_from, 1, &failed, stream);
    RETURN_IF_FAILED(check("cuMemcpyBatchAsync", status));
    *submitted = true;
  }
  return KVBM_OK;
}

}  // namespace

extern "C" {

int kvbm_has_memcpy_batch(void) { return load() == KVBM_OK && (driver.MemcpyBatchAsyncV2 || driver.MemcpyBatchAsyncV1); }

int kvbm_memcpy_batch(const uint64_t* dst, const uint64_t* src, const uint64_t* sizes, uint64_t size, uint64_t count, int mode,
                      int device, uint64_t stream, int* used) {
  enum { kAuto, kOneByOne, kBatched };
  *used = mode == kBatched ? kBatched : kOneByOne;
  if (mode < kAuto || mode > kBatched) return check("kvbm_memcpy_batch", kInvalidValue);
  if (count == 0) return KVBM_OK;
  Current current;
  Device* opened = nullptr;
  RETURN_IF_FAILED(open(device, &opened, &current));
  auto* handle = reinterpret_cast<Stream>(stream);
  const bool can_batch = driver.MemcpyBatchAsyncV2 || driver.MemcpyBatchAsyncV1;
  if (mode == kBatched && !can_batch) return check("cuMemcpyBatchAsync", KVBM_NO_FUNCTION);
  if (mode == kBatched && is_legacy(stream)) return check("cuMemcpyBatchAsync", KVBM_LEGACY_STREAM);
  int capturing = 0;
  // A capture refuses the batched call (CUDA 13.0); do not even ask.
  if (mode == kAuto && can_batch && !is_legacy(stream)) RETURN_IF_FAILED(CU(StreamIsCapturing, handle, &capturing));
  if (mode != kOneByOne && can_batch && !is_legacy(stream) && !capturing) {
    bool submitted = false;
    const int status = copy_batched(dst, src, sizes, size, count, handle, &submitted);
    *used = kBatched;
    const bool refused = status == kInvalidValue || status == kNotSupported || status == kCaptureUnsupported;
    if (mode == kBatched || !refused || submitted) return status;
    *used = kOneByOne;
  }
  return copy_one_by_one(dst, src, sizes, size, count, handle);
}

}  // extern "C"

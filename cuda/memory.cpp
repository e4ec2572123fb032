// memory.cpp: device memory and pinned host memory: allocation, registration, and queries about addresses.
#include "driver.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

using namespace kvbm_driver;

namespace {

constexpr unsigned kRegisterForDevices = 1 | 2, kRegisterReadOnly = 8;  // PORTABLE | DEVICEMAP, READ_ONLY
constexpr int kPopulateRead = 22, kPopulateWrite = 23;  // of madvise since Linux 5.14; some libc headers lack them
constexpr uint64_t kTurnBytes = 16 << 20;  // that a thread touches at a time: whole huge pages, and the last turn is short
constexpr unsigned kMostTouching = 256;
constexpr uint64_t kMappingBytes = 2 << 20;  // cuMemMap: mappings of GPU memory begin and end at multiples of this

// A retired table has no event for the last copy that reads it, and freeing waits for the GPU.  So many are freed at once.
// Each freed table counts 512 bytes of driver overhead, so that many small tables are released soon.
constexpr uint64_t kMostRetired = 1 << 20, kDriverBytes = 512;
std::atomic<uint64_t> retired_bytes{0};

// Queries `count` attributes of an address.
int ask(unsigned count, int* attributes, void** values, uint64_t address) {
  RETURN_IF_FAILED(start());
  RelaxedCapture relaxed;
  int status = driver.PointerGetAttributes(count, attributes, values, address);
  if (status == kInvalidContext) {  // some drivers need any current context
    Current current;
    RETURN_IF_FAILED(current.open(0));
    status = driver.PointerGetAttributes(count, attributes, values, address);
  }
  return check("cuPointerGetAttributes", status);
}

// `type` stays 0 for an address that the driver does not know.  The driver writes one byte of `managed`.
bool is_pinned(unsigned type, int managed) { return type == kMemoryHost && !(managed & 0xff); }

// Enters any context: memory that is registered in one is registered in all.  Prefers a device that is open, then the caller's
// context.  Opening device 0 is the last choice: it takes some hundred megabytes of a GPU that the process may not use.
int enter_any(Current* current) {
  RETURN_IF_FAILED(start());
  for (int i = 0; i < num_devices; ++i)
    if (devices[i].is_open.load(std::memory_order_acquire)) return current->enter(devices[i].context);
  Handle callers = nullptr;
  RETURN_IF_FAILED(CU(CtxGetCurrent, &callers));
  if (callers) return KVBM_OK;
  return current->open(0);
}

// Touches pages; returns an errno, or 0.
int touch(uint64_t address, uint64_t bytes, int how) {
  const int advice = how == KVBM_TOUCH_READONLY ? kPopulateRead : kPopulateWrite;
  int error;
  do error = madvise(reinterpret_cast<void*>(address), bytes, advice) == 0 ? 0 : errno;
  while (error == EINTR || error == EAGAIN);
  if (error != EINVAL || how != KVBM_TOUCH_NEW) return error;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));  // older kernels: write one byte of each page
  for (uint64_t at = address; at < address + bytes; at += page) *reinterpret_cast<volatile char*>(at) = 0;
  return 0;
}

}  // namespace

extern "C" {

int kvbm_pointer_device(uint64_t address, int* device) {
  *device = -1;
  unsigned type = 0;
  int managed = 0, ordinal = -1;
  int attributes[] = {kPointerMemoryType, kPointerIsManaged, kPointerOrdinal};
  void* values[] = {&type, &managed, &ordinal};
  RETURN_IF_FAILED(ask(3, attributes, values, address));
  *device = type == 0 ? -1 : is_pinned(type, managed) ? -2 : ordinal;
  return KVBM_OK;
}

int kvbm_memory_range(uint64_t address, int pinned, uint64_t* begin, uint64_t* end) {
  *begin = *end = 0;
  unsigned type = 0;
  int managed = 0;
  Address first = 0;
  size_t bytes = 0;
  int attributes[] = {kPointerMemoryType, kPointerIsManaged, kPointerRangeStart, kPointerRangeSize};
  void* values[] = {&type, &managed, &first, &bytes};
  RETURN_IF_FAILED(ask(4, attributes, values, address));
  if (type == 0 || is_pinned(type, managed) != (pinned != 0)) return KVBM_OK;
  const bool is_inside = first && first <= address && address - first < bytes;
  *begin = is_inside ? first : address;
  *end = *begin + (is_inside ? bytes : 1);
  return KVBM_OK;
}

int kvbm_find_ungranted(int device, const uint64_t* spans, uint64_t count, uint64_t* index, int* how) {
  *how = KVBM_GRANTED;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  RelaxedCapture relaxed;
  const Location location = {kLocationDevice, current.device->handle};
  Address at = 0;  // addresses below it have been checked
  for (*index = 0; *index < count; ++*index) {
    const Address last = spans[2 * *index + 1];
    at = std::max<Address>(at, spans[2 * *index]);
    while (at < last) {
      unsigned type = 0;
      int managed = 0, ordinal = -1, legacy = 0;
      Address first = 0;
      size_t bytes = 0;
      Handle pool = nullptr;
      int attributes[] = {kPointerMemoryType, kPointerIsManaged, kPointerOrdinal, kPointerIsLegacy,
                          kPointerRangeStart, kPointerRangeSize, kPointerPool};
      void* values[] = {&type, &managed, &ordinal, &legacy, &first, &bytes, &pool};
      RETURN_IF_FAILED(CU(PointerGetAttributes, 7, attributes, values, at));
      const bool is_inside = first && first <= at && at - first < bytes;
      const Address behind = is_inside ? first + bytes : last, next_page = (at | (kMappingBytes - 1)) + 1;
      const bool is_host = type == kMemoryHost || type == 0, is_own = !is_host && ordinal == device;
      if (is_own) {  // the next mapping of the reservation may belong to another GPU
        at = (legacy & 0xff) || pool ? behind : next_page;
        continue;
      }
      if (pool) {
        int access = 0;
        RETURN_IF_FAILED(CU(MemPoolGetAccess, &access, pool, &location));
        if (access != kAccessReadWrite) *how = KVBM_UNGRANTED_POOL;
      } else if (!is_host && !(managed & 0xff) && !(legacy & 0xff)) {
        // Host memory is excluded: all GPUs can access it, although cuMemGetAccess denies that.  For memory that is not a
        // mapping the call fails.  Inside a reservation a failure means: not mapped.
        bool is_mapping = false;
        for (; at < std::min(behind, last); at = (at | (kMappingBytes - 1)) + 1) {
          unsigned long long access = 0;
          const int status = driver.MemGetAccess(&access, &location, at);
          const bool is_unknown = status == kInvalidValue || status == kNotSupported;
          if (status != KVBM_OK && !is_unknown) return check("cuMemGetAccess", status);
          if (is_unknown && !is_mapping) break;
          is_mapping = true;
          if (status == KVBM_OK && access == kAccessReadWrite) continue;
          *how = KVBM_UNGRANTED_MAPPING;
          return KVBM_OK;
        }
        if (is_mapping) continue;
      }
      if (*how != KVBM_GRANTED) return KVBM_OK;
      at = behind;
    }
  }
  return KVBM_OK;
}

int kvbm_host_touch(uint64_t address, uint64_t bytes, int how, int threads) {
  std::atomic<uint64_t> next{0};
  std::atomic<int> error{0};
  const auto work = [&]() noexcept {
    for (;;) {
      const uint64_t first = next.fetch_add(kTurnBytes, std::memory_order_relaxed);
      if (first >= bytes || error.load(std::memory_order_relaxed)) return;
      if (const int failed = touch(address + first, std::min<uint64_t>(kTurnBytes, bytes - first), how)) error = failed;
    }
  };
  const uint64_t workers =
      std::min<uint64_t>({(bytes + kTurnBytes - 1) / kTurnBytes, kMostTouching, static_cast<uint64_t>(std::max(threads, 1))});
  std::array<std::thread, kMostTouching> others;
  size_t started = 0;
  try {
    for (; started + 1 < workers; ++started) others[started] = std::thread(work);
  } catch (...) {
    // No more threads: those that run do all the work.
  }
  work();
  for (size_t i = 0; i < started; ++i) others[i].join();
  // Touching memory with contents only saves time, so its failure is ignored; the registration reports real errors.
  if (error && how == KVBM_TOUCH_NEW) return check("madvise", KVBM_NO_MEMORY);
  return KVBM_OK;
}

int kvbm_host_register(uint64_t address, uint64_t bytes, int read_only) {
  Current current;
  RETURN_IF_FAILED(enter_any(&current));
  RelaxedCapture relaxed;
  return CU(MemHostRegister, reinterpret_cast<void*>(address), bytes,
            kRegisterForDevices | (read_only ? kRegisterReadOnly : 0));
}

int kvbm_host_unregister(uint64_t address) {
  Current current;
  RETURN_IF_FAILED(enter_any(&current));
  RelaxedCapture relaxed;
  return CU(MemHostUnregister, reinterpret_cast<void*>(address));
}

int kvbm_alloc_device(int device, uint64_t bytes, uint64_t* address) {
  *address = 0;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  const bool waits = retired_bytes > kMostRetired;
  if (waits) retired_bytes = 0;
  retired_memory.collect(SIZE_MAX, waits);
  RelaxedCapture relaxed;
  Address allocated = 0;
  RETURN_IF_FAILED(CU(MemAlloc, &allocated, bytes));
  *address = allocated;
  return KVBM_OK;
}

int kvbm_free_device(int device, uint64_t address) {
  if (address == 0) return KVBM_OK;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  RelaxedCapture relaxed;
  return CU(MemFree, address);
}

int kvbm_ipc_handle(int device, uint64_t address, void* handle) {
  Current current;
  RETURN_IF_FAILED(current.open(device));
  IpcHandle made = {};
  RETURN_IF_FAILED(CU(IpcGetMemHandle, &made, address));
  memcpy(handle, made.bytes, sizeof made.bytes);
  return KVBM_OK;
}

int kvbm_ipc_open(int device, const void* handle, uint64_t* address) {
  constexpr unsigned kLazyEnablePeer = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which the call requires
  *address = 0;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  IpcHandle given;
  memcpy(given.bytes, handle, sizeof given.bytes);
  RelaxedCapture relaxed;
  Address opened = 0;
  RETURN_IF_FAILED(CU(IpcOpenMemHandle, &opened, given, kLazyEnablePeer));
  *address = opened;
  return KVBM_OK;
}

int kvbm_ipc_close(int device, uint64_t address) {
  Current current;
  RETURN_IF_FAILED(current.open(device));
  RelaxedCapture relaxed;
  return CU(IpcCloseMemHandle, address);
}

void kvbm_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

void kvbm_retire_device(int device, uint64_t address, uint64_t bytes) {
  if (!address || start() != KVBM_OK) return;  // after a fork it belongs to the parent
  retired_bytes += (bytes + kDriverBytes - 1) / kDriverBytes * kDriverBytes;
  retired_memory.add(device, nullptr, reinterpret_cast<void*>(address),
                     [](int on, void* memory) { kvbm_free_device(on, reinterpret_cast<uint64_t>(memory)); });
}

int kvbm_upload(int device, uint64_t dst, const void* src, uint64_t bytes) {
  if (bytes == 0) return KVBM_OK;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  RelaxedCapture relaxed;
  // cuMemcpyHtoD would wait for the legacy stream, and so for a running model.
  RETURN_IF_FAILED(CU(MemcpyHtoDAsync, dst, src, bytes, current.device->private_stream));
  return CU(StreamSynchronize, current.device->private_stream);
}

int kvbm_copy_now(int device, const uint64_t* dst, const uint64_t* src, uint64_t size, uint64_t count) {
  if (count == 0) return KVBM_OK;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  RelaxedCapture relaxed;
  Stream stream = current.device->private_stream;  // no kernel runs on it
  int status = KVBM_OK;
  for (uint64_t i = 0; i < count && !status; ++i) status = CU(MemcpyAsync, dst[i], src[i], size, stream);
  const int waited = CU(StreamSynchronize, stream);  // also after an error: earlier copies still use the memory
  return status ? status : waited;
}

}  // extern "C"

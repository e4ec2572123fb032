// runtime.cpp: everything between the extension and the machine: the CUDA driver, host threads, checks of block ids.
//
// Nothing of CUDA is linked or included.  The driver's functions are looked up in libcuda.so.1 at first use, so the
// extension imports on any machine and a missing driver is a status code.  Nothing here throws across the C ABI and
// nothing aborts.
//
// What lives until the process ends, on purpose: the retained primary contexts, the loaded images, the ring's slots.
// Tearing them down in a static destructor would race with the driver's own shutdown.
#include "kvbm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstddef>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

namespace {

// ---- the driver's types and functions, as far as they are needed ---------------------------------------------------

using Stream = void*;
using Handle = void*;  // context, module, function, event
using Address = unsigned long long;

enum : int {
  kInvalidValue = 1,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNotReady = 600,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
};

enum : int { kMultiprocessors = 16, kMajor = 75, kMinor = 76 };                     // CUdevice_attribute
enum : int { kPointerMemoryType = 2, kPointerIsManaged = 8, kPointerOrdinal = 9 };  // CUpointer_attribute
enum : unsigned { kMemoryHost = 1 };                                                // CUmemorytype
enum : int { kMaxDynamicShared = 8 };                                               // CUfunction_attribute
enum : unsigned { kHostPortable = 1, kStreamNonBlocking = 1, kEventNoTiming = 2 };
enum : int { kCaptureRelaxed = 2 };  // CUstreamCaptureMode

struct Location {
  int type, id;
};
struct CopyAttributes {  // CUmemcpyAttributes
  int source_order;      // 1: in stream order
  Location source, destination;
  unsigned flags;
};

using BatchV1 = int (*)(Address*, Address*, size_t*, size_t, CopyAttributes*, size_t*, size_t, size_t*, Stream);
using BatchV2 = int (*)(Address*, Address*, size_t*, size_t, CopyAttributes*, size_t*, size_t, Stream);

// X(name, suffix of the exported symbol, needed, parameters).  The suffix names the ABI of the prototype, for drivers
// without cuGetProcAddress.
#define KVBM_DRIVER_FUNCTIONS(X)                                                                            \
  X(Init, "", true, (unsigned))                                                                             \
  X(DriverGetVersion, "", true, (int*))                                                                     \
  X(GetErrorName, "", true, (int, const char**))                                                            \
  X(GetErrorString, "", true, (int, const char**))                                                          \
  X(DeviceGet, "", true, (int*, int))                                                                       \
  X(DeviceGetCount, "", true, (int*))                                                                       \
  X(DeviceGetName, "", true, (char*, int, int))                                                             \
  X(DeviceGetAttribute, "", true, (int*, int, int))                                                         \
  X(DeviceTotalMem, "_v2", true, (size_t*, int))                                                            \
  X(DevicePrimaryCtxRetain, "", true, (Handle*, int))                                                       \
  X(CtxGetCurrent, "", true, (Handle*))                                                                     \
  X(CtxPushCurrent, "_v2", true, (Handle))                                                                  \
  X(CtxPopCurrent, "_v2", true, (Handle*))                                                                  \
  X(ModuleLoadData, "", true, (Handle*, const void*))                                                       \
  X(ModuleGetFunction, "", true, (Handle*, Handle, const char*))                                            \
  X(FuncLoad, "", false, (Handle))                                                                          \
  X(FuncSetAttribute, "", true, (Handle, int, int))                                                         \
  X(LaunchKernel, "", true,                                                                                 \
    (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**)) \
  X(MemAlloc, "_v2", true, (Address*, size_t))                                                              \
  X(MemFree, "_v2", true, (Address))                                                                        \
  X(MemHostAlloc, "", true, (void**, size_t, unsigned))                                                     \
  X(MemFreeHost, "", true, (void*))                                                                         \
  X(MemcpyHtoDAsync, "_v2", true, (Address, const void*, size_t, Stream))                                   \
  X(MemcpyAsync, "", true, (Address, Address, size_t, Stream))                                              \
  X(PointerGetAttributes, "", true, (unsigned, int*, void**, Address))                                      \
  X(StreamCreate, "", true, (Stream*, unsigned))                                                            \
  X(StreamSynchronize, "", true, (Stream))                                                                  \
  X(StreamIsCapturing, "", true, (Stream, int*))                                                            \
  X(ThreadExchangeStreamCaptureMode, "", true, (int*))                                                      \
  X(EventCreate, "", true, (Handle*, unsigned))                                                             \
  X(EventRecord, "", true, (Handle, Stream))                                                                \
  X(EventQuery, "", true, (Handle))                                                                         \
  X(EventDestroy, "_v2", true, (Handle))

struct Driver {
#define KVBM_POINTER(name, suffix, needed, parameters) int(*name) parameters;
  KVBM_DRIVER_FUNCTIONS(KVBM_POINTER)
#undef KVBM_POINTER
  BatchV1 MemcpyBatchAsyncV1;  // CUDA 12.8: reports the failing index
  BatchV2 MemcpyBatchAsyncV2;  // CUDA 13.0: does not
  int version;
};

Driver driver;  // written once, under load_once; all zero before

thread_local const char* last_call = "";

// Every status passes through here, so that an error can name the call.
inline int check(const char* call, int status) {
  if (__builtin_expect(status != KVBM_OK, 0)) last_call = call;
  return status;
}

// Calls a driver function: CU(MemAlloc, &address, bytes).
#define CU(name, ...) check("cu" #name, driver.name(__VA_ARGS__))
#define RETURN_IF_FAILED(expression)                      \
  do {                                                    \
    if (const int status_ = (expression)) return status_; \
  } while (0)

// ---- loading and starting the driver, and what fork() does to it ---------------------------------------------------

enum : int { kUnset = INT_MIN };
std::atomic<int> load_status{kUnset};   // libcuda.so.1 is open and its functions are known
std::atomic<int> start_status{kUnset};  // cuInit has run
std::atomic<bool> start_begun{false};
std::once_flag load_once, start_once;

int load_functions() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return check("dlopen(\"libcuda.so.1\")", KVBM_NO_DRIVER);
  // Below CUDA 12 there is no cuGetProcAddress_v2; the exported symbols do for everything but the batch.
  using GetProcAddress = int (*)(const char*, void**, int, uint64_t, int*);
  auto get_proc_address = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  // A request for a version above the driver's is refused.  12000 covers every prototype above but cuFuncLoad (12.4).
  auto find = [&](const char* name, const char* symbol, int version) -> void* {
    void* found = nullptr;
    if (get_proc_address && get_proc_address(name, &found, version, 0, nullptr) != KVBM_OK) found = nullptr;
    return found ? found : dlsym(library, symbol);
  };
#define KVBM_FIND(name, suffix, needed, parameters)                                              \
  driver.name = reinterpret_cast<int(*) parameters>(find("cu" #name, "cu" #name suffix, 12000)); \
  if ((needed) && !driver.name) return check("dlsym(\"cu" #name suffix "\")", KVBM_NO_DRIVER);
  KVBM_DRIVER_FUNCTIONS(KVBM_FIND)
#undef KVBM_FIND
  RETURN_IF_FAILED(CU(DriverGetVersion, &driver.version));
  // One name, two ABIs: the version asked for decides which one comes back, and dlsym's symbols tell them apart too.
  if (driver.version >= 13000)
    driver.MemcpyBatchAsyncV2 = reinterpret_cast<BatchV2>(find("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", 13000));
  if (driver.version >= 12080 && !driver.MemcpyBatchAsyncV2)
    driver.MemcpyBatchAsyncV1 = reinterpret_cast<BatchV1>(find("cuMemcpyBatchAsync", "cuMemcpyBatchAsync", 12080));
  return KVBM_OK;
}

int load() {
  int status = load_status.load(std::memory_order_acquire);
  if (status != kUnset) return status == KVBM_OK ? status : check("dlopen(\"libcuda.so.1\")", status);
  try {
    std::call_once(load_once, [] { load_status.store(load_functions(), std::memory_order_release); });
  } catch (...) {
    return check("std::call_once", KVBM_NO_MEMORY);
  }
  return load_status.load(std::memory_order_acquire);
}

// A child inherits the driver's state but not its threads: every further call would fail or hang.
void in_forked_child() {
  if (start_begun.load(std::memory_order_relaxed)) start_status.store(KVBM_FORKED, std::memory_order_relaxed);
}

// ---- devices -------------------------------------------------------------------------------------------------------

// A pair of buffers that carries ids and tables to the device, and the event after which it may be used again.
struct Slot {
  void* host;
  Address device;
  size_t capacity;
  Handle event;
  enum { kFree, kTaken, kInFlight, kLost } state;  // kTaken: one thread fills it.  kLost: its event failed; never again
  Slot* next;
};

struct Device {
  std::mutex mutex;  // guards opening the device and loading images and functions
  std::atomic<bool> is_open{false};
  int handle = 0, sms = 0;
  Handle context = nullptr;
  Stream private_stream = nullptr;  // for uploads that must not wait behind the caller's work
  Handle* modules = nullptr;        // one an image; null until loaded
  bool images_loaded = false;
  std::atomic<Handle>* functions = nullptr;  // one a kernel; read without a lock
  std::mutex ring_mutex;
  Slot* newest = nullptr;  // circular: newest->next is the slot used longest ago
};

Device* devices = nullptr;
int num_devices = 0;

int start() {
  const int status = start_status.load(std::memory_order_acquire);
  if (__builtin_expect(status == KVBM_OK, 1)) return KVBM_OK;
  if (status != kUnset) return check(status == KVBM_FORKED ? "fork" : "cuInit", status);
  RETURN_IF_FAILED(load());
  try {
    std::call_once(start_once, [] {
      pthread_atfork(nullptr, nullptr, in_forked_child);
      start_begun.store(true, std::memory_order_relaxed);
      int result = CU(Init, 0);
      if (result == KVBM_OK) result = CU(DeviceGetCount, &num_devices);
      if (result == KVBM_OK && num_devices > 0) {
        devices = new (std::nothrow) Device[static_cast<size_t>(num_devices)];
        if (!devices) result = check("malloc", KVBM_NO_MEMORY);
      }
      start_status.store(result, std::memory_order_release);
    });
  } catch (...) {
    return check("std::call_once", KVBM_NO_MEMORY);
  }
  return start_status.load(std::memory_order_acquire);
}

// Makes a device's context current for a scope.  Where it already is (torch's case) that is one cheap question.
class Current {
 public:
  Current() = default;
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    Handle popped;
    if (pushed_) driver.CtxPopCurrent(&popped);
  }
  int enter(Handle context) {
    Handle now = nullptr;
    RETURN_IF_FAILED(CU(CtxGetCurrent, &now));
    if (now == context) return KVBM_OK;
    RETURN_IF_FAILED(CU(CtxPushCurrent, context));
    pushed_ = true;
    return KVBM_OK;
  }

 private:
  bool pushed_ = false;
};

// While another stream captures a graph in the default mode, allocating, loading and querying would break that
// capture; they are safe for it, as none of them orders anything against the captured work.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver.ThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { driver.ThreadExchangeStreamCaptureMode(&mode_); }

 private:
  int mode_ = kCaptureRelaxed;
};

int open_slowly(Device* device, int ordinal) {
  std::lock_guard<std::mutex> lock(device->mutex);
  if (device->is_open.load(std::memory_order_relaxed)) return KVBM_OK;
  RelaxedCapture relaxed;
  RETURN_IF_FAILED(CU(DeviceGet, &device->handle, ordinal));
  RETURN_IF_FAILED(CU(DeviceGetAttribute, &device->sms, kMultiprocessors, device->handle));
  // Kept if a later step fails, so that a second attempt does not retain again.
  if (!device->context) RETURN_IF_FAILED(CU(DevicePrimaryCtxRetain, &device->context, device->handle));
  Current current;
  RETURN_IF_FAILED(current.enter(device->context));
  if (!device->private_stream) RETURN_IF_FAILED(CU(StreamCreate, &device->private_stream, kStreamNonBlocking));
  const auto kernels = static_cast<size_t>(kvbm_num_kernels);
  if (!device->functions) device->functions = new (std::nothrow) std::atomic<Handle>[kernels + 1]();
  if (!device->modules) device->modules = new (std::nothrow) Handle[static_cast<size_t>(kvbm_num_images) + 1]();
  if (!device->functions || !device->modules) return check("malloc", KVBM_NO_MEMORY);
  device->is_open.store(true, std::memory_order_release);
  return KVBM_OK;
}

// The device with this ordinal, its context current until `current` goes out of scope.
inline int open(int ordinal, Device** out, Current* current) {
  RETURN_IF_FAILED(start());
  if (ordinal < 0 || ordinal >= num_devices) return check("cuDeviceGet", kInvalidDevice);
  Device* device = &devices[ordinal];
  if (!device->is_open.load(std::memory_order_acquire)) RETURN_IF_FAILED(open_slowly(device, ordinal));
  *out = device;
  return current->enter(device->context);
}

// ---- images and kernels --------------------------------------------------------------------------------------------

bool is_kernel(int kernel) { return kernel >= 0 && kernel < kvbm_num_kernels; }

// With device->mutex held and the context current.
int load_kernel(Device* device, int kernel) {
  if (kvbm_num_images == 0) return check("kvbm_images", KVBM_NOT_BUILT);
  if (!device->images_loaded) {
    for (int i = 0; i < kvbm_num_images; ++i)
      if (!device->modules[i]) RETURN_IF_FAILED(CU(ModuleLoadData, &device->modules[i], kvbm_images[i].data));
    device->images_loaded = true;
  }
  if (device->functions[kernel].load(std::memory_order_relaxed)) return KVBM_OK;
  const kvbm_kernel& entry = kvbm_kernels[kernel];
  if (entry.image < 0 || entry.image >= kvbm_num_images) return check(entry.name, KVBM_NOT_BUILT);
  Handle function = nullptr;
  RETURN_IF_FAILED(CU(ModuleGetFunction, &function, device->modules[entry.image], entry.name));
  // Under lazy loading the code would move to the device at the first launch, which can wait behind a running kernel.
  if (driver.FuncLoad) RETURN_IF_FAILED(CU(FuncLoad, function));
  device->functions[kernel].store(function, std::memory_order_release);
  return KVBM_OK;
}

int find_kernel(Device* device, int kernel, Handle* function) {
  *function = device->functions[kernel].load(std::memory_order_acquire);
  if (__builtin_expect(*function != nullptr, 1)) return KVBM_OK;
  std::lock_guard<std::mutex> lock(device->mutex);
  RelaxedCapture relaxed;
  RETURN_IF_FAILED(load_kernel(device, kernel));
  *function = device->functions[kernel].load(std::memory_order_relaxed);
  return KVBM_OK;
}

// ---- the ring ------------------------------------------------------------------------------------------------------

enum : size_t { kSmallestSlot = 16 << 10 };
enum : int { kMostQueries = 4 };  // of the slots used longest ago, before a new one is made

void free_slot(Slot* slot) {
  if (slot->event) driver.EventDestroy(slot->event);
  if (slot->device) driver.MemFree(slot->device);
  if (slot->host) driver.MemFreeHost(slot->host);
  delete slot;
}

int make_slot(size_t bytes, Slot** out) {
  size_t capacity = kSmallestSlot;
  while (capacity < bytes) capacity *= 2;
  Slot* slot = new (std::nothrow) Slot{};
  if (!slot) return check("malloc", KVBM_NO_MEMORY);
  slot->capacity = capacity;
  slot->state = Slot::kTaken;
  int status = CU(MemHostAlloc, &slot->host, capacity, kHostPortable);
  if (status == KVBM_OK) status = CU(MemAlloc, &slot->device, capacity);
  if (status == KVBM_OK) status = CU(EventCreate, &slot->event, kEventNoTiming);
  if (status != KVBM_OK) {
    free_slot(slot);
    return status;
  }
  *out = slot;
  return KVBM_OK;
}

// A slot whose last upload and kernel are done, or a new one: the ring grows to what is in flight at once, and then
// allocates no more.
int take_slot(Device* device, size_t bytes, Slot** out) {
  std::lock_guard<std::mutex> lock(device->ring_mutex);
  int queries = 0;
  if (device->newest) {
    Slot* slot = device->newest;
    do {
      slot = slot->next;
      if (slot->capacity < bytes || slot->state == Slot::kTaken || slot->state == Slot::kLost) continue;
      if (slot->state == Slot::kInFlight) {
        if (queries++ == kMostQueries) break;
        const int status = driver.EventQuery(slot->event);
        if (status == kNotReady) continue;
        if (status != KVBM_OK) return check("cuEventQuery", status);  // an earlier failure, reported late
      }
      slot->state = Slot::kTaken;
      device->newest = slot;
      *out = slot;
      return KVBM_OK;
    } while (slot != device->newest);
  }
  Slot* slot = nullptr;
  RETURN_IF_FAILED(make_slot(bytes, &slot));
  slot->next = device->newest ? device->newest->next : slot;
  if (device->newest) device->newest->next = slot;
  device->newest = slot;
  *out = slot;
  return KVBM_OK;
}

void leave_slot(Device* device, Slot* slot, bool recorded) {
  std::lock_guard<std::mutex> lock(device->ring_mutex);
  slot->state = recorded ? Slot::kInFlight : Slot::kLost;
}

// ---- ids and tables ------------------------------------------------------------------------------------------------

inline int64_t id_at(const void* ids, uint32_t id_bytes, int64_t i) {
  if (!ids) return i;
  return id_bytes == 4 ? static_cast<const int32_t*>(ids)[i] : static_cast<const int64_t*>(ids)[i];
}

bool fit_32_bits(const int64_t* ids, uint32_t count) {
  uint64_t bits = 0;
  if (ids)
    for (uint32_t i = 0; i < count; ++i) bits |= static_cast<uint64_t>(ids[i] ^ (ids[i] >> 63));
  return bits <= static_cast<uint64_t>(INT32_MAX);
}

// Writes ids with `to` bytes each; no ids stand for 0, 1, 2, ….
void write_ids(void* out, uint32_t to, const void* ids, uint32_t from, uint32_t count) {
  if (ids && from == to) {
    memcpy(out, ids, static_cast<size_t>(count) * to);
  } else if (to == 4) {
    auto* narrow = static_cast<int32_t*>(out);
    for (uint32_t i = 0; i < count; ++i) narrow[i] = static_cast<int32_t>(id_at(ids, from, i));
  } else {
    auto* wide = static_cast<int64_t*>(out);
    for (uint32_t i = 0; i < count; ++i) wide[i] = id_at(ids, from, i);
  }
}

bool is_batch(const kvbm_batch* batch) { return batch->id_bytes == 0 || batch->id_bytes == 4 || batch->id_bytes == 8; }

// The four fields of kvbm_args that are set per batch, in the order of inline_mask.
enum { kSrcIds, kDstIds, kSrcTable, kDstTable, kFields };

struct Fields {
  size_t bytes[kFields] = {};   // 0: nothing to carry
  size_t offset[kFields] = {};  // in the payload or in the slot
  bool is_inline[kFields] = {};
  size_t slot_bytes = 0;  // what did not fit
  uint32_t id_bytes = 0;
  bool same_ids = false;  // dst_ids are src_ids: carried once
};

constexpr size_t align_16(size_t bytes) { return (bytes + 15) & ~size_t{15}; }

Fields place_fields(const kvbm_batch* batch) {
  Fields f;
  const size_t pairs = batch->num_pairs;
  f.id_bytes = batch->src_ids || batch->dst_ids ? batch->id_bytes : 0;
  if (f.id_bytes == 8 && fit_32_bits(static_cast<const int64_t*>(batch->src_ids), batch->num_pairs) &&
      fit_32_bits(static_cast<const int64_t*>(batch->dst_ids), batch->num_pairs))
    f.id_bytes = 4;
  f.same_ids = batch->src_ids == batch->dst_ids;
  f.bytes[kSrcIds] = pairs * f.id_bytes;
  f.bytes[kDstIds] = f.same_ids ? 0 : pairs * f.id_bytes;
  f.bytes[kSrcTable] = batch->src_table_device ? 0 : size_t{8} * batch->src_entries;
  f.bytes[kDstTable] = batch->dst_table_device ? 0 : size_t{8} * batch->dst_entries;
  size_t inlined = 0;
  for (int i = 0; i < kFields; ++i) {
    const size_t bytes = align_16(f.bytes[i]);
    f.is_inline[i] = bytes > 0 && inlined + bytes <= KVBM_INLINE_BYTES;
    size_t& end = f.is_inline[i] ? inlined : f.slot_bytes;
    f.offset[i] = end;
    end += bytes;
  }
  return f;
}

void write_fields(const kvbm_batch* batch, const Fields& f, kvbm_args* args, const Slot* slot) {
  uint64_t* const field[kFields] = {&args->src_ids, &args->dst_ids, &args->src_table, &args->dst_table};
  const void* const source[kFields] = {batch->src_ids, batch->dst_ids, batch->src_table, batch->dst_table};
  args->num_pairs = batch->num_pairs;
  args->id_bytes = f.id_bytes;
  args->inline_mask = 0;
  args->src_ids = args->dst_ids = 0;
  args->src_table = batch->src_table_device;
  args->dst_table = batch->dst_table_device;
  for (int i = 0; i < kFields; ++i) {
    if (f.bytes[i] == 0) continue;
    char* base = f.is_inline[i] ? reinterpret_cast<char*>(args->payload) : static_cast<char*>(slot->host);
    void* out = base + f.offset[i];
    if (i == kSrcIds || i == kDstIds)
      write_ids(out, f.id_bytes, source[i], batch->id_bytes, batch->num_pairs);
    else
      memcpy(out, source[i], f.bytes[i]);
    *field[i] = f.is_inline[i] ? f.offset[i] : slot->device + f.offset[i];
    args->inline_mask |= static_cast<uint32_t>(f.is_inline[i]) << i;
  }
  if (f.same_ids && f.id_bytes) {
    args->dst_ids = args->src_ids;
    args->inline_mask |= (args->inline_mask & 1u) << 1;
  }
}

int launch(Handle function, const kvbm_kernel& kernel, kvbm_args* args, int sms, Stream stream) {
  kvbm_grid grid = {};
  RETURN_IF_FAILED(check(kernel.name, kernel.prepare(args, static_cast<uint32_t>(sms), &grid)));
  if (grid.ctas == 0) return KVBM_OK;
  if (grid.shared_bytes > 48 << 10)
    RETURN_IF_FAILED(CU(FuncSetAttribute, function, kMaxDynamicShared, static_cast<int>(grid.shared_bytes)));
  void* parameters[] = {args};
  return CU(LaunchKernel, function, grid.ctas, 1, 1, grid.threads_x, grid.threads_y, 1, grid.shared_bytes, stream, parameters,
            nullptr);
}

// The batch whose ids or tables do not fit the kernel's parameters.
int launch_with_slot(Device* device, Handle function, int kernel, kvbm_args* args, const kvbm_batch* batch,
                     const Fields& fields, Stream stream) {
  RelaxedCapture relaxed;
  int capturing = 0;
  RETURN_IF_FAILED(CU(StreamIsCapturing, stream, &capturing));
  // A captured upload reads its slot again at every replay, for as long as the graph lives, and nobody says when that
  // ends: its slot stays outside the ring and is never released.
  Slot* slot = nullptr;
  RETURN_IF_FAILED(capturing ? make_slot(fields.slot_bytes, &slot) : take_slot(device, fields.slot_bytes, &slot));
  write_fields(batch, fields, args, slot);
  int status = CU(MemcpyHtoDAsync, slot->device, slot->host, fields.slot_bytes, stream);
  if (status == KVBM_OK) status = launch(function, kvbm_kernels[kernel], args, device->sms, stream);
  // Also after a failure: the copy may have been enqueued.
  if (!capturing) leave_slot(device, slot, driver.EventRecord(slot->event, stream) == KVBM_OK);
  return status;
}

// ---- the host ------------------------------------------------------------------------------------------------------

enum : uint64_t { kBytesAThread = 512 << 10 };  // below two of these a second thread costs more than it saves
enum : unsigned { kMostThreads = 256, kTurnsAThread = 8 };
// From here on stores go around the cache.  The size of the last level would be the textbook's limit, but a virtual
// machine reports its host's and owns a slice of it; writing around measured ahead well below that.
enum : uint64_t { kStreamFrom = 8 << 20 };

unsigned usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<unsigned>(std::max(CPU_COUNT(&set), 1));
  return std::max(std::thread::hardware_concurrency(), 1u);  // more CPUs than a cpu_set_t holds
}

uint64_t saturating_product(uint64_t a, uint64_t b) {
  uint64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<uint64_t>::max() : product;
}

// Bytes that a batch writes.  Extents count words (or elements), and inner[0] is the mode along which the source goes
// on: its step is their size.
uint64_t total_bytes(const kvbm_args& args) {
  uint64_t total = 0;
  for (uint32_t p = 0; p < args.num_parts; ++p) {
    const int64_t unit = args.part[p].inner[0].src;
    uint64_t bytes = saturating_product(args.num_pairs, static_cast<uint64_t>(unit < 0 ? -unit : std::max<int64_t>(unit, 1)));
    for (const kvbm_outer& mode : args.part[p].outer) bytes = saturating_product(bytes, std::max(mode.extent.n, 1u));
    for (const kvbm_inner& mode : args.part[p].inner) bytes = saturating_product(bytes, std::max(mode.extent.n, 1u));
    if (__builtin_add_overflow(total, bytes, &total)) return std::numeric_limits<uint64_t>::max();
  }
  return total;
}

// The jobs of all parts, one part after the other, dealt out in contiguous ranges.
struct HostRun {
  const kvbm_kernel* kernel;
  const kvbm_args* args;
  uint64_t jobs, turn;  // all jobs; jobs a turn
  int stream_stores;
  std::atomic<uint64_t> next{0};

  bool is_done() const { return next.load(std::memory_order_relaxed) >= jobs; }

  void work() {
    for (;;) {
      const uint64_t first = next.fetch_add(turn, std::memory_order_relaxed);
      if (first >= jobs) break;
      const uint64_t last = std::min(first + turn, jobs);
      uint64_t begin = 0;
      for (uint32_t p = 0; p < args->num_parts; ++p) {
        const uint64_t end = begin + args->part[p].jobs;
        const uint64_t from = std::max(first, begin), to = std::min(last, end);
        if (from < to)
          kernel->host(args, p, static_cast<uint32_t>(from - begin), static_cast<uint32_t>(to - begin), stream_stores);
        begin = end;
      }
    }
    // Stores around the cache are ordered by nothing else.
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
};

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

bool is_legacy(uint64_t stream) { return stream <= 1; }  // the null stream and CU_STREAM_LEGACY

// ---- checking ids --------------------------------------------------------------------------------------------------

enum : uint32_t { kFew = 32 };  // up to here comparing each with each beats touching memory

// One bit a block.  Kept between calls and cleared after each where it was set: a check is O(pairs), not O(blocks).
class Bitmap {
 public:
  Bitmap() = default;
  Bitmap(const Bitmap&) = delete;
  Bitmap& operator=(const Bitmap&) = delete;
  ~Bitmap() { free(words_); }
  bool reserve(int64_t bits) {
    const size_t words = static_cast<size_t>(bits / 64 + 1);
    if (words <= size_) return true;
    auto* grown = static_cast<uint64_t*>(calloc(words, sizeof(uint64_t)));  // a large one is mapped as it is touched
    if (!grown) return false;
    free(words_);
    words_ = grown;
    size_ = words;
    return true;
  }
  bool test(int64_t i) const { return words_[word(i)] >> (i & 63) & 1; }
  void set(int64_t i) { words_[word(i)] |= uint64_t{1} << (i & 63); }
  void clear(int64_t bits) { memset(words_, 0, static_cast<size_t>(bits / 64 + 1) * sizeof(uint64_t)); }
  void clear_word_of(int64_t i) { words_[word(i)] = 0; }

 private:
  static size_t word(int64_t i) { return static_cast<size_t>(i) / 64; }
  uint64_t* words_ = nullptr;
  size_t size_ = 0;
};

thread_local Bitmap bitmap_of_thread;

enum : int64_t { kSkip = -1 };

template <typename Id>
struct Ids {
  const Id *src, *dst;  // null: 0, 1, 2, …
  int64_t count;
  int64_t src_at(int64_t i) const { return src ? src[i] : i; }
  int64_t dst_at(int64_t i) const { return dst ? dst[i] : i; }
  bool is_skipped(int64_t i) const { return src_at(i) == kSkip || dst_at(i) == kSkip; }
};

// The first i in [0, last) whose destination is `block`, or -1.
template <typename Id>
int64_t find_written(const Ids<Id>& ids, int64_t block, int64_t last) {
  for (int64_t i = 0; i < last; ++i)
    if (ids.dst_at(i) == block && !ids.is_skipped(i)) return i;
  return -1;
}

template <typename Id>
int check_few(const Ids<Id>& ids, bool same_pool, int64_t* index) {
  for (*index = 0; *index < ids.count; ++*index) {
    if (!ids.is_skipped(*index) && find_written(ids, ids.dst_at(*index), *index) >= 0) return KVBM_ID_DST_TWICE;
  }
  for (*index = 0; same_pool && *index < ids.count; ++*index) {
    if (!ids.is_skipped(*index) && find_written(ids, ids.src_at(*index), ids.count) >= 0) return KVBM_ID_READ_AND_WRITTEN;
  }
  return KVBM_ID_OK;
}

template <typename Id>
int check_many(const Ids<Id>& ids, int64_t dst_blocks, bool same_pool, int64_t* index) {
  Bitmap& written = bitmap_of_thread;  // looked up once: that of a thread costs a call
  if (!written.reserve(dst_blocks)) return check("calloc", KVBM_NO_MEMORY);
  int found = KVBM_ID_OK;
  int64_t marked = 0;
  for (; marked < ids.count; ++marked) {
    if (ids.is_skipped(marked)) continue;
    const int64_t block = ids.dst_at(marked);
    if (written.test(block)) {
      *index = marked;
      found = KVBM_ID_DST_TWICE;
      break;
    }
    written.set(block);
  }
  for (int64_t i = 0; found == KVBM_ID_OK && same_pool && i < ids.count; ++i) {
    const int64_t block = ids.src_at(i);
    if (ids.is_skipped(i) || block >= dst_blocks || !written.test(block)) continue;
    *index = i;
    found = KVBM_ID_READ_AND_WRITTEN;
  }
  if (dst_blocks / 64 < marked)
    written.clear(dst_blocks);
  else
    for (int64_t i = 0; i < marked; ++i)
      if (!ids.is_skipped(i)) written.clear_word_of(ids.dst_at(i));
  return found;
}

template <typename Id>
int check_all(const Ids<Id>& ids, int64_t src_blocks, int64_t dst_blocks, bool same_pool, int64_t* index) {
  // All ranges first: the later checks index memory with the ids.
  for (int64_t i = 0; i < ids.count; ++i) {
    *index = i;
    const int64_t src = ids.src_at(i), dst = ids.dst_at(i);
    if (src != kSkip && (src < 0 || src >= src_blocks)) return KVBM_ID_SRC_RANGE;
    if (dst != kSkip && (dst < 0 || dst >= dst_blocks)) return KVBM_ID_DST_RANGE;
  }
  return ids.count <= kFew ? check_few(ids, same_pool, index) : check_many(ids, dst_blocks, same_pool, index);
}

// ---- status codes --------------------------------------------------------------------------------------------------

struct Status {
  int code;
  const char *name, *text;
};

// Those that a caller can do something about; the driver explains the rest.
constexpr Status kStatuses[] = {
    {KVBM_OK, "CUDA_SUCCESS", "No error."},
    {KVBM_NO_DRIVER, "KVBM_NO_DRIVER",
     "There is no usable NVIDIA driver: libcuda.so.1 cannot be loaded or is too old. Install the driver (in a "
     "container: "
     "start it with the GPUs), or use CPU arrays."},
    {KVBM_NOT_BUILT, "KVBM_NOT_BUILT",
     "kvbm was built without CUDA kernels. Reinstall it with nvcc at hand (KVBM_REQUIRE_CUDA=1 turns its absence into "
     "a build error), or use CPU arrays."},
    {KVBM_TOO_LARGE, "KVBM_TOO_LARGE", "An index of this copy does not fit 31 bits. Copy fewer blocks at a time."},
    {KVBM_NO_FUNCTION, "KVBM_NO_FUNCTION",
     "The NVIDIA driver lacks cuMemcpyBatchAsync. Update the driver to one of CUDA 12.8 or later, or use the backend "
     "'async' or 'auto'."},
    {KVBM_NO_MEMORY, "KVBM_NO_MEMORY", "Host memory is exhausted."},
    {KVBM_FORKED, "KVBM_FORKED",
     "CUDA was used in this process before it forked, and CUDA does not survive fork(). Start the child with the "
     "'spawn' or 'forkserver' method, or use CUDA only after the fork."},
    {KVBM_LEGACY_STREAM, "KVBM_LEGACY_STREAM",
     "cuMemcpyBatchAsync does not run on the legacy default stream. Pass a stream of your own, or use the backend "
     "'async' or 'auto'."},
    {1, "CUDA_ERROR_INVALID_VALUE", "An argument is invalid: an address, a size or a stream."},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "The GPU's memory (or the host's pinned memory) is exhausted. Free some, or copy less."},
    {3, "CUDA_ERROR_NOT_INITIALIZED",
     "The driver is not initialised in this process, which is what a fork() after the first use of CUDA leads to. "
     "Start the child with the 'spawn' or 'forkserver' method."},
    {4, "CUDA_ERROR_DEINITIALIZED", "The driver is shutting down with the process."},
    {34, "CUDA_ERROR_STUB_LIBRARY",
     "The libcuda.so.1 found is the toolkit's stub, not a driver. Remove the stubs folder from LD_LIBRARY_PATH."},
    {100, "CUDA_ERROR_NO_DEVICE",
     "There is a driver but no GPU that this process may use. Look at nvidia-smi and CUDA_VISIBLE_DEVICES."},
    {101, "CUDA_ERROR_INVALID_DEVICE", "There is no GPU with this number. CUDA_VISIBLE_DEVICES renumbers them from 0."},
    {200, "CUDA_ERROR_INVALID_IMAGE",
     "The driver cannot read the compiled kernels. It may be older than the CUDA toolkit that built them: update the "
     "driver, or rebuild with its toolkit."},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "The device's CUDA context is not valid (was the device reset?). Restart the process."},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "No kernel image was built for this GPU. Rebuild with CUDA_ARCHS naming its compute capability, e.g. "
     "CUDA_ARCHS=90."},
    {218, "CUDA_ERROR_INVALID_PTX",
     "The driver cannot compile the embedded PTX. Update the driver, or rebuild with CUDA_ARCHS "
     "naming this GPU's compute capability."},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "The embedded PTX is newer than the driver, and no image was built for this GPU. Update the driver, or rebuild "
     "with "
     "CUDA_ARCHS naming its compute capability."},
    {400, "CUDA_ERROR_INVALID_HANDLE", "A handle is invalid: is the stream still alive, and of this device?"},
    {500, "CUDA_ERROR_NOT_FOUND",
     "The kernel is not in its image: kernels and images come from different builds. Reinstall kvbm."},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "A kernel, this one's or any earlier one of the process, accessed memory it may not. The CUDA context is lost: "
     "restart "
     "the process, and look for the culprit with compute-sanitizer or CUDA_LAUNCH_BLOCKING=1."},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "The kernel needs more registers or shared memory than the GPU has."},
    {719, "CUDA_ERROR_LAUNCH_FAILED",
     "An earlier kernel of the process failed. The CUDA context is lost: restart the process, and look for the culprit "
     "with "
     "compute-sanitizer or CUDA_LAUNCH_BLOCKING=1."},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "The driver or this GPU does not support the operation."},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "The kernel module and libcuda.so.1 are of different versions. Reboot, or reinstall the driver."},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "The operation cannot be captured into a graph."},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "An earlier call has invalidated the stream's graph capture."},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "The legacy default stream cannot be used while another stream captures a graph. Pass the capturing stream."},
};

const Status* find_status(int code) {
  for (const Status& status : kStatuses)
    if (status.code == code) return &status;
  return nullptr;
}

bool is_loaded() { return load_status.load(std::memory_order_acquire) == KVBM_OK; }

}  // namespace

// ====================================================================================================================

extern "C" {

const char* kvbm_last_call(void) { return last_call; }

const char* kvbm_status_name(int status) {
  if (const Status* known = find_status(status)) return known->name;
  const char* name = nullptr;
  if (is_loaded() && driver.GetErrorName(status, &name) == KVBM_OK && name) return name;
  return "CUDA_ERROR_UNKNOWN";
}

const char* kvbm_status_text(int status) {
  if (const Status* known = find_status(status)) return known->text;
  const char* text = nullptr;
  if (is_loaded() && driver.GetErrorString(status, &text) == KVBM_OK && text) return text;
  return "The driver knows no more about this error.";
}

int kvbm_driver_version(int* version) {
  *version = 0;
  RETURN_IF_FAILED(load());
  *version = driver.version;
  return KVBM_OK;
}

int kvbm_device_count(int* count) {
  *count = 0;
  RETURN_IF_FAILED(start());
  *count = num_devices;
  return KVBM_OK;
}

int kvbm_device_info(int device, char* name, int name_bytes, int* major, int* minor, int* sms, uint64_t* memory) {
  RETURN_IF_FAILED(start());
  if (device < 0 || device >= num_devices) return check("cuDeviceGet", kInvalidDevice);
  int handle = 0;
  size_t bytes = 0;
  RETURN_IF_FAILED(CU(DeviceGet, &handle, device));
  RETURN_IF_FAILED(CU(DeviceGetName, name, name_bytes, handle));
  RETURN_IF_FAILED(CU(DeviceGetAttribute, major, kMajor, handle));
  RETURN_IF_FAILED(CU(DeviceGetAttribute, minor, kMinor, handle));
  RETURN_IF_FAILED(CU(DeviceGetAttribute, sms, kMultiprocessors, handle));
  RETURN_IF_FAILED(CU(DeviceTotalMem, &bytes, handle));
  *memory = bytes;
  return KVBM_OK;
}

int kvbm_pointer_device(uint64_t address, int* device) {
  *device = -1;
  RETURN_IF_FAILED(start());
  unsigned type = 0;
  int managed = 0, ordinal = -1;
  int attributes[] = {kPointerMemoryType, kPointerIsManaged, kPointerOrdinal};
  void* values[] = {&type, &managed, &ordinal};
  RelaxedCapture relaxed;
  // For an address that the driver does not know this form succeeds and leaves the type at 0.
  int status = driver.PointerGetAttributes(3, attributes, values, address);
  if (status == kInvalidContext) {  // some drivers want a context, whichever
    Current current;
    Device* opened = nullptr;
    RETURN_IF_FAILED(open(0, &opened, &current));
    status = driver.PointerGetAttributes(3, attributes, values, address);
  }
  RETURN_IF_FAILED(check("cuPointerGetAttributes", status));
  if (type == 0)
    *device = -1;
  else if (type == kMemoryHost && !(managed & 0xff))  // the driver writes a bool
    *device = -2;
  else
    *device = ordinal;
  return KVBM_OK;
}

int kvbm_has_memcpy_batch(void) { return load() == KVBM_OK && (driver.MemcpyBatchAsyncV2 || driver.MemcpyBatchAsyncV1); }

int kvbm_warm(int kernel, int device) {
  if (kernel < -1 || kernel >= kvbm_num_kernels) return check("kvbm_warm", kInvalidValue);
  Current current;
  Device* opened = nullptr;
  RETURN_IF_FAILED(open(device, &opened, &current));
  if (kvbm_num_images == 0) return check("kvbm_images", KVBM_NOT_BUILT);
  Handle function = nullptr;
  const int first = kernel < 0 ? 0 : kernel, last = kernel < 0 ? kvbm_num_kernels : kernel + 1;
  for (int i = first; i < last; ++i) RETURN_IF_FAILED(find_kernel(opened, i, &function));
  return KVBM_OK;
}

int kvbm_launch(int kernel, const kvbm_args* args, const kvbm_batch* batch, int device, uint64_t stream) {
  if (batch->num_pairs == 0) return KVBM_OK;
  if (!is_kernel(kernel) || !is_batch(batch)) return check("kvbm_launch", kInvalidValue);
  Current current;
  Device* opened = nullptr;
  RETURN_IF_FAILED(open(device, &opened, &current));
  Handle function = nullptr;
  RETURN_IF_FAILED(find_kernel(opened, kernel, &function));
  kvbm_args copy;  // the payload's unused rest stays as it is: no kernel reads it
  memcpy(&copy, args, offsetof(kvbm_args, payload));
  const Fields fields = place_fields(batch);
  auto* handle = reinterpret_cast<Stream>(stream);
  if (__builtin_expect(fields.slot_bytes > 0, 0))
    return launch_with_slot(opened, function, kernel, &copy, batch, fields, handle);
  write_fields(batch, fields, &copy, nullptr);
  return launch(function, kvbm_kernels[kernel], &copy, opened->sms, handle);
}

int kvbm_run_host(int kernel, const kvbm_args* args, const kvbm_batch* batch, int threads) {
  if (batch->num_pairs == 0) return KVBM_OK;
  if (!is_kernel(kernel) || !is_batch(batch)) return check("kvbm_run_host", kInvalidValue);
  kvbm_args copy;
  memcpy(&copy, args, offsetof(kvbm_args, payload));
  copy.num_pairs = batch->num_pairs;
  copy.id_bytes = batch->src_ids || batch->dst_ids ? batch->id_bytes : 0;
  copy.inline_mask = 0;
  copy.src_ids = reinterpret_cast<uint64_t>(batch->src_ids);
  copy.dst_ids = reinterpret_cast<uint64_t>(batch->dst_ids);
  copy.src_table = reinterpret_cast<uint64_t>(batch->src_table);
  copy.dst_table = reinterpret_cast<uint64_t>(batch->dst_table);
  // Kernels know "both sides 0, 1, 2, …" and "ids on both sides"; where only one side has ids, write out the other's.
  std::unique_ptr<char[]> counted;
  if (copy.id_bytes && (!batch->src_ids || !batch->dst_ids)) {
    counted.reset(new (std::nothrow) char[static_cast<size_t>(batch->num_pairs) * copy.id_bytes]);
    if (!counted) return check("malloc", KVBM_NO_MEMORY);
    write_ids(counted.get(), copy.id_bytes, nullptr, copy.id_bytes, batch->num_pairs);
    (batch->src_ids ? copy.dst_ids : copy.src_ids) = reinterpret_cast<uint64_t>(counted.get());
  }
  const kvbm_kernel& entry = kvbm_kernels[kernel];
  kvbm_grid grid = {};
  RETURN_IF_FAILED(check(entry.name, entry.prepare(&copy, 0, &grid)));

  HostRun run;
  run.kernel = &entry;
  run.args = &copy;
  run.jobs = 0;
  for (uint32_t p = 0; p < copy.num_parts; ++p) run.jobs += copy.part[p].jobs;
  const uint64_t bytes = total_bytes(copy);
  run.stream_stores = bytes > kStreamFrom;
  uint64_t workers = threads > 0 ? static_cast<uint64_t>(threads) : usable_cores();
  workers = std::min({workers, bytes / kBytesAThread, run.jobs, uint64_t{kMostThreads}});
  workers = std::max<uint64_t>(workers, 1);
  // Several turns a thread, so that one that starts late or shares its core holds nobody up.
  run.turn = workers == 1 ? std::max<uint64_t>(run.jobs, 1) : std::max<uint64_t>(run.jobs / (workers * kTurnsAThread), 1);

  std::array<std::thread, kMostThreads> others;
  uint64_t started = 0;
  try {
    for (; started + 1 < workers && !run.is_done(); ++started) others[started] = std::thread([&run] { run.work(); });
  } catch (...) {
    // No further thread to be had: those that run do all the work.
  }
  run.work();
  for (uint64_t i = 0; i < started; ++i) others[i].join();
  return KVBM_OK;
}

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

int kvbm_check_ids(const void* src_ids, const void* dst_ids, uint32_t id_bytes, uint32_t num_pairs, int64_t src_blocks,
                   int64_t dst_blocks, int same_pool, int64_t* index) {
  if (id_bytes == 4) {
    const Ids<int32_t> ids = {static_cast<const int32_t*>(src_ids), static_cast<const int32_t*>(dst_ids), num_pairs};
    return check_all(ids, src_blocks, dst_blocks, same_pool != 0, index);
  }
  const Ids<int64_t> ids = {static_cast<const int64_t*>(src_ids), static_cast<const int64_t*>(dst_ids), num_pairs};
  return check_all(ids, src_blocks, dst_blocks, same_pool != 0, index);
}

int kvbm_alloc_device(int device, uint64_t bytes, uint64_t* address) {
  *address = 0;
  Current current;
  Device* opened = nullptr;
  RETURN_IF_FAILED(open(device, &opened, &current));
  RelaxedCapture relaxed;
  Address allocated = 0;
  RETURN_IF_FAILED(CU(MemAlloc, &allocated, bytes));
  *address = allocated;
  return KVBM_OK;
}

int kvbm_free_device(int device, uint64_t address) {
  if (address == 0) return KVBM_OK;
  Current current;
  Device* opened = nullptr;
  RETURN_IF_FAILED(open(device, &opened, &current));
  RelaxedCapture relaxed;
  return CU(MemFree, address);
}

int kvbm_upload(int device, uint64_t dst, const void* src, uint64_t bytes) {
  if (bytes == 0) return KVBM_OK;
  Current current;
  Device* opened = nullptr;
  RETURN_IF_FAILED(open(device, &opened, &current));
  RelaxedCapture relaxed;
  // On a stream of its own: a plain cuMemcpyHtoD would wait for the legacy stream, and so for a running model.
  RETURN_IF_FAILED(CU(MemcpyHtoDAsync, dst, src, bytes, opened->private_stream));
  return CU(StreamSynchronize, opened->private_stream);
}

int kvbm_synchronize(int device, uint64_t stream) {
  Current current;
  Device* opened = nullptr;
  RETURN_IF_FAILED(open(device, &opened, &current));
  return CU(StreamSynchronize, reinterpret_cast<Stream>(stream));
}

}  // extern "C"

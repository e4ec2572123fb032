// driver.h: the CUDA driver as the runtime's files see it; what runs on the GPU and the extension never include it.
//
// Nothing of CUDA is linked or included.  The driver's functions are looked up in libcuda.so.1 at first use, so the
// extension imports on any machine and a missing driver is a status code.  Nothing here throws across the C ABI and
// nothing aborts.
//
// What lives until the process ends, on purpose: the retained primary contexts, the loaded images, the rings' slots, and every list
// of such things.  A static destructor would race with the driver's own shutdown, which may still call back.
#pragma once

#include <atomic>
#include <cstddef>
#include <list>
#include <mutex>
#include <vector>

#include "kvbm.h"

namespace kvbm_driver {

// ---- the driver's types and functions, as far as they are needed ---------------------------------------------------

using Stream = void*;
using Handle = void*;  // context, module, function, event
using Address = unsigned long long;

enum : int {
  kInvalidValue = 1,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNotReady = 600,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
};

enum : int { kMultiprocessors = 16, kMajor = 75, kMinor = 76 };  // CUdevice_attribute
enum : int {                                                     // CUpointer_attribute
  kPointerMemoryType = 2,
  kPointerIsManaged = 8,
  kPointerOrdinal = 9,
  kPointerIsLegacy = 10,  // IS_LEGACY_CUDA_IPC_CAPABLE: cuMemAlloc's
  kPointerRangeStart = 11,
  kPointerRangeSize = 12,
  kPointerPool = 17,
};
enum : unsigned { kMemoryHost = 1 };                    // CUmemorytype
enum : int { kPtxVersion = 5, kMaxDynamicShared = 8 };  // CUfunction_attribute
enum : int { kSerialization = 6 };                      // CUlaunchAttributeID: programmatic, of a stream
enum : unsigned { kHostPortable = 1, kHostMapped = 2, kStreamNonBlocking = 1, kEventNoTiming = 2 };
enum : int { kCaptureRelaxed = 2 };   // CUstreamCaptureMode
enum : int { kLocationDevice = 1 };   // CUmemLocationType
enum : int { kAccessReadWrite = 3 };  // CUmemAccess_flags

struct Location {
  int type, id;
};
struct CopyAttributes {  // CUmemcpyAttributes
  int source_order;      // 1: in stream order
  Location source, destination;
  unsigned flags;
};

struct Copy2D {  // CUDA_MEMCPY2D
  size_t src_x, src_y;
  int src_type;  // CUmemorytype; 4: whatever the address says
  const void* src_host;
  Address src_device;
  Handle src_array;
  size_t src_pitch;
  size_t dst_x, dst_y;
  int dst_type;
  void* dst_host;
  Address dst_device;
  Handle dst_array;
  size_t dst_pitch;
  size_t width, height;
};

struct IpcHandle {  // CUipcMemHandle
  unsigned char bytes[KVBM_IPC_BYTES];
};

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  alignas(8) int value;
  char rest[60];
};

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
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
  X(ModuleUnload, "", true, (Handle))                                                                       \
  X(ModuleGetFunction, "", true, (Handle*, Handle, const char*))                                            \
  X(FuncLoad, "", false, (Handle))                                                                          \
  X(FuncSetAttribute, "", true, (Handle, int, int))                                                         \
  X(FuncGetAttribute, "", true, (int*, int, Handle))                                                        \
  X(LaunchKernel, "", true,                                                                                 \
    (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**)) \
  X(LaunchKernelEx, "", true, (const LaunchConfig*, Handle, void**, void**))                                \
  X(MemAlloc, "_v2", true, (Address*, size_t))                                                              \
  X(MemFree, "_v2", true, (Address))                                                                        \
  X(MemHostAlloc, "", true, (void**, size_t, unsigned))                                                     \
  X(MemFreeHost, "", true, (void*))                                                                         \
  X(MemcpyHtoDAsync, "_v2", true, (Address, const void*, size_t, Stream))                                   \
  X(MemcpyAsync, "", true, (Address, Address, size_t, Stream))                                              \
  X(MemcpyPeerAsync, "", true, (Address, Handle, Address, Handle, size_t, Stream))                          \
  X(PointerGetAttributes, "", true, (unsigned, int*, void**, Address))                                      \
  X(MemGetAccess, "", true, (unsigned long long*, const Location*, Address))                                \
  X(MemPoolGetAccess, "", true, (int*, Handle, const Location*))                                            \
  X(StreamCreate, "", true, (Stream*, unsigned))                                                            \
  X(StreamDestroy, "_v2", true, (Stream))                                                                   \
  X(StreamSynchronize, "", true, (Stream))                                                                  \
  X(ThreadExchangeStreamCaptureMode, "", true, (int*))                                                      \
  X(EventCreate, "", true, (Handle*, unsigned))                                                             \
  X(EventRecord, "", true, (Handle, Stream))                                                                \
  X(EventQuery, "", true, (Handle))                                                                         \
  X(EventDestroy, "_v2", true, (Handle))                                                                    \
  X(EventSynchronize, "", true, (Handle))                                                                   \
  X(StreamWaitEvent, "", true, (Stream, Handle, unsigned))                                                  \
  X(StreamGetCtx, "", true, (Stream, Handle*))                                                              \
  X(StreamGetCaptureInfo, "_v2", true, (Stream, int*, uint64_t*, Handle*, const Handle**, size_t*))         \
  X(UserObjectCreate, "", true, (Handle*, void*, void (*)(void*), unsigned, unsigned))                      \
  X(GraphRetainUserObject, "", true, (Handle, Handle, unsigned, unsigned))                                  \
  X(DeviceCanAccessPeer, "", true, (int*, int, int))                                                        \
  X(CtxEnablePeerAccess, "", true, (Handle, unsigned))                                                      \
  X(Memcpy2DAsync, "_v2", true, (const Copy2D*, Stream))                                                    \
  X(IpcGetMemHandle, "", true, (IpcHandle*, Address))                                                       \
  X(IpcOpenMemHandle, "_v2", true, (Address*, IpcHandle, unsigned))                                         \
  X(IpcCloseMemHandle, "", true, (Address))                                                                 \
  X(MemHostRegister, "_v2", true, (void*, size_t, unsigned))                                                \
  X(MemHostUnregister, "", true, (void*))

struct Driver {
#define KVBM_POINTER(name, suffix, needed, parameters) int(*name) parameters;
  KVBM_DRIVER_FUNCTIONS(KVBM_POINTER)
#undef KVBM_POINTER
  BatchV1 MemcpyBatchAsyncV1;  // CUDA 12.8: reports the failing index
  BatchV2 MemcpyBatchAsyncV2;  // CUDA 13.0: does not
  int version;
};

extern Driver driver;  // written once, under load_once; all zero before

extern thread_local const char* last_call;

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

// ---- devices -------------------------------------------------------------------------------------------------------

struct Slot;  // of the ring that carries ids and tables (launch.cpp)

struct Device {
  std::mutex mutex;  // guards opening the device and loading images and functions
  std::atomic<bool> is_open{false};
  int handle = 0, sms = 0;
  Handle context = nullptr;
  Stream private_stream = nullptr;  // for uploads that must not wait behind the caller's work
  Stream side_stream = nullptr;     // in place of a caller's stream that cannot do it; tied to that by events, never captured
  Handle* modules = nullptr;        // one an image; null until loaded
  bool images_loaded = false;
  std::atomic<Handle>* functions = nullptr;  // one a kernel; read without a lock
  std::atomic<Handle> fixed[2] = {};         // the kernels of copy.cu, by FixedKernel
  std::mutex ring_mutex;
  Slot* newest = nullptr;  // circular: newest->next is the slot used longest ago
  std::mutex events_mutex;
  std::vector<Handle> events;  // not in use
};

extern Device* devices;
extern int num_devices;

int load();   // libcuda.so.1 is open and its functions are known
int start();  // and cuInit has run
int open_slowly(Device* device, int ordinal);

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
  int open(int ordinal);  // opens this device, and enters its context
  Device* device = nullptr;

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

inline int open_device(int ordinal, Device** device) {
  RETURN_IF_FAILED(start());
  if (ordinal < 0 || ordinal >= num_devices) return check("cuDeviceGet", kInvalidDevice);
  *device = &devices[ordinal];
  return (*device)->is_open.load(std::memory_order_acquire) ? KVBM_OK : open_slowly(*device, ordinal);
}

inline int Current::open(int ordinal) {
  RETURN_IF_FAILED(open_device(ordinal, &device));
  return enter(device->context);
}

// launch.cpp, with the device's context current:
int find_kernel(Device* device, int kernel, Handle* function);
int launch_batch(Device* device, int kernel, const kvbm_args* args, const kvbm_batch* batch, Stream stream);

int load_images(Device* device);  // with device->mutex held

// runtime.cpp: for kernels that were compiled at run time: their code on a device (device->mutex held), and their `prepare`.
int load_runtime_kernel(Device* device, int kernel, Handle* function);
int prepare_runtime(const kvbm_kernel& kernel, kvbm_args* args, uint32_t sms, kvbm_grid* grid);

// What a launch takes along beside its parameters: `write` fills memory that lies at `device` when the kernel runs.
struct Cargo {
  virtual void write(void* host, Address device) = 0;
  virtual int launch() = 0;

 protected:
  ~Cargo() = default;
};
// Fills a slot of the ring, uploads it and launches, in the order of `stream`, which may be capturing a graph.  Behind the bytes that
// are uploaded the slot has `scratch` bytes for the kernels.
int carry(Device* device, size_t bytes, size_t scratch, Stream stream, Cargo* cargo);

// pairs.cpp: the kernels that no layout has a part in.
enum FixedKernel { kCopyPairs, kClear };
int find_fixed_kernel(Device* device, FixedKernel which, Handle* function);

// driver.cpp: the graph that a stream is being captured into, or null; and an object that lives as long as a graph.
int capturing_graph(Stream stream, Handle* graph);
int give_to_graph(Handle graph, void* object, void (*release)(void*));

// driver.cpp: an event of the device that is not in use, and its way back.  What waits for it already is not disturbed by its
// next use.
int take_event(Device* device, Handle* event);
void give_event(Device* device, Handle event);

// driver.cpp: what its owner has let go of while the GPU may still use it.  Whoever takes such a thing looks through the list.
class Retired {
 public:
  using Release = void (*)(int device, void* what);
  // Nothing uses `what` any more once the event is done, which then goes back to its device's pool; null: `release` waits for the GPU.
  void add(int device, Handle event, void* what, Release release);
  // Releases what is done with among the `most` that have waited longest; what has no event only if the caller `waits`.
  void collect(size_t most, bool waits = false);

 private:
  struct Thing {
    int device;  // of the event
    Handle event;
    void* what;
    Release release;
    void let_go() const;
  };
  std::mutex mutex_;
  std::list<Thing> things_;
};
extern Retired& retired_memory;  // rings and tables; looked through when memory is allocated

// driver.cpp: an event of the pool, recorded on a stream of this device; null after a failure.
int mark(Device* device, Stream stream, Handle* event);

// driver.cpp: what comes on `to` from now on waits for what is on `from`, a stream of this device.
int order_streams(Device* device, Stream from, Stream to);

// The null stream and CU_STREAM_LEGACY.
inline bool is_legacy(Stream stream) { return reinterpret_cast<uint64_t>(stream) <= 1; }

}  // namespace kvbm_driver

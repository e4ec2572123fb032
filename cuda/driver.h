// driver.h: the CUDA driver, for the files of the runtime (kernels and the extension do not include it).
//
// No CUDA library is linked, and no CUDA header is included.  The functions of the driver are looked up in libcuda.so.1 at
// first use.  So the extension can be imported on any machine, and a missing driver is a status code.  Nothing throws across
// the C interface, and nothing aborts.
//
// Primary contexts, loaded images, upload slots and the lists of such objects are never destroyed.  A static destructor would
// race with the shutdown of the driver, which may still call back.
#pragma once

#include <atomic>
#include <cstddef>
#include <list>
#include <mutex>
#include <vector>

#include "kvbm.h"

namespace kvbm_driver {

// ---- types and functions of the driver -----------------------------------------------------------------------------

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
  kPointerIsLegacy = 10,  // IS_LEGACY_CUDA_IPC_CAPABLE: memory of cuMemAlloc
  kPointerRangeStart = 11,
  kPointerRangeSize = 12,
  kPointerPool = 17,
};
enum : unsigned { kMemoryHost = 1 };                    // CUmemorytype
enum : int { kPtxVersion = 5, kMaxDynamicShared = 8 };  // CUfunction_attribute
enum : int { kSerialization = 6 };                      // CUlaunchAttributeID: PROGRAMMATIC_STREAM_SERIALIZATION
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
  int src_type;  // CUmemorytype; 4: unified, the address tells
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

// X(name, suffix of the exported symbol, required, parameters).  The suffix is that of the prototype's version, for drivers
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
  BatchV1 MemcpyBatchAsyncV1;  // CUDA 12.8: returns the failing index
  BatchV2 MemcpyBatchAsyncV2;  // CUDA 13.0: without it
  int version;
};

extern Driver driver;  // zero until `load` has written it, once

extern thread_local const char* last_call;

// Every status passes through here, so that an error message can name the call.
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

struct Slot;  // of the upload ring (launch.cpp)

// A kernel's code on a device.
struct Function {
  std::atomic<Handle> handle{nullptr};           // null until loaded
  std::atomic<uint32_t> shared_bytes{48 << 10};  // most dynamic shared memory of a CTA that the driver accepts; only grows
};

struct Device {
  std::mutex mutex;  // held while the device is opened, and while images and functions are loaded
  std::atomic<bool> is_open{false};
  int handle = 0, sms = 0;
  Handle context = nullptr;
  Stream private_stream = nullptr;  // for uploads that must not wait for the caller's work
  Stream side_stream = nullptr;     // replaces a caller's stream that cannot run a call; ordered by events, never captured
  Handle* modules = nullptr;        // one per image; null until loaded
  bool images_loaded = false;
  Function* functions = nullptr;      // one per kernel; read without a lock
  std::atomic<Handle> fixed[2] = {};  // the kernels of copy.cu, by FixedKernel
  std::mutex ring_mutex;
  Slot* newest = nullptr;  // a circular list: newest->next is the least recently used slot
  std::mutex events_mutex;
  std::vector<Handle> events;  // free ones
};

extern Device* devices;
extern int num_devices;

int load();   // libcuda.so.1 is open and its functions are known
int start();  // and cuInit has run
int open_slowly(Device* device, int ordinal);

// Makes a device's context current for a scope.  If it is current already (as with torch), this costs one cheap query.
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
  int open(int ordinal);  // opens the device and enters its context
  Device* device = nullptr;

 private:
  bool pushed_ = false;
};

// If another stream captures a graph in the default mode, allocations, loads and queries would invalidate that capture.  In a
// scope of this class they do not.  That is safe, because they are not ordered with the captured work.
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

// launch.cpp.  The context of the device must be current.
int find_kernel(Device* device, int kernel, Function** function);
int launch_batch(Device* device, int kernel, const kvbm_args* args, const kvbm_batch* batch, Stream stream);

int load_images(Device* device);  // with device->mutex held

// runtime.cpp: kernels that were compiled at run time: loads one on a device (with device->mutex held), and prepares a batch.
int load_runtime_kernel(Device* device, int kernel, Handle* function);
int prepare_runtime(const kvbm_kernel& kernel, kvbm_args* args, uint32_t sms, kvbm_grid* grid);

// Data that a launch needs besides its parameters.  `write` fills `host`, which is uploaded to `device` before `launch`.
struct Cargo {
  virtual void write(void* host, Address device) = 0;
  virtual int launch() = 0;

 protected:
  ~Cargo() = default;
};
// Fills a slot of the upload ring, uploads it and launches, in the order of `stream`, which may be capturing a graph.  Behind
// the `bytes` that are uploaded the slot has `scratch` bytes for the kernels.
int carry(Device* device, size_t bytes, size_t scratch, Stream stream, Cargo* cargo);

// pairs.cpp: the kernels of copy.cu.
enum FixedKernel { kCopyPairs, kClear };
int find_fixed_kernel(Device* device, FixedKernel which, Handle* function);

// driver.cpp: the graph that captures a stream, or null.
int capturing_graph(Stream stream, Handle* graph);
// Calls `release` with `object` when the graph, and every graph made from it, is destroyed.
int give_to_graph(Handle graph, void* object, void (*release)(void*));

// driver.cpp: takes a free event of the device, and returns it.  An event may be returned while streams wait for it: its next
// record does not affect them.
int take_event(Device* device, Handle* event);
void give_event(Device* device, Handle event);

// driver.cpp: objects whose owner is gone, but which the GPU may still use.  Each later allocation of such an object releases
// those that are done.
class Retired {
 public:
  using Release = void (*)(int device, void* what);
  // Calls `release` after `event`, and returns the event to the pool of its device.  Null: `release` itself waits for the GPU.
  void add(int device, Handle event, void* what, Release release);
  // Releases what is done among the `most` oldest objects.  Those without an event are released only if the caller `waits`.
  void collect(size_t most, bool waits = false);

 private:
  struct Object {
    int device;  // of the event
    Handle event;
    void* what;
    Release release;
    void finish() const;
  };
  std::mutex mutex_;
  std::list<Object> objects_;
};
extern Retired& retired_memory;  // rings and tables; collected when memory is allocated

// driver.cpp: takes an event and records it on a stream of this device; null after a failure.
int mark(Device* device, Stream stream, Handle* event);

// driver.cpp: later work on `to` waits for the work that is on `from`, a stream of this device.
int order_streams(Device* device, Stream from, Stream to);

// The null stream and CU_STREAM_LEGACY.
inline bool is_legacy(Stream stream) { return reinterpret_cast<uint64_t>(stream) <= 1; }

}  // namespace kvbm_driver

// driver.cpp: finds and starts the CUDA driver, opens devices, and has events, graphs and the texts of status codes.
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <climits>
#include <new>

namespace kvbm_driver {

Driver driver;
thread_local const char* last_call = "";
Device* devices = nullptr;
int num_devices = 0;

// ---- loading and starting the driver, and fork() -------------------------------------------------------------------

constexpr int kUnset = INT_MIN;
std::atomic<int> load_status{kUnset};   // libcuda.so.1 is open and its functions are known
std::atomic<int> start_status{kUnset};  // cuInit has run
std::atomic<bool> start_begun{false};
std::once_flag load_once, start_once;

int load_functions() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return check("dlopen(\"libcuda.so.1\")", KVBM_NO_DRIVER);
  // Drivers before CUDA 12 have no cuGetProcAddress_v2.  Then exported symbols are used, for all functions but batched copies.
  using GetProcAddress = int (*)(const char*, void**, int, uint64_t, int*);
  auto get_proc_address = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  // The driver refuses versions above its own.  12000 has every function but cuFuncLoad (12.4).
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
  // cuMemcpyBatchAsync has two prototypes.  The requested version, or the name of the symbol, selects one.
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

// A forked child has the driver's state but not its threads, so every call would fail or hang.
void in_forked_child() {
  if (start_begun.load(std::memory_order_relaxed)) start_status.store(KVBM_FORKED, std::memory_order_relaxed);
}

// ---- devices -------------------------------------------------------------------------------------------------------

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
      if (result == KVBM_OK && num_devices == 0) result = check("cuDeviceGetCount", kNoDevice);
      if (result == KVBM_OK) {
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

int open_slowly(Device* device, int ordinal) {
  std::lock_guard<std::mutex> lock(device->mutex);
  if (device->is_open.load(std::memory_order_relaxed)) return KVBM_OK;
  RelaxedCapture relaxed;
  RETURN_IF_FAILED(CU(DeviceGet, &device->handle, ordinal));
  RETURN_IF_FAILED(CU(DeviceGetAttribute, &device->sms, kMultiprocessors, device->handle));
  // Stays set if a later step fails, so that a second attempt does not retain it again.
  if (!device->context) RETURN_IF_FAILED(CU(DevicePrimaryCtxRetain, &device->context, device->handle));
  Current current;
  RETURN_IF_FAILED(current.enter(device->context));
  for (Stream* stream : {&device->private_stream, &device->side_stream})
    if (!*stream) RETURN_IF_FAILED(CU(StreamCreate, stream, kStreamNonBlocking));
  const auto kernels = static_cast<size_t>(kvbm_num_kernels);
  if (!device->functions) device->functions = new (std::nothrow) Function[kernels + KVBM_MAX_RUNTIME];
  if (!device->modules) device->modules = new (std::nothrow) Handle[static_cast<size_t>(kvbm_num_images) + 1]();
  if (!device->functions || !device->modules) return check("malloc", KVBM_NO_MEMORY);
  device->is_open.store(true, std::memory_order_release);
  return KVBM_OK;
}

// ---- events --------------------------------------------------------------------------------------------------------

int take_event(Device* device, Handle* event) {
  {
    std::lock_guard<std::mutex> lock(device->events_mutex);
    if (!device->events.empty()) {
      *event = device->events.back();
      device->events.pop_back();
      return KVBM_OK;
    }
  }
  RelaxedCapture relaxed;
  Current current;  // an event belongs to the current context, and the caller's may be that of another GPU
  RETURN_IF_FAILED(current.enter(device->context));
  return CU(EventCreate, event, kEventNoTiming);
}

void give_event(Device* device, Handle event) {
  try {
    std::lock_guard<std::mutex> lock(device->events_mutex);
    device->events.push_back(event);
  } catch (...) {
    driver.EventDestroy(event);
  }
}

int mark(Device* device, Stream stream, Handle* event) {
  RETURN_IF_FAILED(take_event(device, event));
  Current current;
  int status = current.enter(device->context);
  if (status == KVBM_OK) status = CU(EventRecord, *event, stream);
  if (status == KVBM_OK) return KVBM_OK;
  give_event(device, *event);
  *event = nullptr;
  return status;
}

int order_streams(Device* device, Stream from, Stream to) {
  Current current;
  RETURN_IF_FAILED(current.enter(device->context));
  Handle event = nullptr;
  RETURN_IF_FAILED(mark(device, from, &event));
  const int status = CU(StreamWaitEvent, to, event, 0);
  give_event(device, event);
  return status;
}

// ---- retired objects -----------------------------------------------------------------------------------------------

Retired& retired_memory = *new Retired;

void Retired::Object::finish() const {
  if (event) give_event(&devices[device], event);
  release(device, what);
}

void Retired::add(int device, Handle event, void* what, Release release) {
  const Object object = {device, event, what, release};
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.push_back(object);
  } catch (...) {  // no memory for the list: wait instead
    if (event) driver.EventSynchronize(event);
    object.finish();
  }
}

void Retired::collect(size_t most, bool waits) {
  RelaxedCapture relaxed;
  std::unique_lock<std::mutex> lock(mutex_);
  for (size_t left = std::min(most, objects_.size()); left > 0 && !objects_.empty(); --left) {
    const Object object = objects_.front();
    if (object.event ? driver.EventQuery(object.event) != KVBM_OK : !waits) {
      objects_.splice(objects_.end(), objects_, objects_.begin());
      continue;
    }
    objects_.pop_front();
    lock.unlock();
    object.finish();
    lock.lock();
  }
}

// ---- graphs --------------------------------------------------------------------------------------------------------

int capturing_graph(Stream stream, Handle* graph) {
  enum { kActive = 1 };
  int state = 0;
  uint64_t id = 0;
  *graph = nullptr;
  // The legacy stream is never captured, and this query for it would invalidate the capture of another stream.
  if (is_legacy(stream)) return KVBM_OK;
  RETURN_IF_FAILED(CU(StreamGetCaptureInfo, stream, &state, &id, graph, nullptr, nullptr));
  if (state != kActive) *graph = nullptr;
  return KVBM_OK;
}

int give_to_graph(Handle graph, void* object, void (*release)(void*)) {
  enum { kNoDestructorSync = 1, kMove = 1 };
  Handle owned = nullptr;
  RETURN_IF_FAILED(CU(UserObjectCreate, &owned, object, release, 1, kNoDestructorSync));
  return CU(GraphRetainUserObject, graph, owned, 1, kMove);
}

// ---- status codes --------------------------------------------------------------------------------------------------

struct Status {
  int code;
  const char *name, *text;
};

// Statuses with advice for the caller.  The driver has the texts of all others.
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
    {KVBM_NOT_GRANTED, "KVBM_NOT_GRANTED",
     "Some memory lies on another GPU, comes from the virtual memory API or from a stream-ordered pool, and is not granted "
     "to this GPU. Grant it (torch does so at its first own copy between the two GPUs), or copy on the GPU that it lies on; "
     "between GPUs one by one (mode=FALLBACK_ONLY)."},
    {KVBM_NO_MEMORY, "KVBM_NO_MEMORY", "Host memory is exhausted."},
    {KVBM_FORKED, "KVBM_FORKED",
     "CUDA was used in this process before it forked, and CUDA does not survive fork(). Start the child with the "
     "'spawn' or 'forkserver' method, or use CUDA only after the fork."},
    {KVBM_TOO_MANY, "KVBM_TOO_MANY",
     "too many kernels were compiled at run time in this process: build them in (kvbm codegen --layouts DIR, then "
     "KVBM_LAYOUTS=DIR "
     "pip install .)"},
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

// A field of the table for a status, else the driver's text.
const char* find_text(int status, const char* Status::* field, int (*Driver::*ask)(int, const char**), const char* otherwise) {
  for (const Status& known : kStatuses)
    if (known.code == status) return known.*field;
  const bool is_loaded = load_status.load(std::memory_order_acquire) == KVBM_OK;
  const char* text = nullptr;
  return is_loaded && (driver.*ask)(status, &text) == KVBM_OK && text ? text : otherwise;
}

}  // namespace kvbm_driver

using namespace kvbm_driver;

extern "C" {

const char* kvbm_last_call(void) { return last_call; }

const char* kvbm_status_name(int status) {
  return find_text(status, &Status::name, &Driver::GetErrorName, "CUDA_ERROR_UNKNOWN");
}

const char* kvbm_status_text(int status) {
  return find_text(status, &Status::text, &Driver::GetErrorString, "The driver knows no more about this error.");
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

int kvbm_synchronize(int device, uint64_t stream) {
  Current current;
  RETURN_IF_FAILED(current.open(device));
  return CU(StreamSynchronize, reinterpret_cast<Stream>(stream));
}

int kvbm_event_take(int device, uint64_t* event) {
  *event = 0;
  Device* opened = nullptr;
  RETURN_IF_FAILED(open_device(device, &opened));
  Handle taken = nullptr;
  RETURN_IF_FAILED(take_event(opened, &taken));
  *event = reinterpret_cast<uint64_t>(taken);
  return KVBM_OK;
}

void kvbm_event_give(int device, uint64_t event) {
  // After a fork the driver cannot be used, and the event belongs to the parent.
  if (event && start() == KVBM_OK) give_event(&devices[device], reinterpret_cast<Handle>(event));
}

int kvbm_event_record(int device, uint64_t event, uint64_t stream) {
  Current current;
  RETURN_IF_FAILED(current.open(device));
  return CU(EventRecord, reinterpret_cast<Handle>(event), reinterpret_cast<Stream>(stream));
}

int kvbm_event_query(int device, uint64_t event, int* is_done) {
  Current current;
  RETURN_IF_FAILED(current.open(device));
  RelaxedCapture relaxed;
  const int status = driver.EventQuery(reinterpret_cast<Handle>(event));
  *is_done = status == KVBM_OK;
  return status == kNotReady ? KVBM_OK : check("cuEventQuery", status);
}

int kvbm_event_synchronize(int device, uint64_t event) {
  Current current;
  RETURN_IF_FAILED(current.open(device));
  RelaxedCapture relaxed;
  return CU(EventSynchronize, reinterpret_cast<Handle>(event));
}

int kvbm_stream_wait(int device, uint64_t stream, uint64_t event) {
  Current current;
  RETURN_IF_FAILED(current.open(device));
  return CU(StreamWaitEvent, reinterpret_cast<Stream>(stream), reinterpret_cast<Handle>(event), 0);
}

int kvbm_stream_device(uint64_t stream, int* device) {
  *device = -1;
  RETURN_IF_FAILED(start());
  if (stream <= 2) return KVBM_OK;  // a default stream belongs to the current device
  Handle context = nullptr;
  RETURN_IF_FAILED(CU(StreamGetCtx, reinterpret_cast<Stream>(stream), &context));
  for (int i = 0; i < num_devices; ++i)
    if (devices[i].is_open.load(std::memory_order_acquire) && devices[i].context == context) *device = i;
  return KVBM_OK;
}

int kvbm_stream_is_captured(int device, uint64_t stream, int* is_captured) {
  Current current;
  RETURN_IF_FAILED(current.open(device));
  Handle graph = nullptr;
  RETURN_IF_FAILED(capturing_graph(reinterpret_cast<Stream>(stream), &graph));
  *is_captured = graph != nullptr;
  return KVBM_OK;
}

int kvbm_stream_make(int device, uint64_t* stream) {
  Current current;
  RETURN_IF_FAILED(current.open(device));
  Stream made = nullptr;
  RETURN_IF_FAILED(CU(StreamCreate, &made, 0));
  *stream = reinterpret_cast<uint64_t>(made);
  return KVBM_OK;
}

void kvbm_stream_drop(int device, uint64_t stream) {
  Current current;
  if (current.open(device) == KVBM_OK) driver.StreamDestroy(reinterpret_cast<Stream>(stream));
}

int kvbm_enable_peer(int device, int peer, int* can) {
  enum { kAlreadyEnabled = 704 };
  *can = 0;
  Current current, other;
  RETURN_IF_FAILED(other.open(peer));
  RETURN_IF_FAILED(current.open(device));
  RETURN_IF_FAILED(CU(DeviceCanAccessPeer, can, current.device->handle, other.device->handle));
  if (!*can) return KVBM_OK;
  const int status = driver.CtxEnablePeerAccess(other.device->context, 0);
  return status == kAlreadyEnabled ? KVBM_OK : check("cuCtxEnablePeerAccess", status);
}

}  // extern "C"

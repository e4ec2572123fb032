// memory.cpp: memory that copies read and write: on the GPU, and on the host where the GPU reaches it.
#include "driver.h"

using namespace kvbm_driver;

extern "C" {

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

}  // extern "C"

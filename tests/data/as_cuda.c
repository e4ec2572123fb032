/* Tensors of the CPU that say from C that they lie on a GPU: torch's own DLPack exchange API, with another device. */
#include <stdint.h>

typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct {
  uint32_t major, minor;
  void *older, *allocate, *export_tensor, *import_tensor;
  int (*look)(void *, DLTensor *);
  void *stream;
} Exchange;

static Exchange *real, mine;
long looks; /* how often it was asked */

static int look(void *tensor, DLTensor *out) {
  const int status = real->look(tensor, out);
  ++looks;
  out->device_type = 2;
  return status;
}

Exchange *as_cuda(Exchange *given) {
  real = given;
  mine = *given;
  mine.look = look;
  return &mine;
}

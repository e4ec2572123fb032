/* A libcuda.so.1 for machines without a GPU: device memory is host memory, and a launch runs the loop nest of its parameters
 * by plain recursion, in its stream's order, when it is pumped.  It shares kvbm.h with the code it stands under, and nothing else.
 * The environment says what fails: FAKE_INIT, FAKE_LOAD, FAKE_LAUNCH, FAKE_REGISTER (a CUresult), FAKE_VERSION (13000). */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvbm.h"

typedef unsigned long long Address;
typedef void *Handle;

static int knob(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

/* ---- what the tests read and steer ---- */
long copies_2d, registered;
unsigned register_flags; /* of the last registration */
long pushes, pops, slots, launches, single_copies, batches, batch_on_legacy;
long batched_copies; /* that the batches held */
long lookups;        /* of addresses */
Address fake_pinned[2], fake_ordinary[2];
int deferred; /* work waits for fake_pump instead of being done at once */

/* ---- work in the order of its submission ---- */
typedef struct Work {
  enum { COPY, LAUNCH, EVENT } kind;
  void *to;
  const void *from; /* COPY: source.  LAUNCH: the kernel's name */
  size_t bytes; /* LAUNCH: CTAs */
  union {
    kvbm_args args;
    kvbm_pairs pairs;
  };
  struct Work *next;
} Work;
static Work *first, **last = &first;

static const uint64_t *list(const kvbm_args *a, int bit, uint64_t field) {
  return (const uint64_t *)(a->inline_mask >> bit & 1 ? (const char *)a->payload + field : (const char *)field);
}

static int64_t block(const kvbm_args *a, int bit, uint64_t field, uint32_t i) {
  if (a->id_bytes == 0 || a->inline_mask >> (4 + bit) & 1) return i;
  return a->id_bytes == 4 ? ((const int32_t *)list(a, bit, field))[i] : ((const int64_t *)list(a, bit, field))[i];
}

typedef struct Place {
  int64_t src, dst, src_entry, dst_entry;
} Place;

static void walk(const kvbm_args *a, const kvbm_part *p, int mode, int64_t unit, Place at) {
  if (mode == KVBM_MAX_OUTER + KVBM_MAX_INNER) {
    memcpy((char *)list(a, 3, a->dst_table)[at.dst_entry] + at.dst, (char *)list(a, 2, a->src_table)[at.src_entry] + at.src, unit);
    return;
  }
  const kvbm_outer *o = mode < KVBM_MAX_OUTER ? &p->outer[mode] : NULL;
  const kvbm_inner *i = o ? NULL : &p->inner[mode - KVBM_MAX_OUTER];
  const uint32_t extent = o ? o->extent.n : i->extent.n;
  for (uint32_t c = 0; c < (extent ? extent : 1); ++c) {
    walk(a, p, mode + 1, unit, at);
    at.src += o ? o->src : i->src;
    at.dst += o ? o->dst : i->dst;
    at.src_entry += o ? o->src_table : 0;
    at.dst_entry += o ? o->dst_table : 0;
  }
}

static void run_kernel(const char *name, const kvbm_args *a) {
  if (!strncmp(name, "few_", 4)) name += 4;
  for (uint32_t part = 0; part < a->num_parts; ++part) {
    const char *segment = part ? strstr(name, "__") + 2 : name;
    const kvbm_part *p = &a->part[part];
    int64_t unit = p->inner[0].src; /* a word; a tile's modes step elements, whose size is in its name */
    if (!strncmp(segment, "tile", 4)) unit = atoi(strstr(segment, "_e") + 2);
    for (uint32_t i = 0; i < a->num_pairs; ++i) {
      const int64_t src = block(a, 0, a->src_ids, i), dst = block(a, 1, a->dst_ids, i);
      const Place at = {p->src_offset + src * a->src_id_stride, p->dst_offset + dst * a->dst_id_stride,
                        p->src_table_offset + src * a->src_id_table, p->dst_table_offset + dst * a->dst_id_table};
      if (src == -1 || dst == -1) continue;
      if (src >= 0 && dst >= 0 && src < a->src_blocks && dst < a->dst_blocks)
        walk(a, p, 0, unit, at);
      else if (a->fault)
        *(uint32_t *)a->fault = i + 1;
    }
  }
}

/* copy.cu's: each CTA of 128 threads takes as many tiles as its tiles have threads for. */
static void run_pairs(const kvbm_pairs *p, size_t ctas) {
  const kvbm_pair *list = p->pairs ? (const kvbm_pair *)p->pairs : p->payload;
  const uint64_t rows = 128 >> p->log_width;
  if (ctas != (p->jobs + rows - 1) / rows || p->tile_bytes % 16 || p->tiles.n * (uint64_t)p->tile_bytes < p->bytes) abort();
  for (uint64_t job = 0; job < ctas * rows && job < p->jobs; ++job) {
    const kvbm_pair at = list[job / p->tiles.n];
    const uint64_t tile = job % p->tiles.n, skew = at.dst % 16;
    const uint64_t from = tile ? tile * p->tile_bytes - skew : 0;
    const uint64_t to = tile + 1 < p->tiles.n ? (tile + 1) * p->tile_bytes - skew : p->bytes;
    memcpy((char *)at.dst + from, (const char *)at.src + from, to - from);
  }
}

int fake_pump(int most) {
  int done = 0;
  for (; first && done != most; ++done) {
    Work *work = first;
    if (!(first = work->next)) last = &first;
    if (work->kind == COPY) memcpy(work->to, work->from, work->bytes);
    if (work->kind == LAUNCH && !strcmp(work->from, "kvbm_copy_pairs"))
      run_pairs(&work->pairs, work->bytes);
    else if (work->kind == LAUNCH)
      run_kernel(work->from, &work->args);
    if (work->kind == EVENT) --*(int *)work->to;
    free(work);
  }
  return done;
}

static void submit(Work work) {
  *last = malloc(sizeof work);
  **last = work;
  last = &(*last)->next;
  if (!deferred) fake_pump(-1);
}

/* ---- the driver's functions, as far as kvbm calls them ---- */
static __thread Handle context[64];
static __thread int depth;
enum { INVALID_VALUE = 1, NO_CONTEXT = 201, NOT_READY = 600 };

int cuInit(unsigned flags) { return knob("FAKE_INIT", 0); }
int cuDriverGetVersion(int *version) { return *version = knob("FAKE_VERSION", 13000), 0; }
int cuGetErrorName(int status, const char **text) { return *text = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int status, const char **text) { return *text = "the fake driver's own", 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int bytes, int device) { return snprintf(name, bytes, "Fake GPU"), 0; }
int cuDeviceGetAttribute(int *value, int what, int device) { return *value = what == 16 ? 132 : 9, 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = 1ull << 37, 0; }
int cuDevicePrimaryCtxRetain(Handle *made, int device) { return *made = (Handle)(uintptr_t)(device + 1), 0; }
int cuCtxGetCurrent(Handle *current) { return *current = depth ? context[depth - 1] : NULL, 0; }
int cuCtxPushCurrent_v2(Handle made) { return context[depth++] = made, __sync_add_and_fetch(&pushes, 1), 0; }
int cuCtxPopCurrent_v2(Handle *was) { return *was = context[--depth], __sync_add_and_fetch(&pops, 1), 0; }
int cuModuleLoadData(Handle *module, const void *image) {
  return *module = (Handle)image, depth ? knob("FAKE_LOAD", 0) : NO_CONTEXT;
}
int cuModuleGetFunction(Handle *function, Handle module, const char *name) { return *function = (Handle)name, 0; }
int cuFuncLoad(Handle function) { return 0; }
int cuFuncSetAttribute(Handle function, int what, int value) { return 0; }
int cuLaunchKernel(Handle name, unsigned gx, unsigned gy, unsigned gz, unsigned x, unsigned y, unsigned z, unsigned shared,
                   Handle stream, void **parameters, void **extra) {
  if (!depth) return NO_CONTEXT;
  ++launches;
  Work work = {.kind = LAUNCH, .from = name, .bytes = gx};
  memcpy(&work.args, parameters[0], sizeof work.args);
  if (!knob("FAKE_LAUNCH", 0)) submit(work);
  return knob("FAKE_LAUNCH", 0);
}
int cuMemAlloc_v2(Address *made, size_t bytes) { return *made = (Address)malloc(bytes), depth ? 0 : NO_CONTEXT; }
int cuMemFree_v2(Address address) { return free((void *)address), 0; }
int cuMemHostAlloc(void **made, size_t bytes, unsigned flags) { return ++slots, *made = malloc(bytes), 0; }
int cuMemFreeHost(void *memory) { return free(memory), 0; }
int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, Handle stream) {
  if (stream == (Handle)0x77) return memcpy((void *)to, from, bytes), 0; /* kvbm's own: waited for at once */
  return submit((Work){.kind = COPY, .to = (void *)to, .from = from, .bytes = bytes}), 0;
}
int cuMemcpyAsync(Address to, Address from, size_t bytes, Handle stream) {
  if (bytes > knob("FAKE_MOST_BYTES", 1 << 30)) return INVALID_VALUE; /* beyond its allocation */
  ++single_copies;
  return submit((Work){.kind = COPY, .to = (void *)to, .from = (void *)from, .bytes = bytes}), 0;
}
static int memcpy_batch(Address *to, Address *from, size_t *bytes, size_t count, void *attributes, size_t *starts,
                        size_t kinds, Handle stream) {
  for (size_t i = 0; i < count; ++i)
    if (bytes[i] > knob("FAKE_MOST_BYTES", 1 << 30)) return INVALID_VALUE;
  ++batches;
  batched_copies += count;
  batch_on_legacy += (uintptr_t)stream <= 1;
  for (size_t i = 0; i < count; ++i)
    submit((Work){.kind = COPY, .to = (void *)to[i], .from = (void *)from[i], .bytes = bytes[i]});
  return 0;
}
static struct {
  char *begin, *end;
} ranges[64]; /* `registered` of them */
int cuPointerGetAttributes(unsigned count, int *what, void **values, Address address) {
  /* All on GPU 0 but for what is registered, and two ranges that a test names: [from, to) of pinned and of ordinary host memory. */
  long in = 0;
  while (in < registered && !(address >= (Address)ranges[in].begin && address < (Address)ranges[in].end)) ++in;
  const Address begin = in < registered ? (Address)ranges[in].begin : fake_pinned[0];
  const Address end = in < registered ? (Address)ranges[in].end : fake_pinned[1];
  const int pinned = address - begin < end - begin, is_told = pinned && !knob("FAKE_NO_RANGES", 0);
  const int ordinary = address - fake_ordinary[0] < fake_ordinary[1] - fake_ordinary[0];
  ++lookups;
  for (unsigned i = 0; i < count; ++i) {
    if (what[i] == 2) *(unsigned *)values[i] = ordinary ? 0 : pinned ? 1 : 2;
    if (what[i] == 8) *(char *)values[i] = 0;
    if (what[i] == 9) *(int *)values[i] = 0;
    if (what[i] == 11 && is_told) *(Address *)values[i] = begin;
    if (what[i] == 12 && is_told) *(size_t *)values[i] = end - begin;
  }
  return 0;
}
int cuStreamCreate(Handle *made, unsigned flags) { return *made = (Handle)0x77, 0; }
int cuStreamDestroy_v2(Handle stream) { return 0; }
int cuStreamSynchronize(Handle stream) { return 0; }
int cuStreamIsCapturing(Handle stream, int *capturing) { return *capturing = 0, 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cuEventCreate(Handle *made, unsigned flags) { return *made = calloc(1, sizeof(int)), 0; }
int cuEventRecord(Handle event, Handle stream) { return ++*(int *)event, submit((Work){.kind = EVENT, .to = event}), 0; }
int cuEventQuery(Handle event) { return *(int *)event ? NOT_READY : 0; }
int cuEventDestroy_v2(Handle event) { return free(event), 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *how) {
  /* Everything else is found under its plain name. */
  *found = !strcmp(name, "cuMemcpyBatchAsync") && version >= 13000 && version <= knob("FAKE_VERSION", 13000) ? memcpy_batch : NULL;
  return 0;
}
int cuEventSynchronize(Handle event) { return 0; }
int cuEventElapsedTime(float *ms, Handle from, Handle to) { return *ms = 1, 0; }
int cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) { return 0; }
int cuStreamGetCtx(Handle stream, Handle *found) { return *found = (Handle)0x1234, 0; }
int cuStreamGetCaptureInfo_v2(Handle stream, int *status, uint64_t *id, Handle *graph, const Handle **edges, size_t *count) { return *status = 0, 0; }
int cuUserObjectCreate(Handle *made, void *what, void (*destroy)(void *), unsigned count, unsigned flags) { return *made = what, 0; }
int cuGraphRetainUserObject(Handle graph, Handle object, unsigned count, unsigned flags) { return 0; }
int cuDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 1, 0; }
int cuCtxEnablePeerAccess(Handle peer, unsigned flags) { return 0; }
typedef struct {
  size_t src_x, src_y;
  int src_type;
  const void *src_host;
  Address src_device;
  Handle src_array;
  size_t src_pitch, dst_x, dst_y;
  int dst_type;
  void *dst_host;
  Address dst_device;
  Handle dst_array;
  size_t dst_pitch, width, height;
} Copy2D;
int cuMemcpy2DAsync_v2(const Copy2D *c, Handle stream) {
  ++copies_2d;
  for (size_t row = 0; row < c->height; ++row)
    submit((Work){.kind = COPY,
                  .to = (char *)c->dst_device + row * c->dst_pitch,
                  .from = (char *)c->src_device + row * c->src_pitch,
                  .bytes = c->width});
  return 0;
}
int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
  /* FAKE_REGISTER is what fails; FAKE_REGISTER_FROM: only once so many are registered */
  const int status = registered >= knob("FAKE_REGISTER_FROM", 0) ? knob("FAKE_REGISTER", 0) : 0;
  if (status) return status;
  if (!depth) return NO_CONTEXT;
  if (((uintptr_t)memory | bytes) % 4096 || registered == 64) return INVALID_VALUE; /* stricter than the real one */
  for (long i = 0; i < registered; ++i)
    if ((char *)memory < ranges[i].end && ranges[i].begin < (char *)memory + bytes) return 712; /* registered already */
  ranges[registered].begin = memory, ranges[registered++].end = (char *)memory + bytes;
  return register_flags = flags, 0;
}
int cuMemHostUnregister(void *memory) {
  long i = 0;
  while (i < registered && ranges[i].begin != memory) ++i;
  if (!depth || i == registered) return depth ? 713 : NO_CONTEXT; /* not registered */
  return ranges[i] = ranges[--registered], 0;
}

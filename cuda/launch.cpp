// launch.cpp: loads and launches kernels.  Ids and tables go into their parameters, or through the upload ring.
#include <string.h>

#include <algorithm>
#include <new>

#include "batch.h"
#include "driver.h"

namespace kvbm_driver {

// A slot of the upload ring: a pinned buffer, a device buffer, and the event after which both may be used again.
struct Slot {
  void* host;
  Address device;
  size_t capacity;
  Handle event;
  // kTaken: a thread fills it.  kCaptured: a graph reads it at every replay.  kLost: its event failed, so it is not used again.
  // Taking a slot needs the lock of the ring.  Releasing one does not, because the driver may wait for a thread that does it.
  enum State { kFree, kTaken, kInFlight, kCaptured, kLost };
  std::atomic<State> state;
  Slot* next;
};

// ---- images and kernels --------------------------------------------------------------------------------------------

// With device->mutex held and the context current.
int load_images(Device* device) {
  if (kvbm_num_images == 0) return check("kvbm_images", KVBM_NOT_BUILT);
  if (device->images_loaded) return KVBM_OK;
  for (int i = 0; i < kvbm_num_images; ++i)
    if (!device->modules[i]) RETURN_IF_FAILED(CU(ModuleLoadData, &device->modules[i], kvbm_images[i].data));
  device->images_loaded = true;
  return KVBM_OK;
}

int load_kernel(Device* device, int kernel) {
  if (device->functions[kernel].handle.load(std::memory_order_relaxed)) return KVBM_OK;
  Handle function = nullptr;
  if (is_kernel(kernel)) {
    RETURN_IF_FAILED(load_images(device));
    const kvbm_kernel& entry = kvbm_kernels[kernel];
    if (entry.image < 0 || entry.image >= kvbm_num_images) return check(entry.name, KVBM_NOT_BUILT);
    RETURN_IF_FAILED(CU(ModuleGetFunction, &function, device->modules[entry.image], entry.name));
  } else {
    RETURN_IF_FAILED(load_runtime_kernel(device, kernel, &function));
  }
  // With lazy loading, the first launch would load the code, and that may wait for a running kernel.
  if (driver.FuncLoad) RETURN_IF_FAILED(CU(FuncLoad, function));
  device->functions[kernel].handle.store(function, std::memory_order_release);
  return KVBM_OK;
}

int find_kernel(Device* device, int kernel, Function** function) {
  *function = &device->functions[kernel];
  if (__builtin_expect((*function)->handle.load(std::memory_order_acquire) != nullptr, 1)) return KVBM_OK;
  std::lock_guard<std::mutex> lock(device->mutex);
  RelaxedCapture relaxed;
  return load_kernel(device, kernel);
}

// Lets CTAs of a kernel have so much dynamic shared memory.
int allow_shared(Device* device, Function* function, uint32_t bytes) {
  if (__builtin_expect(bytes <= function->shared_bytes.load(std::memory_order_acquire), 1)) return KVBM_OK;
  std::lock_guard<std::mutex> lock(device->mutex);  // a smaller value would undo that of another thread
  if (bytes <= function->shared_bytes.load(std::memory_order_relaxed)) return KVBM_OK;
  RETURN_IF_FAILED(
      CU(FuncSetAttribute, function->handle.load(std::memory_order_relaxed), kMaxDynamicShared, static_cast<int>(bytes)));
  function->shared_bytes.store(bytes, std::memory_order_release);
  return KVBM_OK;
}

// ---- the upload ring -----------------------------------------------------------------------------------------------

constexpr size_t kSmallestSlot = 16 << 10;
constexpr int kMostQueries = 4;  // events that are queried before a new slot is made

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

// Takes a slot whose last upload and kernel are done, or makes one.  The ring grows to the number of launches in flight, and
// then allocates no more.
int take_slot(Device* device, size_t bytes, Slot** out) {
  std::lock_guard<std::mutex> lock(device->ring_mutex);
  int queries = 0;
  if (device->newest) {
    Slot* slot = device->newest;
    do {
      slot = slot->next;
      if (slot->capacity < bytes || (slot->state != Slot::kFree && slot->state != Slot::kInFlight)) continue;
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

// The driver calls it, on any thread, when the last graph that reads the slot is destroyed.
void release_captured_slot(void* slot) { static_cast<Slot*>(slot)->state = Slot::kFree; }

// ---- ids and tables ------------------------------------------------------------------------------------------------

// The arrays of a batch: four in the order of inline_mask, and the positions for digests.
enum { kSrcIds, kDstIds, kSrcTable, kDstTable, kPositions, kFields };

struct Fields {
  size_t bytes[kFields] = {};   // 0: not uploaded
  size_t offset[kFields] = {};  // in the payload or in the slot
  bool is_inline[kFields] = {};
  size_t slot_bytes = 0;  // of the fields that do not fit into the payload
  uint32_t id_bytes = 0;
  uint32_t counted = 0;   // bits 4 and 5 of inline_mask
  bool same_ids = false;  // both sides have the same list, which is uploaded once
};

constexpr size_t align_16(size_t bytes) { return (bytes + 15) & ~size_t{15}; }

Fields place_fields(const kvbm_batch* batch, size_t described, size_t tail, bool digests) {
  const size_t room = KVBM_INLINE_BYTES - tail;
  Fields f;
  const kvbm_side &src = batch->src, &dst = batch->dst;
  const bool on_device = src.ids_device || dst.ids_device;
  if (has_ids(src) || has_ids(dst)) {
    f.id_bytes = on_device ? batch->id_bytes : sizeof(int32_t);
    f.counted = static_cast<uint32_t>(!has_ids(src)) << 4 | static_cast<uint32_t>(!has_ids(dst)) << 5;
  }
  f.same_ids = src.ids == dst.ids && src.ids;
  f.bytes[kSrcIds] = src.ids ? size_t{f.id_bytes} * batch->num_pairs : 0;
  f.bytes[kDstIds] = dst.ids && !f.same_ids ? size_t{f.id_bytes} * batch->num_pairs : 0;
  f.bytes[kSrcTable] = src.table_device ? 0 : size_t{8} * src.entries;
  f.bytes[kDstTable] = dst.table_device ? 0 : size_t{8} * dst.entries;
  f.bytes[kPositions] = digests && batch->positions ? sizeof(int64_t) * batch->num_pairs : 0;
  size_t inlined = described;
  for (int i = 0; i < kFields; ++i) {
    const size_t bytes = align_16(f.bytes[i]);
    f.is_inline[i] = bytes > 0 && inlined + bytes <= room;
    size_t& end = f.is_inline[i] ? inlined : f.slot_bytes;
    f.offset[i] = end;
    end += bytes;
  }
  return f;
}

void write_fields(const kvbm_batch* batch, const Fields& f, kvbm_args* args, void* slot_host, Address slot_device) {
  uint64_t* const field[kFields] = {&args->src_ids, &args->dst_ids, &args->src_table, &args->dst_table,
                                    &args->digest.positions};
  const void* const source[kFields] = {batch->src.ids, batch->dst.ids, batch->src.table, batch->dst.table, batch->positions};
  static const uint32_t bit[kFields] = {1, 2, 4, 8, KVBM_POSITIONS_INLINE};
  args->num_pairs = batch->num_pairs;
  args->id_bytes = f.id_bytes;
  args->inline_mask = (args->inline_mask & kDescribed) | f.counted;
  if (args->inline_mask & KVBM_DIGEST) {
    args->digest.positions = batch->positions_device;
    args->digest.position_bytes = batch->positions ? sizeof(int64_t) : batch->positions_device ? batch->position_bytes : 0;
  }
  args->fault = batch->fault;
  args->src_blocks = batch->src.blocks;
  args->dst_blocks = batch->dst.blocks;
  args->src_ids = batch->src.ids_device;
  args->dst_ids = batch->dst.ids_device;
  args->src_table = batch->src.table_device;
  args->dst_table = batch->dst.table_device;
  for (int i = 0; i < kFields; ++i) {
    if (f.bytes[i] == 0) continue;
    char* base = f.is_inline[i] ? reinterpret_cast<char*>(args->payload) : static_cast<char*>(slot_host);
    void* out = base + f.offset[i];
    if (f.id_bytes == 8 && (i == kSrcIds || i == kDstIds))  // the ids of the other side are on the GPU and have 8 bytes
      std::copy_n(static_cast<const int32_t*>(source[i]), batch->num_pairs, static_cast<int64_t*>(out));
    else
      memcpy(out, source[i], f.bytes[i]);
    *field[i] = f.is_inline[i] ? f.offset[i] : slot_device + f.offset[i];
    if (f.is_inline[i]) args->inline_mask |= bit[i];
  }
  if (f.same_ids) {
    args->dst_ids = args->src_ids;
    args->inline_mask |= (args->inline_mask & 1u) << 1;
  }
}

// Sets the digests of a batch to zero, in the order of the stream.
int clear_digests(Device* device, const kvbm_batch& batch, Stream stream) {
  enum : uint32_t { kThreads = 256 };
  Handle function = nullptr;
  RETURN_IF_FAILED(find_fixed_kernel(device, kClear, &function));
  Address digests = batch.digests;
  uint64_t count = batch.num_pairs;
  void* parameters[] = {&digests, &count};
  return CU(LaunchKernel, function, (batch.num_pairs - 1) / kThreads + 1, 1, 1, kThreads, 1, 1, 0, stream, parameters, nullptr);
}

// Launches a kernel after `clear_digests`.  The kernel may start early if its code waits before it adds to the digests
// (griddepcontrol.wait).  Code for architecture 90 and later does.  The architecture of the image counts, not that of the GPU.
int launch_behind_clear(Handle function, const kvbm_grid& grid, Stream stream, void** parameters) {
  enum : int { kWaits = 90 };
  int version = 0;
  RETURN_IF_FAILED(CU(FuncGetAttribute, &version, kPtxVersion, function));
  const LaunchAttribute early = {kSerialization, 1, {}};
  const LaunchConfig config = {
      {grid.ctas, 1, 1}, {grid.threads_x, grid.threads_y, 1}, grid.shared_bytes, stream, &early, version >= kWaits ? 1u : 0u};
  return CU(LaunchKernelEx, &config, function, parameters, nullptr);
}

int launch(Function* function, const kvbm_kernel& kernel, kvbm_args* args, Device* device, const kvbm_batch* batch,
           Stream stream) {
  // A kernel with teams needs no more than one CTA for each multiprocessor that it may use.
  const bool is_limited = kernel.teams > 1 || args->inline_mask & KVBM_SM_LIMITED;
  uint32_t most = static_cast<uint32_t>(device->sms);
  if (is_limited && batch->max_ctas) most = std::min(most, batch->max_ctas);
  kvbm_grid grid = {};
  RETURN_IF_FAILED(
      check(kernel.name, kernel.prepare ? kernel.prepare(args, most, &grid) : prepare_runtime(kernel, args, most, &grid)));
  const bool clears = args->inline_mask & KVBM_DIGEST && !batch->adds;
  if (clears) RETURN_IF_FAILED(clear_digests(device, *batch, stream));
  if (grid.ctas == 0) return KVBM_OK;
  if (is_limited) grid.ctas = std::min(grid.ctas, most);
  RETURN_IF_FAILED(allow_shared(device, function, grid.shared_bytes));
  const Handle handle = function->handle.load(std::memory_order_relaxed);
  void* parameters[] = {args};
  if (clears) return launch_behind_clear(handle, grid, stream, parameters);
  return CU(LaunchKernel, handle, grid.ctas, 1, 1, grid.threads_x, grid.threads_y, 1, grid.shared_bytes, stream, parameters,
            nullptr);
}

int carry(Device* device, size_t bytes, size_t scratch, Stream stream, Cargo* cargo) {
  RelaxedCapture relaxed;
  Handle graph = nullptr;
  RETURN_IF_FAILED(capturing_graph(stream, &graph));
  Slot* slot = nullptr;
  RETURN_IF_FAILED(take_slot(device, bytes + scratch, &slot));
  cargo->write(slot->host, slot->device);
  int status = bytes ? CU(MemcpyHtoDAsync, slot->device, slot->host, bytes, stream) : KVBM_OK;
  if (status == KVBM_OK) status = cargo->launch();
  if (graph) {
    // Every replay reads the slot again, so it belongs to the graph until this is destroyed.
    slot->state = Slot::kCaptured;
    const int given = give_to_graph(graph, slot, release_captured_slot);
    return status == KVBM_OK ? given : status;
  }
  // Also after a failure, because the upload may have been enqueued.
  slot->state = driver.EventRecord(slot->event, stream) == KVBM_OK ? Slot::kInFlight : Slot::kLost;
  return status;
}

// A batch with ids or tables that do not fit into the kernel's parameters.
struct BatchCargo : Cargo {
  Function* function;
  const kvbm_kernel& kernel;
  kvbm_args* args;
  const kvbm_batch* batch;
  const Fields& fields;
  Device* device;
  Stream stream;
  BatchCargo(Function* function, const kvbm_kernel& kernel, kvbm_args* args, const kvbm_batch* batch, const Fields& fields,
             Device* device, Stream stream)
      : function(function), kernel(kernel), args(args), batch(batch), fields(fields), device(device), stream(stream) {}
  void write(void* host, Address device) override { write_fields(batch, fields, args, host, device); }
  int launch() override { return kvbm_driver::launch(function, kernel, args, device, batch, stream); }
};

// ---- small batches -------------------------------------------------------------------------------------------------

// One side of a small batch.  The base addresses of its blocks are gathered into the kernel's parameters, so that the kernel
// reads neither ids nor tables in memory.
struct Small {
  kvbm_side* side;
  int64_t* id_table;
  int64_t id_stride;
  int64_t span;  // table entries from the first to behind the last one of a block
  int64_t (*start)(const kvbm_args&, uint32_t, int64_t*);
  uint32_t units;  // the bit of inline_mask for ids that count units
  // Number of table entries to store; -1: the entries of a block are not adjacent.
  int64_t to_carry(uint32_t pairs) const {
    if (!side->ids) return *id_table ? -1 : side->entries;
    return *id_table == 0 || span <= *id_table ? pairs * span : -1;
  }
};

int64_t block_span(const kvbm_args& args, int32_t kvbm_outer::* step, int32_t kvbm_part::* offset) {
  int64_t last = 0;
  for (uint32_t p = 0; p < args.num_parts; ++p) {
    int64_t entry = args.part[p].*offset;
    for (const kvbm_outer& mode : args.part[p].outer) entry += (int64_t{mode.extent.n} - 1) * (mode.*step);
    last = std::max(last, entry);
  }
  return last + 1;
}

// The addresses of a side's blocks, less what the kernel adds: i strides for block i, as for ids that are not given.  Its stride
// still tells `prepare` how blocks lie.
void gather(const kvbm_args& args, const Small& small, uint32_t n, uint64_t* out) {
  // Taken out of memory once: for all that the compiler knows, `out` may be over it.
  const int32_t* const ids = small.side->ids;
  const uint64_t* const table = small.side->table;
  const int64_t stride = small.id_stride, step = *small.id_table, span = small.span;
  if (args.inline_mask & small.units) {
    for (uint32_t i = 0; i < n; ++i) {
      int64_t id = ids[i];
      const int64_t start = small.start(args, 0, &id) - i * stride;
      for (int64_t entry = 0; entry < span; ++entry) *out++ = table[id * step + entry] + start;
    }
  } else if (span == 1 && step == 0) {  // all blocks lie in one allocation
    const uint64_t base = table[0];
    for (uint32_t i = 0; i < n; ++i) out[i] = base + (int64_t{ids[i]} - int64_t{i}) * stride;
  } else {
    for (uint32_t i = 0; i < n; ++i) {
      const int64_t start = (int64_t{ids[i]} - int64_t{i}) * stride;
      const uint64_t* const own = table + ids[i] * step;
      for (int64_t entry = 0; entry < span; ++entry) *out++ = own[entry] + start;
    }
  }
}

// Writes the addresses into `gathered` and points the batch there; false where it is too large, or has nothing to gather.
bool resolve(kvbm_args* args, kvbm_batch* batch, uint64_t* gathered) {
  const uint32_t n = batch->num_pairs;
  if (batch->kept != n || batch->src.ids_device || batch->dst.ids_device || n > KVBM_INLINE_BYTES / 8 ||
      (!batch->src.ids && !batch->dst.ids))
    return false;
  const kvbm_part& one = args->part[0];
  const kvbm_units& units = units_of(*args);
  uint32_t mask = args->inline_mask;
  for (uint32_t p = 1; p < args->num_parts; ++p)  // planes in arrays of their own, where an id steps differently
    if (args->part[p].src_id_stride != one.src_id_stride || args->part[p].dst_id_stride != one.dst_id_stride ||
        (mask & (KVBM_SRC_UNITS | KVBM_DST_UNITS) && memcmp(&units.part[p], &units.part[0], sizeof units.part[0]) != 0))
      return false;
  Small sides[] = {
      {&batch->src, &args->src_id_table, one.src_id_stride,
       block_span(*args, &kvbm_outer::src_table, &kvbm_part::src_table_offset), src_start, KVBM_SRC_UNITS},
      {&batch->dst, &args->dst_id_table, one.dst_id_stride,
       block_span(*args, &kvbm_outer::dst_table, &kvbm_part::dst_table_offset), dst_start, KVBM_DST_UNITS},
  };
  for (const Small& small : sides)
    if (small.side->ids) mask &= ~small.units;  // these will be followed here
  auto bytes = static_cast<int64_t>(described_bytes(args->num_parts, mask));
  for (const Small& small : sides) {
    const int64_t carried = small.to_carry(n);
    if (carried < 0) return false;
    bytes += static_cast<int64_t>(align_16(8 * carried) + align_16(4 * size_t{n}));
  }
  bytes += static_cast<int64_t>(tail_bytes(*args));
  if (mask & KVBM_DIGEST && batch->positions) bytes += static_cast<int64_t>(align_16(sizeof(int64_t) * size_t{n}));
  if (bytes > KVBM_INLINE_BYTES) return false;
  for (Small& small : sides) {
    const int64_t carried = small.to_carry(n);
    kvbm_side& side = *small.side;
    if (side.ids) {
      gather(*args, small, n, gathered);
      side.table = gathered;
      gathered += carried;
      side.ids = nullptr;  // block i of the batch
      side.blocks = n;
      *small.id_table = small.span;
    }
    side.table_device = 0;
    side.entries = static_cast<uint32_t>(carried);
  }
  args->inline_mask = mask;
  return true;
}

int launch_batch(Device* device, int kernel, const kvbm_args* args, const kvbm_batch* batch, Stream stream) {
  if (batch->num_pairs == 0) return KVBM_OK;
  const kvbm_kernel* const entry = is_kernel(kernel) ? &kvbm_kernels[kernel] : kvbm_kernel_at(kernel);
  if (!entry) return check("kvbm_launch", kInvalidValue);
  Function* function = nullptr;
  RETURN_IF_FAILED(find_kernel(device, kernel, &function));
  kvbm_args copy;  // the payload's unused rest stays as it is: no kernel reads it
  copy_description(&copy, *args);
  kvbm_batch small = *batch;
  uint64_t gathered[KVBM_INLINE_BYTES / 8];
  if (resolve(&copy, &small, gathered)) batch = &small;
  const bool digests = copy.inline_mask & KVBM_DIGEST;
  const Fields fields = place_fields(batch, described_bytes(copy.num_parts, copy.inline_mask), tail_bytes(copy), digests);
  if (digests) copy.digest.out = batch->digests;
  if (__builtin_expect(fields.slot_bytes > 0, 0)) {
    BatchCargo cargo(function, *entry, &copy, batch, fields, device, stream);
    return carry(device, fields.slot_bytes, 0, stream, &cargo);
  }
  write_fields(batch, fields, &copy, nullptr, 0);
  return launch(function, *entry, &copy, device, batch, stream);
}

}  // namespace kvbm_driver

using namespace kvbm_driver;

extern "C" {

int kvbm_warm(int kernel, int device) {
  if (kernel != -1 && !kvbm_kernel_at(kernel)) return check("kvbm_warm", kInvalidValue);
  Current current;
  RETURN_IF_FAILED(current.open(device));
  if (kvbm_num_images == 0 && kernel < kvbm_num_kernels) return check("kvbm_images", KVBM_NOT_BUILT);
  Function* found = nullptr;
  const int first = kernel < 0 ? 0 : kernel, last = kernel < 0 ? kvbm_num_kernels : kernel + 1;
  for (int i = first; i < last; ++i) RETURN_IF_FAILED(find_kernel(current.device, i, &found));
  Handle function = nullptr;
  RETURN_IF_FAILED(find_fixed_kernel(current.device, kClear, &function));
  return kernel < 0 ? find_fixed_kernel(current.device, kCopyPairs, &function) : KVBM_OK;
}

int kvbm_launch(int kernel, const kvbm_args* args, const kvbm_batch* batch, int device, uint64_t stream) {
  if (batch->num_pairs == 0) return KVBM_OK;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  return launch_batch(current.device, kernel, args, batch, reinterpret_cast<Stream>(stream));
}

}  // extern "C"

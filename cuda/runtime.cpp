// runtime.cpp: kernels that were compiled at run time: their numbers, their code on each device, and how they prepare a batch.
//
// Entries are never removed, because a launch, a graph or another thread may have their numbers.  An entry is complete before
// its number is returned, so readers take no lock.
#include <string.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "batch.h"
#include "driver.h"
#include "prepare.cuh"

namespace kvbm_driver {

namespace {

struct Image {
  int capability;
  std::vector<unsigned char> cubin;
  const Image* next;
};

struct Compiled : kvbm_kernel {
  std::string text;  // the memory of `name`
  kvbm::Structure structure[KVBM_MAX_PARTS];
  bool is_tile[KVBM_MAX_PARTS];
  std::atomic<const Image*> images{nullptr};
};

std::atomic<Compiled*> compiled[KVBM_MAX_RUNTIME];
std::atomic<int> num_compiled{0};
std::mutex adding;

Compiled* compiled_at(int kernel) {
  const int i = kernel - kvbm_num_kernels;
  return i >= 0 && i < num_compiled.load(std::memory_order_acquire) ? compiled[i].load(std::memory_order_relaxed) : nullptr;
}

bool is_word(int32_t bytes) { return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16; }

// Whether Rows or Tile has an instance of this form.  All of FewRows are built in.
bool is_form(const kvbm_form& form, uint32_t parts) {
  if (form.outer < 0 || form.outer > KVBM_MAX_OUTER || !is_word(form.word)) return false;
  if (form.sm_limited < 0 || form.sm_limited > 1 || (form.sm_limited && parts > 1)) return false;
  if (form.kind == KVBM_ROWS) return form.inner >= 1 && form.inner <= KVBM_MAX_INNER && !form.sm_limited;
  return form.kind == KVBM_TILE && form.inner >= 0 && form.inner + 2 <= KVBM_MAX_INNER && is_word(form.element) &&
         (form.word == form.element || form.word == 16);
}

// The same as kvbm::Kernel::prepare, with the structure as values instead of template arguments.
int prepare_compiled(const Compiled& entry, kvbm_args* args, uint32_t sms, kvbm_grid* grid) {
  uint64_t ctas = 0;
  uint32_t most_shared = 0;
  for (uint32_t i = 0; i < entry.parts; ++i) {
    uint32_t shared = 0;
    const bool fits = entry.is_tile[i] ? kvbm::prepare_tile(entry.structure[i], *args, args->part[i], sms, shared)
                                       : kvbm::prepare_rows(entry.structure[i], *args, args->part[i], sms, shared);
    if (!fits) return KVBM_TOO_LARGE;
    ctas += args->part[i].ctas;
    most_shared = shared > most_shared ? shared : most_shared;
  }
  if (ctas >= (1u << 31)) return KVBM_TOO_LARGE;
  const uint32_t teams = entry.teams;
  grid->ctas = kvbm::divide_up(ctas, teams);
  grid->threads_x = entry.structure[0].threads * teams;
  grid->threads_y = 1;
  grid->shared_bytes = most_shared * teams;
  return KVBM_OK;
}

int add(const char* name, const kvbm_form* forms, uint32_t parts, const void* cubin, uint64_t bytes, int capability,
        int* index) {
  const auto* first = static_cast<const unsigned char*>(cubin);
  std::unique_ptr<Image> image(new Image{capability, std::vector<unsigned char>(first, first + bytes), nullptr});
  std::lock_guard<std::mutex> lock(adding);
  const int known = num_compiled.load(std::memory_order_relaxed);
  Compiled* entry = nullptr;
  for (int i = 0; i < known && !entry; ++i) {
    Compiled* other = compiled[i].load(std::memory_order_relaxed);
    if (other->text == name) {
      entry = other;
      *index = kvbm_num_kernels + i;
    }
  }
  if (!entry) {
    if (known == KVBM_MAX_RUNTIME) return check("kvbm_add_kernel", KVBM_TOO_MANY);
    std::unique_ptr<Compiled> made(new Compiled);
    bool any_tile = false;
    for (uint32_t i = 0; i < parts; ++i) any_tile |= forms[i].kind == KVBM_TILE;
    const uint32_t teams = forms[0].sm_limited ? kvbm::kFewTeams : 1;
    for (uint32_t i = 0; i < parts; ++i) {
      const kvbm_form& form = forms[i];
      made->is_tile[i] = form.kind == KVBM_TILE;
      // All parts of a launch have CTAs of one size: with a tile that of tiles (codegen.py does the same).
      made->structure[i] = {form.outer,
                            form.inner,
                            static_cast<uint32_t>(form.element),
                            static_cast<uint32_t>(form.word),
                            any_tile ? kvbm::kTileThreads : kvbm::kRowThreads,
                            teams};
    }
    made->text = name;
    static_cast<kvbm_kernel&>(*made) = {made->text.c_str(), -1, parts, teams, nullptr, nullptr};
    entry = made.release();
    compiled[known].store(entry, std::memory_order_relaxed);
    num_compiled.store(known + 1, std::memory_order_release);
    *index = kvbm_num_kernels + known;
  }
  for (const Image* i = entry->images.load(std::memory_order_relaxed); i; i = i->next)
    if (i->capability == capability) return KVBM_OK;  // another thread was faster
  image->next = entry->images.load(std::memory_order_relaxed);
  entry->images.store(image.release(), std::memory_order_release);
  return KVBM_OK;
}

}  // namespace

int load_runtime_kernel(Device* device, int kernel, Handle* function) {
  const Compiled* entry = compiled_at(kernel);
  if (!entry) return check("kvbm_kernel_at", kInvalidValue);
  int major = 0, minor = 0;
  RETURN_IF_FAILED(CU(DeviceGetAttribute, &major, kMajor, device->handle));
  RETURN_IF_FAILED(CU(DeviceGetAttribute, &minor, kMinor, device->handle));
  // A cubin also runs on later minor versions: take the latest that fits.
  const Image* best = nullptr;
  for (const Image* i = entry->images.load(std::memory_order_acquire); i; i = i->next)
    if (i->capability / 10 == major && i->capability % 10 <= minor && (!best || i->capability > best->capability)) best = i;
  if (!best) return check(entry->name, KVBM_NOT_BUILT);
  Handle module = nullptr;
  RETURN_IF_FAILED(CU(ModuleLoadData, &module, best->cubin.data()));
  const int status = CU(ModuleGetFunction, function, module, entry->name);
  if (status != KVBM_OK) driver.ModuleUnload(module);
  return status;
}

int prepare_runtime(const kvbm_kernel& kernel, kvbm_args* args, uint32_t sms, kvbm_grid* grid) {
  return prepare_compiled(static_cast<const Compiled&>(kernel), args, sms, grid);
}

}  // namespace kvbm_driver

using namespace kvbm_driver;

extern "C" {

int kvbm_add_kernel(const char* name, const kvbm_form* forms, uint32_t parts, const void* cubin, uint64_t bytes, int capability,
                    int* index) {
  bool fits = parts >= 1 && parts <= KVBM_MAX_PARTS && bytes > 0 && capability > 0;
  for (uint32_t i = 0; fits && i < parts; ++i) fits = is_form(forms[i], parts);
  if (!fits) return check("kvbm_add_kernel", kInvalidValue);
  try {
    return add(name, forms, parts, cubin, bytes, capability, index);
  } catch (const std::bad_alloc&) {
    return check("kvbm_add_kernel", KVBM_NO_MEMORY);
  }
}

const kvbm_kernel* kvbm_kernel_at(int kernel) {
  if (is_kernel(kernel)) return &kvbm_kernels[kernel];
  return compiled_at(kernel);
}

}  // extern "C"

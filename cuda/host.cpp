// host.cpp: what runs on the host: the kernels' host halves on all cores, and the checks of block ids.
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <type_traits>

#include "batch.h"
#include "driver.h"

using namespace kvbm_driver;

namespace {

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

// ---- checking ids --------------------------------------------------------------------------------------------------

enum : uint32_t { kFew = 32 };  // up to here comparing each with each beats touching memory

// The batch that last wrote a block, one number a block.  Kept between calls and never cleared: each batch has a number
// of its own, so a check is O(pairs), not O(blocks).
class Stamps {
 public:
  Stamps() = default;
  Stamps(const Stamps&) = delete;
  Stamps& operator=(const Stamps&) = delete;
  ~Stamps() { free(stamps_); }
  // The batch's number, or 0 without memory.
  uint32_t next(int64_t blocks) {
    const auto size = static_cast<size_t>(blocks);
    if (size > size_) {
      auto* grown = static_cast<uint32_t*>(calloc(size, sizeof(uint32_t)));  // a large one is mapped as it is touched
      if (!grown) return 0;
      free(stamps_);
      stamps_ = grown;
      size_ = size;
      last_ = 0;
    }
    if (++last_ == 0) {
      memset(stamps_, 0, size_ * sizeof(uint32_t));
      last_ = 1;
    }
    return last_;
  }
  uint32_t* data() { return stamps_; }

 private:
  uint32_t* stamps_ = nullptr;
  size_t size_ = 0;
  uint32_t last_ = 0;
};

thread_local Stamps stamps_of_thread;

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
  Stamps& stamps = stamps_of_thread;  // looked up once: that of a thread costs a call
  const uint32_t mine = stamps.next(dst_blocks);
  if (!mine) return check("calloc", KVBM_NO_MEMORY);
  uint32_t* const written = stamps.data();
  for (int64_t i = 0; i < ids.count; ++i) {
    if (ids.is_skipped(i)) continue;
    uint32_t& by = written[ids.dst_at(i)];
    if (by == mine) {
      *index = i;
      return KVBM_ID_DST_TWICE;
    }
    by = mine;
  }
  for (int64_t i = 0; same_pool && i < ids.count; ++i) {
    const int64_t block = ids.src_at(i);
    if (ids.is_skipped(i) || block >= dst_blocks || written[block] != mine) continue;
    *index = i;
    return KVBM_ID_READ_AND_WRITTEN;
  }
  return KVBM_ID_OK;
}

// Whether every id is a block or -1.  In t = id + 1 and most - t the top bit tells, without a branch or a comparison, so that
// compilers make several at a time.
template <typename Id>
bool are_in_range(const Id* ids, int64_t count, int64_t blocks) {
  using Unsigned = std::make_unsigned_t<Id>;
  if (!ids) return count <= blocks;
  const auto most = static_cast<Unsigned>(std::min<int64_t>(blocks, std::numeric_limits<Id>::max()));
  Unsigned outside = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto t = static_cast<Unsigned>(static_cast<Unsigned>(ids[i]) + 1);
    outside |= t | static_cast<Unsigned>(most - t);
  }
  return !(outside >> (8 * sizeof(Id) - 1));
}

template <typename Id>
int check_all(const Ids<Id>& ids, int64_t src_blocks, int64_t dst_blocks, bool same_pool, int64_t* index) {
  // All ranges first: the later checks index memory with the ids.
  if (!are_in_range(ids.src, ids.count, src_blocks) || !are_in_range(ids.dst, ids.count, dst_blocks)) {
    for (int64_t i = 0; i < ids.count; ++i) {
      *index = i;
      const int64_t src = ids.src_at(i), dst = ids.dst_at(i);
      if (src != kSkip && (src < 0 || src >= src_blocks)) return KVBM_ID_SRC_RANGE;
      if (dst != kSkip && (dst < 0 || dst >= dst_blocks)) return KVBM_ID_DST_RANGE;
    }
  }
  return ids.count <= kFew ? check_few(ids, same_pool, index) : check_many(ids, dst_blocks, same_pool, index);
}

template <typename Id>
uint32_t count_kept(const Id* src, const Id* dst, uint32_t count) {
  uint32_t kept = 0;
  if (src && dst)
    for (uint32_t i = 0; i < count; ++i) kept += (src[i] != kSkip) & (dst[i] != kSkip);
  else if (const Id* ids = src ? src : dst)
    for (uint32_t i = 0; i < count; ++i) kept += ids[i] != kSkip;
  else
    kept = count;
  return kept;
}

}  // namespace

uint32_t kvbm_driver::count_pairs(const kvbm_batch& batch) {
  if (batch.id_bytes == 4)
    return count_kept(static_cast<const int32_t*>(batch.src_ids), static_cast<const int32_t*>(batch.dst_ids), batch.num_pairs);
  return count_kept(static_cast<const int64_t*>(batch.src_ids), static_cast<const int64_t*>(batch.dst_ids), batch.num_pairs);
}

extern "C" {

int kvbm_run_host(int kernel, const kvbm_args* args, const kvbm_batch* batch, int threads) {
  if (batch->num_pairs == 0) return KVBM_OK;
  if (!is_kernel(kernel) || !is_batch(batch) || !kvbm_kernels[kernel].host) return check("kvbm_run_host", kInvalidValue);
  kvbm_args copy;
  memcpy(&copy, args, inline_start(*args));
  copy.num_pairs = batch->num_pairs;
  copy.id_bytes = batch->src_ids || batch->dst_ids ? batch->id_bytes : 0;
  copy.inline_mask = static_cast<uint32_t>(!batch->src_ids) << 4 | static_cast<uint32_t>(!batch->dst_ids) << 5;
  copy.fault = 0;
  copy.src_ids = reinterpret_cast<uint64_t>(batch->src_ids);
  copy.dst_ids = reinterpret_cast<uint64_t>(batch->dst_ids);
  copy.src_table = reinterpret_cast<uint64_t>(batch->src_table);
  copy.dst_table = reinterpret_cast<uint64_t>(batch->dst_table);
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

int kvbm_check_ids(const void* src_ids, const void* dst_ids, uint32_t id_bytes, uint32_t num_pairs, int64_t src_blocks,
                   int64_t dst_blocks, int same_pool, int64_t* index) {
  if (id_bytes == 4) {
    const Ids<int32_t> ids = {static_cast<const int32_t*>(src_ids), static_cast<const int32_t*>(dst_ids), num_pairs};
    return check_all(ids, src_blocks, dst_blocks, same_pool != 0, index);
  }
  const Ids<int64_t> ids = {static_cast<const int64_t*>(src_ids), static_cast<const int64_t*>(dst_ids), num_pairs};
  return check_all(ids, src_blocks, dst_blocks, same_pool != 0, index);
}

int kvbm_check_range(const void* ids, uint32_t id_bytes, uint32_t num_pairs, int64_t blocks, int64_t* index) {
  for (*index = 0; *index < num_pairs; ++*index) {
    const int64_t id = id_at(ids, id_bytes, *index);
    if (id != kSkip && (id < 0 || id >= blocks)) return KVBM_ID_SRC_RANGE;
  }
  return KVBM_ID_OK;
}

}  // extern "C"

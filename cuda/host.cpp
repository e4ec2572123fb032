// host.cpp: work on the host: the host halves of kernels on all cores, and the checks of block ids.
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

#include "batch.h"
#include "driver.h"

using namespace kvbm_driver;

namespace {

// ---- running kernels -----------------------------------------------------------------------------------------------

constexpr uint64_t kBytesAThread = 512 << 10;  // fewest bytes of a thread: below that its start costs more than it saves
constexpr unsigned kMostThreads = 256, kTurnsAThread = 8;
// Copies larger than this store around the cache.  It is not the size of the last-level cache: a virtual machine reports the
// cache of its host, but has a slice of it.  Measured, streaming stores are faster from far smaller sizes on.
constexpr uint64_t kStreamFrom = 2 << 20;

unsigned usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<unsigned>(std::max(CPU_COUNT(&set), 1));
  return std::max(std::thread::hardware_concurrency(), 1u);  // the machine has more CPUs than a cpu_set_t can hold
}

uint64_t saturating_product(uint64_t a, uint64_t b) {
  uint64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<uint64_t>::max() : product;
}

// Bytes that a batch writes (of digests alone: at least the bytes that it reads).  Extents count words or elements, and the
// source is contiguous along inner[0], so the stride of inner[0] is their size.  Call it before `prepare`, which may sort the
// modes.
uint64_t total_bytes(const kvbm_args& args) {
  uint64_t total = 0;
  for (uint32_t p = 0; p < args.num_parts; ++p) {
    const int64_t unit = args.part[p].inner[0].src;
    uint64_t bytes = saturating_product(args.num_pairs, static_cast<uint64_t>(std::clamp<int64_t>(std::abs(unit), 1, 16)));
    for (const kvbm_outer& mode : args.part[p].outer) bytes = saturating_product(bytes, std::max(mode.extent.n, 1u));
    for (const kvbm_inner& mode : args.part[p].inner) bytes = saturating_product(bytes, std::max(mode.extent.n, 1u));
    if (__builtin_add_overflow(total, bytes, &total)) return std::numeric_limits<uint64_t>::max();
  }
  return total;
}

// The jobs of all parts, one part after the other.  Threads take contiguous ranges of them.
struct HostRun {
  const kvbm_kernel* kernel;
  const kvbm_args* args;
  uint64_t jobs, turn;  // number of all jobs, and of the jobs that a thread takes at a time
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
    // Orders the streaming stores before the end of the thread.
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
};

// ---- checking ids --------------------------------------------------------------------------------------------------

constexpr uint32_t kMostPairwise = 32;  // up to this many pairs, comparing each with each is faster than a table

// For each block, the number of the batch that last wrote it.  The table is kept between calls and not cleared, because each
// batch has a new number.  So a check is O(pairs), not O(blocks).
class Stamps {
 public:
  Stamps() = default;
  Stamps(const Stamps&) = delete;
  Stamps& operator=(const Stamps&) = delete;
  ~Stamps() { free(stamps_); }
  // The number of a new batch; 0: out of memory.
  uint32_t next(int64_t blocks) {
    const auto size = static_cast<size_t>(blocks);
    if (size > size_) {
      auto* grown = static_cast<uint32_t*>(calloc(size, sizeof(uint32_t)));  // pages of a large one are mapped at first use
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

// The ids of a batch, in memory that no other thread writes.
struct Ids {
  const int32_t *src, *dst;  // null: 0, 1, 2, …
  int64_t count;
  int64_t src_at(int64_t i) const { return src ? src[i] : i; }
  int64_t dst_at(int64_t i) const { return dst ? dst[i] : i; }
  bool is_skipped(int64_t i) const { return src_at(i) == kSkip || dst_at(i) == kSkip; }
  bool any_skipped() const {  // the only id below 0
    int32_t all = 0;
    for (const int32_t* side : {src, dst})
      for (int64_t i = 0; side && i < count; ++i) all |= side[i];
    return all < 0;
  }
};

// The first i in [0, last) whose destination is `block`, or -1.
int64_t find_written(const Ids& ids, int64_t block, int64_t last) {
  for (int64_t i = 0; i < last; ++i)
    if (ids.dst_at(i) == block && !ids.is_skipped(i)) return i;
  return -1;
}

int check_pairwise(const Ids& ids, bool same_pool, uint32_t* kept, int64_t* index) {
  for (*index = 0; *index < ids.count; ++*index) {
    if (ids.is_skipped(*index)) continue;
    if (ids.dst && find_written(ids, ids.dst[*index], *index) >= 0) return KVBM_ID_DST_TWICE;
    ++*kept;
  }
  for (*index = 0; same_pool && *index < ids.count; ++*index) {
    if (!ids.is_skipped(*index) && find_written(ids, ids.src_at(*index), ids.count) >= 0) return KVBM_ID_READ_AND_WRITTEN;
  }
  return KVBM_ID_OK;
}

int check_by_stamps(const Ids& ids, int64_t dst_blocks, bool same_pool, uint32_t* kept, int64_t* index) {
  Stamps& stamps = stamps_of_thread;  // one lookup: access to a thread_local costs a call
  const uint32_t mine = stamps.next(dst_blocks);
  if (!mine) return check("calloc", KVBM_NO_MEMORY);
  uint32_t* const written = stamps.data();
  const bool skips = ids.any_skipped();
  for (int64_t i = 0; i < ids.count; ++i) {
    if (skips && ids.is_skipped(i)) continue;
    uint32_t& by = written[ids.dst_at(i)];
    if (by == mine) {
      *index = i;
      return KVBM_ID_DST_TWICE;
    }
    by = mine;
    *kept += skips;
  }
  if (!skips) *kept = static_cast<uint32_t>(ids.count);
  for (int64_t i = 0; same_pool && i < ids.count; ++i) {
    const int64_t block = ids.src_at(i);
    if (ids.is_skipped(i) || block >= dst_blocks || written[block] != mine) continue;
    *index = i;
    return KVBM_ID_READ_AND_WRITTEN;
  }
  return KVBM_ID_OK;
}

// Larger pools are checked by sorting the ids: a number for each block would take more than 256 MB.
constexpr int64_t kMostStamped = 1 << 26;

int check_sorted(const Ids& ids, bool same_pool, uint32_t* kept, int64_t* index) {
  struct Written {
    int64_t block, at;
    bool operator<(const Written& other) const { return block != other.block ? block < other.block : at < other.at; }
  };
  const std::unique_ptr<Written[]> written(new (std::nothrow) Written[static_cast<size_t>(ids.count)]);
  if (!written) return check("malloc", KVBM_NO_MEMORY);
  Written* end = written.get();
  for (int64_t i = 0; i < ids.count; ++i)
    if (!ids.is_skipped(i)) *end++ = {ids.dst_at(i), i};
  std::sort(written.get(), end);
  *index = ids.count;
  for (Written* one = written.get() + 1; one < end; ++one)
    if (one->block == one[-1].block) *index = std::min(*index, one->at);
  if (*index < ids.count) return KVBM_ID_DST_TWICE;
  *kept = static_cast<uint32_t>(end - written.get());
  for (*index = 0; same_pool && *index < ids.count; ++*index) {
    if (ids.is_skipped(*index)) continue;
    const int64_t block = ids.src_at(*index);
    const Written* found = std::lower_bound(written.get(), end, Written{block, 0});
    if (found != end && found->block == block) return KVBM_ID_READ_AND_WRITTEN;
  }
  return KVBM_ID_OK;
}

// Volatile: another thread may be writing `given`, and what is checked must be what is kept.
template <typename Id>
int take(const volatile Id* given, uint32_t count, uint64_t most, int32_t* out, int64_t* index, int64_t* id) {
  for (uint32_t i = 0; i < count; ++i) {
    const Id one = given[i];
    out[i] = static_cast<int32_t>(one);
    if (__builtin_expect(static_cast<uint64_t>(int64_t{one}) + 1 > most, 0)) {
      *index = i;
      *id = one;
      return KVBM_ID_RANGE;
    }
  }
  return KVBM_ID_OK;
}

}  // namespace

extern "C" {

int kvbm_run_host(int kernel, const kvbm_args* args, const kvbm_batch* batch, int threads) {
  if (batch->num_pairs == 0) return KVBM_OK;
  if (!is_kernel(kernel) || !kvbm_kernels[kernel].host) return check("kvbm_run_host", kInvalidValue);
  kvbm_args copy;
  copy_description(&copy, *args);
  copy.num_pairs = batch->num_pairs;
  copy.id_bytes = batch->src.ids || batch->dst.ids ? sizeof(int32_t) : 0;
  copy.inline_mask &= kDescribed;
  if (copy.inline_mask & KVBM_DIGEST) {
    copy.digest.out = batch->digests;
    copy.digest.positions = reinterpret_cast<uint64_t>(batch->positions);
    copy.digest.position_bytes = batch->positions ? sizeof(int64_t) : 0;
    if (!batch->adds) memset(reinterpret_cast<void*>(batch->digests), 0, sizeof(uint64_t) * batch->num_pairs);
  }
  copy.inline_mask |= static_cast<uint32_t>(!batch->src.ids) << 4 | static_cast<uint32_t>(!batch->dst.ids) << 5;
  copy.fault = 0;
  copy.src_blocks = batch->src.blocks;
  copy.dst_blocks = batch->dst.blocks;
  copy.src_ids = reinterpret_cast<uint64_t>(batch->src.ids);
  copy.dst_ids = reinterpret_cast<uint64_t>(batch->dst.ids);
  copy.src_table = reinterpret_cast<uint64_t>(batch->src.table);
  copy.dst_table = reinterpret_cast<uint64_t>(batch->dst.table);
  const kvbm_kernel& entry = kvbm_kernels[kernel];
  const uint64_t bytes = total_bytes(copy);
  kvbm_grid grid = {};
  RETURN_IF_FAILED(check(entry.name, entry.prepare(&copy, 0, &grid)));

  HostRun run;
  run.kernel = &entry;
  run.args = &copy;
  run.jobs = 0;
  for (uint32_t p = 0; p < copy.num_parts; ++p) run.jobs += copy.part[p].jobs;
  run.stream_stores = bytes > kStreamFrom;
  uint64_t workers = std::min({bytes / kBytesAThread, run.jobs, uint64_t{kMostThreads}});
  if (workers > 1) workers = std::min<uint64_t>(workers, threads > 0 ? static_cast<uint64_t>(threads) : usable_cores());
  workers = std::max<uint64_t>(workers, 1);
  // Several turns per thread, so that a thread that starts late or shares its core does not delay the end.
  run.turn = workers == 1 ? std::max<uint64_t>(run.jobs, 1) : std::max<uint64_t>(run.jobs / (workers * kTurnsAThread), 1);

  std::array<std::thread, kMostThreads> others;
  uint64_t started = 0;
  try {
    for (; started + 1 < workers && !run.is_done(); ++started) others[started] = std::thread([&run] { run.work(); });
  } catch (...) {
    // No more threads: those that run do all the work.
  }
  run.work();
  for (uint64_t i = 0; i < started; ++i) others[i].join();
  return KVBM_OK;
}

int kvbm_take_ids(const void* given, uint32_t bytes, uint32_t count, int64_t blocks, int32_t* out, int64_t* index,
                  int64_t* id) {
  const auto most = static_cast<uint64_t>(std::min<int64_t>(blocks, std::numeric_limits<int32_t>::max()));
  if (bytes == 4) return take(static_cast<const volatile int32_t*>(given), count, most, out, index, id);
  return take(static_cast<const volatile int64_t*>(given), count, most, out, index, id);
}

int kvbm_check_ids(const int32_t* src, const int32_t* dst, uint32_t num_pairs, int64_t dst_blocks, int same_pool,
                   uint32_t* kept, int64_t* index) {
  const Ids ids = {src, dst, num_pairs};
  *kept = 0;
  if (!dst && !same_pool) {
    *kept = num_pairs - (src ? static_cast<uint32_t>(std::count(src, src + num_pairs, int32_t{kSkip})) : 0);
    return KVBM_ID_OK;
  }
  if (num_pairs <= kMostPairwise) return check_pairwise(ids, same_pool != 0, kept, index);
  if (dst_blocks > kMostStamped) return check_sorted(ids, same_pool != 0, kept, index);
  return check_by_stamps(ids, dst_blocks, same_pool != 0, kept, index);
}

}  // extern "C"

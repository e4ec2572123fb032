// pairs.cpp: copies of pairs of addresses: checks, the GPU of each address, and the launch of copy.cu's kernel.
#include <string.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <new>

#include "driver.h"

namespace kvbm_driver {
namespace {

// ---- overlapping ranges --------------------------------------------------------------------------------------------

struct Span {
  uint64_t start, position;
};

// Memory for spans.  It is kept between calls unless it is large: in fresh memory every 256 spans cost a page fault, as much
// time as sorting them.
struct Scratch {
  std::unique_ptr<Span[]> spans;
  uint64_t size = 0;
  bool reserve(uint64_t count) {
    if (count <= size) return true;
    spans.reset(new (std::nothrow) Span[count]);
    size = spans ? count : 0;
    return size > 0;
  }
  void trim() {
    enum : uint64_t { kMostKept = 64 << 10 };
    if (size > kMostKept) *this = Scratch();
  }
};
enum { kOfSource, kOfDestination, kOfSort };
thread_local std::array<Scratch, 3> scratch_of_thread;

// The non-empty ranges of one list; `sort` orders them by address.
class Spans {
 public:
  Spans(const kvbm_spans& given, Scratch& spans, Scratch& other) : given_(given), spans_(spans), other_(other) {}
  Spans(const Spans&) = delete;
  Spans& operator=(const Spans&) = delete;
  ~Spans() {
    spans_.trim();
    other_.trim();
  }

  // Returns KVBM_OK, KVBM_NO_MEMORY, or 1: the range at *position has address 0.
  int collect(uint64_t* position) {
    if (!spans_.reserve(given_.count + 1)) return check("malloc", KVBM_NO_MEMORY);
    for (uint64_t i = 0; i < given_.count; ++i) {
      const uint64_t start = given_.addresses[i];
      if (size_of(i) == 0) continue;
      if (start == 0) {
        *position = i;
        return 1;
      }
      is_sorted_ &= count_ == 0 || spans_.spans[count_ - 1].start <= start;
      spans_.spans[count_] = {start, i};
      low_ = std::min(low_, start);
      high_ = std::max(high_, start);
      behind_ = std::max(behind_, end_of(spans_.spans[count_]));
      ++count_;
    }
    return KVBM_OK;
  }

  // A radix sort, least significant digit first: several times faster than std::sort for ten thousand addresses.
  int sort() {
    if (is_sorted_) return KVBM_OK;
    if (!other_.reserve(count_)) return check("malloc", KVBM_NO_MEMORY);
    uint64_t varying = 0;  // the bits that differ: most high bits, and those below the alignment, are the same
    for (uint64_t i = 0; i < count_; ++i) varying |= spans_.spans[i].start - low_;
    const int lowest = __builtin_ctzll(varying), bits = 64 - __builtin_clzll(high_ - low_) - lowest;
    const int digits = (bits + kMostDigitBits - 1) / kMostDigitBits, digit_bits = (bits + digits - 1) / digits;
    const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
    for (int shift = lowest; shift < lowest + bits; shift += digit_bits) {
      std::array<uint64_t, 1 << kMostDigitBits> at = {};
      for (uint64_t i = 0; i < count_; ++i) ++at[(spans_.spans[i].start - low_) >> shift & mask];
      uint64_t before = 0;
      for (uint64_t d = 0; d <= mask; ++d) {
        const uint64_t here = at[d];
        at[d] = before;
        before += here;
      }
      for (uint64_t i = 0; i < count_; ++i)
        other_.spans[at[(spans_.spans[i].start - low_) >> shift & mask]++] = spans_.spans[i];
      std::swap(spans_, other_);
    }
    is_sorted_ = true;
    return KVBM_OK;
  }

  uint64_t count() const { return count_; }
  uint64_t low() const { return low_; }
  uint64_t behind() const { return behind_; }
  const Span& operator[](uint64_t i) const { return spans_.spans[i]; }
  uint64_t end_of(const Span& span) const {
    uint64_t end;
    return __builtin_add_overflow(span.start, size_of(span.position), &end) ? std::numeric_limits<uint64_t>::max() : end;
  }

 private:
  enum : int { kMostDigitBits = 10 };
  uint64_t size_of(uint64_t position) const { return given_.sizes ? given_.sizes[position] : given_.size; }
  const kvbm_spans& given_;
  Scratch &spans_, &other_;
  uint64_t count_ = 0, low_ = std::numeric_limits<uint64_t>::max(), high_ = 0, behind_ = 0;
  bool is_sorted_ = true;
};

// ---- devices of addresses ------------------------------------------------------------------------------------------

struct Allocation {
  uint64_t first, behind;
  int device;
};

// The allocation around an address; only the address itself if the driver does not tell the range.
int find_allocation(uint64_t address, Allocation* out) {
  *out = {address, address + 1, -1};
  RETURN_IF_FAILED(kvbm_pointer_device(address, &out->device));
  if (out->device == -1) return KVBM_OK;
  uint64_t first = 0, behind = 0;
  if (kvbm_memory_range(address, out->device == -2, &first, &behind) == KVBM_OK && behind) *out = {first, behind, out->device};
  return KVBM_OK;
}

// ---- the launch ----------------------------------------------------------------------------------------------------

constexpr uint64_t kMostPairs = 1 << 20, kMostJobs = (uint64_t{1} << 31) - 1;                    // of a launch
constexpr uint32_t kThreads = 128, kLogThreads = 7, kLogMinWidth = 3, kLoads = 2, kWidest = 16;  // as in copy.cu

class Launch : public Cargo {
 public:
  Launch(Handle function, const uint64_t* dst, const uint64_t* src, uint64_t count, Stream stream)
      : function_(function), dst_(dst), src_(src), count_(count), stream_(stream) {}

  int prepare(uint64_t bytes, int sms) {
    uint64_t differing = kWidest;
    for (uint64_t i = 0; i < count_; ++i) differing |= dst_[i] ^ src_[i];
    const uint64_t narrowest = differing & -differing;
    // Short pairs share a CTA: each gets as many threads as it has words.
    uint32_t log_width = kLogThreads;
    while (log_width > kLogMinWidth && (narrowest * kLoads << (log_width - 1)) >= bytes) --log_width;
    uint64_t tile = uint64_t{kWidest} * kLoads << log_width;
    // Small batches take smaller tiles, so that every multiprocessor has some.
    if (log_width == kLogThreads && jobs(bytes, tile) < uint64_t{4} * static_cast<uint64_t>(sms)) tile /= kLoads;
    while (jobs(bytes, tile) > kMostJobs) tile *= 2;
    if (tile >> 31) return check("kvbm_copy_pairs", KVBM_TOO_LARGE);
    args_.bytes = bytes;
    args_.tile_bytes = static_cast<uint32_t>(tile);
    args_.tiles = kvbm_make_div(static_cast<uint32_t>(divide_up(bytes, tile)));
    args_.jobs = static_cast<uint32_t>(jobs(bytes, tile));
    args_.log_width = log_width;
    return KVBM_OK;
  }

  size_t bytes() const { return count_ * sizeof(kvbm_pair); }

  void write(void* host, Address device) override {
    auto* pairs = static_cast<kvbm_pair*>(host);
    for (uint64_t i = 0; i < count_; ++i) pairs[i] = {src_[i], dst_[i]};
    args_.pairs = device;
  }

  void write_inline() { write(args_.payload, 0); }

  int launch() override {
    void* parameters[] = {&args_};
    const uint64_t ctas = divide_up(args_.jobs, kThreads >> args_.log_width);
    return CU(LaunchKernel, function_, static_cast<unsigned>(ctas), 1, 1, kThreads, 1, 1, 0, stream_, parameters, nullptr);
  }

 private:
  static uint64_t divide_up(uint64_t n, uint64_t by) { return n / by + (n % by != 0); }
  uint64_t jobs(uint64_t bytes, uint64_t tile) const {
    uint64_t jobs;
    return __builtin_mul_overflow(count_, divide_up(bytes, tile), &jobs) ? std::numeric_limits<uint64_t>::max() : jobs;
  }

  Handle function_;
  const uint64_t *dst_, *src_;
  uint64_t count_;
  Stream stream_;
  kvbm_pairs args_;  // the unused rest of the payload is not initialised: the kernel does not read it
};

static_assert(sizeof(kvbm_pairs) == 4096, "the parameters of a kernel have 4,096 bytes");

}  // namespace

int find_fixed_kernel(Device* device, FixedKernel which, Handle* function) {
  *function = device->fixed[which].load(std::memory_order_acquire);
  if (__builtin_expect(*function != nullptr, 1)) return KVBM_OK;
  std::lock_guard<std::mutex> lock(device->mutex);
  RelaxedCapture relaxed;
  RETURN_IF_FAILED(load_images(device));
  const char* const name = which == kClear ? "kvbm_clear" : "kvbm_copy_pairs";
  int image = 0;
  while (image < kvbm_num_images && strcmp(kvbm_images[image].name, "copy.cu") != 0) ++image;
  if (image == kvbm_num_images) return check(name, KVBM_NOT_BUILT);
  RETURN_IF_FAILED(CU(ModuleGetFunction, function, device->modules[image], name));
  if (driver.FuncLoad) RETURN_IF_FAILED(CU(FuncLoad, *function));
  device->fixed[which].store(*function, std::memory_order_release);
  return KVBM_OK;
}

}  // namespace kvbm_driver

using namespace kvbm_driver;

extern "C" {

int kvbm_check_spans(const kvbm_spans* src, const kvbm_spans* dst, uint64_t* first, uint64_t* second) {
  auto& scratch = scratch_of_thread;  // one lookup: access to a thread_local costs a call
  Spans read(*src, scratch[kOfSource], scratch[kOfSort]), written(*dst, scratch[kOfDestination], scratch[kOfSort]);
  int status = read.collect(first);
  if (status) return status < 0 ? status : KVBM_SPAN_NULL_SRC;
  status = written.collect(first);
  if (status) return status < 0 ? status : KVBM_SPAN_NULL_DST;
  RETURN_IF_FAILED(written.sort());
  for (uint64_t i = 1; i < written.count(); ++i) {
    if (written.end_of(written[i - 1]) <= written[i].start) continue;
    *first = std::min(written[i - 1].position, written[i].position);
    *second = std::max(written[i - 1].position, written[i].position);
    return KVBM_SPAN_DST_TWICE;
  }
  if (read.behind() <= written.low() || written.behind() <= read.low()) return KVBM_SPAN_OK;  // or one of them is empty
  RETURN_IF_FAILED(read.sort());
  uint64_t w = 0;
  for (uint64_t r = 0; r < read.count(); ++r) {
    while (w < written.count() && written.end_of(written[w]) <= read[r].start) ++w;
    if (w == written.count()) break;
    if (written[w].start >= read.end_of(read[r])) continue;
    *first = read[r].position;
    *second = written[w].position;
    return KVBM_SPAN_READ_AND_WRITTEN;
  }
  return KVBM_SPAN_OK;
}

int kvbm_find_device(const uint64_t* addresses, uint64_t count, int* device, uint64_t* gpus, uint64_t* index) {
  std::array<Allocation, 32> known;  // the last 32 found
  uint64_t found = 0, last = 0;
  *device = -2;
  *gpus = 0;
  for (*index = 0; *index < count; ++*index) {
    const uint64_t address = addresses[*index];
    const auto holds = [address](const Allocation& a) { return a.first <= address && address < a.behind; };
    if (found == 0 || !holds(known[last])) {
      const auto* end = known.data() + std::min<uint64_t>(found, known.size());
      last = static_cast<uint64_t>(std::find_if(static_cast<const Allocation*>(known.data()), end, holds) - known.data());
      if (known.data() + last == end) {
        last = found++ % known.size();
        RETURN_IF_FAILED(find_allocation(address, &known[last]));
      }
    }
    const int where = known[last].device;
    if (where == -1) {
      *device = -1;
      return KVBM_OK;
    }
    if (where < 0) continue;
    if (where < 64) *gpus |= uint64_t{1} << where;
    if (*device < 0) *device = where;
  }
  return KVBM_OK;
}

int kvbm_launch_pairs(const uint64_t* dst, const uint64_t* src, uint64_t size, uint64_t count, int device, uint64_t stream) {
  if (count == 0 || size == 0) return KVBM_OK;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  Handle function = nullptr;
  RETURN_IF_FAILED(find_fixed_kernel(current.device, kCopyPairs, &function));
  auto* handle = reinterpret_cast<Stream>(stream);
  for (uint64_t i = 0; i < count; i += kMostPairs) {
    const uint64_t n = std::min<uint64_t>(count - i, kMostPairs);
    Launch launch(function, dst + i, src + i, n, handle);
    RETURN_IF_FAILED(launch.prepare(size, current.device->sms));
    if (n <= KVBM_INLINE_PAIRS) {
      launch.write_inline();
      RETURN_IF_FAILED(launch.launch());
    } else {
      RETURN_IF_FAILED(carry(current.device, launch.bytes(), 0, handle, &launch));
    }
  }
  return KVBM_OK;
}

}  // extern "C"

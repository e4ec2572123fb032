// copy.cu: kernels that are independent of layouts: one copies pairs of addresses, one sets digests to zero.
//
// Each pair is copied in the widest word that fits both sides.  If source and destination are misaligned by the same number of
// bytes, all but the first and last few bytes are copied in words of 16.
#include "address.cuh"

namespace kvbm {
namespace {

constexpr uint32_t kPairThreads = 128;
constexpr uint32_t kPairLoads = 2;  // words a thread loads before it stores them
constexpr uint32_t kMinPairWidth = 8;
constexpr uint32_t kClearThreads = 256;

// Copies `bytes` with the `width` threads of one tile; `lane` is the number of this thread.
template <int WORD>
__device__ __forceinline__ void copy_span(const char* src, char* dst, uint32_t bytes, uint32_t lane, uint32_t width) {
  uint32_t head = static_cast<uint32_t>(-reinterpret_cast<uint64_t>(dst)) & (WORD - 1);
  if (head > bytes) head = bytes;
  const uint32_t words = (bytes - head) / WORD, tail = (bytes - head) % WORD;
  const char* from = src + head;
  char* to = dst + head;
  for (uint32_t i = lane; i < words; i += width * kPairLoads) {
    Word<WORD> v[kPairLoads];
    KVBM_UNROLL
    for (uint32_t u = 0; u < kPairLoads; ++u)
      if (i + u * width < words) load(v[u], from + uint64_t{i + u * width} * WORD);
    KVBM_UNROLL
    for (uint32_t u = 0; u < kPairLoads; ++u)
      if (i + u * width < words) store(to + uint64_t{i + u * width} * WORD, v[u]);
  }
  if constexpr (WORD > 1) {
    // The unaligned bytes at both ends, fewer than two words: one loop copies both.
    for (uint32_t i = lane; i < head + tail; i += width) {
      const uint32_t at = i < head ? i : bytes - tail + (i - head);
      uint8_t v;
      load(v, src + at);
      store(dst + at, v);
    }
  }
}

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace
}  // namespace kvbm

// for pair: for tile: for word of the tile (threads)
extern "C" __global__ void __launch_bounds__(kvbm::kPairThreads, 2048 / kvbm::kPairThreads)
    kvbm_copy_pairs(const __grid_constant__ kvbm_pairs args) {
  using namespace kvbm;
  // The first thread of each tile looks the pair up for all its threads.
  __shared__ struct {
    const char* src;
    char* dst;
    uint32_t bytes;
  } found[kPairThreads / kMinPairWidth];
  const uint32_t row = threadIdx.x >> args.log_width, width = 1u << args.log_width, lane = threadIdx.x & (width - 1);
  if (lane == 0) {
    uint32_t pair = blockIdx.x * (kPairThreads >> args.log_width) + row;
    found[row].bytes = 0;
    if (pair < args.jobs) {
      const uint32_t tile = take(pair, args.tiles);
      const kvbm_pair at = args.pairs ? reinterpret_cast<const kvbm_pair*>(args.pairs)[pair] : args.payload[pair];
      // All tiles but the first start at an aligned destination; the last one has the remaining bytes.
      const uint32_t misaligned = at.dst & 15;
      const uint64_t first = tile == 0 ? 0 : uint64_t{tile} * args.tile_bytes - misaligned;
      const uint64_t last = tile + 1 == args.tiles.n ? args.bytes : uint64_t{tile + 1} * args.tile_bytes - misaligned;
      found[row].src = reinterpret_cast<const char*>(at.src + first);
      found[row].dst = reinterpret_cast<char*>(at.dst + first);
      found[row].bytes = static_cast<uint32_t>(last - first);
    }
  }
  __syncthreads();
  const uint32_t bytes = found[row].bytes;
  if (bytes == 0) return;
  const char* src = found[row].src;
  char* dst = found[row].dst;
  const uint64_t differing = reinterpret_cast<uint64_t>(src) ^ reinterpret_cast<uint64_t>(dst);
  if ((differing & 15) == 0)
    copy_span<16>(src, dst, bytes, lane, width);
  else if ((differing & 7) == 0)
    copy_span<8>(src, dst, bytes, lane, width);
  else if ((differing & 3) == 0)
    copy_span<4>(src, dst, bytes, lane, width);
  else if ((differing & 1) == 0)
    copy_span<2>(src, dst, bytes, lane, width);
  else
    copy_span<1>(src, dst, bytes, lane, width);
}

// Sets digests to zero before a kernel adds to them.  That kernel may start early, and waits before its first addition
// (cells.cuh).
extern "C" __global__ void __launch_bounds__(kvbm::kClearThreads) kvbm_clear(uint64_t* digests, uint64_t count) {
  kvbm::let_next_start();
  for (uint64_t i = blockIdx.x * uint64_t{kvbm::kClearThreads} + threadIdx.x; i < count;
       i += gridDim.x * uint64_t{kvbm::kClearThreads})
    digests[i] = 0;
}

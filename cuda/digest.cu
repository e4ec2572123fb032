// digest.cu: the end of a digest: a pair's sums, which its kernel left one by one, become one number.
#include "permute.cuh"

namespace kvbm {
namespace {

constexpr uint32_t kSumLoads = 4;  // sums a thread has in flight

// The sums at first, first + apart, …, `count` runs of `length` each: threads take them in turns.
__device__ __forceinline__ uint64_t add_runs(const uint64_t* first, uint64_t apart, uint32_t count, uint32_t length) {
  uint64_t sum = 0;
  const uint64_t all = uint64_t(count) * length;
  for (uint64_t i = threadIdx.x; i < all; i += kSumLoads * KVBM_SUM_THREADS) {
    uint64_t v[kSumLoads];
#pragma unroll
    for (uint32_t u = 0; u < kSumLoads; ++u) {
      const uint64_t at = i + u * KVBM_SUM_THREADS;
      v[u] = at < all ? __ldcg(first + (length == apart ? at : at / length * apart + at % length)) : 0;
    }
#pragma unroll
    for (uint32_t u = 0; u < kSumLoads; ++u) sum += v[u];
  }
  return sum;
}

}  // namespace
}  // namespace kvbm

// One CTA a pair.  The sums of a place, a pair's chunk, follow each other.
extern "C" __global__ void __launch_bounds__(KVBM_SUM_THREADS) kvbm_digest_sums(const __grid_constant__ kvbm_sums args) {
  __shared__ uint64_t of_warp[KVBM_SUM_THREADS / 32];
  const uint32_t pair = blockIdx.x;
  uint64_t sum = 0;
  for (uint32_t i = 0; i < args.num_parts; ++i) {
    const uint32_t length = args.part[i].in_place, chunks = args.part[i].chunks;
    const uint64_t* sums = reinterpret_cast<const uint64_t*>(args.sums) + args.part[i].slot;
    if (args.part[i].pairs_first)
      sum += kvbm::add_runs(sums + uint64_t(pair) * length, uint64_t(gridDim.x) * length, chunks, length);
    else
      sum += kvbm::add_runs(sums + uint64_t(pair) * chunks * length, length, chunks, length);
  }
  for (uint32_t apart = 16; apart; apart /= 2) sum += __shfl_down_sync(~0u, (unsigned long long)sum, apart);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (uint32_t i = 1; i < KVBM_SUM_THREADS / 32; ++i) sum += of_warp[i];
  uint64_t* out = reinterpret_cast<uint64_t*>(args.out) + pair;
  *out = args.adds ? *out + sum : sum;
}

// digest.cu: the end of a digest: a pair's sums, which its kernels left one by one, become one number.
#include "permute.cuh"

// One CTA a pair.  Sums of a place (a pair's chunk) follow each other: a tile's, then the next tile's.
extern "C" __global__ void __launch_bounds__(256) kvbm_digest_sums(const __grid_constant__ kvbm_sums args) {
  using namespace kvbm;
  __shared__ uint64_t of_warp[8];
  const uint32_t pair = blockIdx.x;
  uint64_t sum = 0;
  for (uint32_t i = 0; i < args.num_parts; ++i) {
    const uint32_t in_place = args.part[i].in_place, chunks = args.part[i].chunks;
    const uint64_t* sums = reinterpret_cast<const uint64_t*>(args.sums) + args.part[i].slot;
    const uint64_t first = args.part[i].pairs_first ? pair : uint64_t(pair) * chunks, apart = args.part[i].pairs_first ? gridDim.x : 1;
    if (apart == 1) {
      sums += first * in_place;
      for (uint64_t j = threadIdx.x; j < uint64_t(chunks) * in_place; j += blockDim.x) sum += sums[j];
    } else {
      for (uint32_t chunk = threadIdx.x / 32; chunk < chunks; chunk += blockDim.x / 32)
        for (uint32_t j = threadIdx.x % 32; j < in_place; j += 32) sum += sums[(first + chunk * apart) * in_place + j];
    }
  }
  for (uint32_t apart = 16; apart; apart /= 2) sum += __shfl_down_sync(~0u, (unsigned long long)sum, apart);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (uint32_t i = 1; i < 8; ++i) sum += of_warp[i];
    uint64_t* out = reinterpret_cast<uint64_t*>(args.out) + pair;
    *out = args.adds ? *out + sum : sum;
  }
}

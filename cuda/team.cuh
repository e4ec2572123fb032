// team.cuh: the threads that work on one piece: a whole CTA, or one of the teams that share it.
#pragma once

#include "words.cuh"

namespace kvbm {

// With TEAMS > 1, that many teams of THREADS share a CTA.  Each does what a CTA does otherwise, and loops over its pieces.
// Teams are independent of each other.  All threads of a team take the same turns and reach the same barriers.
template <uint32_t THREADS, uint32_t TEAMS>
struct Team {
#ifdef __CUDACC__
  static __device__ __forceinline__ uint32_t number() { return TEAMS == 1 ? 0 : threadIdx.x / THREADS; }
  static __device__ __forceinline__ uint32_t thread() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % THREADS; }
  static __device__ __forceinline__ void sync() {
    static_assert(TEAMS < 16 && THREADS % 32 == 0, "a CTA has 16 named barriers, and whole warps wait at them");
    if constexpr (TEAMS == 1)
      __syncthreads();
    else
      asm volatile("bar.sync %0, %1;" ::"r"(1 + number()), "n"(THREADS) : "memory");
  }
  // Call it before the next turn overwrites the shared memory of this one.
  static __device__ __forceinline__ void sync_turn() {
    if constexpr (TEAMS > 1) sync();
  }
#endif
};

}  // namespace kvbm

// team.cuh: the threads that work on one piece.
#pragma once

#include "words.cuh"

namespace kvbm {

// The threads that work on one piece: a CTA's, or with TEAMS those of one of the teams that share it.  Teams know nothing of
// each other; within one, every thread takes the same turns and meets the same barriers.
template <uint32_t THREADS, uint32_t TEAMS>
struct Team {
#ifdef __CUDACC__
  static __device__ __forceinline__ uint32_t number() { return TEAMS == 1 ? 0 : threadIdx.x / THREADS; }
  static __device__ __forceinline__ uint32_t thread() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % THREADS; }
  static __device__ __forceinline__ void sync() {
    static_assert(TEAMS < 16 && THREADS % 32 == 0, "a CTA has 16 barriers, on which whole warps wait");
    if constexpr (TEAMS == 1)
      __syncthreads();
    else
      asm volatile("bar.sync %0, %1;" ::"r"(1 + number()), "n"(THREADS) : "memory");
  }
  // Before the next turn overwrites what this one left in shared memory.
  static __device__ __forceinline__ void sync_turn() {
    if constexpr (TEAMS > 1) sync();
  }
#endif
};

}  // namespace kvbm

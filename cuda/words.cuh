// words.cuh: the words that kernels move, and how they are loaded and stored, on the GPU and on the host.
#pragma once

#include "kvbm.h"

#ifdef __CUDACC__
#define KVBM_INLINE __host__ __device__ __forceinline__
#define KVBM_UNROLL _Pragma("unroll")
#define KVBM_UNROLL_4 _Pragma("unroll 4")
#define KVBM_NO_UNROLL _Pragma("unroll 1")
#else
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#define KVBM_INLINE inline
#define KVBM_UNROLL
#endif

namespace kvbm {

struct alignas(16) Word16 {
  uint32_t x[4];
};
struct alignas(8) Word8 {
  uint32_t x[2];
};

template <int BYTES>
KVBM_INLINE auto word_of() {
  if constexpr (BYTES == 16)
    return Word16{};
  else if constexpr (BYTES == 8)
    return Word8{};
  else if constexpr (BYTES == 4)
    return uint32_t{};
  else if constexpr (BYTES == 2)
    return uint16_t{};
  else
    return uint8_t{};
}
template <int BYTES>
using Word = decltype(word_of<BYTES>());

#ifdef __CUDACC__
// Every byte is read once and written once.  Loads set the L2 policy evict_last and stores are streaming, so that the L2 writes
// back written lines early: 5 % faster.  The loaded lines do not stay: the next kernels replace them within two passes
// (benchmarks/NOTES.md).
// Loads are not `ld.global.nc`, although no source is written during the kernel: ptxas moves those past stores, and then each
// thread has one load in flight instead of several.
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void load(Word16& v, const char* p) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
               : "l"(p), "l"(evict_last_policy()));
}
// The same for a part of a sector of 32 bytes, of which the warp loads the rest next: that comes from the L1.
__device__ __forceinline__ void load_half(Word16& v, const char* p) {
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
               : "l"(p), "l"(evict_last_policy()));
}
__device__ __forceinline__ void load(Word8& v, const char* p) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.x[0]), "=r"(v.x[1])
               : "l"(p), "l"(evict_last_policy()));
}
__device__ __forceinline__ void load_half(Word8& v, const char* p) {
  asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.x[0]), "=r"(v.x[1])
               : "l"(p), "l"(evict_last_policy()));
}
// Several narrow words share a sector of 32 bytes, so these loads use the L1.
__device__ __forceinline__ void load(uint32_t& v, const char* p) { asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p)); }
__device__ __forceinline__ void load(uint16_t& v, const char* p) { asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p)); }
__device__ __forceinline__ void load(uint8_t& v, const char* p) {
  uint16_t wide;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(wide) : "l"(p));
  v = uint8_t(wide);
}
__device__ __forceinline__ void store(char* p, const Word16& v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x[0]), "r"(v.x[1]), "r"(v.x[2]), "r"(v.x[3])
               : "memory");
}
__device__ __forceinline__ void store(char* p, const Word8& v) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x[0]), "r"(v.x[1]) : "memory");
}
__device__ __forceinline__ void store(char* p, uint32_t v) { *reinterpret_cast<uint32_t*>(p) = v; }
__device__ __forceinline__ void store(char* p, uint16_t v) { *reinterpret_cast<uint16_t*>(p) = v; }
__device__ __forceinline__ void store(char* p, uint8_t v) { *reinterpret_cast<uint8_t*>(p) = v; }

// An asynchronous copy from global to shared memory, without registers; of less than 4 bytes it is an ordinary one.
template <int BYTES>
__device__ __forceinline__ void fetch(char* shared, const char* src) {
  const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(src), "l"(evict_last_policy())
                 : "memory");
  } else if constexpr (BYTES >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(src), "n"(BYTES) : "memory");
  } else {
    Word<BYTES> v;
    load(v, src);
    *reinterpret_cast<Word<BYTES>*>(shared) = v;
  }
}
// Makes a group of the thread's copies since the last one; waits until at most so many groups are under way.
__device__ __forceinline__ void close_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS>
__device__ __forceinline__ void wait_for_fetches() {
  if constexpr (GROUPS == 0)
    asm volatile("cp.async.wait_all;" ::: "memory");
  else
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
#else
template <class W>
inline void load(W& v, const char* p) {
  std::memcpy(&v, p, sizeof v);
}
template <class W>
inline void store(char* p, const W& v) {
  std::memcpy(p, &v, sizeof v);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // sanitizers do not see streaming stores, nor every memcpy: copy word by word
#else
constexpr bool kSanitized = false;
#endif

// Copies a run on the host.  `streaming`: words of 16 bytes are stored around the cache, as in a large memcpy.  An ordinary
// store reads the destination's line first, so 1.5 times as many bytes would cross the bus.
template <int WORD>
inline void copy_run(char* dst, const char* src, uint64_t bytes, bool streaming) {
#ifdef __SSE2__
  if (WORD == 16 && streaming && !kSanitized) {
    for (uint64_t i = 0; i < bytes; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
    return;
  }
#endif
  if (bytes >= 64 && !kSanitized) {
    std::memcpy(dst, src, bytes);
    return;
  }
  for (uint64_t i = 0; i < bytes; i += WORD) {
    Word<WORD> v;
    load(v, src + i);
    store(dst + i, v);
  }
}

// Runs that are not adjacent are too short for the hardware prefetcher, so the code prefetches a fixed distance ahead.
// A prefetch never faults, whatever the address.
constexpr uint32_t kCacheLine = 64;
constexpr uint64_t kPieceBytes = 1024;         // bytes that are copied at a time
constexpr uint64_t kPrefetchBytes = 12 << 10;  // distance; a shorter one is slower, up to 24 KiB is no faster
constexpr uint64_t kPrefetchCached = 8 << 10;  // distance where stores go through the cache
inline void prefetch(const char* src, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(src + i);
}

inline void fence_streaming_stores(bool streaming) {
#ifdef __SSE2__
  if (streaming) _mm_sfence();
#endif
}
#endif

}  // namespace kvbm

// emulated_gpu.h: enough of CUDA C++ that a host compiler compiles the kernels' device code, and runs it: a thread is a fiber.
//
// emulation.py puts it in front of permute.cuh, whose statements in PTX become calls of `load`, `store`, `fetch`, `wait_at` and
// `wait_for_clear`, `close_fetches` and `wait_for_fetches`.
//
// What it emulates
//   Threads    Those of a CTA take turns; in every other CTA from the last one to the first. One runs until it waits or returns.
//   Waiting    __syncthreads, named barriers, shuffles and sums of a warp. Who waits for a thread that never comes is a deadlock.
//   Memory     Of host and GPU alike. Shared memory is noise at first. An address that is not a multiple of its word is an error.
//   Copies     Asynchronous ones (cp.async) read and write when their thread waits for them, which it must do.
//   CTAs       One after the other.
//
// What it does not: time, caches, races between threads that run at the same moment.
#pragma once

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __CUDACC__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
using std::min;

namespace emulated {

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "emulated GPU: %s\n", what);
  abort();
}

enum State { RUNS, AT_BARRIER, IN_WARP, DONE };

struct Index {
  uint32_t x;
};

struct Fetch {
  char* shared;
  const char* src;
  uint32_t bytes, group;
};

struct Thread {
  ucontext_t context;  // where it begins; behind that, jumps, which ask the system nothing
  jmp_buf at;
  bool has_begun;
  State state;
  uint32_t barrier, wanted;  // AT_BARRIER: its number, and how many threads meet there; 0: all of the CTA
  uint64_t given;            // IN_WARP: to the others
  std::vector<char> stack;
  std::vector<Fetch> fetches;  // that are under way, and the number of groups that are closed
  uint32_t groups;
  uint32_t mask;     // the lanes that exchange
  void* fake_stack;  // AddressSanitizer's
};

inline std::vector<Thread> all(1024);  // that a CTA may have: they never move
inline uint32_t num_threads;
inline Thread* const threads = all.data();
inline jmp_buf scheduler;
inline uint32_t current;
inline Index thread_index, block_index, grid_size;
inline void (*work)(void*);
inline void* work_of;
#if defined(__SANITIZE_ADDRESS__)
inline void* fake_stack;
inline const void* scheduler_stack;
inline size_t scheduler_bytes;
#endif

// Back to the scheduler, until it is this thread's turn again.
inline void leave(State state) {
  Thread& me = threads[current];
  me.state = state;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&me.fake_stack, scheduler_stack, scheduler_bytes);
#endif
  if (!_setjmp(me.at)) _longjmp(scheduler, 1);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(me.fake_stack, &scheduler_stack, &scheduler_bytes);  // it may be another thread's by now
#endif
}

inline void begin() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
  for (;;) {
    work(work_of);
    if (!threads[current].fetches.empty()) fail("a thread does not wait for what it fetches");
    leave(DONE);
  }
}

inline void enter(uint32_t number) {
  Thread& next = threads[number];
  current = thread_index.x = number;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_stack, next.stack.data(), next.stack.size());
#endif
  if (!_setjmp(scheduler)) {
    if (next.has_begun) _longjmp(next.at, 1);
    next.has_begun = true;
    setcontext(&next.context);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

// Lets those go on who have met all that they wait for. False: nobody has.
inline bool release() {
  bool any = false;
  const uint32_t count = num_threads;
  uint32_t here[16] = {}, wanted[16] = {}, gone = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const Thread& one = threads[i];
    gone += one.state == DONE;
    if (one.state == AT_BARRIER) ++here[one.barrier], wanted[one.barrier] = one.wanted;
  }
  for (uint32_t i = 0; i < count; ++i) {
    Thread& one = threads[i];
    if (one.state != AT_BARRIER || here[one.barrier] != (wanted[one.barrier] ? wanted[one.barrier] : count - gone)) continue;
    one.state = RUNS;
    any = true;
  }
  for (uint32_t first = 0; first < count; ++first) {  // the lanes of a mask, which all name the same one
    if (threads[first].state != IN_WARP) continue;
    const uint32_t mask = threads[first].mask, warp = first / 32 * 32;
    bool all = true;
    for (uint32_t k = 0; k < 32; ++k) {
      if (!(mask >> k & 1)) continue;
      all = all && warp + k < count && threads[warp + k].state == IN_WARP && threads[warp + k].mask == mask;
    }
    for (uint32_t k = 0; all && k < 32; ++k)
      if (mask >> k & 1) threads[warp + k].state = RUNS;
    any = any || all;
  }
  return any;
}

inline void run_cta(uint32_t number, uint32_t size, void (*what)(void*), void* of) {
  static constexpr size_t kStack = 256 << 10;
  work = what;
  work_of = of;
  block_index.x = number;
  num_threads = size;
  for (uint32_t i = 0; i < size; ++i) {
    Thread& one = threads[i];
    one.state = RUNS;
    if (!one.stack.empty()) continue;
    one.stack.resize(kStack);
    getcontext(&one.context);
    one.context.uc_stack.ss_sp = one.stack.data();
    one.context.uc_stack.ss_size = one.stack.size();
    one.context.uc_link = nullptr;
    makecontext(&one.context, begin, 0);
  }
  do {
    for (uint32_t i = 0; i < size; ++i) {
      const uint32_t turn = number % 2 ? size - 1 - i : i;
      if (threads[turn].state == RUNS) enter(turn);
    }
  } while (release());
  for (uint32_t i = 0; i < size; ++i)
    if (threads[i].state != DONE) fail("a thread waits for another that never comes");
}

// What the lanes of a warp give to each other.
struct Lanes {
  uint64_t given[32];
};
inline Lanes exchange(uint32_t mask, uint64_t value) {
  if (!(mask >> current % 32 & 1)) fail("a thread is not in its own mask");
  Lanes all;
  threads[current].given = value;
  threads[current].mask = mask;
  leave(IN_WARP);
  for (uint32_t i = 0; i < 32; ++i) all.given[i] = threads[current / 32 * 32 + i].given;
  leave(IN_WARP);  // nobody gives the next one before all have read this one
  return all;
}

// What the launch did not wait for is done now.
extern "C" {
inline void (*emulated_wait)();
}
inline void wait_for_clear() { emulated_wait(); }

inline void wait_at(uint32_t barrier, uint32_t wanted) {
  threads[current].barrier = barrier;
  threads[current].wanted = wanted;
  leave(AT_BARRIER);
}

template <class W>
void load(W& v, const char* p) {
  if (uintptr_t(p) % sizeof v) fail("a load from an address that is not a multiple of its word");
  memcpy(&v, p, sizeof v);
}
template <class W>
void store(char* p, const W& v) {
  if (uintptr_t(p) % sizeof v) fail("a store to an address that is not a multiple of its word");
  memcpy(p, &v, sizeof v);
}
template <int BYTES>
void fetch(char* shared, const char* src) {
  if ((uintptr_t(shared) | uintptr_t(src)) % BYTES) fail("cp.async of an address that is not a multiple of its bytes");
  threads[current].fetches.push_back({shared, src, BYTES, threads[current].groups});
}
inline void close_fetches() { ++threads[current].groups; }
inline void wait_for_fetches(uint32_t groups) {
  Thread& me = threads[current];
  if (groups == 0) ++me.groups;  // cp.async.wait_all
  size_t done = 0;
  for (; done < me.fetches.size() && me.fetches[done].group + groups < me.groups; ++done)
    memcpy(me.fetches[done].shared, me.fetches[done].src, me.fetches[done].bytes);
  me.fetches.erase(me.fetches.begin(), me.fetches.begin() + done);
}

template <class ARGS>
struct Launch {
  const ARGS* args;
  char* shared;
  void (*kernel)(const ARGS&, char*);
};

template <class ARGS>
void launch(void (*kernel)(const ARGS&, char*), const ARGS* args, uint32_t ctas, uint32_t threads, uint32_t shared_bytes) {
  std::vector<char> shared(shared_bytes + 16);
  grid_size.x = ctas;
  for (uint32_t cta = 0; cta < ctas; ++cta) {
    memset(shared.data(), 0xab, shared.size());
    char* aligned = shared.data() + (16 - uintptr_t(shared.data()) % 16) % 16;
    Launch<ARGS> one = {args, aligned, kernel};
    run_cta(cta, threads, [](void* of) {
      auto* mine = static_cast<Launch<ARGS>*>(of);
      mine->kernel(*mine->args, mine->shared);
    }, &one);
  }
}

}  // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define gridDim emulated::grid_size

inline void __syncthreads() { emulated::wait_at(0, 0); }
inline uint64_t __shfl_xor_sync(uint32_t mask, unsigned long long value, uint32_t apart) {
  return emulated::exchange(mask, value).given[emulated::current % 32 ^ apart];
}
inline uint64_t __shfl_sync(uint32_t mask, unsigned long long value, uint32_t lane) {
  return emulated::exchange(mask, value).given[lane % 32];
}
inline int __any_sync(uint32_t mask, int given) {
  int any = 0;
  const emulated::Lanes all = emulated::exchange(mask, given);
  for (uint32_t i = 0; i < 32; ++i) any |= mask >> i & 1 && all.given[i];
  return any;
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value) {
  uint32_t sum = 0;
  for (uint64_t one : emulated::exchange(mask, value).given) sum += uint32_t(one);
  return sum;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t chosen) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t made = 0;
  for (int i = 0; i < 4; ++i) made |= uint32_t(bytes >> 8 * (chosen >> 4 * i & 7) & 0xff) << 8 * i;
  return made;
}
inline void atomicAdd(unsigned long long* to, unsigned long long value) { *to += value; }

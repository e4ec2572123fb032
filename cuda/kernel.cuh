// kernel.cuh: a kernel of one part, of two (K and V in one launch), of planes, or of a cast; KVBM_KERNEL defines one by its name.
#pragma once

#include "cast.cuh"
#include "digest.cuh"
#include "few.cuh"
#include "planes.cuh"
#include "rows.cuh"
#include "tile.cuh"

namespace kvbm {

template <class... PARTS>
struct Kernel;

template <class P>
struct Kernel<P> {
  static constexpr uint32_t kTeams = P::kTeams, kThreads = P::kThreads * kTeams, kMinCtas = kTeams > 1 ? 1 : P::kMinCtas;
  // grid->ctas is enough for all the work at once.  With teams a launch may have fewer: they loop.
  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    if (!P::prepare(*a, a->part[0], sms, grid->shared_bytes)) return KVBM_TOO_LARGE;
    grid->ctas = divide_up(a->part[0].ctas, kTeams);
    grid->threads_x = kThreads;
    grid->threads_y = 1;
    grid->shared_bytes *= kTeams;
    return KVBM_OK;
  }
#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, char* shared) {
    const kvbm_part& p = a.part[0];
    if constexpr (kTeams == 1) {
      P::run(a, p, blockIdx.x, shared);
    } else {
      const uint32_t team = P::Mine::number();
      shared += team * P::team_bytes(p);
      for (uint32_t cta = blockIdx.x * kTeams + team; cta < p.ctas; cta += gridDim.x * kTeams) P::run(a, p, cta, shared);
    }
  }
#else
  static void run_host(const kvbm_args* a, uint32_t, uint32_t first, uint32_t last, int streaming) {
    P::host(*a, a->part[0], first, last, streaming != 0);
  }
  static constexpr decltype(&run_host) host() {
    if constexpr (kTeams == 1)
      return run_host;
    else
      return nullptr;
  }
#endif
};

template <class P, class Q>
struct Kernel<P, Q> {
  static_assert(P::kThreads == Q::kThreads, "the parts of one launch have CTAs of one size");
  static_assert(P::kTeams == 1 && Q::kTeams == 1, "kernels with teams have one part: each part is a launch");
  static constexpr uint32_t kTeams = 1, kThreads = P::kThreads,
                            kMinCtas = P::kMinCtas < Q::kMinCtas ? P::kMinCtas : Q::kMinCtas;
  static int prepare(kvbm_args* a, uint32_t sms, kvbm_grid* grid) {
    uint32_t shared[2];
    if (!P::prepare(*a, a->part[0], sms, shared[0]) || !Q::prepare(*a, a->part[1], sms, shared[1])) return KVBM_TOO_LARGE;
    if (uint64_t{a->part[0].ctas} + a->part[1].ctas >= (1u << 31)) return KVBM_TOO_LARGE;
    grid->ctas = a->part[0].ctas + a->part[1].ctas;
    grid->threads_x = kThreads;
    grid->threads_y = 1;
    grid->shared_bytes = shared[0] > shared[1] ? shared[0] : shared[1];
    return KVBM_OK;
  }
#ifdef __CUDACC__
  static __device__ __forceinline__ void run(const kvbm_args& a, char* shared) {
    if (blockIdx.x < a.part[0].ctas)
      P::run(a, a.part[0], blockIdx.x, shared);
    else
      Q::run(a, a.part[1], blockIdx.x - a.part[0].ctas, shared);
  }
#else
  static void run_host(const kvbm_args* a, uint32_t part, uint32_t first, uint32_t last, int streaming) {
    part == 0 ? P::host(*a, a->part[0], first, last, streaming != 0) : Q::host(*a, a->part[1], first, last, streaming != 0);
  }
  static constexpr decltype(&run_host) host() { return run_host; }
#endif
};

template <int OUTER, int INNER, int WORD>
struct Kernel<FewRows<OUTER, INNER, WORD>> : FewRows<OUTER, INNER, WORD> {};

template <int OUTER, int INNER, bool SUMS>
struct Kernel<Record<OUTER, INNER, SUMS>> : Record<OUTER, INNER, SUMS> {};

template <int OUTER, int INNER, bool GATHERS>
struct Kernel<Page<OUTER, INNER, GATHERS>> : Page<OUTER, INNER, GATHERS> {};

template <int OUTER, int INNER, class FROM, class TO, class SCALE, bool SUMS>
struct Kernel<Cast<OUTER, INNER, FROM, TO, SCALE, SUMS>> : Cast<OUTER, INNER, FROM, TO, SCALE, SUMS> {};

template <int OUTER, int INNER, bool QUANTISES, int PAIR>
struct Kernel<CastAny<OUTER, INNER, QUANTISES, PAIR>> : CastAny<OUTER, INNER, QUANTISES, PAIR> {};

}  // namespace kvbm

// The generated files have one such line per kernel.
#ifdef __CUDACC__
#define KVBM_KERNEL(name, ...)                                                                                           \
  extern "C" __global__ void __launch_bounds__(kvbm::Kernel<__VA_ARGS__>::kThreads, kvbm::Kernel<__VA_ARGS__>::kMinCtas) \
      name(const __grid_constant__ kvbm_args args) {                                                                     \
    extern __shared__ __align__(16) char shared[];                                                                       \
    kvbm::Kernel<__VA_ARGS__>::run(args, shared);                                                                        \
  }
#else
#define KVBM_KERNEL(name, image, parts, ...) \
  {#name,                                    \
   image,                                    \
   parts,                                    \
   kvbm::Kernel<__VA_ARGS__>::kTeams,        \
   kvbm::Kernel<__VA_ARGS__>::prepare,       \
   kvbm::Kernel<__VA_ARGS__>::host()},
#endif

// Compares the casts of runs for each instruction set of this CPU with those of single values.  Prints what was compared, and
// the number of differences.
#include <cstdio>
#include <random>
#include <vector>

#include "cast_host.cuh"

using namespace kvbm;

template <class F>
uint32_t code_at(const std::vector<char>& from, uint64_t i) {
  if constexpr (F::kBits == 4) return uint8_t(from[i / 2]) >> i % 2 * 4 & 15;
  uint32_t code = 0;
  memcpy(&code, &from[i * F::kBits / 8], F::kBits / 8);
  return code;
}

template <class FROM, class TO>
void compare(const char* name) {
  constexpr uint64_t kCount = 1 << 16, kGuard = 64;
  std::mt19937 random(7);
  std::vector<char> from(kCount * FROM::kBits / 8), to(kCount * TO::kBits / 8 + kGuard);
  for (char& byte : from) byte = char(random());
  if (FROM::kBits == 16)
    for (uint64_t i = 0; i < kCount; ++i) memcpy(&from[2 * i], &i, 2);  // every code
  struct {
    const char* isa;
    bool runs;
    HostRuns<FROM, TO> how;
  } const all[] = {
      {"plain", true, {cast_plain<FROM, TO>, largest_plain<FROM>}},
#ifdef __x86_64__
      {"avx2", __builtin_cpu_supports("avx2") != 0, {cast_avx2<FROM, TO>, largest_avx2<FROM>}},
      {"avx512", __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"),
       {cast_avx512<FROM, TO>, largest_avx512<FROM>}},
#endif
  };
  for (const auto& one : all) {
    uint64_t bad = 0;
    for (uint64_t run : {8, 16, 24, 128, 1 << 15}) {
      if (!one.runs) continue;
      for (float factor : {1.0f, 0.37f, 1e-30f}) {
        std::fill(to.begin(), to.end(), char(0x5a));
        for (uint64_t i = 0; i + run <= kCount; i += run)
          one.how.cast(&from[i * FROM::kBits / 8], &to[i * TO::kBits / 8], run, factor);
        const uint64_t done = kCount / run * run;
        for (uint64_t i = 0; i < done; ++i)
          bad += code_at<TO>(to, i) != TO::round(FROM::value(code_at<FROM>(from, i)) * factor);
        for (uint64_t i = done * TO::kBits / 8; i < to.size(); ++i) bad += to[i] != 0x5a;
      }
      if constexpr (FROM::kBits >= 16) {
        for (uint64_t i = 0; i + run <= kCount; i += run) {
          uint32_t most = 0;
          for (uint64_t k = i; k < i + run; ++k) {
            const uint32_t code = code_at<FROM>(from, k) & (~0u >> (33 - FROM::kBits));
            if (code < FROM::kInfinite && code > most) most = code;
          }
          bad += one.how.largest(&from[i * FROM::kBits / 8], run) != most;
        }
      }
    }
    printf("%s %s %d %llu\n", name, one.isa, one.runs, static_cast<unsigned long long>(bad));
  }
}

template <class PLAIN>
void both_ways(const char* name) {
  compare<PLAIN, E4m3>(name);
  compare<PLAIN, E5m2>(name);
  compare<PLAIN, I8>(name);
  compare<PLAIN, E2m1>(name);
  compare<PLAIN, Bf16>(name);
  compare<E4m3, PLAIN>(name);
  compare<E5m2, PLAIN>(name);
  compare<I8, PLAIN>(name);
  compare<E2m1, PLAIN>(name);
}

int main() {
  both_ways<F16>("f16");
  both_ways<F32>("f32");
  both_ways<Bf16>("bf16");
}

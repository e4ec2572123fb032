// Compares the casts of groups for each instruction set of this CPU with those of single values.  Prints what was compared, and
// the number of differences.
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "cast_host.cuh"

using namespace kvbm;

template <class F>
uint32_t code_at(const char* from, uint64_t i) {
  if constexpr (F::kBits == 4) return uint8_t(from[i / 2]) >> i % 2 * 4 & 15;
  uint32_t code = 0;
  memcpy(&code, from + i * F::kBits / 8, F::kBits / 8);
  return code;
}

constexpr uint64_t kCount = 1 << 16, kGuard = 64;

// Codes of which some groups are finite and others not; every code, if it has 16 bits.
template <class F>
std::vector<char> elements(std::mt19937& random, bool finite) {
  std::vector<char> made(kCount * F::kBits / 8);
  for (char& byte : made) byte = char(random());
  if constexpr (F::kBits >= 16) {
    for (uint64_t i = 0; i < kCount; ++i) {
      uint32_t code = F::kBits == 16 ? uint32_t(i) : code_at<F>(made.data(), i);
      if (finite && (code & (~0u >> (33 - F::kBits))) >= F::kInfinite) code -= F::kInfinite;
      memcpy(&made[i * F::kBits / 8], &code, F::kBits / 8);
    }
  }
  return made;
}

template <class FROM, class TO, class SCALE>
uint64_t differences(CastGroups cast, bool finite, uint32_t run, float given) {
  constexpr bool kQuantises = FROM::kBits >= 16, kComputes = kQuantises && SCALE::kBits;
  constexpr uint64_t kScale = SCALE::kBits / 8;
  std::mt19937 random(7);
  const std::vector<char> from = elements<FROM>(random, finite);
  const uint64_t groups = kCount / run;
  std::vector<char> to(kCount * TO::kBits / 8 + kGuard, 0x5a), scales(groups * kScale + kGuard, 0x5a);
  if (!kComputes)
    for (uint64_t i = 0; i < groups * kScale; ++i) scales[i] = char(random());
  kvbm_part part = {};
  part.inner[0].extent.n = run / 8;
  part.inner[1].extent.n = part.inner[2].extent.n = 1;
  HostGroups some = {};
  uint64_t bad = 0;
  for (uint64_t first = 0; first < groups; first += some.count) {
    some.count = uint32_t(std::min<uint64_t>(HostGroups::kMost - first % 3, groups - first));
    for (uint32_t g = 0; g < some.count; ++g) {
      some.src[g] = &from[(first + g) * run * FROM::kBits / 8];
      some.dst[g] = &to[(first + g) * run * TO::kBits / 8];
      some.scale[g] = &scales[(first + g) * kScale];
      some.given[g] = given;
    }
    cast(some, part);
  }
  for (uint64_t g = 0; g < groups; ++g) {
    uint32_t scale = 0;
    memcpy(&scale, &scales[g * kScale], kScale);
    if constexpr (kComputes) {
      uint32_t most = 0;
      for (uint64_t i = g * run; i < (g + 1) * run; ++i) {
        const uint32_t code = code_at<FROM>(from.data(), i) & (~0u >> (33 - FROM::kBits));
        if (code < FROM::kInfinite && code > most) most = code;
      }
      bad += scale != scale_of<SCALE>(bits_of(FROM::value(most)), range_of<TO>(), given);
    }
    const float factor = kQuantises ? 1.0f / factor_of<SCALE>(scale, given) : factor_of<SCALE>(scale, given);
    for (uint64_t i = g * run; i < (g + 1) * run; ++i)
      bad += code_at<TO>(to.data(), i) != TO::round(FROM::value(code_at<FROM>(from.data(), i)) * factor);
  }
  for (uint64_t i = 0; i < kGuard; ++i)
    bad += (to[groups * run * TO::kBits / 8 + i] != 0x5a) + (scales[groups * kScale + i] != 0x5a);
  return bad;
}

template <class FROM, class TO, class SCALE>
void compare(const char* name) {
  struct {
    const char* isa;
    bool runs;
    CastGroups cast;
  } const all[] = {
      {"plain", true, cast_groups_plain<FROM, TO, SCALE>},
#ifdef __x86_64__
      {"avx2", __builtin_cpu_supports("avx2") != 0, cast_groups_avx2<FROM, TO, SCALE>},
      {"avx512", __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"),
       cast_groups_avx512<FROM, TO, SCALE>},
#endif
  };
  for (const auto& one : all) {
    uint64_t bad = 0;
    for (uint32_t run : {8, 16, 24, 32, 128, 1 << 13})
      for (float given : {1.0f, 0.37f, 0x1.1p-100f, 0x1.1p-101f, 0x1.1p100f})
        for (bool finite : {false, true})
          if (one.runs) bad += differences<FROM, TO, SCALE>(one.cast, finite, run, given);
    printf("%s %s %d %llu\n", name, one.isa, one.runs, static_cast<unsigned long long>(bad));
  }
}

template <class PLAIN, class QUANTISED, class SCALE>
void both_ways(const char* name) {
  compare<PLAIN, QUANTISED, SCALE>(name);
  compare<QUANTISED, PLAIN, SCALE>(name);
}

int main() {
  DefaultArithmetic arithmetic;
  both_ways<Bf16, E4m3, F32>("bf16");
  both_ways<Bf16, E4m3, E8m0>("bf16");
  both_ways<Bf16, E4m3, None>("bf16");
  both_ways<Bf16, E5m2, F32>("bf16");
  both_ways<Bf16, I8, F32>("bf16");
  both_ways<Bf16, E2m1, E4m3>("bf16");
  both_ways<F16, E4m3, F32>("f16");
  both_ways<F16, E2m1, E8m0>("f16");
  both_ways<F32, E4m3, None>("f32");
  both_ways<F32, E2m1, E4m3>("f32");
  compare<F16, Bf16, None>("f16");
}

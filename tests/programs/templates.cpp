// templates.cpp: the host half of the templates, asked from outside: `grids` or `places`, and numbers on the standard input.
#include <cstdio>
#include <cstring>
#include <vector>
#include "permute.cuh"
using namespace kvbm;
static const kvbm_kernel kernels[] = {
#include "kernels.inc"
};

// sms, pairs, extents of the four outer and the eight inner modes -> what each kernel says of its grid
static void grids() {
  kvbm_args a = {};
  uint32_t sms, n;
  if (scanf("%u %u", &sms, &a.num_pairs) != 2) return;
  for (auto& mode : a.part[0].outer) if (scanf("%u", &n) == 1) mode.extent.n = n;
  for (auto& mode : a.part[0].inner) if (scanf("%u", &n) == 1) mode.extent.n = n;
  for (const kvbm_kernel& kernel : kernels) {
    kvbm_grid grid = {};
    const int status = kernel.prepare(&a, sms, &grid);
    printf("%s %u %d %d %u %u %u %u\n", kernel.name, kernel.teams, kernel.host != nullptr, status, a.part[0].ctas,
           grid.ctas, grid.threads_x, grid.shared_bytes);
  }
}

// id_bytes, inline_mask, blocks of both sides, pairs, ids of both sides -> where each pair goes, and what is noted of it: first
// with nowhere to note it
static void places() {
  static kvbm_args a = {};
  uint32_t noted;
  if (scanf("%u %u %u %u %u", &a.id_bytes, &a.inline_mask, &a.src_blocks, &a.dst_blocks, &a.num_pairs) != 5) return;
  std::vector<long long> ids[2];
  std::vector<int32_t> narrow[2];
  uint64_t* const field[2] = {&a.src_ids, &a.dst_ids};
  for (int side = 0; side < 2; ++side) {
    ids[side].resize(a.num_pairs);
    for (auto& id : ids[side]) if (scanf("%lld", &id) != 1) return;
    narrow[side].assign(ids[side].begin(), ids[side].end());
    const void* list = a.id_bytes == 8 ? static_cast<const void*>(ids[side].data()) : narrow[side].data();
    const uint64_t behind = sizeof(kvbm_part) + side * 1024;  // the one part
    char* inside = reinterpret_cast<char*>(a.payload) + behind;
    memcpy(inside, list, a.num_pairs * a.id_bytes);
    *field[side] = a.inline_mask >> side & 1 ? behind : reinterpret_cast<uint64_t>(list);
    if (a.inline_mask >> side & 16) *field[side] = 8;  // not to be followed
  }
  const uint64_t base = 0;
  const auto number = [](const void* p) { return static_cast<long long>(reinterpret_cast<intptr_t>(p)); };
  a.src_table = a.dst_table = reinterpret_cast<uint64_t>(&base);
  a.part[0].src_id_stride = a.part[0].dst_id_stride = 1;
  set_jobs(a, a.part[0], 0, 1, 1);
  for (int turn = 0; turn < 2; ++turn) {
    a.fault = turn ? reinterpret_cast<uint64_t>(&noted) : 0;
    for (uint32_t pair = 0; pair < a.num_pairs; ++pair) {
      Bases at = {};
      noted = 0;
      if (!locate<0>(a, a.part[0], pair, at)) printf("- - ");
      else printf("%lld %lld ", number(at.src), number(at.dst));
      printf("%u ", noted);
    }
  }
}

int main(int, char** how) { *how[1] == 'g' ? grids() : places(); }

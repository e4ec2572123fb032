// prepare.cpp: do kernels that were compiled at run time prepare their launches as built ones do?
#include <cstdio>
#include <cstdlib>
#include "kernel.cuh"
#include "runtime.cpp"
namespace kvbm_driver { Driver driver; thread_local const char* last_call = ""; }
using namespace kvbm;
extern "C" const kvbm_kernel kvbm_kernels[] = {
#include "kernels.inc"
};
extern "C" const int32_t kvbm_num_kernels = sizeof kvbm_kernels / sizeof *kvbm_kernels;
static const struct { uint32_t parts; kvbm_form forms[2]; } forms[] = {
#include "forms.inc"
};

static long agreed, refused;
static uint64_t state = 12345;
static uint64_t draw(uint64_t below) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (state >> 33) % below;
}
static uint32_t extent() { return draw(3) ? 1 + draw(5) : draw(4) ? 1u << draw(10) : 1 + draw(3000); }

int main() {
  static kvbm_args given, built, compiled;
  for (int k = 0; k < kvbm_num_kernels; ++k) {
    int number = 0;
    const kvbm_kernel& kernel = kvbm_kernels[k];
    if (kvbm_add_kernel("compiled", forms[k].forms, forms[k].parts, "code", 4, 90, &number))
      return printf("%s: not added\n", kernel.name);
    kvbm_driver::num_compiled.store(0);  // a number for the next one
    kvbm_driver::Compiled* entry = kvbm_driver::compiled[0].load();
    if (entry->parts != kernel.parts || entry->teams != kernel.teams) return printf("%s: other parts\n", kernel.name);
    for (int turn = 0; turn < 300; ++turn) {
      given = {};
      given.num_pairs = 1 + draw(2000);
      given.num_parts = forms[k].parts;
      const int64_t src_id = int64_t(draw(2)) << draw(30), dst_id = int64_t(draw(2)) << draw(30);
      for (uint32_t p = 0; p < given.num_parts; ++p) {
        given.part[p].src_id_stride = src_id, given.part[p].dst_id_stride = dst_id;
        for (auto& mode : given.part[p].outer) {
          mode.extent = kvbm_make_div(draw(4) ? 1 : extent());
          mode.src = draw(1u << 31), mode.dst = draw(1u << 31), mode.src_table = draw(3), mode.dst_table = draw(3);
        }
        for (auto& mode : given.part[p].inner) {
          mode.extent = kvbm_make_div(draw(2) ? 1 : extent());
          mode.src = draw(1u << 31) << !draw(200), mode.dst = draw(1u << 31);
        }
        for (int side = 0; side < 2 && forms[k].forms[p].kind == KVBM_TILE; ++side)  // whole words on both sides
          given.part[p].inner[side].extent = kvbm_make_div(16 * given.part[p].inner[side].extent.n);
      }
      built = given, compiled = given;
      const uint32_t sms = draw(5) ? 132 : 1 + draw(160);
      kvbm_grid a = {}, b = {};
      const int one = kernel.prepare(&built, sms, &a);
      const int other = kvbm_driver::prepare_runtime(*entry, &compiled, sms, &b);
      if (one != other || (one == 0 && (memcmp(&a, &b, sizeof a) || memcmp(&built, &compiled, sizeof built))))
        return printf("%s: turn %d: %d %d, %u %u CTAs, %u %u bytes\n", kernel.name, turn, one, other, a.ctas, b.ctas,
                      a.shared_bytes, b.shared_bytes);
      ++(one ? refused : agreed);
    }
  }
  return printf("%ld agreed, %ld refused\n", agreed, refused), 0;
}

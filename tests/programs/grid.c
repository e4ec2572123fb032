/* The fake driver, which also notes the grid that it was asked for, and how much shared memory each kernel may have. */
#define cuLaunchKernel launch
#define cuFuncSetAttribute unused
#include "../data/fake_driver.c"
#undef cuLaunchKernel
#undef cuFuncSetAttribute
long last_grid, last_threads, last_shared, most_shared; /* of the last launch; what its kernel may have */
static struct Allowed {
  void* kernel;
  long bytes;
} allowed[256];
static long* allowed_of(void* kernel) {
  int i = 0;
  while (allowed[i].kernel && allowed[i].kernel != kernel) ++i;
  if (i == 255) abort();
  if (!allowed[i].kernel) allowed[i] = (struct Allowed){kernel, 48 << 10};
  return &allowed[i].bytes;
}
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned x, unsigned y, unsigned z, unsigned shared, void* s,
                   void** p, void** e) {
  last_grid = gx, last_threads = x, last_shared = shared, most_shared = *allowed_of(f);
  return shared > most_shared ? 1 : launch(f, gx, gy, gz, x, y, z, shared, s, p, e);
}
int cuFuncSetAttribute(void* f, int what, int value) {
  if (what == 8) *allowed_of(f) = value;
  return 0;
}

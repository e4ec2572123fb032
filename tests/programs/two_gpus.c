/* two_gpus.c: a driver that knows the names of two GPUs and nothing else. */
#include <string.h>
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, device ? "Second GPU" : "First GPU"); return size == 0; }

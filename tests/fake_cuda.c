/* What torch's CUDA build asks of a driver and of its runtime before it touches a device: eight H100s are there, and nothing
 * has been allocated on them; pinned memory is ordinary memory. Everything else fails as it does without a driver, so that
 * work on a real device shows. It is preloaded under the driver's name (scripts/fake_cuda.sh). */
#include <stdlib.h>
size_t last_pinned; /* bytes that the last pinned block was asked for with */
int cudaGetDeviceProperties(void *properties, int device) { return 0; }
int cudaHostAlloc(void **block, size_t bytes, unsigned flags) { *block = malloc(last_pinned = bytes); return 0; }
int cudaFreeHost(void *block) { free(block); return 0; }
signed char _ZN3c104cuda12device_countEv(void) { return 8; }
_Bool _ZN3c104cuda17hasPrimaryContextEa(signed char device) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *active = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 8; return 0; }
/* Guards of a tensor on another GPU than the first one go there, and back. */
static _Thread_local int current;
int cudaGetDevice(int *device) { *device = current; return 0; }
int cudaSetDevice(int device) { current = device; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -1; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }

/* A process' wall clock, shifted while it runs: preloaded by tests/faults/clocks.py.
 *
 * The file that CLOCK_FILE names holds one double, the seconds to add. Only the wall clock is
 * shifted: like a real machine's, a monotonic clock never jumps.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double *shift;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void set_up(void) {
  real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  const char *path = getenv("CLOCK_FILE");
  int file = path ? open(path, O_RDONLY) : -1;
  if (file < 0) return;
  void *memory = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) shift = memory;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!real_clock_gettime) set_up();
  int result = real_clock_gettime(clock, now);
  if (result == 0 && shift && clock == CLOCK_REALTIME) {
    double whole = floor(*shift);
    now->tv_sec += (time_t)whole;
    now->tv_nsec += (long)((*shift - whole) * 1e9);
    if (now->tv_nsec >= 1000000000L) {
      now->tv_sec += 1;
      now->tv_nsec -= 1000000000L;
    }
  }
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec precise;
  int result = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return result;
}

time_t time(time_t *where) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (where) *where = precise.tv_sec;
  return precise.tv_sec;
}

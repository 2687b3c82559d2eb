/* CLOCK_REALTIME is ahead by as many seconds as the file CLOCK_FILE has bytes. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, id, now);
  const char *file = getenv("CLOCK_FILE");
  struct stat ahead;
  if (result == 0 && id == CLOCK_REALTIME && file && stat(file, &ahead) == 0)
    now->tv_sec += ahead.st_size;
  return result;
}

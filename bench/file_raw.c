/* file_raw.c: what the disk and the page cache give to plain threads with plain buffers: the rates that bench/device_file.ts
 * compares with. Built and started by it:
 *
 *     file_raw read-cached|read-direct|write-direct FILE BYTES THREADS
 *
 * Prints seconds and processor seconds. Writing asks for the whole size first and ends with fdatasync, inside the time. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define PIECE (UINT64_C(8) << 20)

static int file;
static int writes;
static uint64_t size;
static _Atomic uint64_t next;
static _Atomic int failed;

static void *work(void *buffer) {
  for (uint64_t at; (at = atomic_fetch_add(&next, PIECE)) < size && !failed;) {
    uint64_t bytes = size - at < PIECE ? size - at : PIECE;
    for (uint64_t done = 0; done < bytes;) {
      ssize_t moved = writes ? pwrite(file, (char *)buffer + done, bytes - done, (off_t)(at + done))
                             : pread(file, (char *)buffer + done, bytes - done, (off_t)(at + done));
      if (moved <= 0) {
        failed = 1;
        return NULL;
      }
      done += (uint64_t)moved;
    }
  }
  return NULL;
}

static double seconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int main(int count, char **words) {
  if (count != 5) return 2;
  int direct = strstr(words[1], "direct") ? O_DIRECT : 0, threads = atoi(words[4]);
  writes = strncmp(words[1], "write", 5) == 0;
  size = strtoull(words[3], NULL, 10);
  file = open(words[2], (writes ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY) | direct, 0666);
  if (file < 0 || threads < 1 || threads > 256) return 1;
  void *buffers[256];
  pthread_t ids[256];
  for (int i = 0; i < threads; i++) {
    if (posix_memalign(&buffers[i], 4096, PIECE)) return 1;
    memset(buffers[i], i + 1, PIECE); /* touched before the clock starts */
  }
  double begin = seconds(CLOCK_MONOTONIC), busy = seconds(CLOCK_PROCESS_CPUTIME_ID);
  if (writes && fallocate(file, 0, 0, (off_t)size)) return 1;
  for (int i = 0; i < threads; i++) {
    if (pthread_create(&ids[i], NULL, work, buffers[i])) return 1;
  }
  for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
  if (writes && fdatasync(file)) failed = 1;
  printf("%.6f %.6f\n", seconds(CLOCK_MONOTONIC) - begin, seconds(CLOCK_PROCESS_CPUTIME_ID) - busy);
  return failed;
}

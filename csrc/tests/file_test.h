/* file_test.h: what the tests of the file path share: a folder, patterns, and requests that are waited for. */
#ifndef LM_FILE_TEST_H
#define LM_FILE_TEST_H

#include "core_test.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>

#include "../core/file.h"

static char folder[64];

/* A new folder for one program; gone at its end. A test that syncs thousands of times asks for one in memory. */
static inline void make_test_folder(bool in_memory) {
  bool memory = in_memory && access("/dev/shm", W_OK) == 0;
  strcpy(folder, memory ? "/dev/shm/loramem-file-XXXXXX" : "/tmp/loramem-file-XXXXXX");
  if (!mkdtemp(folder)) abort();
}

static inline void remove_test_folder(void) {
  char command[128];
  snprintf(command, sizeof command, "rm -rf %s", folder);
  if (system(command)) abort();
}

/* A path in the folder; the last four stay valid. */
static inline const char *in_folder(const char *name) {
  static char paths[4][160];
  static int next;
  char *path = paths[next++ & 3];
  snprintf(path, 160, "%s/%s", folder, name);
  return path;
}

static inline uint8_t pattern(uint64_t at) {
  return (uint8_t)(at * 37 + (at >> 8) * 11 + (at >> 16));
}

static inline uint64_t open_descriptors(void) {
  uint64_t count = 0;
  for (int fd = 0; fd < 256; fd++) count += fcntl(fd, F_GETFD) != -1;
  return count;
}

static inline bool exists(const char *path) {
  return access(path, F_OK) == 0;
}

/* Waits for a request and destroys it. @return its status, or that of the context if it was not accepted */
static inline int32_t settle(lm_ctx *ctx, lm_file_request *request, lm_file_result *result, lm_file **file) {
  if (!request) return lm_last_error(ctx, NULL, 0);
  const struct timespec pause = {.tv_nsec = 50000};
  while (lm_file_request_query(request) == LM_NOT_READY) nanosleep(&pause, NULL);
  int32_t status = lm_file_request_query(request);
  if (result) lm_file_request_result(request, result);
  if (file) *file = lm_file_request_file(request);
  lm_file_request_destroy(request);
  return status;
}

static inline lm_file_ring_stats ring_stats_of(lm_file_ring *ring) {
  lm_file_ring_stats stats = {0};
  lm_file_ring_stats_get(ring, &stats);
  return stats;
}

/* A file that holds the pattern. */
static inline void write_pattern(const char *path, uint64_t bytes) {
  uint8_t *data = malloc(bytes + 1);
  for (uint64_t i = 0; i < bytes; i++) data[i] = pattern(i);
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (fd < 0 || write(fd, data, bytes) != (ssize_t)bytes) abort();
  close(fd);
  free(data);
}

#endif

/* files.c: the system calls of the file path with failures on request and a log, for tests.
 *
 * The log holds one line of JSON for each call: its name, arguments and result (a negative errno is a failure), and "data", how
 * many raw bytes follow the line: what pwrite wrote. It is written without a buffer, so it is whole when the process is killed. */
#define _GNU_SOURCE
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long ull;

/* Counts a call. @return 0, or the negative errno that it fails with instead of being made; 1 stands for "moves nothing" */
static int begin(lm_sim_files *files) {
  const lm_sim_options *options = files->options;
  uint64_t count = atomic_fetch_add(&files->count, 1) + 1;
  if (count == options->file_kill_at) kill(getpid(), SIGKILL);
  if (files->log >= 0) pthread_mutex_lock(&files->mutex);
  uint64_t first = options->file_fail_at, fails = options->file_fails ? options->file_fails : 1;
  if (!first || count < first || count - first >= fails) return 0;
  return options->file_error ? -(int)options->file_error : 1;
}

static bool put(int fd, const void *data, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    ssize_t done = write(fd, (const uint8_t *)data + at, bytes - at);
    if (done > 0) at += (size_t)done;
    else if (errno != EINTR) return false;
  }
  return true;
}

/* Ends a call: the arguments as JSON members, each followed by a comma, and what was written. @return result */
static int64_t end(lm_sim_files *files, const char *call, int64_t result, const void *data, const char *arguments, ...) {
  if (files->log < 0) return result;
  char text[9000];
  int length = snprintf(text, sizeof text, "{\"call\":\"%s\",", call);
  va_list values;
  va_start(values, arguments);
  length += vsnprintf(text + length, sizeof text - (size_t)length, arguments, values);
  va_end(values);
  size_t bytes = data && result > 0 ? (size_t)result : 0;
  length += snprintf(text + length, sizeof text - (size_t)length, "\"result\":%lld,\"data\":%zu}\n", (long long)result, bytes);
  if (put(files->log, text, (size_t)length)) (void)put(files->log, data, bytes);
  pthread_mutex_unlock(&files->mutex);
  return result;
}

/* A call that takes the owner first. */
#define CALL(name, ...) (failed ? (failed > 0 ? -EIO : failed) : files->inner->name(files->inner->owner, __VA_ARGS__))

static int32_t sim_open(void *owner, const char *path, int32_t flags, uint32_t mode) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  int64_t result = CALL(open, path, flags, mode);
  return (int32_t)end(files, "open", result, NULL, "\"path\":\"%s\",\"flags\":%d,", path, flags);
}

static int32_t sim_close(void *owner, int32_t fd) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  /* A close that fails has closed all the same. */
  int64_t result = files->inner->close(files->inner->owner, fd);
  if (failed) result = failed > 0 ? -EIO : failed;
  return (int32_t)end(files, "close", result, NULL, "\"fd\":%d,", fd);
}

static uint64_t most(const lm_sim_files *files, uint64_t bytes) {
  uint64_t limit = files->options->file_most;
  return limit && bytes > limit ? limit : bytes;
}

static int64_t sim_pread(void *owner, int32_t fd, void *memory, uint64_t bytes, uint64_t offset, int32_t cached_only) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  int64_t result = failed > 0 ? 0 : CALL(pread, fd, memory, most(files, bytes), offset, cached_only);
  return end(files, "pread", result, NULL, "\"fd\":%d,\"offset\":%llu,\"bytes\":%llu,\"cachedOnly\":%d,", fd, (ull)offset,
             (ull)bytes, cached_only);
}

static int64_t sim_pwrite(void *owner, int32_t fd, const void *memory, uint64_t bytes, uint64_t offset) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  int64_t result = failed > 0 ? 0 : CALL(pwrite, fd, memory, most(files, bytes), offset);
  return end(files, "pwrite", result, memory, "\"fd\":%d,\"offset\":%llu,\"bytes\":%llu,", fd, (ull)offset, (ull)bytes);
}

static int32_t sim_fallocate(void *owner, int32_t fd, uint64_t bytes) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  return (int32_t)end(files, "fallocate", CALL(fallocate, fd, bytes), NULL, "\"fd\":%d,\"bytes\":%llu,", fd, (ull)bytes);
}

static int32_t sim_ftruncate(void *owner, int32_t fd, uint64_t bytes) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  return (int32_t)end(files, "ftruncate", CALL(ftruncate, fd, bytes), NULL, "\"fd\":%d,\"bytes\":%llu,", fd, (ull)bytes);
}

static int32_t sim_fdatasync(void *owner, int32_t fd) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  return (int32_t)end(files, "fdatasync", CALL(fdatasync, fd), NULL, "\"fd\":%d,", fd);
}

static int32_t sim_fsync(void *owner, int32_t fd) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  return (int32_t)end(files, "fsync", CALL(fsync, fd), NULL, "\"fd\":%d,", fd);
}

static int32_t sim_rename(void *owner, const char *from, const char *to) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  return (int32_t)end(files, "rename", CALL(rename, from, to), NULL, "\"path\":\"%s\",\"to\":\"%s\",", from, to);
}

static int32_t sim_unlink(void *owner, const char *path) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  return (int32_t)end(files, "unlink", CALL(unlink, path), NULL, "\"path\":\"%s\",", path);
}

static int32_t sim_mkdir(void *owner, const char *path, uint32_t mode) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  return (int32_t)end(files, "mkdir", CALL(mkdir, path, mode), NULL, "\"path\":\"%s\",", path);
}

static int32_t sim_flock(void *owner, int32_t fd, int32_t operation) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  return (int32_t)end(files, "flock", CALL(flock, fd, operation), NULL, "\"fd\":%d,", fd);
}

static int32_t sim_fstat(void *owner, int32_t fd, uint64_t *bytes, uint32_t *mode) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  return (int32_t)end(files, "fstat", CALL(fstat, fd, bytes, mode), NULL, "\"fd\":%d,", fd);
}

static int32_t sim_statvfs(void *owner, const char *path, uint64_t *free_bytes) {
  lm_sim_files *files = owner;
  int failed = begin(files);
  return (int32_t)end(files, "statvfs", CALL(statvfs, path, free_bytes), NULL, "\"path\":\"%s\",", path);
}

void lm_sim_files_open(lm_sim_files *files, const lm_file_calls *inner, const lm_sim_options *options) {
  *files = (lm_sim_files){
      .calls =
          {
              .owner = files,
              .open = sim_open,
              .close = sim_close,
              .pread = sim_pread,
              .pwrite = sim_pwrite,
              .fallocate = sim_fallocate,
              .ftruncate = sim_ftruncate,
              .fdatasync = sim_fdatasync,
              .fsync = sim_fsync,
              .rename = sim_rename,
              .unlink = sim_unlink,
              .mkdir = sim_mkdir,
              .flock = sim_flock,
              .fstat = sim_fstat,
              .statvfs = sim_statvfs,
          },
      .inner = inner,
      .options = options,
      .log = -1,
  };
  pthread_mutex_init(&files->mutex, NULL);
  if (options->file_log[0]) files->log = open(options->file_log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
}

void lm_sim_files_close(lm_sim_files *files) {
  if (files->log >= 0) close(files->log);
  pthread_mutex_destroy(&files->mutex);
}

/* file_calls.c: the system's own calls behind the table of the file path. */
#define _GNU_SOURCE
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int64_t outcome(int64_t result) {
  return result < 0 ? -errno : result;
}

static int32_t sys_open(void *owner, const char *path, int32_t flags, uint32_t mode) {
  (void)owner;
  return (int32_t)outcome(open(path, flags, mode));
}

static int32_t sys_close(void *owner, int32_t fd) {
  (void)owner;
  return (int32_t)outcome(close(fd));
}

static int64_t sys_pread(void *owner, int32_t fd, void *memory, uint64_t bytes, uint64_t offset, int32_t cached_only) {
  (void)owner;
  if (!cached_only) return outcome(pread(fd, memory, bytes, (off_t)offset));
  struct iovec part = {.iov_base = memory, .iov_len = bytes};
  int64_t result = outcome(preadv2(fd, &part, 1, (off_t)offset, RWF_NOWAIT));
  return result == -ENOSYS || result == -EINVAL ? -EOPNOTSUPP : result;
}

static int64_t sys_pwrite(void *owner, int32_t fd, const void *memory, uint64_t bytes, uint64_t offset) {
  (void)owner;
  return outcome(pwrite(fd, memory, bytes, (off_t)offset));
}

/* Not posix_fallocate: where the file system cannot, that one writes every block. */
static int32_t sys_fallocate(void *owner, int32_t fd, uint64_t bytes) {
  (void)owner;
  return (int32_t)outcome(fallocate(fd, 0, 0, (off_t)bytes));
}

static int32_t sys_ftruncate(void *owner, int32_t fd, uint64_t bytes) {
  (void)owner;
  return (int32_t)outcome(ftruncate(fd, (off_t)bytes));
}

static int32_t sys_fdatasync(void *owner, int32_t fd) {
  (void)owner;
  return (int32_t)outcome(fdatasync(fd));
}

static int32_t sys_fsync(void *owner, int32_t fd) {
  (void)owner;
  return (int32_t)outcome(fsync(fd));
}

static int32_t sys_rename(void *owner, const char *from, const char *to) {
  (void)owner;
  return (int32_t)outcome(rename(from, to));
}

static int32_t sys_unlink(void *owner, const char *path) {
  (void)owner;
  return (int32_t)outcome(unlink(path));
}

static int32_t sys_mkdir(void *owner, const char *path, uint32_t mode) {
  (void)owner;
  return (int32_t)outcome(mkdir(path, mode));
}

static int32_t sys_flock(void *owner, int32_t fd, int32_t operation) {
  (void)owner;
  return (int32_t)outcome(flock(fd, operation));
}

static int32_t sys_fstat(void *owner, int32_t fd, uint64_t *bytes, uint32_t *mode) {
  (void)owner;
  struct stat found;
  if (fstat(fd, &found)) return -errno;
  *bytes = (uint64_t)found.st_size;
  *mode = found.st_mode;
  return 0;
}

static int32_t sys_statvfs(void *owner, const char *path, uint64_t *free_bytes) {
  (void)owner;
  struct statvfs found;
  if (statvfs(path, &found)) return -errno;
  *free_bytes = (uint64_t)found.f_bavail * found.f_frsize;
  return 0;
}

const lm_file_calls lm_system_calls = {
    .open = sys_open,
    .close = sys_close,
    .pread = sys_pread,
    .pwrite = sys_pwrite,
    .fallocate = sys_fallocate,
    .ftruncate = sys_ftruncate,
    .fdatasync = sys_fdatasync,
    .fsync = sys_fsync,
    .rename = sys_rename,
    .unlink = sys_unlink,
    .mkdir = sys_mkdir,
    .flock = sys_flock,
    .fstat = sys_fstat,
    .statvfs = sys_statvfs,
};

const lm_file_calls *lm_file_calls_of(lm_ctx *ctx) {
  return ctx->api->file_calls ? ctx->api->file_calls(ctx->backend) : &lm_system_calls;
}

int32_t lm_call_open(const lm_file_calls *calls, const char *path, int32_t flags, uint32_t mode) {
  int32_t fd;
  do fd = calls->open(calls->owner, path, flags, mode);
  while (fd == -EINTR);
  return fd;
}

uint64_t lm_clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

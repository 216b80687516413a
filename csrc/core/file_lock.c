/* file_lock.c: advisory locks (flock) that die with the process. */
#define _GNU_SOURCE
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

struct lm_file_lock {
  lm_ctx *ctx;
  const lm_file_calls *calls;
  int32_t fd;
};

static int32_t fail_call(lm_ctx *ctx, const char *call, int32_t error, const char *path) {
  const char *name = strerrorname_np(-error), *text = strerrordesc_np(-error);
  return lm_fail(ctx, LM_ERR_FILE, "%s: %s (%s): path=\"%s\": check the path and its folder", call, text ? text : "unknown error",
                 name ? name : "?", path);
}

/* Who wrote its process id into the file; 0 = unknown. */
static int32_t read_holder(const lm_file_calls *calls, int32_t fd) {
  char text[32] = "";
  int64_t got = calls->pread(calls->owner, fd, text, sizeof text - 1, 0, 0);
  long pid = got > 0 ? strtol(text, NULL, 10) : 0;
  return pid > 0 && pid <= INT32_MAX ? (int32_t)pid : 0;
}

/* The process id is for people; a lock without it is still a lock, but the file must not name somebody else. */
static int32_t write_holder(const lm_file_calls *calls, int32_t fd) {
  char text[32];
  int length = snprintf(text, sizeof text, "%ld\n", (long)getpid());
  int32_t failed;
  int64_t put;
  do failed = calls->ftruncate(calls->owner, fd, 0);
  while (failed == -EINTR);
  if (failed) return failed;
  do put = calls->pwrite(calls->owner, fd, text, (uint64_t)length, 0);
  while (put == -EINTR);
  return put < 0 ? (int32_t)put : put < length ? -EIO : 0;
}

lm_file_lock *lm_file_lock_acquire(lm_ctx *ctx, int32_t *holder, const char *path) {
  static const char op[] = "lm_file_lock_acquire";
  if (!ctx) return NULL;
  if (!path || !holder) {
    lm_fail(ctx, LM_ERR_ARGUMENT, "%s: path or holder is NULL", op);
    return NULL;
  }
  const lm_file_calls *calls = lm_file_calls_of(ctx);
  lm_file_lock *lock = lm_heap_alloc(ctx, sizeof *lock, op);
  if (!lock) return NULL;
  int32_t fd = lm_call_open(calls, path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) {
    fail_call(ctx, "open", fd, path);
    lm_heap_release(lock);
    return NULL;
  }
  const char *call = "flock";
  int32_t failed;
  do failed = calls->flock(calls->owner, fd, LOCK_EX | LOCK_NB);
  while (failed == -EINTR);
  if (failed == -EWOULDBLOCK) {
    *holder = read_holder(calls, fd);
    lm_fail(ctx, LM_ERR_BUSY, "%s: the lock is held: path=\"%s\" pid=%d: wait for it to end, or choose another folder", op, path,
            *holder);
  } else {
    if (!failed) failed = write_holder(calls, fd), call = "write";
    if (failed) fail_call(ctx, call, failed, path);
  }
  if (failed) {
    (void)calls->close(calls->owner, fd);
    lm_heap_release(lock);
    return NULL;
  }
  *lock = (lm_file_lock){.ctx = ctx, .calls = calls, .fd = fd};
  lm_ctx_ref(ctx);
  return lock;
}

void lm_file_lock_destroy(lm_file_lock *lock) {
  if (!lock) return;
  lm_ctx *ctx = lock->ctx;
  (void)lock->calls->close(lock->calls->owner, lock->fd); /* drops the lock: nobody else has this open file */
  lm_heap_release(lock);
  lm_ctx_unref(ctx);
}

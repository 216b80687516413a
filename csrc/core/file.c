/* file.c: files themselves, and the requests that are one job: open, sync, publish, close, remove, make a folder, ask for room. */
#define _GNU_SOURCE
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Submits a job that is complete but for what `fill` would add. */
static lm_file_request *job(lm_file_ring *ring, lm_file *file, int32_t kind, const char *path, lm_done_fn fn, uint64_t tag,
                            const char *op) {
  lm_file_request *request = lm_request_new(ring, file, kind, path, 0, fn, tag, op);
  if (request) lm_ring_submit(request);
  return request;
}

/* Open ----------------------------------------------------------------------------------------------------------- */

lm_file_request *lm_file_open(lm_file_ring *ring, const char *path, int32_t mode, int32_t flags, uint64_t bytes, lm_done_fn fn,
                              uint64_t tag) {
  static const char op[] = "lm_file_open";
  if (!ring) return NULL;
  if (!path || mode < LM_FILE_READ || mode > LM_FILE_UPDATE || (flags & ~1) || bytes > INT64_MAX ||
      (bytes && mode != LM_FILE_CREATE)) {
    lm_fail(ring->ctx, LM_ERR_ARGUMENT, "%s: path is NULL, or mode, flags or bytes are not allowed: mode=%d flags=%d bytes=%llu",
            op, mode, flags, (unsigned long long)bytes);
    return NULL;
  }
  lm_file_request *request = lm_request_new(ring, NULL, LM_JOB_OPEN, path, 0, fn, tag, op);
  if (!request) return NULL;
  request->mode = mode;
  request->flags = flags;
  request->argument = bytes;
  lm_ring_submit(request);
  return request;
}

/* Asks for O_DIRECT, which the file system may refuse. @return false with the failure kept */
static bool open_direct(lm_file_request *request, lm_file *file, int32_t flags) {
  const lm_file_calls *calls = file->ring->calls;
  int32_t fd = lm_call_open(calls, file->path, flags | O_DIRECT, 0);
  if (fd >= 0) {
    file->direct_fd = fd;
    atomic_store(&file->direct, true);
  } else if (fd == -EINVAL || fd == -EOPNOTSUPP) {
    atomic_fetch_add(&file->ring->counters.fallbacks, 1);
  } else {
    lm_request_fail_call(request, "open", fd, file->path, 0);
    return false;
  }
  return true;
}

/* Can the page cache be asked? If not, a file that is only read goes through it: what is there must not be read again. */
static void ask_cache(lm_file *file) {
  const lm_file_calls *calls = file->ring->calls;
  uint8_t byte;
  file->tells_cached = calls->pread(calls->owner, file->fd, &byte, 1, 0, 1) != -EOPNOTSUPP;
  if (!file->tells_cached && file->mode == LM_FILE_READ) atomic_store(&file->direct, false);
}

/* Gives the new file its size, or fails before it has taken the last room from others, which fallocate alone would do until it
 * fails. Where the file system cannot reserve, the size alone is set. */
static bool preallocate(lm_file_request *request, lm_file *file) {
  const lm_file_calls *calls = file->ring->calls;
  const char *call = "statvfs";
  uint64_t room = 0;
  int32_t failed = calls->statvfs(calls->owner, file->path, &room);
  if (!failed) {
    call = "fallocate";
    if (room < request->argument) failed = -ENOSPC;
  }
  if (!failed) {
    do failed = calls->fallocate(calls->owner, file->fd, request->argument);
    while (failed == -EINTR);
  }
  if (failed == -EOPNOTSUPP) {
    call = "ftruncate";
    do failed = calls->ftruncate(calls->owner, file->fd, request->argument);
    while (failed == -EINTR);
  }
  if (failed) lm_request_fail_call(request, call, failed, file->path, request->argument);
  return !failed;
}

static bool open_file(lm_file_request *request, lm_file *file) {
  const lm_file_calls *calls = file->ring->calls;
  int32_t flags = O_CLOEXEC | (file->mode == LM_FILE_READ ? O_RDONLY : O_RDWR);
  int32_t create = file->mode == LM_FILE_CREATE ? O_CREAT | O_EXCL : 0;
  int32_t fd = lm_call_open(calls, file->path, flags | create, 0666);
  if (fd < 0) {
    lm_request_fail_call(request, "open", fd, file->path, 0);
    return false;
  }
  file->fd = fd;
  file->made = create;
  uint64_t bytes = 0;
  uint32_t mode = 0;
  int32_t failed = calls->fstat(calls->owner, fd, &bytes, &mode);
  if (!failed && S_ISDIR(mode)) failed = -EISDIR;
  if (failed) {
    lm_request_fail_call(request, "fstat", failed, file->path, 0);
    return false;
  }
  /* Pipes and devices have no page cache to go around. */
  if (!(request->flags & 1) && S_ISREG(mode) && !open_direct(request, file, flags)) return false;
  if (request->argument && !preallocate(request, file)) return false;
  if (atomic_load(&file->direct)) ask_cache(file);
  request->result.value = request->argument ? request->argument : bytes;
  request->result.direct = atomic_load(&file->direct);
  return true;
}

static void run_open(lm_file_request *request) {
  lm_file_ring *ring = request->ring;
  uint64_t path_bytes = strlen(request->path) + 1;
  lm_file *file = ring->ctx->host.alloc(ring->ctx, sizeof *file + path_bytes);
  if (!file) {
    lm_request_fail(request, LM_ERR_OUT_OF_MEMORY, 0, 0, "lm_file_open: out of host memory");
    return;
  }
  file->ring = ring;
  lm_ring_ref(ring);
  atomic_fetch_add(&ring->files, 1);
  atomic_store(&file->refs, 1);
  file->mode = request->mode;
  file->fd = file->direct_fd = -1;
  atomic_store(&file->path, memcpy(file + 1, request->path, path_bytes));
  if (open_file(request, file)) request->opened = file;
  else lm_file_unref(file);
}

/* Close ---------------------------------------------------------------------------------------------------------- */

/* The first failure, or 0. */
static int32_t close_file(lm_file *file, const char **call) {
  const lm_file_calls *calls = file->ring->calls;
  int32_t failed = 0;
  if (atomic_exchange(&file->closed, true)) return 0;
  if (file->made) {
    failed = calls->unlink(calls->owner, file->path);
    *call = "unlink";
    if (failed == -ENOENT) failed = 0;
  }
  const int32_t fds[] = {file->fd, file->direct_fd};
  for (int i = 0; i < 2; i++) {
    int32_t one = fds[i] >= 0 ? calls->close(calls->owner, fds[i]) : 0;
    /* The descriptor is gone whatever close says, also when it was interrupted. */
    if (one && one != -EINTR && !failed) failed = one, *call = "close";
  }
  atomic_fetch_sub(&file->ring->files, 1);
  return failed;
}

void lm_file_unref(lm_file *file) {
  if (atomic_fetch_sub_explicit(&file->refs, 1, memory_order_acq_rel) != 1) return;
  const char *call;
  (void)close_file(file, &call);
  lm_file_ring *ring = file->ring;
  if (file->path != (char *)(file + 1)) free(file->path);
  lm_heap_release(file);
  lm_ring_unref(ring);
}

void lm_file_destroy(lm_file *file) {
  if (file) lm_file_unref(file);
}

lm_file_request *lm_file_close(lm_file *file, lm_done_fn fn, uint64_t tag) {
  static const char op[] = "lm_file_close";
  if (!file) return NULL;
  if (atomic_load(&file->active)) {
    lm_fail(file->ring->ctx, LM_ERR_STATE, "%s: requests of the file are under way: wait for them first: path=\"%s\"", op,
            file->path);
    return NULL;
  }
  return job(file->ring, file, LM_JOB_CLOSE, NULL, fn, tag, op);
}

static void run_close(lm_file_request *request) {
  const char *call = "close";
  int32_t failed = close_file(request->file, &call);
  if (failed) lm_request_fail_call(request, call, failed, request->file->path, 0);
}

/* Sync and publish ----------------------------------------------------------------------------------------------- */

/* @return false with a failure reported if the file is closed */
static bool check_open(lm_file *file, const char *op) {
  if (!file) return false;
  if (!atomic_load(&file->closed)) return true;
  lm_fail(file->ring->ctx, LM_ERR_STATE, "%s: the file is closed: path=\"%s\"", op, file->path);
  return false;
}

lm_file_request *lm_file_sync(lm_file *file, lm_done_fn fn, uint64_t tag) {
  static const char op[] = "lm_file_sync";
  return check_open(file, op) ? job(file->ring, file, LM_JOB_SYNC, NULL, fn, tag, op) : NULL;
}

lm_file_request *lm_file_publish(lm_file *file, const char *path, lm_done_fn fn, uint64_t tag) {
  static const char op[] = "lm_file_publish";
  if (!check_open(file, op)) return NULL;
  if (!path) {
    lm_fail(file->ring->ctx, LM_ERR_ARGUMENT, "%s: path is NULL", op);
    return NULL;
  }
  return job(file->ring, file, LM_JOB_PUBLISH, path, fn, tag, op);
}

static int32_t retry(int32_t (*call)(void *owner, int32_t fd), void *owner, int32_t fd) {
  int32_t failed;
  do failed = call(owner, fd);
  while (failed == -EINTR);
  return failed;
}

/* Makes names in the folder of path last. File systems that cannot sync a folder are taken as they are. */
static bool sync_folder(lm_file_request *request, const char *path) {
  const lm_file_calls *calls = request->ring->calls;
  const char *slash = strrchr(path, '/');
  size_t length = slash ? (size_t)(slash - path) : 1;
  if (length == 0) length = 1; /* the root */
  char *folder = strndup(slash ? path : ".", length);
  if (!folder) {
    lm_request_fail(request, LM_ERR_OUT_OF_MEMORY, 0, 0, "fsync of a folder: out of host memory");
    return false;
  }
  const char *call = "open";
  int32_t fd = lm_call_open(calls, folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0), failed = fd < 0 ? fd : 0;
  if (fd >= 0) {
    failed = retry(calls->fsync, calls->owner, fd);
    call = "fsync";
    if (failed == -EINVAL || failed == -EOPNOTSUPP) failed = 0;
    (void)calls->close(calls->owner, fd);
  }
  if (failed) lm_request_fail_call(request, call, failed, folder, 0);
  free(folder);
  return !failed;
}

static void run_sync(lm_file_request *request) {
  lm_file *file = request->file;
  int32_t failed = retry(file->ring->calls->fdatasync, file->ring->calls->owner, file->fd);
  if (failed) lm_request_fail_call(request, "fdatasync", failed, file->path, 0);
}

static void run_publish(lm_file_request *request) {
  lm_file *file = request->file;
  const lm_file_calls *calls = file->ring->calls;
  if (!atomic_exchange(&file->made, false)) {
    lm_request_fail(request, LM_ERR_STATE, 0, 0, "lm_file_publish: the file was not made here, or is published: path=\"%s\"",
                    file->path);
    return;
  }
  char *path = strdup(request->path);
  if (!path) {
    atomic_store(&file->made, true);
    lm_request_fail(request, LM_ERR_OUT_OF_MEMORY, 0, 0, "lm_file_publish: out of host memory");
    return;
  }
  const char *call = "fsync";
  int32_t failed = retry(calls->fsync, calls->owner, file->fd);
  if (!failed) {
    failed = calls->rename(calls->owner, file->path, path);
    call = "rename";
  }
  if (failed) {
    atomic_store(&file->made, true);
    lm_request_fail_call(request, call, failed, file->path, 0);
    free(path);
    return;
  }
  /* It has its name, so it is no longer ours to remove, whether or not the folder can be synced. */
  atomic_store(&file->path, path);
  (void)sync_folder(request, path);
}

/* Paths ---------------------------------------------------------------------------------------------------------- */

static lm_file_request *path_job(lm_file_ring *ring, int32_t kind, const char *path, lm_done_fn fn, uint64_t tag,
                                 const char *op) {
  if (!ring) return NULL;
  if (path) return job(ring, NULL, kind, path, fn, tag, op);
  lm_fail(ring->ctx, LM_ERR_ARGUMENT, "%s: path is NULL", op);
  return NULL;
}

lm_file_request *lm_file_remove(lm_file_ring *ring, const char *path, lm_done_fn fn, uint64_t tag) {
  return path_job(ring, LM_JOB_REMOVE, path, fn, tag, "lm_file_remove");
}

lm_file_request *lm_folder_create(lm_file_ring *ring, const char *path, lm_done_fn fn, uint64_t tag) {
  return path_job(ring, LM_JOB_FOLDER, path, fn, tag, "lm_folder_create");
}

lm_file_request *lm_disk_free(lm_file_ring *ring, const char *path, lm_done_fn fn, uint64_t tag) {
  return path_job(ring, LM_JOB_DISK_FREE, path, fn, tag, "lm_disk_free");
}

static void run_remove(lm_file_request *request) {
  const lm_file_calls *calls = request->ring->calls;
  int32_t failed = calls->unlink(calls->owner, request->path);
  if (failed) lm_request_fail_call(request, "unlink", failed, request->path, 0);
  else (void)sync_folder(request, request->path);
}

/* Makes the first `length` bytes of the path; the parents only where the system says that one is missing. */
static bool make_folder(lm_file_request *request, size_t length) {
  const lm_file_calls *calls = request->ring->calls;
  char *path = request->path, end = path[length];
  path[length] = 0;
  int32_t failed = calls->mkdir(calls->owner, path, 0777);
  const char *slash = strrchr(path, '/');
  path[length] = end;
  if (failed == -ENOENT && slash && slash != path) {
    if (!make_folder(request, (size_t)(slash - path))) return false;
    path[length] = 0;
    failed = calls->mkdir(calls->owner, path, 0777);
    path[length] = end;
  }
  if (failed == -EEXIST) return true;
  path[length] = 0;
  if (failed) lm_request_fail_call(request, "mkdir", failed, path, 0);
  bool good = !failed && sync_folder(request, path);
  path[length] = end;
  return good;
}

static void run_folder(lm_file_request *request) {
  const lm_file_calls *calls = request->ring->calls;
  size_t length = strlen(request->path);
  while (length > 1 && request->path[length - 1] == '/') request->path[--length] = 0;
  if (!make_folder(request, length)) return;
  int32_t fd = lm_call_open(calls, request->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) lm_request_fail_call(request, "open", fd, request->path, 0); /* a file is in the way */
  else (void)calls->close(calls->owner, fd);
}

static void run_disk_free(lm_file_request *request) {
  const lm_file_calls *calls = request->ring->calls;
  int32_t failed = calls->statvfs(calls->owner, request->path, &request->result.value);
  if (failed) lm_request_fail_call(request, "statvfs", failed, request->path, 0);
}

void lm_job_run(lm_file_request *request) {
  if (atomic_load(&request->cancelled)) {
    request->dropped = true;
    return;
  }
  switch (request->kind) {
    case LM_JOB_OPEN: run_open(request); break;
    case LM_JOB_SYNC: run_sync(request); break;
    case LM_JOB_PUBLISH: run_publish(request); break;
    case LM_JOB_CLOSE: run_close(request); break;
    case LM_JOB_REMOVE: run_remove(request); break;
    case LM_JOB_FOLDER: run_folder(request); break;
    default: run_disk_free(request);
  }
}

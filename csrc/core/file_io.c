/* file_io.c: moving a range of a file whatever the calls do: short counts, interruptions, a file system that refuses O_DIRECT
 * late, a file that ends too early. */
#define _GNU_SOURCE
#include "file.h"

#include <errno.h>

static void count(_Atomic uint64_t *counter, uint64_t bytes) {
  atomic_fetch_add_explicit(counter, bytes, memory_order_relaxed);
}

/* From now on the file goes through the page cache. */
static void fall_back(lm_file *file) {
  if (atomic_exchange(&file->direct, false)) count(&file->ring->counters.fallbacks, 1);
}

/* What one call at `at` may move of `bytes` bytes, and whether without the page cache. */
static uint64_t stretch(const lm_file *file, uint64_t at, uint64_t bytes, bool *direct) {
  *direct = atomic_load_explicit(&file->direct, memory_order_relaxed);
  if (!*direct) return bytes;
  uint64_t into = at % LM_BLOCK;
  if (!into && bytes >= LM_BLOCK) return bytes - bytes % LM_BLOCK;
  *direct = false;
  return into && bytes > LM_BLOCK - into ? LM_BLOCK - into : bytes;
}

/* Takes what the page cache holds from `at` on. One block is asked for first: a miss may make the system read ahead. */
static uint64_t load_cached(lm_file *file, uint8_t *memory, uint64_t at, uint64_t to) {
  if (!file->tells_cached || !atomic_load_explicit(&file->direct, memory_order_relaxed)) return 0;
  const lm_file_calls *calls = file->ring->calls;
  uint64_t done = 0, bytes = to - at;
  while (done < bytes) {
    uint64_t ask = done ? bytes - done : bytes < LM_BLOCK ? bytes : LM_BLOCK;
    int64_t got = calls->pread(calls->owner, file->fd, memory + done, ask, at + done, 1);
    if (got <= 0) break;
    done += (uint64_t)got;
  }
  count(&file->ring->counters.read_cached, done);
  return done;
}

bool lm_file_load(lm_file_request *request, uint8_t *memory, uint64_t from, uint64_t to, uint64_t least) {
  lm_file *file = request->file;
  lm_file_counters *counters = &file->ring->counters;
  const lm_file_calls *calls = file->ring->calls;
  uint64_t at = from + load_cached(file, memory, from, to);
  while (at < least) {
    bool direct;
    uint64_t ask = stretch(file, at, to - at, &direct);
    int64_t got = calls->pread(calls->owner, direct ? file->direct_fd : file->fd, memory + (at - from), ask, at, 0);
    if (got == -EINTR) {
      count(&counters->retries, 1);
    } else if (got == -EINVAL && direct) {
      fall_back(file);
    } else if (got <= 0) {
      lm_request_fail_call(request, "pread", got, file->path, at);
      return false;
    } else {
      count(direct ? &counters->read_direct : &counters->read_buffered, (uint64_t)got);
      at += (uint64_t)got;
      if ((uint64_t)got < ask && at < least) count(&counters->retries, 1);
    }
  }
  return true;
}

bool lm_file_store(lm_file_request *request, const uint8_t *memory, uint64_t from, uint64_t to) {
  lm_file *file = request->file;
  lm_file_counters *counters = &file->ring->counters;
  const lm_file_calls *calls = file->ring->calls;
  for (uint64_t at = from; at < to;) {
    bool direct;
    uint64_t ask = stretch(file, at, to - at, &direct);
    int64_t put = calls->pwrite(calls->owner, direct ? file->direct_fd : file->fd, memory + (at - from), ask, at);
    if (put == -EINTR) {
      count(&counters->retries, 1);
    } else if (put == -EINVAL && direct) {
      fall_back(file);
    } else if (put <= 0) {
      lm_request_fail_call(request, "pwrite", put ? put : -EIO, file->path, at);
      return false;
    } else {
      count(direct ? &counters->write_direct : &counters->write_buffered, (uint64_t)put);
      at += (uint64_t)put;
      if ((uint64_t)put < ask) count(&counters->retries, 1);
    }
  }
  return true;
}

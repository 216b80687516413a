/* file_request.c: requests: how they are accepted, what became of them, and their end. */
#define _GNU_SOURCE
#include "file.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MOST_PATH 4096

lm_file_request *lm_request_new(lm_file_ring *ring, lm_file *file, int32_t kind, const char *path, uint64_t extra,
                                lm_done_fn fn, uint64_t tag, const char *op) {
  lm_ctx *ctx = ring->ctx;
  uint64_t path_bytes = path ? strnlen(path, MOST_PATH) + 1 : 0;
  if (path && (path_bytes <= 1 || path_bytes > MOST_PATH)) {
    lm_fail(ctx, LM_ERR_ARGUMENT, "%s: path must have 1 to %d bytes", op, MOST_PATH - 1);
    return NULL;
  }
  lm_file_request *request = lm_heap_alloc(ctx, sizeof *request + extra + path_bytes, op);
  if (!request) return NULL;
  if (fn) {
    request->notice = lm_notice_reserve(ctx, fn, tag, op);
    if (!request->notice) {
      lm_heap_release(request);
      return NULL;
    }
  }
  if (path) request->path = memcpy((uint8_t *)(request + 1) + extra, path, path_bytes);
  request->ctx = ctx;
  request->ring = ring;
  request->kind = kind;
  atomic_store(&request->status, LM_NOT_READY);
  lm_ring_ref(ring);
  atomic_fetch_add(&ring->requests, 1);
  if (file) {
    atomic_fetch_add(&file->refs, 1);
    atomic_fetch_add(&file->active, 1);
    request->file = file;
  }
  return request;
}

/* Drops what a request holds until its end. */
static void let_go(lm_file_request *request) {
  lm_file *file = request->file;
  request->file = NULL;
  if (file) atomic_fetch_sub(&file->active, 1);
  if (file) lm_file_unref(file);
  atomic_fetch_sub(&request->ring->requests, 1);
}

static void request_free(lm_file_request *request) {
  lm_file_ring *ring = request->ring;
  if (request->opened) lm_file_unref(request->opened);
  lm_heap_release(request);
  lm_ring_unref(ring);
}

void lm_request_abandon(lm_file_request *request) {
  lm_notice_drop(request->notice);
  let_go(request);
  request_free(request);
}

bool lm_request_stopped(lm_file_request *request) {
  return atomic_load_explicit(&request->failed, memory_order_relaxed) ||
         atomic_load_explicit(&request->cancelled, memory_order_relaxed);
}

void lm_request_fail(lm_file_request *request, int32_t status, int32_t error, uint64_t offset, const char *format, ...) {
  pthread_mutex_lock(&request->ring->mutex);
  bool first = !atomic_exchange(&request->failed, true);
  /* Pieces are begun in the order of the extents, so the lowest of those that fail does not depend on the threads. */
  bool lower = status == LM_ERR_FILE && request->result.status == status && offset < request->result.offset;
  if (first || lower) {
    request->result.status = status;
    request->result.error = error;
    request->result.offset = offset;
    va_list values;
    va_start(values, format);
    vsnprintf(request->text, sizeof request->text, format, values);
    va_end(values);
  }
  pthread_mutex_unlock(&request->ring->mutex);
}

void lm_request_fail_call(lm_file_request *request, const char *call, int64_t error, const char *path, uint64_t offset) {
  if (error == 0) {
    lm_request_fail(request, LM_ERR_FILE, 0, offset, "%s: the file ends too early: path=\"%s\" offset=%llu", call, path,
                    (unsigned long long)offset);
  } else {
    const char *name = strerrorname_np((int)-error), *text = strerrordesc_np((int)-error);
    lm_request_fail(request, LM_ERR_FILE, (int32_t)-error, offset, "%s: %s (%s): path=\"%s\" offset=%llu", call,
                    text ? text : "unknown error", name ? name : "?", path, (unsigned long long)offset);
  }
}

/* The first failure, else what cancelling left out. */
static int32_t outcome(lm_file_request *request) {
  if (atomic_load(&request->failed)) return request->result.status;
  if (!request->dropped) return LM_OK;
  snprintf(request->text, sizeof request->text, "%s", lm_status_text(LM_ERR_CANCELLED));
  return LM_ERR_CANCELLED;
}

void lm_request_finish(lm_file_request *request) {
  lm_ctx *ctx = request->ctx;
  lm_point copies = request->copies; /* no other thread has a piece any more */
  if (copies.stream) {
    int32_t status = ctx->api->stream_wait(ctx->backend, copies.stream->handle, copies.mark);
    lm_stream_unref(copies.stream);
    request->copies.stream = NULL;
    if (status < 0) {
      char text[LM_ERROR_TEXT_MAX]; /* the backend has said what to do */
      (void)lm_last_error(ctx, text, sizeof text);
      lm_request_fail(request, status, 0, 0, "%s", text);
    }
  }
  pthread_mutex_lock(&request->ring->mutex);
  if (request->started) request->result.seconds = (double)(lm_clock_ns() - request->started) * 1e-9;
  int32_t status = request->result.status = outcome(request);
  pthread_mutex_unlock(&request->ring->mutex);
  let_go(request);
  lm_notice *notice = request->notice;
  int32_t before = LM_NOT_READY;
  if (!atomic_compare_exchange_strong(&request->status, &before, status)) request_free(request);
  if (notice) lm_notice_post(notice, status);
}

int32_t lm_file_request_query(lm_file_request *request) {
  return request ? atomic_load(&request->status) : LM_ERR_ARGUMENT;
}

int32_t lm_file_request_result(lm_file_request *request, lm_file_result *result) {
  if (!request) return LM_ERR_ARGUMENT;
  if (!result) return lm_fail(request->ctx, LM_ERR_ARGUMENT, "lm_file_request_result: result is NULL");
  int32_t status = atomic_load(&request->status);
  *result = (lm_file_result){.status = LM_NOT_READY};
  if (status != LM_NOT_READY) *result = request->result;
  result->bytes = atomic_load(&request->moved);
  return LM_OK;
}

int32_t lm_file_request_error(lm_file_request *request, void *buf, uint64_t cap) {
  int32_t status = lm_file_request_query(request);
  if (buf && cap) snprintf(buf, cap, "%s", request && status < 0 ? request->text : "");
  return status;
}

/* @return LM_OK for a transfer that has ended well */
static int32_t check_done(lm_file_request *request, const char *op) {
  if (!request) return LM_ERR_ARGUMENT;
  int32_t status = atomic_load(&request->status);
  if (status == LM_OK && request->kind >= LM_TRANSFER_READ) return LM_OK;
  return lm_fail(request->ctx, LM_ERR_STATE, "%s: not a transfer that has ended well: status=%d", op, status);
}

int32_t lm_file_request_checksums(lm_file_request *request, void *crcs) {
  static const char op[] = "lm_file_request_checksums";
  int32_t status = check_done(request, op);
  if (status) return status;
  if (!request->checksums || !crcs) {
    return lm_fail(request->ctx, LM_ERR_ARGUMENT, "%s: crcs is NULL, or checksums were not asked for", op);
  }
  for (int32_t i = 0; i < request->count; i++) {
    uint32_t crc = atomic_load(&request->extents[i].crc);
    memcpy((uint8_t *)crcs + sizeof crc * (uint32_t)i, &crc, sizeof crc);
  }
  return LM_OK;
}

int32_t lm_file_request_host(lm_file_request *request, void *buf, uint64_t bytes) {
  static const char op[] = "lm_file_request_host";
  int32_t status = check_done(request, op);
  if (status) return status;
  if (!buf || bytes != request->host_bytes) {
    return lm_fail(request->ctx, LM_ERR_ARGUMENT, "%s: buf is NULL or of another size: bytes=%llu wanted=%llu", op,
                   (unsigned long long)bytes, (unsigned long long)request->host_bytes);
  }
  if (bytes) memcpy(buf, request->host, bytes);
  return LM_OK;
}

lm_file *lm_file_request_file(lm_file_request *request) {
  if (!request || atomic_load(&request->status) != LM_OK) return NULL;
  pthread_mutex_lock(&request->ring->mutex);
  lm_file *file = request->opened;
  request->opened = NULL;
  pthread_mutex_unlock(&request->ring->mutex);
  return file;
}

void lm_file_request_cancel(lm_file_request *request) {
  if (request) atomic_store(&request->cancelled, true);
}

void lm_file_request_destroy(lm_file_request *request) {
  if (!request) return;
  lm_file_request_cancel(request);
  if (atomic_exchange(&request->status, LM_REQUEST_DROPPED) != LM_NOT_READY) request_free(request);
}

/* Transfers -------------------------------------------------------------------------------------------------------- */

/* Checks extents and adds up the host memory that they need. */
static int32_t check_extents(lm_ctx *ctx, const lm_file_extent *extents, int32_t count, uint64_t *host_bytes, const char *op) {
  if (count < 0 || (count > 0 && !extents)) {
    return lm_fail(ctx, LM_ERR_ARGUMENT, "%s: extents is NULL or count negative: count=%d", op, count);
  }
  for (int32_t i = 0; i < count; i++) {
    const lm_file_extent *e = &extents[i];
    if (e->bytes > INT64_MAX || e->offset > INT64_MAX - e->bytes) {
      return lm_fail(ctx, LM_ERR_ARGUMENT, "%s: extent %d ends beyond 2^63: offset=%llu bytes=%llu", op, i,
                     (unsigned long long)e->offset, (unsigned long long)e->bytes);
    }
    if (!e->memory && __builtin_add_overflow(*host_bytes, e->bytes, host_bytes)) *host_bytes = UINT64_MAX;
  }
  if (*host_bytes <= INT64_MAX) return LM_OK;
  return lm_fail(ctx, LM_ERR_ARGUMENT, "%s: extents without memory have more than 2^63 bytes", op);
}

/* Copies the extents and finds out whose memory they are in. */
static int32_t take_extents(lm_file_request *request, const lm_file_extent *extents, const char *op) {
  lm_ctx *ctx = request->ctx;
  uint8_t *host = request->host;
  int32_t status = LM_OK;
  pthread_mutex_lock(&ctx->mutex);
  for (int32_t i = 0; !status && i < request->count; i++) {
    const lm_file_extent *e = &extents[i];
    lm_extent *own = &request->extents[i];
    own->offset = e->offset;
    own->bytes = e->bytes;
    own->memory = e->memory;
    own->host = !e->memory;
    if (!e->memory) {
      own->memory = host;
      host += e->bytes;
    } else if (e->bytes) {
      lm_range *range = lm_range_find(ctx, e->memory, e->bytes);
      own->host = range && range->pinned;
      if (!range) {
        status = lm_fail(ctx, LM_ERR_ARGUMENT,
                         "%s: extent %d is not inside device memory or page-locked memory of this context: memory=%p bytes=%llu",
                         op, i, e->memory, (unsigned long long)e->bytes);
      }
    }
  }
  pthread_mutex_unlock(&ctx->mutex);
  return status;
}

static lm_file_request *transfer(lm_file *file, int32_t kind, const lm_file_extent *extents, const void *host, int32_t count,
                                 int32_t flags, lm_stream *stream, lm_done_fn fn, uint64_t tag, const char *op) {
  if (!file) return NULL;
  lm_ctx *ctx = file->ring->ctx;
  uint64_t host_bytes = 0;
  bool write = kind == LM_TRANSFER_WRITE;
  int32_t status = check_extents(ctx, extents, count, &host_bytes, op);
  if (!status && stream) status = lm_stream_check(ctx, stream, false, op);
  if (!status && (flags & ~1)) status = lm_fail(ctx, LM_ERR_ARGUMENT, "%s: flags must be 0 or 1: flags=%d", op, flags);
  if (!status && write && host_bytes && !host) status = lm_fail(ctx, LM_ERR_ARGUMENT, "%s: host is NULL", op);
  if (!status && atomic_load(&file->closed)) status = lm_fail(ctx, LM_ERR_STATE, "%s: the file is closed", op);
  if (!status && write && file->mode == LM_FILE_READ) {
    status = lm_fail(ctx, LM_ERR_STATE, "%s: the file was opened for reading: path=\"%s\"", op, file->path);
  }
  if (status) return NULL;
  uint64_t extent_bytes = (uint64_t)count * sizeof(lm_extent);
  lm_file_request *request = lm_request_new(file->ring, file, kind, NULL, extent_bytes + host_bytes, fn, tag, op);
  if (!request) return NULL;
  request->extents = (lm_extent *)(request + 1);
  request->host = (uint8_t *)(request + 1) + extent_bytes;
  request->host_bytes = host_bytes;
  request->count = count;
  request->checksums = flags & 1;
  if (write && host_bytes) memcpy(request->host, host, host_bytes);
  status = take_extents(request, extents, op);
  if (!status) status = lm_ring_submit_after(request, stream);
  if (!status) return request;
  lm_request_abandon(request);
  return NULL;
}

lm_file_request *lm_file_read(lm_file *file, const lm_file_extent *extents, int32_t count, int32_t flags, lm_stream *stream,
                              lm_done_fn fn, uint64_t tag) {
  return transfer(file, LM_TRANSFER_READ, extents, NULL, count, flags, stream, fn, tag, "lm_file_read");
}

lm_file_request *lm_file_write(lm_file *file, const lm_file_extent *extents, const void *host, int32_t count, int32_t flags,
                               lm_stream *stream, lm_done_fn fn, uint64_t tag) {
  return transfer(file, LM_TRANSFER_WRITE, extents, host, count, flags, stream, fn, tag, "lm_file_write");
}

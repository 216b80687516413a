/* file_transfer.c: cutting transfers into pieces, and moving a piece between file, slot and memory. */
#include "file.h"

#include <string.h>

static uint64_t block_down(uint64_t at) {
  return at - at % LM_BLOCK;
}

static uint64_t block_up(uint64_t at) {
  return block_down(at + LM_BLOCK - 1);
}

/* Whether an extent is read or written where it is. Without the page cache its memory must lie as its bytes do in the file. */
static bool straight(const lm_file_request *request, const lm_extent *extent) {
  if (!extent->host || extent->bytes < LM_STRAIGHT_BYTES) return false;
  if (!atomic_load_explicit(&request->file->direct, memory_order_relaxed)) return true;
  return ((uintptr_t)extent->memory - extent->offset) % LM_BLOCK == 0;
}

int lm_piece_cut(lm_file_request *request, lm_piece *piece, lm_slot *slot) {
  const lm_extent *extents = request->extents;
  while (request->at < request->count && request->skip == extents[request->at].bytes) {
    request->at++;
    request->skip = 0;
  }
  if (request->at == request->count) return 0;
  const lm_extent *extent = &extents[request->at];
  bool alone = straight(request, extent);
  if (!alone && !slot) return -1;
  uint64_t from = extent->offset + request->skip;
  uint64_t most = block_down(from) + request->ring->slot_bytes, end = extent->offset + extent->bytes;
  *piece = (lm_piece){.request = request, .slot = alone ? NULL : slot, .from = from, .extent = request->at,
                      .skip = request->skip};
  piece->to = end < most ? end : most;
  request->skip += piece->to - from;
  /* What follows in the file comes along. */
  for (int32_t next = request->at + 1; !alone && piece->to == end && next < request->count; next++) {
    extent = &extents[next];
    if (extent->bytes == 0) continue;
    if (extent->offset != end || end == most || straight(request, extent)) break;
    end = extent->offset + extent->bytes;
    piece->to = end < most ? end : most;
    request->at = next;
    request->skip = piece->to - extent->offset;
  }
  return 1;
}

/* A run of a piece within one extent. */
typedef struct run {
  lm_extent *extent;
  uint64_t skip, bytes, at; /* in the extent; of both; in the file */
} run;

/* The next run of a piece; begin with bytes = 0 and at = piece->from. @return false at the end */
static bool next_run(const lm_piece *piece, run *r) {
  if (!r->extent) {
    r->extent = &piece->request->extents[piece->extent];
    r->skip = piece->skip;
    r->at = piece->from;
  } else {
    r->at += r->bytes;
    if (r->at == piece->to) return false;
    do r->extent++;
    while (r->extent->bytes == 0);
    r->skip = 0;
  }
  uint64_t rest = r->extent->bytes - r->skip, wanted = piece->to - r->at;
  r->bytes = rest < wanted ? rest : wanted;
  return true;
}

/* Where a byte of the file lies in a slot: its place in its block is kept. */
static uint8_t *in_slot(const lm_piece *piece, uint64_t at) {
  return piece->slot->data + (at - block_down(piece->from));
}

/* The checksum of an extent is the sum of those of its runs, each moved over what follows it; so their order does not matter. */
static void add_checksum(const run *r, const uint8_t *data) {
  uint32_t crc = lm_crc32c(0, data, r->bytes);
  atomic_fetch_xor(&r->extent->crc, lm_crc32c_shift(crc, r->extent->bytes - r->skip - r->bytes));
}

/* The stream for copies in a direction; one that failed is replaced, since nothing more would run on it. Under copy_mutex. */
static lm_stream *copy_stream(lm_file_ring *ring, int direction) {
  lm_ctx *ctx = ring->ctx;
  lm_stream *stream = ring->streams[direction];
  if (stream && ctx->api->stream_query(ctx->backend, stream->handle, 0) < 0) {
    lm_stream_destroy(stream);
    stream = NULL;
  }
  if (!stream) stream = lm_stream_create(ctx, 0);
  ring->streams[direction] = stream;
  return stream;
}

static void keep_point(lm_point *point, lm_stream *stream, uint64_t mark) {
  if (point->stream != stream) {
    if (point->stream) lm_stream_unref(point->stream);
    lm_stream_ref(stream);
  }
  *point = (lm_point){.stream = stream, .mark = mark};
}

static void fail_device(lm_file_request *request, int32_t status) {
  char text[LM_ERROR_TEXT_MAX];
  if (lm_last_error(request->ctx, text, sizeof text) != status) text[0] = 0;
  lm_request_fail(request, status, 0, 0, "the copy between slot and device failed: %s",
                  text[0] ? text : lm_status_text(status));
}

/* Enqueues the copies of a piece between its slot and device memory. @return false with the failure kept */
static bool enqueue_copies(lm_piece *piece, int direction) {
  lm_file_request *request = piece->request;
  lm_file_ring *ring = request->ring;
  lm_ctx *ctx = ring->ctx;
  lm_stream *stream = NULL;
  int32_t status = LM_OK;
  pthread_mutex_lock(&ring->copy_mutex);
  for (run r = {0}; !status && next_run(piece, &r);) {
    if (r.extent->host) continue;
    if (!stream) stream = copy_stream(ring, direction);
    if (!stream) {
      status = lm_last_error(ctx, NULL, 0);
      break;
    }
    uint8_t *slot = in_slot(piece, r.at), *memory = r.extent->memory + r.skip;
    if (direction == LM_TO_DEVICE) status = ctx->api->copy(ctx->backend, stream->handle, memory, slot, r.bytes);
    else status = ctx->api->copy(ctx->backend, stream->handle, slot, memory, r.bytes);
  }
  if (stream) {
    uint64_t mark = lm_stream_mark(stream);
    keep_point(&piece->slot->use, stream, mark);
    if (direction == LM_TO_DEVICE) {
      /* A stream that was replaced has failed, and with it the pieces before. */
      if (request->copies.stream && request->copies.stream != stream && !status) status = LM_ERR_DEVICE;
      keep_point(&request->copies, stream, mark);
    }
  }
  pthread_mutex_unlock(&ring->copy_mutex);
  if (status) fail_device(request, status);
  return !status;
}

int32_t lm_slot_await(lm_file_ring *ring, lm_slot *slot) {
  if (!slot->use.stream) return LM_OK;
  lm_ctx *ctx = ring->ctx;
  uint64_t begin = lm_clock_ns();
  int32_t status = ctx->api->stream_wait(ctx->backend, slot->use.stream->handle, slot->use.mark);
  atomic_fetch_add_explicit(&ring->counters.device_ns, lm_clock_ns() - begin, memory_order_relaxed);
  lm_stream_unref(slot->use.stream);
  slot->use.stream = NULL;
  return status;
}

static void moved(const lm_piece *piece, uint64_t begin) {
  lm_file_ring *ring = piece->request->ring;
  uint64_t bytes = piece->to - piece->from;
  atomic_fetch_add_explicit(&ring->counters.file_ns, lm_clock_ns() - begin, memory_order_relaxed);
  atomic_fetch_add_explicit(&piece->request->moved, bytes, memory_order_relaxed);
  if (piece->slot) atomic_fetch_add_explicit(&ring->counters.copied, bytes, memory_order_relaxed);
}

/* A piece that needs no slot: host memory that begins where the extent says. */
static uint8_t *own_memory(const lm_piece *piece) {
  return piece->request->extents[piece->extent].memory + piece->skip;
}

/* Whether a piece that was handed out is left alone. Not after another piece has failed: which failure lies first in the file
 * shows only when all that were begun have ended. */
static bool left_alone(const lm_file_request *request) {
  return atomic_load_explicit(&request->cancelled, memory_order_relaxed) || request->stream_status < 0;
}

void lm_piece_read(lm_piece *piece) {
  lm_file_request *request = piece->request;
  lm_slot *slot = piece->slot;
  if (slot) (void)lm_slot_await(request->ring, slot); /* whoever filled it has seen its failure */
  if (left_alone(request)) return;
  uint64_t begin = lm_clock_ns(), from = piece->from, to = piece->to;
  uint8_t *memory;
  if (!slot) {
    memory = own_memory(piece);
  } else {
    /* Whole blocks, so that all of it can do without the page cache. */
    if (atomic_load_explicit(&request->file->direct, memory_order_relaxed)) from = block_down(from), to = block_up(to);
    memory = in_slot(piece, from);
  }
  if (!lm_file_load(request, memory, from, to, piece->to)) return;
  moved(piece, begin);
  for (run r = {0}; next_run(piece, &r);) {
    uint8_t *data = slot ? in_slot(piece, r.at) : memory;
    if (request->checksums) add_checksum(&r, data);
    if (slot && r.extent->host) memcpy(r.extent->memory + r.skip, data, r.bytes);
  }
  if (slot) (void)enqueue_copies(piece, LM_TO_DEVICE);
}

void lm_piece_fill(lm_piece *piece) {
  (void)lm_slot_await(piece->request->ring, piece->slot);
  if (!left_alone(piece->request)) piece->slot->piece.spoilt = !enqueue_copies(piece, LM_TO_HOST);
}

void lm_piece_write(lm_piece *piece) {
  lm_file_request *request = piece->request;
  lm_slot *slot = piece->slot;
  int32_t status = slot ? lm_slot_await(request->ring, slot) : LM_OK;
  if (status < 0) fail_device(request, status);
  if (status < 0 || piece->spoilt || left_alone(request)) return;
  for (run r = {0}; next_run(piece, &r);) {
    uint8_t *data = slot ? in_slot(piece, r.at) : own_memory(piece);
    if (slot && r.extent->host) memcpy(data, r.extent->memory + r.skip, r.bytes);
    if (request->checksums) add_checksum(&r, data);
  }
  uint64_t begin = lm_clock_ns();
  const uint8_t *memory = slot ? in_slot(piece, piece->from) : own_memory(piece);
  if (lm_file_store(request, memory, piece->from, piece->to)) moved(piece, begin);
}

/* file.h: what the files of the file path share.
 *
 * A request is accepted (file_request.c), waits in the queue of its ring, and is cut into pieces there; the threads of the
 * ring take pieces and move them (file_ring.c, file_transfer.c) by calls that go on after short and interrupted ones
 * (file_io.c). A request that is no transfer is one job (file.c).
 *
 * A piece is a range of the file of at most a slot. Read: wait until the copy out of the slot has ended, read, enqueue copies
 * to the device. Write: enqueue copies to the slot, at once for as many slots as are free; later wait for them and write.
 * Page-locked memory that lies in the file's alignment is read and written where it is, without a slot.
 *
 * Locks: ring.mutex guards the queue, the lists of slots and the outcome of requests, ring.copy_mutex the copy streams. Neither
 * is held while a file or a device is awaited, nor together. */
#ifndef LM_FILE_H
#define LM_FILE_H

#include "core.h"

#define LM_BLOCK LM_PAGE                    /* O_DIRECT: alignment of offsets, sizes and memory */
#define LM_STRAIGHT_BYTES UINT64_C(65536)   /* host memory of this size is not sent through a slot */

enum { LM_TO_DEVICE, LM_TO_HOST, LM_DIRECTIONS };

typedef struct lm_slot lm_slot;

/* A piece of a transfer: bytes [from, to) of the file, beginning `skip` bytes into an extent. */
typedef struct lm_piece {
  lm_file_request *request;
  lm_slot *slot; /* NULL: the memory of the extent itself */
  uint64_t from, to;
  int32_t extent;
  uint64_t skip;
  bool spoilt; /* not all of its slot was filled */
} lm_piece;

struct lm_slot {
  lm_slot *next;
  uint8_t *data;
  lm_point use; /* the last copies from or to it; no stream = none */
  lm_piece piece;
};

typedef struct lm_slot_list {
  lm_slot *first, **last;
} lm_slot_list;

/* Names as in lm_file_ring_stats. */
typedef struct lm_file_counters {
  _Atomic uint64_t read_direct, read_cached, read_buffered, write_direct, write_buffered, copied, retries, fallbacks;
  _Atomic uint64_t file_ns, device_ns, idle_ns;
} lm_file_counters;

struct lm_file_ring {
  lm_ctx *ctx;
  const lm_file_calls *calls;
  _Atomic int32_t refs; /* the user's handle, files, requests; the last one ends the threads */
  uint64_t slot_bytes;
  uint32_t slot_count, thread_count;
  uint8_t *memory;      /* page-locked, all slots */
  lm_slot *slots;
  lm_file_counters counters;
  _Atomic uint64_t requests, files;

  pthread_mutex_t mutex; /* everything below */
  pthread_cond_t changed, ended;
  lm_file_request *first, **last; /* with pieces to hand out, or jobs */
  lm_slot_list free;   /* the longest unused first */
  lm_slot_list filled; /* to be written once their copies have ended */
  uint32_t free_count, running;
  bool closing, awaited;

  pthread_mutex_t copy_mutex;
  lm_stream *streams[LM_DIRECTIONS];
};

struct lm_file {
  lm_file_ring *ring; /* with a reference */
  _Atomic int32_t refs;
  _Atomic int32_t active; /* requests under way */
  _Atomic bool direct;    /* O_DIRECT is used */
  bool tells_cached;      /* the page cache can be asked without waiting */
  int32_t mode;
  int32_t fd, direct_fd;  /* direct_fd is -1 without O_DIRECT */
  _Atomic bool made;      /* by us, and not published */
  _Atomic bool closed;
  char *_Atomic path;     /* lies behind the struct until the file is published, which happens once */
};

/* What a job does and what a transfer is. */
enum {
  LM_JOB_OPEN, LM_JOB_SYNC, LM_JOB_PUBLISH, LM_JOB_CLOSE, LM_JOB_REMOVE, LM_JOB_FOLDER, LM_JOB_DISK_FREE,
  LM_TRANSFER_READ, LM_TRANSFER_WRITE
};

#define LM_REQUEST_DROPPED INT32_MIN

typedef struct lm_extent {
  uint64_t offset, bytes;
  uint8_t *memory;
  bool host;            /* the host can touch the memory */
  _Atomic uint32_t crc; /* of the pieces so far, each moved to its place */
} lm_extent;

struct lm_file_request {
  lm_ctx *ctx;
  lm_file_ring *ring;   /* with a reference */
  lm_file *file;        /* with a reference until the end; NULL where there is none */
  int32_t kind, mode, flags;
  uint64_t argument;    /* bytes of LM_JOB_OPEN */
  lm_notice *notice;    /* NULL without a callback */
  lm_file *opened;      /* by LM_JOB_OPEN, until the user takes it */
  char *path;

  lm_extent *extents;
  int32_t count;
  uint8_t *host;        /* memory of extents without any */
  uint64_t host_bytes;
  bool checksums;
  _Atomic uint64_t moved;
  _Atomic bool cancelled, failed;
  /* LM_NOT_READY until everything below is final; setting it is the last that the ring does with a request, so that whoever
   * sees it can give everything back. LM_REQUEST_DROPPED: the user destroyed it before, and the ring frees it. */
  _Atomic int32_t status;

  lm_file_request *next; /* under ring.mutex: */
  int32_t stream_status; /* of the stream that it came after */
  int32_t at;            /* the extent that the next piece begins in, */
  uint64_t skip;         /* and where in it */
  uint32_t in_flight;    /* pieces handed out and not finished */
  bool exhausted;        /* out of the queue */
  bool dropped;          /* pieces were left out */
  uint64_t started;      /* nanoseconds, 0 = not yet */
  lm_file_result result; /* status, error and offset of the first failure */
  char text[LM_ERROR_TEXT_MAX];

  lm_point copies;       /* under ring.copy_mutex: the last of its copies to the device */
};

/* file_calls.c ----------------------------------------------------------------------------------------------------- */

extern const lm_file_calls lm_system_calls;
/* lm_file_calls_of: the table of a context. */
const lm_file_calls *lm_file_calls_of(lm_ctx *ctx);
/* lm_call_open: open, again where it was interrupted. */
int32_t lm_call_open(const lm_file_calls *calls, const char *path, int32_t flags, uint32_t mode);
/* lm_clock_ns: CLOCK_MONOTONIC. */
uint64_t lm_clock_ns(void);

/* file_request.c --------------------------------------------------------------------------------------------------- */

/* lm_request_new: a request with its references on ring and file; NULL with the failure reported.
 *   path   copied; NULL allowed
 *   extra  bytes of heap for extents and host memory */
lm_file_request *lm_request_new(lm_file_ring *ring, lm_file *file, int32_t kind, const char *path, uint64_t extra,
                                lm_done_fn fn, uint64_t tag, const char *op);
/* lm_request_abandon: it is not accepted after all; nobody else has seen it. */
void lm_request_abandon(lm_file_request *request);
/* lm_request_fail: keep the first failure of a request, of several in the file the one that lies first.
 *   error   errno, 0 = none
 *   offset  in the file */
void lm_request_fail(lm_file_request *request, int32_t status, int32_t error, uint64_t offset, const char *format, ...)
    __attribute__((cold, format(printf, 5, 6)));
/* lm_request_fail_call: a system call failed. A negative errno, or 0 for a file that ends too early. */
void lm_request_fail_call(lm_file_request *request, const char *call, int64_t error, const char *path, uint64_t offset);
/* lm_request_finish: everything was done or dropped: wait for copies, make the outcome final, call back. */
void lm_request_finish(lm_file_request *request);
/* lm_request_stopped: nothing more is to be begun. */
bool lm_request_stopped(lm_file_request *request);

/* file_ring.c ------------------------------------------------------------------------------------------------------ */

void lm_ring_submit(lm_file_request *request);
/* lm_ring_submit_after: the same once stream has passed this point; at once if it is NULL. */
int32_t lm_ring_submit_after(lm_file_request *request, lm_stream *stream);
void lm_ring_ref(lm_file_ring *ring);
void lm_ring_unref(lm_file_ring *ring);

/* file_transfer.c -------------------------------------------------------------------------------------------------- */

/* lm_piece_cut: the next piece of a transfer; under ring.mutex.
 * @return 1, 0 if there is none, -1 if it needs a slot and there is none */
int lm_piece_cut(lm_file_request *request, lm_piece *piece, lm_slot *slot);
/* lm_piece_read, lm_piece_fill, lm_piece_write: the work of a piece; failures are kept in its request. */
void lm_piece_read(lm_piece *piece);
void lm_piece_fill(lm_piece *piece);
void lm_piece_write(lm_piece *piece);
/* lm_slot_await: the copies of a slot. @return their status; the slot has none afterwards */
int32_t lm_slot_await(lm_file_ring *ring, lm_slot *slot);

/* file_io.c -------------------------------------------------------------------------------------------------------- */

/* lm_file_load, _store: move [from, to) of a file, to or from memory, whatever the calls do; a failure is kept in request.
 *   least  reading may end here, at the end of the file */
bool lm_file_load(lm_file_request *request, uint8_t *memory, uint64_t from, uint64_t to, uint64_t least);
bool lm_file_store(lm_file_request *request, const uint8_t *memory, uint64_t from, uint64_t to);

/* file.c ----------------------------------------------------------------------------------------------------------- */

void lm_job_run(lm_file_request *request);
void lm_file_unref(lm_file *file);

/* crc32c.c --------------------------------------------------------------------------------------------------------- */

/* lm_crc32c_join: the checksum of two pieces one after the other is lm_crc32c_shift(first, bytes of the second) ^ second. */
uint32_t lm_crc32c_shift(uint32_t crc, uint64_t bytes);
/* lm_crc32c_portable: lm_crc32c without the instruction. */
uint32_t lm_crc32c_portable(uint32_t crc, const void *data, uint64_t bytes);

#endif

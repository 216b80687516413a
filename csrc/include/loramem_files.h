/* loramem_files.h: files on one side, device memory or page-locked memory on the other, through a ring of page-locked slots.
 * Included by loramem.h.
 *
 * A ring is made once and serves loading, saving, offload and streaming: slots, threads that read and write, and a copy
 * stream for each direction. What a request asks for is cut into pieces of at most a slot; requests take turns piece by piece.
 *
 * Requests      Everything that may wait for the file system is a request: it is accepted at once, runs on the threads of the
 *               ring, and ends with one call of fn(tag, status) on a thread of the library (none if fn is NULL: then ask
 *               lm_file_request_query). Whoever submits it owns it and destroys it, before or after its end. NULL instead of
 *               a request: it was not accepted, fn is not called, status and text are in the context.
 * Failures      A request reports one failure, the one that lies first in the file. What it had not begun is dropped, its slots
 *               come back, and the ring goes on. Memory that a failed read was to fill holds anything.
 * Memory        Extents are borrowed until the request ends: the memory must live, and must not be written by others. A file
 *               must stay open as long.
 * O_DIRECT      A file is opened without the page cache where the file system allows it; what is not aligned to 4 KiB goes
 *               through the page cache all the same, and what a read finds there is taken from there. */

typedef struct lm_file_ring lm_file_ring;       /* page-locked slots, threads, copy streams */
typedef struct lm_file lm_file;                 /* an open file of a ring */
typedef struct lm_file_request lm_file_request; /* file work under way, or its result */
typedef struct lm_file_lock lm_file_lock;       /* an advisory lock, held by this process */

/* ------------------------------------------------------------------------------------------------------------------
 * Ring
 * ------------------------------------------------------------------------------------------------------------------ */

/* lm_file_ring_create: lock the slots and start the threads.
 *   slot_bytes  multiple of 4096, 0 = 8 MiB, at most 1 GiB (one system call moves less than 2 GiB)
 *   slots       1 to 1024, 0 = 8
 *   threads     1 to 256, 0 = one per available core, at most 8
 * @return an owned ring, or NULL (LM_ERR_PINNED where so much memory cannot be locked) */
LM_API lm_file_ring *lm_file_ring_create(lm_ctx *ctx, uint64_t slot_bytes, int32_t slots, int32_t threads);

/* lm_file_ring_destroy: files and requests of the ring may be destroyed later; with the last of them everything is given back. */
LM_API void lm_file_ring_destroy(lm_file_ring *ring);

/* State of a ring. Bytes and counts since it was made unless named otherwise. */
typedef struct lm_file_ring_stats {
  uint64_t slots;          /* a count */
  uint64_t slot_bytes;     /* of one slot */
  uint64_t threads;        /* a count */
  uint64_t free_slots;     /* in no use now, a count */
  uint64_t requests;       /* under way now, a count */
  uint64_t files;          /* open now, a count */
  uint64_t read_direct;    /* bytes read without the page cache */
  uint64_t read_cached;    /* bytes that a file opened without the page cache was found to have there */
  uint64_t read_buffered;  /* bytes read through the page cache */
  uint64_t write_direct;   /* bytes written without the page cache */
  uint64_t write_buffered; /* bytes written through the page cache */
  uint64_t copied;         /* bytes that passed through slots */
  uint64_t retries;        /* calls that moved less than asked for or were interrupted, and went on, a count */
  uint64_t fallbacks;      /* files that refused O_DIRECT, a count */
  double file_seconds;     /* spent by all threads in reading and writing files */
  double device_seconds;   /* spent by all threads waiting for copies */
  double idle_seconds;     /* spent by all threads without work */
} lm_file_ring_stats;

/* lm_file_ring_stats_get: fills stats. */
LM_API int32_t lm_file_ring_stats_get(lm_file_ring *ring, lm_file_ring_stats *stats);

/* ------------------------------------------------------------------------------------------------------------------
 * Files
 * ------------------------------------------------------------------------------------------------------------------ */

/* How a file is opened: to read it; to make it, where nothing has that name yet; to read and write one that is there. */
enum { LM_FILE_READ = 0, LM_FILE_CREATE = 1, LM_FILE_UPDATE = 2 };

/* lm_file_open: open or make a file. A symbolic link is followed, but by LM_FILE_CREATE.
 *   mode   LM_FILE_READ, LM_FILE_CREATE or LM_FILE_UPDATE
 *   flags  0; 1 = always through the page cache
 *   bytes  of LM_FILE_CREATE: size that the disk is asked for at once (a full disk fails now), 0 = none; else 0
 * lm_file_request_file gives the file when the request has ended. */
LM_API lm_file_request *lm_file_open(lm_file_ring *ring, const char *path, int32_t mode, int32_t flags, uint64_t bytes,
                                     lm_done_fn fn, uint64_t tag);

/* Bytes of a file and where they are in memory. */
typedef struct lm_file_extent {
  uint64_t offset; /* of the first byte in the file */
  uint64_t bytes;  /* may be 0, and may be more than the ring holds */
  void *memory;    /* device or page-locked memory of the context; NULL = the next bytes of the request's own host memory */
} lm_file_extent;

/* lm_file_read: from a file to memory. The request ends when the bytes are there.
 *   extents  [count] copied; neighbours in the file that follow each other in the list are read together
 *   flags    0; 1 = checksums
 *   stream   what it has been given so far runs before the first byte is written; NULL = nothing to wait for
 * Extents without memory are read into memory of the request, see lm_file_request_host. */
LM_API lm_file_request *lm_file_read(lm_file *file, const lm_file_extent *extents, int32_t count, int32_t flags,
                                     lm_stream *stream, lm_done_fn fn, uint64_t tag);

/* lm_file_write: from memory to a file. The request ends when the file system has taken the bytes; lm_file_sync makes them last.
 *   extents  [count] copied
 *   host     [sum of the bytes of extents without memory] copied; NULL where there are none
 *   flags    0; 1 = checksums
 *   stream   what it has been given so far runs before the first byte is read; NULL = nothing to wait for */
LM_API lm_file_request *lm_file_write(lm_file *file, const lm_file_extent *extents, const void *host, int32_t count,
                                      int32_t flags, lm_stream *stream, lm_done_fn fn, uint64_t tag);

/* lm_file_sync: fdatasync: what was written so far survives a power cut. */
LM_API lm_file_request *lm_file_sync(lm_file *file, lm_done_fn fn, uint64_t tag);

/* lm_file_publish: the atomic end of a file that was made: fsync, rename onto path, fsync of the folder of path. A symbolic
 * link at path is replaced. The request fails with LM_ERR_STATE for a file that is published or was not made. */
LM_API lm_file_request *lm_file_publish(lm_file *file, const char *path, lm_done_fn fn, uint64_t tag);

/* lm_file_close: close the file; one that was made and not published is removed. Not accepted while another request of the
 * file is under way. The file still has to be destroyed. */
LM_API lm_file_request *lm_file_close(lm_file *file, lm_done_fn fn, uint64_t tag);

/* lm_file_destroy: with the last of its requests the file is closed, if it was not, as lm_file_close does. */
LM_API void lm_file_destroy(lm_file *file);

/* lm_file_remove: unlink a file and sync its folder. */
LM_API lm_file_request *lm_file_remove(lm_file_ring *ring, const char *path, lm_done_fn fn, uint64_t tag);

/* lm_folder_create: make a folder and the parents that are missing, and sync where they appear. One that exists is fine. */
LM_API lm_file_request *lm_folder_create(lm_file_ring *ring, const char *path, lm_done_fn fn, uint64_t tag);

/* lm_disk_free: bytes that this user can still write where path lies; the result's value. */
LM_API lm_file_request *lm_disk_free(lm_file_ring *ring, const char *path, lm_done_fn fn, uint64_t tag);

/* ------------------------------------------------------------------------------------------------------------------
 * Requests
 * ------------------------------------------------------------------------------------------------------------------ */

/* What became of a request. */
typedef struct lm_file_result {
  uint64_t bytes;  /* read or written so far, also while it is under way */
  uint64_t value;  /* lm_file_open: size of the file; lm_disk_free: bytes */
  uint64_t offset; /* in the file, of what failed */
  double seconds;  /* from its first piece to its end */
  int32_t status;  /* LM_NOT_READY until it has ended */
  int32_t error;   /* errno of the system call that failed, else 0 */
  int32_t direct;  /* lm_file_open: 1 if the file is used without the page cache */
  int32_t reserved;
} lm_file_result;

/* lm_file_request_query: @return LM_NOT_READY until the request has ended, from then on its status */
LM_API int32_t lm_file_request_query(lm_file_request *request);

/* lm_file_request_result: fills result. */
LM_API int32_t lm_file_request_result(lm_file_request *request, lm_file_result *result);

/* lm_file_request_error: copies the text of the request's failure into buf [cap], terminated; empty where there is none.
 * @return as lm_file_request_query */
LM_API int32_t lm_file_request_error(lm_file_request *request, void *buf, uint64_t cap);

/* lm_file_request_file: the file of a successful lm_file_open, owned, once; NULL otherwise. */
LM_API lm_file *lm_file_request_file(lm_file_request *request);

/* lm_file_request_checksums: CRC-32C of each extent, after a successful transfer with checksums.
 *   crcs  [count of its extents] written */
LM_API int32_t lm_file_request_checksums(lm_file_request *request, void *crcs);

/* lm_file_request_host: the bytes of extents without memory, one after the other, after a successful read.
 *   buf  [bytes] written; bytes is their sum */
LM_API int32_t lm_file_request_host(lm_file_request *request, void *buf, uint64_t bytes);

/* lm_file_request_cancel: begin no further piece. The request ends with LM_ERR_CANCELLED unless it had done everything. */
LM_API void lm_file_request_cancel(lm_file_request *request);

/* lm_file_request_destroy: cancels a request that is under way, without waiting for it. */
LM_API void lm_file_request_destroy(lm_file_request *request);

/* ------------------------------------------------------------------------------------------------------------------
 * Locks and checksums
 * ------------------------------------------------------------------------------------------------------------------ */

/* lm_file_lock_acquire: take an exclusive lock (flock) on a file, which is made where it is missing and holds the process id
 * of the holder. Never waits. The system drops the lock when the process ends, however it ends.
 *   holder  [1] written with LM_ERR_BUSY: process id of the holder, 0 = unknown
 * @return an owned lock, or NULL (LM_ERR_BUSY where another holds it) */
LM_API lm_file_lock *lm_file_lock_acquire(lm_ctx *ctx, int32_t *holder, const char *path);

/* lm_file_lock_destroy: drop the lock; the file stays. */
LM_API void lm_file_lock_destroy(lm_file_lock *lock);

/* lm_crc32c: CRC-32C (Castagnoli, RFC 3720) of data that continues data of checksum crc; 0 to begin. */
LM_API uint32_t lm_crc32c(uint32_t crc, const void *data, uint64_t bytes);

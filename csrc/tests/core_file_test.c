/* Device files: bytes arrive where they belong whatever their alignment, requests share the ring, everything comes back. */
#include "file_test.h"

#define KIB UINT64_C(1024)
#define FILE_BYTES (300 * KIB + 77)

typedef struct rig {
  lm_ctx *ctx;
  lm_file_ring *ring;
  lm_stream *stream;
  uint8_t *device; /* the host can look: the CPU's device memory */
  lm_pinned *pinned;
} rig;

static rig open_rig(const char *device, uint64_t slot_bytes, int32_t slots, int32_t threads) {
  rig r = {.ctx = open_device(device)};
  r.ring = lm_file_ring_create(r.ctx, slot_bytes, slots, threads);
  r.stream = lm_stream_create(r.ctx, 0);
  r.device = lm_mem_reserve(r.ctx, 1024 * KIB);
  r.pinned = lm_pinned_create(r.ctx, 1024 * KIB, 0);
  return r;
}

static void close_rig(rig *r) {
  lm_file_ring_stats stats = ring_stats_of(r->ring);
  EXPECT(stats.free_slots == stats.slots && stats.requests == 0 && stats.files == 0);
  lm_file_ring_destroy(r->ring);
  lm_stream_destroy(r->stream);
  lm_mem_release(r->ctx, r->device);
  lm_pinned_destroy(r->pinned);
  lm_stats after = stats_of(r->ctx);
  EXPECT(after.reserved == 0 && after.pinned == 0);
  lm_ctx_destroy(r->ctx);
}

static lm_file *open_file(rig *r, const char *path, int32_t mode, int32_t flags, uint64_t bytes) {
  lm_file *file = NULL;
  EXPECT(settle(r->ctx, lm_file_open(r->ring, path, mode, flags, bytes, NULL, 0), NULL, &file) == LM_OK && file);
  return file;
}

static void close_file(rig *r, lm_file *file) {
  EXPECT(settle(r->ctx, lm_file_close(file, NULL, 0), NULL, NULL) == LM_OK);
  lm_file_destroy(file);
}

static int32_t read_one(rig *r, lm_file *file, uint64_t offset, uint64_t bytes, void *memory) {
  lm_file_extent extent = {offset, bytes, memory};
  return settle(r->ctx, lm_file_read(file, &extent, 1, 0, NULL, NULL, 0), NULL, NULL);
}

static bool holds_pattern(const uint8_t *memory, uint64_t offset, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i++) {
    if (memory[i] != pattern(offset + i)) return false;
  }
  return true;
}

/* memory-io 56, 57: odd offsets in the file and in memory. Mutants: in_slot() without block_down(); lm_file_load() from `from`
 * instead of block_down(from); stretch() that lets an unaligned call go without the page cache. */
static void odd_offsets(void) {
  rig r = open_rig("cpu", 16 * KIB, 3, 2);
  uint8_t *host = lm_pinned_data(r.pinned);
  write_pattern(in_folder("odd"), FILE_BYTES);
  for (int32_t flags = 0; flags < 2; flags++) {
    lm_file *file = open_file(&r, in_folder("odd"), LM_FILE_READ, flags, 0);
    if (atomic_load(&file->direct)) { /* what is not cached is read in whole blocks, past all of the page cache */
      uint64_t before = ring_stats_of(r.ring).read_buffered;
      EXPECT(posix_fadvise(file->fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
      EXPECT(read_one(&r, file, 4097, 70 * KIB, r.device) == LM_OK && holds_pattern(r.device, 4097, 70 * KIB));
      EXPECT(ring_stats_of(r.ring).read_buffered == before && atomic_load(&file->direct));
    }
    for (uint64_t odd = 1; odd < 256; odd += 6) {
      uint64_t bytes = 70 * KIB + odd;
      memset(r.device, 0, 128 * KIB);
      memset(host, 0, 128 * KIB);
      EXPECT(read_one(&r, file, odd, bytes, r.device + 256) == LM_OK && holds_pattern(r.device + 256, odd, bytes));
      EXPECT(r.device[255] == 0 && r.device[256 + bytes] == 0);
      EXPECT(read_one(&r, file, odd, bytes, host + odd) == LM_OK && holds_pattern(host + odd, odd, bytes));
      EXPECT(host[odd - 1] == 0 && host[odd + bytes] == 0);
      EXPECT(read_one(&r, file, odd, bytes, host + 3) == LM_OK && holds_pattern(host + 3, odd, bytes));
    }
    close_file(&r, file);
  }
  close_rig(&r);
}

/* Every way to write, then the file is read by the system's own calls. Mutants: the head or the tail left out; the tail of one
 * piece rounded up over the head of the next. */
static void writes_what_is_there(void) {
  rig r = open_rig("cpu", 16 * KIB, 3, 2);
  uint8_t *host = lm_pinned_data(r.pinned);
  uint8_t *found = malloc(400 * KIB);
  for (int32_t flags = 0; flags < 2; flags++) {
    for (uint64_t odd = 0; odd < 5; odd++) {
      /* device | own | pinned, too short to go straight | nothing | pinned, straight if aligned alike */
      uint64_t cut[] = {odd, odd + 100 * KIB + 1, odd + 100 * KIB + 11, odd + 110 * KIB, odd + 110 * KIB, odd + 250 * KIB + 5};
      uint8_t own[10];
      for (uint64_t i = 0; i < cut[1] - cut[0]; i++) r.device[i] = pattern(cut[0] + i);
      for (uint64_t i = 0; i < 10; i++) own[i] = pattern(cut[1] + i);
      for (uint64_t i = cut[2]; i < cut[5]; i++) host[i + 4096 * odd] = pattern(i);
      lm_file_extent extents[5];
      uint8_t *memory[] = {r.device, NULL, host + cut[2] + 4096 * odd, host, host + cut[4] + 4096 * odd};
      for (int i = 0; i < 5; i++) extents[i] = (lm_file_extent){cut[i], cut[i + 1] - cut[i], memory[i]};
      lm_file *file = open_file(&r, in_folder("written"), LM_FILE_CREATE, flags, odd & 1 ? 300 * KIB : 0);
      bool direct = atomic_load(&file->direct);
      lm_file_request *request = lm_file_write(file, extents, own, 5, 1, r.stream, NULL, 0);
      uint32_t crcs[5];
      while (lm_file_request_query(request) == LM_NOT_READY) usleep(50);
      EXPECT(lm_file_request_checksums(request, crcs) == LM_OK);
      lm_file_result result;
      lm_file_request_result(request, &result);
      EXPECT(result.bytes == cut[5] - cut[0] && result.seconds > 0);
      lm_file_request_destroy(request);
      EXPECT(settle(r.ctx, lm_file_sync(file, NULL, 0), NULL, NULL) == LM_OK);
      int fd = open(in_folder("written"), O_RDONLY);
      EXPECT(pread(fd, found, 400 * KIB, 0) == (ssize_t)(odd & 1 ? 300 * KIB : cut[5]));
      close(fd);
      EXPECT(holds_pattern(found + odd, odd, cut[5] - odd));
      EXPECT(atomic_load(&file->direct) == direct); /* no call was refused */
      for (int i = 0; i < 5; i++) EXPECT(crcs[i] == lm_crc32c(0, found + cut[i], cut[i + 1] - cut[i]));
      close_file(&r, file);
      EXPECT(!exists(in_folder("written"))); /* it was not published */
    }
  }
  free(found);
  close_rig(&r);
}

/* Lines of the log of file calls that contain `part`. */
static int calls_with(const char *part) {
  FILE *log = fopen(in_folder("log"), "r");
  char line[1024];
  int count = 0;
  while (fgets(line, sizeof line, log)) count += strstr(line, part) != NULL; /* nothing is written, so it is all text */
  fclose(log);
  return count;
}

/* memory-io 47, 59: extents larger than the ring, and many small ones that follow each other are read by few calls. Mutant: a
 * piece that ends with its extent. */
static void reads_neighbours_together(void) {
  char device[128];
  snprintf(device, sizeof device, "sim:file_log=%s", in_folder("log"));
  rig r = open_rig(device, 64 * KIB, 2, 2);
  write_pattern(in_folder("many"), 256 * KIB);
  lm_file *file = open_file(&r, in_folder("many"), LM_FILE_READ, 1, 0);
  lm_file_extent extents[512];
  for (int i = 0; i < 512; i++) extents[i] = (lm_file_extent){(uint64_t)i * 512, 512, r.device + (uint64_t)i * 768};
  EXPECT(settle(r.ctx, lm_file_read(file, extents, 512, 0, NULL, NULL, 0), NULL, NULL) == LM_OK);
  EXPECT(calls_with("\"pread\"") == 4);
  for (int i = 0; i < 512; i++) EXPECT(holds_pattern(r.device + (uint64_t)i * 768, (uint64_t)i * 512, 512));
  EXPECT(ring_stats_of(r.ring).copied == 256 * KIB);
  EXPECT(read_one(&r, file, 0, 256 * KIB, r.device) == LM_OK && holds_pattern(r.device, 0, 256 * KIB));
  close_file(&r, file);
  close_rig(&r);
}

static int32_t slow_fill(void *arg, int32_t status) {
  (void)status;
  uint8_t *memory = arg;
  usleep(20000);
  for (uint64_t i = 0; i < 64 * KIB; i++) memory[i] = pattern(i);
  return LM_OK;
}

/* memory-io 34, 37: a write takes what the stream produces before it, whenever that is. Mutant: the stream is not waited for. */
static void goes_after_its_stream(void) {
  rig r = open_rig("cpu", 16 * KIB, 3, 2);
  lm_file *file = open_file(&r, in_folder("late"), LM_FILE_CREATE, 0, 0);
  memset(r.device, 0, 64 * KIB);
  call_in(r.stream, slow_fill, r.device);
  lm_file_extent extent = {0, 64 * KIB, r.device};
  lm_file_request *write = lm_file_write(file, &extent, NULL, 1, 0, r.stream, NULL, 0);
  EXPECT(lm_file_request_query(write) == LM_NOT_READY); /* and no thread is held up meanwhile: */
  lm_file_extent own = {100 * KIB, 5, NULL};
  EXPECT(settle(r.ctx, lm_file_write(file, &own, "12345", 1, 0, NULL, NULL, 0), NULL, NULL) == LM_OK);
  EXPECT(settle(r.ctx, write, NULL, NULL) == LM_OK);
  memset(r.device, 0, 64 * KIB);
  EXPECT(read_one(&r, file, 0, 64 * KIB, r.device) == LM_OK && holds_pattern(r.device, 0, 64 * KIB));
  /* What failed on the stream fails the transfer, and nothing but it. */
  call_in(r.stream, fail_here, NULL);
  EXPECT(settle(r.ctx, lm_file_read(file, &extent, 1, 0, r.stream, NULL, 0), NULL, NULL) == LM_ERR_DEVICE);
  EXPECT(read_one(&r, file, 0, 64 * KIB, r.device) == LM_OK);
  close_file(&r, file);
  close_rig(&r);
}

/* Readers and writers at once, on one ring: each finds its own bytes. Run under the thread sanitizer. Mutants: a slot that is
 * given back before its copy has ended; a request without a turn. */
static void many_at_once(void) {
  enum { COUNT = 8 };
  const uint64_t bytes = 100 * KIB + 13;
  rig r = open_rig("sim:delays=200/0", 16 * KIB, 4, 4);
  lm_file *files[COUNT];
  lm_file_request *requests[2 * COUNT];
  char name[32];
  for (int i = 0; i < COUNT; i++) {
    snprintf(name, sizeof name, "many-%d", i);
    files[i] = open_file(&r, in_folder(name), LM_FILE_CREATE, i & 1, 0);
    for (uint64_t at = 0; at < bytes; at++) r.device[(uint64_t)i * 128 * KIB + at] = (uint8_t)(pattern(at) + i);
  }
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < COUNT; i++) {
      lm_file_extent extent = {(uint64_t)i, bytes, r.device + (uint64_t)i * 128 * KIB};
      requests[i] = round ? lm_file_read(files[i], &extent, 1, 1, NULL, NULL, 0)
                          : lm_file_write(files[i], &extent, NULL, 1, 1, NULL, NULL, 0);
    }
    for (int i = 0; i < COUNT; i++) EXPECT(settle(r.ctx, requests[i], NULL, NULL) == LM_OK);
    if (!round) memset(r.device, 0, 1024 * KIB);
  }
  for (int i = 0; i < COUNT; i++) {
    bool same = true;
    for (uint64_t at = 0; at < bytes; at++) same = same && r.device[(uint64_t)i * 128 * KIB + at] == (uint8_t)(pattern(at) + i);
    EXPECT(same);
    close_file(&r, files[i]);
  }
  close_rig(&r);
}

/* A small read does not wait for the end of a large write. Mutant: a request that stays first until it is done. */
static void take_turns(void) {
  rig r = open_rig("sim:delays=1000/1000", 4 * KIB, 2, 1);
  write_pattern(in_folder("small"), 4 * KIB);
  lm_file *large = open_file(&r, in_folder("large"), LM_FILE_CREATE, 0, 0);
  lm_file *small = open_file(&r, in_folder("small"), LM_FILE_READ, 0, 0);
  lm_file_extent extent = {0, 1024 * KIB, r.device};
  lm_file_request *write = lm_file_write(large, &extent, NULL, 1, 0, NULL, NULL, 0);
  EXPECT(read_one(&r, small, 0, 4 * KIB, lm_pinned_data(r.pinned)) == LM_OK);
  EXPECT(lm_file_request_query(write) == LM_NOT_READY);
  lm_file_request_cancel(write);
  EXPECT(settle(r.ctx, write, NULL, NULL) == LM_ERR_CANCELLED);
  close_file(&r, large);
  close_file(&r, small);
  close_rig(&r);
}

/* Mutants: the ring freed with its handle; a file closed with its handle while a request uses it. */
static void destroyed_in_any_order(void) {
  uint64_t before = open_descriptors();
  for (int round = 0; round < 20; round++) {
    rig r = open_rig("sim:delays=300/300", 16 * KIB, 2, 2);
    lm_file *file = open_file(&r, in_folder("gone"), LM_FILE_CREATE, 0, 0);
    lm_file_extent extent = {1, 200 * KIB, r.device};
    lm_file_request *request = lm_file_write(file, &extent, NULL, 1, 0, NULL, NULL, 0);
    EXPECT(!lm_file_close(file, NULL, 0) && failed_with(r.ctx, LM_ERR_STATE, "under way"));
    lm_file_ring_destroy(r.ring);
    lm_file_destroy(file);
    if (round & 1) EXPECT(settle(r.ctx, request, NULL, NULL) == LM_OK);
    else lm_file_request_destroy(request);
    lm_stream_destroy(r.stream);
    lm_pinned_destroy(r.pinned);
    for (int i = 0; i < 2000 && (exists(in_folder("gone")) || open_descriptors() > before); i++) usleep(1000);
    EXPECT(!exists(in_folder("gone")) && open_descriptors() == before);
    lm_mem_release(r.ctx, r.device);
    lm_ctx_destroy(r.ctx);
  }
}

/* Mutant: cancelling is not looked at between pieces. */
static void cancelled(void) {
  rig r = open_rig("sim:delays=2000/2000", 4 * KIB, 2, 1);
  lm_file *file = open_file(&r, in_folder("cancelled"), LM_FILE_CREATE, 0, 0);
  lm_file_extent extent = {0, 1024 * KIB, r.device};
  lm_file_request *request = lm_file_write(file, &extent, NULL, 1, 0, NULL, NULL, 0);
  lm_file_request_cancel(request);
  lm_file_result result;
  EXPECT(settle(r.ctx, request, &result, NULL) == LM_ERR_CANCELLED && result.bytes < 1024 * KIB);
  request = lm_file_sync(file, NULL, 0);
  int32_t status = (lm_file_request_cancel(request), settle(r.ctx, request, NULL, NULL));
  EXPECT(status == LM_OK || status == LM_ERR_CANCELLED);
  close_file(&r, file);
  close_rig(&r);
}

static void on_done(uint64_t tag, int32_t status) {
  gate *g = (gate *)(uintptr_t)tag;
  pthread_mutex_lock(&g->mutex);
  g->reached = status == LM_OK;
  pthread_cond_broadcast(&g->changed);
  pthread_mutex_unlock(&g->mutex);
}

/* Mutants: rename before fsync is seen by the log tests; here: publish that leaves `made`, so that closing removes the file. */
static void published(void) {
  rig r = open_rig("cpu", 0, 0, 0);
  lm_file_ring_stats stats = ring_stats_of(r.ring);
  EXPECT(stats.slots == 8 && stats.slot_bytes == 8 << 20 && stats.threads >= 1 && stats.threads <= 8);
  EXPECT(settle(r.ctx, lm_folder_create(r.ring, in_folder("a/b/c/"), NULL, 0), NULL, NULL) == LM_OK);
  EXPECT(settle(r.ctx, lm_folder_create(r.ring, in_folder("a/b"), NULL, 0), NULL, NULL) == LM_OK);
  lm_file *file = open_file(&r, in_folder("a/b/c/x.tmp"), LM_FILE_CREATE, 0, 0);
  lm_file_extent own = {0, 5, NULL};
  gate done = GATE_CLOSED;
  lm_file_request *request = lm_file_write(file, &own, "12345", 1, 0, NULL, on_done, (uint64_t)(uintptr_t)&done);
  gate_await(&done);
  lm_file_request_destroy(request);
  EXPECT(settle(r.ctx, lm_file_publish(file, in_folder("a/b/c/x"), NULL, 0), NULL, NULL) == LM_OK);
  EXPECT(settle(r.ctx, lm_file_publish(file, in_folder("a/b/c/y"), NULL, 0), NULL, NULL) == LM_ERR_STATE);
  close_file(&r, file);
  EXPECT(exists(in_folder("a/b/c/x")) && !exists(in_folder("a/b/c/x.tmp")));
  lm_file_result result;
  EXPECT(settle(r.ctx, lm_disk_free(r.ring, in_folder("a"), NULL, 0), &result, NULL) == LM_OK && result.value > 0);
  EXPECT(settle(r.ctx, lm_file_remove(r.ring, in_folder("a/b/c/x"), NULL, 0), &result, NULL) == LM_OK);
  EXPECT(settle(r.ctx, lm_file_remove(r.ring, in_folder("a/b/c/x"), NULL, 0), &result, NULL) == LM_ERR_FILE);
  EXPECT(result.error == ENOENT);
  write_pattern(in_folder("a/file"), 5);
  EXPECT(settle(r.ctx, lm_folder_create(r.ring, in_folder("a/file/b"), NULL, 0), &result, NULL) == LM_ERR_FILE);
  EXPECT(settle(r.ctx, lm_folder_create(r.ring, in_folder("a/file"), NULL, 0), &result, NULL) == LM_ERR_FILE);
  EXPECT(result.error == ENOTDIR);
  EXPECT(settle(r.ctx, lm_file_open(r.ring, in_folder("a"), LM_FILE_READ, 0, 0, NULL, 0), &result, NULL) == LM_ERR_FILE);
  EXPECT(result.error == EISDIR);
  EXPECT(settle(r.ctx, lm_file_open(r.ring, in_folder("a/file"), LM_FILE_CREATE, 0, 0, NULL, 0), &result, NULL) == LM_ERR_FILE);
  EXPECT(result.error == EEXIST);
  close_rig(&r);
}

static void refuses(void) {
  rig r = open_rig("cpu", 16 * KIB, 2, 1);
  lm_ctx *ctx = r.ctx;
  write_pattern(in_folder("refuses"), 100);
  EXPECT(!lm_file_ring_create(ctx, 4097, 2, 1) && failed_with(ctx, LM_ERR_ARGUMENT, "slot_bytes=4097"));
  EXPECT(!lm_file_ring_create(ctx, 0, -1, 1) && !lm_file_ring_create(ctx, 0, 1, 257) && !lm_file_ring_create(NULL, 0, 0, 0));
  EXPECT(!lm_file_open(r.ring, in_folder("refuses"), 3, 0, 0, NULL, 0) && failed_with(ctx, LM_ERR_ARGUMENT, "mode=3"));
  EXPECT(!lm_file_open(r.ring, in_folder("refuses"), LM_FILE_READ, 0, 1, NULL, 0));
  EXPECT(!lm_file_open(r.ring, "", LM_FILE_READ, 0, 0, NULL, 0) && failed_with(ctx, LM_ERR_ARGUMENT, "path"));
  lm_file *file = open_file(&r, in_folder("refuses"), LM_FILE_READ, 0, 0);
  uint8_t outside[16];
  lm_file_extent bad[] = {{0, 16, outside}, {INT64_MAX, 1, r.device}, {UINT64_MAX, 1, r.device}, {0, UINT64_MAX, NULL}};
  for (int i = 0; i < 4; i++) EXPECT(!lm_file_read(file, &bad[i], 1, 0, NULL, NULL, 0));
  EXPECT(!lm_file_read(file, bad, -1, 0, NULL, NULL, 0) && !lm_file_read(file, NULL, 1, 0, NULL, NULL, 0));
  EXPECT(!lm_file_read(file, NULL, 0, 2, NULL, NULL, 0) && failed_with(ctx, LM_ERR_ARGUMENT, "flags=2"));
  EXPECT(!lm_file_write(file, bad, NULL, 0, 0, NULL, NULL, 0) && failed_with(ctx, LM_ERR_STATE, "opened for reading"));
  EXPECT(read_one(&r, file, 50, 51, r.device) == LM_ERR_FILE); /* one byte too many */
  EXPECT(read_one(&r, file, 50, 50, r.device) == LM_OK && holds_pattern(r.device, 50, 50));
  EXPECT(settle(ctx, lm_file_read(file, NULL, 0, 0, NULL, NULL, 0), NULL, NULL) == LM_OK);
  lm_file_extent nothing = {1000, 0, r.device};
  EXPECT(settle(ctx, lm_file_read(file, &nothing, 1, 0, NULL, NULL, 0), NULL, NULL) == LM_OK);
  EXPECT(settle(ctx, lm_file_publish(file, in_folder("other"), NULL, 0), NULL, NULL) == LM_ERR_STATE);
  EXPECT(settle(ctx, lm_file_close(file, NULL, 0), NULL, NULL) == LM_OK);
  EXPECT(!lm_file_sync(file, NULL, 0) && failed_with(ctx, LM_ERR_STATE, "closed"));
  EXPECT(!lm_file_read(file, NULL, 0, 0, NULL, NULL, 0));
  lm_file_destroy(file);
  lm_file_ring_destroy(NULL), lm_file_destroy(NULL), lm_file_request_destroy(NULL), lm_file_lock_destroy(NULL);
  close_rig(&r);
}

/* Mutants: flock without LOCK_NB (waits for ever); the descriptor left open. */
static void locks(void) {
  lm_ctx *ctx = open_device("cpu");
  uint64_t before = open_descriptors();
  int32_t holder = -1;
  lm_file_lock *lock = lm_file_lock_acquire(ctx, &holder, in_folder("lock"));
  EXPECT(lock && holder == -1);
  EXPECT(!lm_file_lock_acquire(ctx, &holder, in_folder("lock")) && holder == getpid());
  EXPECT(failed_with(ctx, LM_ERR_BUSY, "is held"));
  EXPECT(!lm_file_lock_acquire(ctx, &holder, in_folder("none/lock")) && failed_with(ctx, LM_ERR_FILE, "ENOENT"));
  lm_file_lock_destroy(lock);
  lock = lm_file_lock_acquire(ctx, &holder, in_folder("lock"));
  EXPECT(lock);
  lm_ctx_destroy(ctx);
  lm_file_lock_destroy(lock);
  EXPECT(open_descriptors() == before);
}

int main(void) {
  make_test_folder(false);
  test("lm_file_read() puts bytes where they belong from odd offsets", odd_offsets);
  test("lm_file_write() writes every kind of extent, with checksums", writes_what_is_there);
  test("lm_file_read() reads neighbours together and extents larger than the ring", reads_neighbours_together);
  test("lm_file_write() goes after its stream without holding up the ring", goes_after_its_stream);
  test("lm_file_ring_create() serves readers and writers at once", many_at_once);
  test("lm_file_read() takes its turn beside a large write", take_turns);
  test("lm_file_ring_destroy() and the others may come in any order", destroyed_in_any_order);
  test("lm_file_request_cancel() begins no further piece", cancelled);
  test("lm_file_publish() gives a file its name; folders are made and files removed", published);
  test("lm_file_*() refuse what is wrong", refuses);
  test("lm_file_lock_acquire() is exclusive and names the holder", locks);
  remove_test_folder();
  return summary();
}

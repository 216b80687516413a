/* host_memory.c: memory of the machine, taken only when it is there.
 *
 * The kernel promises more than it has and kills a process when the promise falls due. So the room is looked up first, in
 * /proc/meminfo and in every cgroup above the process, and all pages are touched at once. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend.h"

#define PAGE UINT64_C(4096)
#define HUGE UINT64_C(0x200000)
#define HUGE_FROM (2 * HUGE)         /* smaller blocks gain nothing from huge pages */
#define SPARE (UINT64_C(64) << 20)   /* left to the rest of the process and the system */
#define UNLIMITED UINT64_MAX

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Value of "key: n kB" or "key n" in a file of such lines; fallback if it is not there. */
static uint64_t read_field(const char *path, const char *key, uint64_t unit, uint64_t fallback) {
  FILE *file = fopen(path, "re");
  if (!file) return fallback;
  char line[256];
  size_t length = strlen(key);
  uint64_t value = fallback;
  while (fgets(line, sizeof line, file)) {
    if (strncmp(line, key, length) != 0) continue;
    value = strtoull(line + length, NULL, 10) * unit;
    break;
  }
  fclose(file);
  return value;
}

/* First number of a file; fallback for "max" or no file. */
static uint64_t read_number(const char *path, uint64_t fallback) {
  FILE *file = fopen(path, "re");
  if (!file) return fallback;
  char line[64] = "";
  char *end = line;
  uint64_t value = fgets(line, sizeof line, file) ? strtoull(line, &end, 10) : 0;
  fclose(file);
  return end == line ? fallback : value;
}

typedef struct room {
  uint64_t total;
  uint64_t available;
} room;

/* One cgroup folder of either version. The page cache that it could drop counts as available. */
static void cgroup_room(const char *folder, bool unified, room *room) {
  char path[1280];
  snprintf(path, sizeof path, "%s/%s", folder, unified ? "memory.max" : "memory.limit_in_bytes");
  uint64_t limit = read_number(path, UNLIMITED);
  if (limit >= UNLIMITED / 4) return; /* version 1 writes a huge number for "no limit" */
  snprintf(path, sizeof path, "%s/%s", folder, unified ? "memory.current" : "memory.usage_in_bytes");
  uint64_t used = read_number(path, 0);
  snprintf(path, sizeof path, "%s/memory.stat", folder);
  uint64_t cache = read_field(path, unified ? "inactive_file " : "total_inactive_file ", 1, 0);
  used -= cache < used ? cache : used;
  uint64_t available = used < limit ? limit - used : 0;
  if (limit < room->total) room->total = limit;
  if (available < room->available) room->available = available;
}

/* The process's cgroup and all above it; in a container the path may be outside, then only the root is there to read. */
static void cgroups_room(room *room) {
  FILE *file = fopen("/proc/self/cgroup", "re");
  if (!file) return;
  char line[1024];
  while (fgets(line, sizeof line, file)) {
    line[strcspn(line, "\n")] = 0;
    char *controllers = strchr(line, ':');
    char *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path) continue;
    *path++ = 0;
    bool unified = controllers[1] == 0;
    if (!unified && !strstr(controllers + 1, "memory")) continue;
    const char *root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    for (;;) {
      char folder[1200];
      snprintf(folder, sizeof folder, "%s%s", root, path);
      cgroup_room(folder, unified, room);
      char *slash = strrchr(path, '/');
      if (!slash || !*path) break;
      *slash = 0;
    }
  }
  fclose(file);
}

static room look(void) {
  room room;
  room.total = read_field("/proc/meminfo", "MemTotal:", 1024, UNLIMITED);
  room.available = read_field("/proc/meminfo", "MemAvailable:", 1024, UNLIMITED);
  cgroups_room(&room);
  return room;
}

uint64_t lm_host_memory_total(void) {
  return look().total;
}

uint64_t lm_host_memory_available(void) {
  return look().available;
}

static uint64_t mapped_bytes(uint64_t bytes) {
  return (bytes + PAGE - 1) & ~(PAGE - 1);
}

/* Anonymous memory, aligned to a huge page if it is large. */
static void *map(uint64_t bytes) {
  uint64_t extra = bytes >= HUGE_FROM ? HUGE - PAGE : 0;
  uint8_t *raw = mmap(NULL, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return NULL;
  if (!extra) return raw;
  uint64_t before = -(uintptr_t)raw & (HUGE - 1);
  if (before) munmap(raw, before);
  if (extra > before) munmap(raw + before + bytes, extra - before);
  (void)madvise(raw + before, bytes, MADV_HUGEPAGE);
  return raw + before;
}

/* Refuses what the machine cannot give. @return false with the failure reported */
static bool has_room(const lm_host *host, uint64_t bytes, int32_t status, const char *op, uint64_t *available) {
  *available = lm_host_memory_available();
  if (bytes <= UINT64_MAX / 4 && mapped_bytes(bytes) + SPARE <= *available) return true;
  host->fail(host->owner, status,
             "%s: this would leave the machine without memory: requested=%llu available=%llu kept_spare=%llu: ask for "
             "less",
             op, (unsigned long long)bytes, (unsigned long long)*available, (unsigned long long)SPARE);
  return false;
}

/* Brings in all pages. @return 0 or an errno */
static int touch(uint8_t *memory, uint64_t size) {
  if (madvise(memory, size, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  for (uint64_t at = 0; at < size; at += PAGE) *(volatile uint8_t *)(memory + at) = 0; /* Linux before 5.14 */
  return 0;
}

static void refused(const lm_host *host, int32_t status, const char *op, uint64_t bytes, uint64_t available, int error) {
  host->fail(host->owner, status, "%s: the system refused: requested=%llu available=%llu: %s", op,
             (unsigned long long)bytes, (unsigned long long)available, strerror(error));
}

void *lm_host_memory_take(const lm_host *host, uint64_t bytes, int32_t status, const char *op) {
  uint64_t available;
  if (!has_room(host, bytes, status, op, &available)) return NULL;
  uint64_t size = mapped_bytes(bytes);
  uint8_t *memory = map(size);
  int error = memory ? touch(memory, size) : errno;
  if (!error) return memory;
  if (memory) munmap(memory, size);
  refused(host, status, op, bytes, available, error);
  return NULL;
}

void lm_host_memory_give(void *memory, uint64_t bytes) {
  munmap(memory, mapped_bytes(bytes));
}

#define UNBACKED (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

void *lm_host_range_reserve(const lm_host *host, uint64_t *bytes) {
  int error = ENOMEM;
  *bytes = 0;
  /* Addresses cost nothing; a process that may have only so many gets as many as it may. */
  for (uint64_t pages = look().total / LM_RANGE_PAGE * 8; pages >= 32; pages /= 2) {
    *bytes = (pages & ~UINT64_C(1)) * LM_RANGE_PAGE;
    uint8_t *raw = mmap(NULL, *bytes + LM_RANGE_PAGE, PROT_NONE, UNBACKED, -1, 0);
    if (raw == MAP_FAILED) {
      error = errno;
      continue;
    }
    uint64_t before = -(uintptr_t)raw & (LM_RANGE_PAGE - 1);
    if (before) munmap(raw, before);
    munmap(raw + before + *bytes, LM_RANGE_PAGE - before);
    return raw + before;
  }
  refused(host, LM_ERR_OUT_OF_MEMORY, "lm_pool_create", *bytes, lm_host_memory_available(), error);
  return NULL;
}

int32_t lm_host_range_commit(const lm_host *host, void *memory, uint64_t bytes) {
  static const char op[] = "lm_pool_alloc";
  uint64_t available;
  if (!has_room(host, bytes, LM_ERR_OUT_OF_MEMORY, op, &available)) return LM_ERR_OUT_OF_MEMORY;
  int error = mprotect(memory, bytes, PROT_READ | PROT_WRITE) ? errno : 0;
  if (!error) (void)madvise(memory, bytes, MADV_HUGEPAGE);
  if (!error) error = touch(memory, bytes);
  if (!error) return LM_OK;
  lm_host_range_decommit(memory, bytes);
  refused(host, LM_ERR_OUT_OF_MEMORY, op, bytes, available, error);
  return LM_ERR_OUT_OF_MEMORY;
}

void lm_host_range_decommit(void *memory, uint64_t bytes) {
  (void)mmap(memory, bytes, PROT_NONE, UNBACKED | MAP_FIXED, -1, 0);
}

void lm_host_range_release(void *memory, uint64_t bytes) {
  munmap(memory, bytes);
}

/* pool_report.c: the pool's out-of-memory text, and its snapshot. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define OWNERS_SHOWN 10

void lm_pool_free_bytes(lm_pool *pool, uint64_t *largest, uint64_t *total) {
  const lm_pool_stats *stats = &pool->stats;
  *largest = lm_pages_free(pool);
  *total = 0;
  for (uint8_t zone = 0; zone < LM_ZONES; zone++) {
    uint64_t run = 0;
    for (lm_block *block = pool->zones[zone]; block; block = block->after) {
      bool free = lm_block_usable(block, LM_ANYBODY);
      run = free ? run + block->bytes : 0;
      if (free) *total += block->bytes;
      if (run > *largest) *largest = run;
    }
  }
  if (stats->limit && *largest > stats->limit - stats->current) *largest = stats->limit - stats->current;
}

typedef struct share {
  const char *label;
  uint64_t bytes;
  uint64_t blocks;
} share;

static int by_label(const void *a, const void *b) {
  return strcmp(((const share *)a)->label, ((const share *)b)->label);
}

static int by_bytes(const void *a, const void *b) {
  uint64_t x = ((const share *)a)->bytes, y = ((const share *)b)->bytes;
  return x < y ? 1 : x > y ? -1 : by_label(a, b);
}

/* Live bytes by label, largest first. @return how many, 0 also if there is no heap memory for the list */
static uint32_t shares_of(lm_pool *pool, share *shares) {
  uint32_t count = 0, merged = 0;
  for (uint32_t i = 0; i < pool->block_count; i++) {
    const lm_block *block = pool->blocks[i];
    if (block->live) shares[count++] = (share){.label = block->label, .bytes = block->bytes, .blocks = 1};
  }
  qsort(shares, count, sizeof *shares, by_label);
  for (uint32_t i = 0; i < count; i++) {
    if (merged && strcmp(shares[merged - 1].label, shares[i].label) == 0) {
      shares[merged - 1].bytes += shares[i].bytes;
      shares[merged - 1].blocks++;
    } else {
      shares[merged++] = shares[i];
    }
  }
  qsort(shares, merged, sizeof *shares, by_bytes);
  return merged;
}

void lm_pool_report(lm_pool *pool, uint64_t requested, const char *label) {
  typedef unsigned long long ull;
  uint64_t largest, total;
  lm_pool_free_bytes(pool, &largest, &total);
  uint64_t limit = pool->stats.limit;
  uint64_t used = pool->stats.reserved - lm_pages_free(pool); /* in pages with live blocks */
  bool limited = limit && (used >= limit || requested > limit - used);
  char text[LM_ERROR_TEXT_MAX];
  int length = snprintf(text, sizeof text,
                        "lm_pool_alloc: out of memory: requested=%llu label=\"%.*s\" largest_free=%llu total_free=%llu "
                        "fragmentation=%.3f live=%llu reserved=%llu limit=%llu: %s",
                        (ull)requested, LM_LABEL_MAX - 1, label ? label : "", (ull)largest, (ull)total,
                        total ? 1.0 - (double)largest / (double)total : 0.0, (ull)pool->stats.current,
                        (ull)pool->stats.reserved, (ull)limit,
                        limited ? "free blocks or raise the limit" : "the system has no more: free blocks or ask for less");
  share *shares = pool->ctx->host.alloc(pool->ctx, (pool->block_count + 1) * sizeof *shares);
  uint32_t count = shares ? shares_of(pool, shares) : 0;
  for (uint32_t i = 0; i < count && i < OWNERS_SHOWN; i++) {
    const char *name = shares[i].label[0] ? shares[i].label : "(no label)";
    length += snprintf(text + length, sizeof text - (size_t)length, "%s\n  %llu bytes in %llu blocks: %s",
                       i ? "" : "\nlargest owners:", (ull)shares[i].bytes, (ull)shares[i].blocks, name);
  }
  lm_heap_release(shares);
  lm_fail(pool->ctx, LM_ERR_OUT_OF_MEMORY, "%s", text);
}

/* Blocks side by side, up to the next addresses without memory. @return the last of them */
static lm_block *write_segment(lm_text *text, lm_block *first, uint64_t now) {
  typedef unsigned long long ull;
  lm_block *last = first;
  while (last->after && (last->after->live || last->after->owner != LM_UNBACKED)) last = last->after;
  lm_text_add(text, "{\"bytes\":%llu,\"blocks\":[", (ull)(last->address + last->bytes - first->address));
  for (lm_block *block = first;; block = block->after) {
    const char *state = block->live ? "live" : block->owner == LM_NOBODY ? "free" : "pending";
    lm_text_add(text, "%s{\"offset\":%llu,\"bytes\":%llu,\"state\":\"%s\"", block == first ? "" : ",",
                (ull)(block->address - first->address), (ull)block->bytes, state);
    if (block->live) {
      lm_text_add(text, ",\"label\":");
      lm_text_string(text, block->label);
      lm_text_add(text, ",\"requested\":%llu,\"ageMs\":%llu", (ull)block->requested, (ull)(now - block->since));
    }
    lm_text_add(text, "}");
    if (block == last) break;
  }
  lm_text_add(text, "]}");
  return last;
}

int32_t lm_pool_snapshot(lm_pool *pool, void *buf, uint64_t cap) {
  if (!pool) return LM_ERR_ARGUMENT;
  lm_text text = {.buf = buf, .cap = buf ? cap : 0};
  uint64_t now = lm_clock_ms();
  lm_text_add(&text, "[");
  pthread_mutex_lock(&pool->mutex);
  lm_settle(pool, LM_NOBODY);
  bool first = true;
  for (uint8_t zone = 0; zone < LM_ZONES; zone++) {
    for (lm_block *block = pool->zones[zone]; block; block = block->after) {
      if (block->owner == LM_UNBACKED && !block->live) continue;
      lm_text_add(&text, first ? "" : ",");
      block = write_segment(&text, block, now);
      first = false;
    }
  }
  pthread_mutex_unlock(&pool->mutex);
  lm_text_add(&text, "]");
  return (int32_t)(text.length + 1);
}

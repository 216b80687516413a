/* paged.c: address ranges of device memory whose pages come and go. */
#include "core.h"

#define BITS UINT64_C(64)

void *lm_paged_reserve(lm_ctx *ctx, uint64_t *bytes, const char *op) {
  void *memory = ctx->api->range_reserve(ctx->backend, bytes);
  if (!memory) return NULL;
  uint64_t words = (*bytes / LM_RANGE_PAGE + BITS - 1) / BITS;
  uint64_t *pages = lm_heap_alloc(ctx, words * sizeof *pages, op);
  lm_range range = {.begin = memory, .bytes = *bytes, .kind = LM_RANGE_POOL, .pages = pages};
  pthread_mutex_lock(&ctx->mutex);
  bool added = pages && lm_range_add(ctx, range, op);
  pthread_mutex_unlock(&ctx->mutex);
  if (added) return memory;
  lm_heap_release(pages);
  ctx->api->range_release(ctx->backend, memory, *bytes);
  return NULL;
}

static bool has_page(const lm_range *range, uint64_t page) {
  return range->pages[page / BITS] >> page % BITS & 1;
}

bool lm_paged_held(const lm_range *range, uint64_t offset, uint64_t bytes) {
  uint64_t last = (offset + (bytes ? bytes - 1 : 0)) / LM_RANGE_PAGE;
  for (uint64_t page = offset / LM_RANGE_PAGE; page <= last;) {
    if (page % BITS == 0 && last - page >= BITS && range->pages[page / BITS] == UINT64_MAX) page += BITS;
    else if (!has_page(range, page++)) return false;
  }
  return true;
}

/* The range that an address of it lies in, whether or not there is memory. Under ctx->mutex. */
static lm_range *range_of(lm_ctx *ctx, const uint8_t *address) {
  uint32_t low = 0, high = ctx->range_count;
  while (low + 1 < high) {
    uint32_t middle = low + (high - low) / 2;
    if (ctx->ranges[middle].begin <= address) low = middle;
    else high = middle;
  }
  return &ctx->ranges[low];
}

/* Notes that pages have memory or have none. */
static void note(lm_ctx *ctx, const uint8_t *memory, uint64_t bytes, bool held) {
  lm_range *range = range_of(ctx, memory);
  uint64_t first = (uint64_t)(memory - range->begin) / LM_RANGE_PAGE, count = bytes / LM_RANGE_PAGE;
  for (uint64_t page = first; page < first + count; page++) {
    uint64_t bit = UINT64_C(1) << page % BITS;
    if (held) range->pages[page / BITS] |= bit;
    else range->pages[page / BITS] &= ~bit;
  }
  range->held += held ? bytes : -bytes;
  if (held) lm_count_taken(ctx, LM_RANGE_POOL, count, bytes);
  else lm_count_given(ctx, LM_RANGE_POOL, count, bytes);
}

bool lm_paged_commit(lm_ctx *ctx, void *memory, uint64_t bytes) {
  bool done = !ctx->api->range_commit(ctx->backend, memory, bytes);
  pthread_mutex_lock(&ctx->mutex);
  if (done) note(ctx, memory, bytes, true);
  else ctx->classes[LM_MEMORY_DEVICE].failures++;
  pthread_mutex_unlock(&ctx->mutex);
  return done;
}

void lm_paged_decommit(lm_ctx *ctx, void *memory, uint64_t bytes) {
  pthread_mutex_lock(&ctx->mutex);
  note(ctx, memory, bytes, false);
  pthread_mutex_unlock(&ctx->mutex);
  ctx->api->range_decommit(ctx->backend, memory, bytes);
}

void lm_paged_release(lm_ctx *ctx, void *memory) {
  pthread_mutex_lock(&ctx->mutex);
  lm_range range = *range_of(ctx, memory);
  lm_count_given(ctx, LM_RANGE_POOL, range.held / LM_RANGE_PAGE, range.held);
  lm_range_remove(ctx, memory);
  pthread_mutex_unlock(&ctx->mutex);
  uint64_t count = range.bytes / LM_RANGE_PAGE;
  for (uint64_t page = 0; page < count;) {
    uint64_t end = page;
    if (page % BITS == 0 && !range.pages[page / BITS]) {
      page += BITS;
      continue;
    }
    while (end < count && has_page(&range, end)) end++;
    uint8_t *from = range.begin + page * LM_RANGE_PAGE;
    if (end > page) ctx->api->range_decommit(ctx->backend, from, (end - page) * LM_RANGE_PAGE);
    page = end > page ? end : page + 1;
  }
  ctx->api->range_release(ctx->backend, range.begin, range.bytes);
  lm_heap_release(range.pages);
}

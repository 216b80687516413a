/* pool_pages.c: the pages behind the pool's blocks: where room is made, and where its memory comes from. */
#include "pool.h"

static uint64_t page_up(uint64_t value) {
  return (value + LM_RANGE_PAGE - 1) & ~(LM_RANGE_PAGE - 1);
}

static bool unbacked(const lm_block *block) {
  return !block->live && !block->moving && block->owner == LM_UNBACKED;
}

/* Cuts a free or unbacked block in two; both stay in their lists. */
static bool cut(lm_pool *pool, lm_block *block, uint64_t bytes) {
  if (block->bytes <= bytes) return true;
  lm_block_remove(pool, block);
  bool done = lm_block_split(pool, block, bytes);
  lm_block_list(pool, block);
  return done;
}

/* Neighbours that the driver is at: first to last, in no list. */
typedef struct place {
  lm_block *first, *last;
  uint64_t missing; /* bytes of pages without memory */
} place;

/* Bytes of memory that a place at the start of such a series would lack. */
static uint64_t missing_at(const lm_block *block, uint64_t bytes) {
  uint64_t missing = 0;
  for (;; block = block->after) {
    uint64_t part = block->bytes < bytes ? block->bytes : bytes;
    if (unbacked(block)) missing += page_up(part);
    bytes -= part;
    if (!bytes) return missing;
  }
}

/* The first block of the series of free and unbacked neighbours that lacks least, the smallest of such; NULL if none fits. */
static lm_block *find_place(lm_pool *pool, uint8_t zone, uint32_t owner, uint64_t bytes) {
  lm_block *best = NULL, *first = NULL;
  uint64_t least = 0, smallest = 0, sum = 0;
  for (lm_block *block = pool->zones[zone]; block; block = block->after) {
    bool open = lm_block_usable(block, owner) || unbacked(block);
    if (open && !first) first = block;
    if (open) sum += block->bytes;
    if (open && block->after) continue;
    if (sum >= bytes) {
      uint64_t missing = missing_at(first, bytes);
      if (!best || missing < least || (missing == least && sum < smallest)) {
        best = first;
        least = missing;
        smallest = sum;
      }
    }
    first = NULL;
    sum = 0;
  }
  return best;
}

/* Takes what is needed of such a series out of all lists. @return false without heap memory, and nothing has changed */
static bool take_place(lm_pool *pool, lm_block *first, uint64_t bytes, place *place) {
  lm_block *last = first;
  uint64_t left = bytes;
  for (; last->bytes < left; last = last->after) left -= last->bytes;
  if (!cut(pool, last, unbacked(last) ? page_up(left) : left)) return false;
  *place = (struct place){.first = first, .last = last};
  for (lm_block *block = first;; block = block->after) {
    if (unbacked(block)) place->missing += block->bytes;
    lm_block_remove(pool, block);
    block->moving = true;
    if (block == last) return true;
  }
}

static void put_back(lm_pool *pool, const place *place) {
  for (lm_block *block = place->first, *next;; block = next) {
    bool last = block == place->last;
    next = block->after;
    block->moving = false;
    lm_block_insert(pool, block);
    if (last) return;
  }
}

/* Puts memory behind the pages of a place that have none; what was reserved for pages that stay without is given up. */
static bool commit(lm_pool *pool, const place *place) {
  uint64_t done = 0;
  bool good = true;
  pthread_mutex_unlock(&pool->mutex);
  for (lm_block *block = place->first; good; block = block->after) {
    bool lacks = block->owner == LM_UNBACKED;
    good = !lacks || lm_paged_commit(pool->ctx, block->address, block->bytes);
    if (lacks && good) done += block->bytes;
    if (block == place->last) break;
  }
  pthread_mutex_lock(&pool->mutex);
  pool->stats.driver_calls += done / LM_RANGE_PAGE;
  pool->stats.reserved -= place->missing - done;
  for (lm_block *block = place->first; done; block = block->after) {
    if (block->owner != LM_UNBACKED) continue;
    done -= block->bytes;
    block->owner = LM_NOBODY;
    block->mark = 0;
  }
  return good;
}

/* Pages that no live block touches, a series of them as one block each, linked by bin_after. */
typedef struct leavers {
  lm_block *first;
  uint64_t bytes;
  uint64_t mark; /* in the stream that owned some of them: what must pass before their memory goes */
} leavers;

/* Takes the pages [begin, begin + bytes) of a series of free blocks out of all lists. */
static void take_pages(lm_pool *pool, lm_block *first, uint8_t *begin, uint64_t bytes, leavers *leavers) {
  while (first->address + first->bytes <= begin) first = first->after;
  if (first->address < begin) {
    if (!cut(pool, first, (uint64_t)(begin - first->address))) return;
    first = first->after;
  }
  lm_block *last = first;
  while (last->address + last->bytes < begin + bytes) last = last->after;
  if (!cut(pool, last, (uint64_t)(begin + bytes - last->address))) {
    lm_block_remove(pool, first);
    lm_block_insert(pool, first);
    return;
  }
  for (lm_block *block = first;; block = block->after) {
    if (block->owner != LM_NOBODY && block->mark > leavers->mark) leavers->mark = block->mark;
    lm_block_remove(pool, block);
    if (block == last) break;
  }
  lm_block *block = lm_blocks_join(pool, first, last, LM_UNBACKED);
  block->moving = true;
  block->bin_after = leavers->first;
  leavers->first = block;
  leavers->bytes += bytes;
}

/* Finds up to `most` bytes of pages that no live block touches and that are usable for `owner`, those with the highest addresses
 * of a zone first, so that what stays lies together at its start; takes them out of all lists unless leavers is NULL.
 * @return bytes found */
static uint64_t find_pages(lm_pool *pool, uint32_t owner, uint64_t most, leavers *leavers) {
  uint64_t found = 0;
  for (uint8_t zone = LM_ZONES; zone-- > 0;) { /* pages of the large ones first: more of them are whole */
    lm_block *last = pool->zones[zone];
    while (last->after) last = last->after;
    while (last && found < most) {
      if (!lm_block_usable(last, owner)) {
        last = last->before;
        continue;
      }
      lm_block *first = last;
      while (first->before && lm_block_usable(first->before, owner)) first = first->before;
      uint8_t *begin = first->address + (page_up((uintptr_t)first->address) - (uintptr_t)first->address);
      uint8_t *end = last->address + last->bytes;
      end -= (uintptr_t)end % LM_RANGE_PAGE;
      uint64_t bytes = end > begin ? (uint64_t)(end - begin) : 0;
      if (bytes > most - found) bytes = most - found;
      last = first->before;
      if (bytes && leavers) take_pages(pool, first, end - bytes, bytes, leavers);
      found += bytes;
    }
  }
  return found;
}

uint64_t lm_pages_free(lm_pool *pool) {
  return pool->fixed ? 0 : find_pages(pool, LM_ANYBODY, UINT64_MAX, NULL);
}

/* Takes the memory of the pages away, after the stream that owned some of them has passed. */
static void let_go(lm_pool *pool, leavers *leavers, lm_stream *stream) {
  pthread_mutex_unlock(&pool->mutex);
  if (stream && leavers->mark) lm_point_wait((lm_point){.stream = stream, .mark = leavers->mark});
  for (lm_block *block = leavers->first; block; block = block->bin_after) {
    lm_paged_decommit(pool->ctx, block->address, block->bytes);
  }
  pthread_mutex_lock(&pool->mutex);
  pool->stats.driver_calls += leavers->bytes / LM_RANGE_PAGE;
  for (lm_block *block = leavers->first, *next; block; block = next) {
    next = block->bin_after;
    block->moving = false;
    lm_block_insert(pool, block);
  }
}

lm_block *lm_pool_grow(lm_pool *pool, uint32_t owner, uint8_t zone, uint64_t bytes) {
  lm_block *first = pool->fixed ? NULL : find_place(pool, zone, owner, bytes);
  place place;
  if (!first || !take_place(pool, first, bytes, &place)) return NULL;
  uint64_t limit = pool->stats.limit;
  uint64_t room = limit ? page_up(limit) - pool->stats.reserved : UINT64_MAX;
  /* A program whose steps fit only if pages go to and fro gets more memory once as many have moved as there are, so that every
   * pool settles, and then makes no driver call and no wait. */
  bool settled = place.missing <= room && pool->moved >= pool->stats.reserved;
  /* A graph that is recorded now may use what was freed before. */
  bool movable = !settled && atomic_load(&pool->ctx->recordings) == 0;
  uint64_t found = movable ? find_pages(pool, owner, place.missing, NULL) : 0;
  if (place.missing - found > room) {
    put_back(pool, &place);
    return NULL;
  }
  leavers leavers = {0};
  if (found) (void)find_pages(pool, owner, found, &leavers);
  bool fits = place.missing - leavers.bytes <= room; /* fewer pages leave where heap memory is short */
  /* Counted before anything is done, so that the limit holds for all threads. */
  pool->stats.reserved += (fits ? place.missing : 0) - leavers.bytes;
  pool->moved += leavers.bytes;
  if (leavers.first) let_go(pool, &leavers, pool->owners[owner]->stream);
  if (fits && commit(pool, &place)) return lm_blocks_join(pool, place.first, place.last, owner);
  put_back(pool, &place);
  return NULL;
}

void lm_pool_settle_all(lm_pool *pool) {
  for (uint32_t i = 1; i < pool->owner_count; i++) {
    const lm_block *youngest = pool->owners[i]->youngest;
    if (!youngest) continue;
    lm_point point = {.stream = pool->owners[i]->stream, .mark = youngest->mark};
    lm_stream_ref(point.stream); /* its slot may be given to another stream while the mutex is released */
    pthread_mutex_unlock(&pool->mutex);
    lm_point_wait(point);
    lm_stream_unref(point.stream);
    pthread_mutex_lock(&pool->mutex);
  }
  lm_settle(pool, LM_NOBODY);
}

void lm_pool_shrink(lm_pool *pool) {
  leavers leavers = {0};
  if (pool->fixed) return;
  lm_pool_settle_all(pool);
  if (find_pages(pool, LM_NOBODY, UINT64_MAX, &leavers) == 0) return;
  let_go(pool, &leavers, NULL);
  pool->stats.reserved -= leavers.bytes;
  pool->moved = 0; /* what comes next may be of another kind */
}

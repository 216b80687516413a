/* pool_blocks.c: blocks, bins and owners of the pool; no policy. */
#include "pool.h"

#include <string.h>

#define LAST_BIN (LM_BIN_COUNT - 1)

/* How many blocks of a bin are compared, so that a take has an end; further ones are looked at until one fits. */
#define COMPARED 32

static uint32_t bin_of(uint64_t bytes) {
  uint64_t granules = bytes / LM_GRANULE;
  if (granules < 16) return (uint32_t)granules;
  uint32_t power = 63 - (uint32_t)__builtin_clzll(granules);
  uint32_t bin = 16 + (power - 4) * 8 + (uint32_t)(granules >> (power - 3) & 7);
  return bin < LAST_BIN ? bin : LAST_BIN;
}

void lm_block_remove(lm_pool *pool, lm_block *block) {
  if (block->owner == LM_UNBACKED) return;
  lm_owner *owner = pool->owners[block->owner];
  lm_bins *bins = &owner->zones[block->zone];
  uint32_t bin = block->bin;
  if (block->bin_before) {
    block->bin_before->bin_after = block->bin_after;
  } else {
    bins->bins[bin] = block->bin_after;
    if (!block->bin_after) bins->bitmap[bin / 64] &= ~(UINT64_C(1) << bin % 64);
  }
  if (block->bin_after) block->bin_after->bin_before = block->bin_before;
  if (block->owner == LM_NOBODY) return;
  if (block->older) block->older->younger = block->younger;
  else owner->oldest = block->younger;
  if (block->younger) block->younger->older = block->older;
  else owner->youngest = block->older;
}

/* Puts a block into its owner's bin, and into the list by mark after `older`. */
static void link_block(lm_pool *pool, lm_block *block, lm_block *older) {
  if (block->owner == LM_UNBACKED) return;
  lm_owner *owner = pool->owners[block->owner];
  lm_bins *bins = &owner->zones[block->zone];
  const lm_block *next = block->after;
  uint32_t bin = next && !next->live && next->owner == LM_UNBACKED ? LAST_BIN : bin_of(block->bytes);
  block->bin = (uint16_t)bin;
  block->bin_before = NULL;
  block->bin_after = bins->bins[bin];
  if (block->bin_after) block->bin_after->bin_before = block;
  bins->bins[bin] = block;
  bins->bitmap[bin / 64] |= UINT64_C(1) << bin % 64;
  if (block->owner == LM_NOBODY) return;
  block->older = older;
  block->younger = older ? older->younger : owner->oldest;
  if (block->older) block->older->younger = block;
  else owner->oldest = block;
  if (block->younger) block->younger->older = block;
  else owner->youngest = block;
}

/* The block after which a mark comes in the list of a stream: nearly always the youngest. */
static lm_block *older_than(lm_pool *pool, const lm_block *block) {
  if (block->owner == LM_NOBODY || block->owner == LM_UNBACKED) return NULL;
  lm_block *older = pool->owners[block->owner]->youngest;
  while (older && older->mark > block->mark) older = older->older;
  return older;
}

void lm_block_list(lm_pool *pool, lm_block *block) {
  link_block(pool, block, older_than(pool, block));
}

static lm_block *block_new(lm_pool *pool) {
  lm_block *block = pool->spare;
  if (block) {
    pool->spare = block->after;
    return block;
  }
  static const char op[] = "lm_pool_alloc";
  if (!lm_heap_grow(pool->ctx, &pool->blocks, pool->block_count, &pool->block_capacity, sizeof block, op)) return NULL;
  block = lm_heap_alloc(pool->ctx, sizeof *block, op);
  if (!block) return NULL;
  block->index = pool->block_count;
  block->generation = 1;
  pool->blocks[pool->block_count++] = block;
  return block;
}

static void block_drop(lm_pool *pool, lm_block *block) {
  block->after = pool->spare;
  pool->spare = block;
}

/* Appends the next neighbour, which is in no list, to a block. */
static void absorb(lm_pool *pool, lm_block *block) {
  lm_block *next = block->after;
  block->bytes += next->bytes;
  if (next->mark > block->mark) block->mark = next->mark;
  block->after = next->after;
  if (block->after) block->after->before = block;
  block_drop(pool, next);
}

static bool joins(const lm_block *block, const lm_block *neighbour) {
  return neighbour && !neighbour->live && !neighbour->moving && neighbour->owner == block->owner;
}

void lm_block_insert(lm_pool *pool, lm_block *block) {
  if (joins(block, block->after)) {
    lm_block_remove(pool, block->after);
    absorb(pool, block);
  }
  if (joins(block, block->before)) {
    lm_block *before = block->before;
    lm_block_remove(pool, before);
    absorb(pool, before);
    block = before;
  }
  lm_block_list(pool, block);
}

bool lm_block_split(lm_pool *pool, lm_block *block, uint64_t bytes) {
  if (block->bytes == bytes) return true;
  lm_block *rest = block_new(pool);
  if (!rest) return false;
  rest->zone = block->zone;
  rest->live = rest->moving = false;
  rest->address = block->address + bytes;
  rest->bytes = block->bytes - bytes;
  rest->owner = block->owner;
  rest->mark = block->mark;
  rest->before = block;
  rest->after = block->after;
  if (rest->after) rest->after->before = rest;
  block->after = rest;
  block->bytes = bytes;
  link_block(pool, rest, block->older);
  return true;
}

/* The block of a bin that fits and has the lowest address. */
static lm_block *best_of_bin(const lm_bins *bins, uint32_t bin, uint64_t bytes) {
  lm_block *best = NULL;
  uint32_t seen = 0;
  for (lm_block *block = bins->bins[bin]; block && (!best || seen < COMPARED); block = block->bin_after, seen++) {
    if (block->bytes >= bytes && (!best || block->address < best->address)) best = block;
  }
  return best;
}

/* Not every block of the first bin fits, nor of the last; all of those between do. */
static lm_block *best_of(const lm_bins *bins, uint64_t bytes) {
  uint32_t bin = bin_of(bytes);
  lm_block *block = best_of_bin(bins, bin, bytes);
  if (block || bin == LAST_BIN) return block;
  uint32_t word = ++bin / 64;
  uint64_t bits = bins->bitmap[word] >> bin % 64 << bin % 64;
  while (!bits && ++word < sizeof bins->bitmap / sizeof bits) bits = bins->bitmap[word];
  return bits ? best_of_bin(bins, word * 64 + (uint32_t)__builtin_ctzll(bits), bytes) : NULL;
}

/* The block of an owner or of nobody that a take chooses. */
static lm_block *best_for(lm_pool *pool, uint32_t owner, uint8_t zone, uint64_t bytes) {
  lm_block *block = best_of(&pool->owners[owner]->zones[zone], bytes);
  if (block && block->bytes == bytes) return block;
  lm_block *other = best_of(&pool->owners[LM_NOBODY]->zones[zone], bytes);
  if (!block || !other) return block ? block : other;
  return other->bin < block->bin || (other->bin == block->bin && other->address < block->address) ? other : block;
}

lm_block *lm_block_take(lm_pool *pool, uint32_t owner, uint8_t zone, uint64_t bytes) {
  lm_block *block = best_for(pool, owner, zone, bytes);
  if (block) lm_block_remove(pool, block);
  return block;
}

lm_block *lm_block_take_rest(lm_pool *pool, uint32_t owner, uint64_t bytes) {
  lm_block *block = best_for(pool, owner, LM_SMALL, bytes);
  if (!block || block->bytes >= LM_SMALL_MAX) return NULL;
  lm_block_remove(pool, block);
  return block;
}

bool lm_run_find(lm_pool *pool, uint8_t zone, uint32_t owner, uint64_t bytes, lm_run *best) {
  lm_block *first = NULL;
  uint64_t sum = 0;
  best->first = NULL;
  for (lm_block *block = pool->zones[zone]; block; block = block->after) {
    if (!lm_block_usable(block, owner)) {
      first = NULL;
      sum = 0;
      continue;
    }
    if (!first) first = block;
    sum += block->bytes;
    while (sum - first->bytes >= bytes) { /* the shortest run that ends here */
      sum -= first->bytes;
      first = first->after;
    }
    if (sum < bytes || (best->first && best->bytes <= sum)) continue;
    *best = (lm_run){.first = first, .last = block, .bytes = sum};
  }
  return best->first != NULL;
}

lm_block *lm_blocks_join(lm_pool *pool, lm_block *first, lm_block *last, uint32_t owner) {
  uint64_t mark = 0;
  for (lm_block *block = first;; block = block->after) {
    if (block->owner == owner && block->mark > mark) mark = block->mark;
    block->moving = false;
    if (block == last) break;
  }
  for (bool end = first == last; !end;) {
    end = first->after == last;
    absorb(pool, first);
  }
  first->owner = owner;
  first->mark = mark;
  first->older = older_than(pool, first);
  return first;
}

lm_block *lm_run_join(lm_pool *pool, lm_run run, uint64_t bytes) {
  lm_block_remove(pool, run.last);
  if (!lm_block_split(pool, run.last, run.last->bytes - (run.bytes - bytes))) {
    lm_block_list(pool, run.last);
    return NULL;
  }
  for (lm_block *block = run.first; block != run.last; block = block->after) lm_block_remove(pool, block);
  return lm_blocks_join(pool, run.first, run.last, run.first->owner);
}

void lm_settle(lm_pool *pool, uint32_t except) {
  for (uint32_t i = 1; i < pool->owner_count; i++) {
    if (i == except) continue;
    lm_owner *owner = pool->owners[i];
    while (owner->oldest && lm_point_passed((lm_point){.stream = owner->stream, .mark = owner->oldest->mark})) {
      lm_block *block = owner->oldest;
      lm_block_remove(pool, block);
      block->owner = LM_NOBODY;
      lm_block_insert(pool, block);
    }
  }
}

/* Slots of streams that were destroyed and have ended are used again. */
static void owners_purge(lm_pool *pool) {
  lm_settle(pool, LM_NOBODY);
  for (uint32_t i = 1; i < pool->owner_count; i++) {
    lm_owner *owner = pool->owners[i];
    lm_stream *stream = owner->stream;
    if (!stream || owner->oldest || !atomic_load(&stream->closed)) continue;
    if (!lm_point_passed((lm_point){.stream = stream, .mark = lm_stream_mark(stream)})) continue;
    owner->stream = NULL;
    lm_stream_unref(stream);
  }
}

uint32_t lm_owner_of(lm_pool *pool, lm_stream *stream) {
  static const char op[] = "lm_pool_alloc";
  for (uint32_t i = 1; i < pool->owner_count; i++) {
    if (pool->owners[i]->stream == stream) return i;
  }
  owners_purge(pool);
  uint32_t slot = 1;
  while (slot < pool->owner_count && pool->owners[slot]->stream) slot++;
  if (slot == pool->owner_count) {
    uint64_t element = sizeof *pool->owners;
    if (!lm_heap_grow(pool->ctx, &pool->owners, pool->owner_count, &pool->owner_capacity, element, op)) return 0;
    lm_owner *owner = lm_heap_alloc(pool->ctx, sizeof *owner, op);
    if (!owner) return 0;
    pool->owners[pool->owner_count++] = owner;
  }
  lm_stream_ref(stream);
  pool->owners[slot]->stream = stream;
  return slot;
}

lm_block *lm_block_add(lm_pool *pool, uint8_t zone, uint8_t *memory, uint64_t bytes) {
  lm_block *block = block_new(pool);
  if (!block) return NULL;
  block->before = block->after = NULL;
  block->address = memory;
  block->bytes = bytes;
  block->zone = zone;
  block->owner = LM_NOBODY;
  block->mark = 0;
  block->live = block->moving = false;
  return block;
}

lm_block *lm_block_of(lm_pool *pool, uint64_t handle) {
  uint32_t index = (uint32_t)handle - 1;
  if (index >= pool->block_count) return NULL;
  lm_block *block = pool->blocks[index];
  return block->live && block->generation == handle >> 32 ? block : NULL;
}

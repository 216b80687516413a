/* core_pool_place_test.c: where the pool puts blocks, and which of its pages move. */
#include "pool_test.h"

static lm_ctx *ctx;
static lm_stream *a;

/* Mutants: compare bytes instead of addresses in best_of_bin, or one block. */
static void fits_best(void) {
  lm_pool *pool = lm_pool_create(ctx, 0);
  const uint64_t sizes[] = {700 * KIB, 70 * KIB, 310 * KIB, 70 * KIB, 300 * KIB, 70 * KIB, 450 * KIB, 70 * KIB};
  for (int order = 0; order < 2; order++) {
    uint64_t handles[8];
    void *pointers[8];
    for (int i = 0; i < 8; i++) {
      handles[i] = take(pool, sizes[i], a);
      pointers[i] = at(pool, handles[i]);
    }
    for (int i = 0; i < 7; i += 2) EXPECT(lm_pool_free(pool, handles[order ? i : 6 - i], a) == LM_OK);
    uint64_t first = take(pool, 430 * KIB, a), second = take(pool, 299 * KIB, a), third = take(pool, 299 * KIB, a);
    EXPECT(at(pool, first) == pointers[6]);                                    /* 700 KiB are lower, and of another class */
    EXPECT(at(pool, second) == pointers[2] && at(pool, third) == pointers[4]); /* one class: the lower first */
    const uint64_t rest[] = {first, second, third, handles[1], handles[3], handles[5], handles[7]};
    for (int i = 0; i < 7; i++) EXPECT(lm_pool_free(pool, rest[i], a) == LM_OK);
  }
  EXPECT(pool_stats_of(pool).reserved == 2 * MIB);
  lm_pool_destroy(pool);
}

/* Mutant: leave LAST_BIN out of link_block. */
static void leaves_the_end(void) {
  lm_pool *pool = lm_pool_create(ctx, 0);
  uint64_t first = take(pool, 768 * KIB, a);
  uint8_t *begin = at(pool, first);
  take(pool, 768 * KIB, a);
  EXPECT(lm_pool_free(pool, first, a) == LM_OK);
  EXPECT(at(pool, take(pool, 512 * KIB, a)) == begin); /* not the 512 KiB up to the end */
  take(pool, MIB, a);                                  /* which grow */
  EXPECT(at(pool, take(pool, 256 * KIB, a)) == begin + 512 * KIB && pool_stats_of(pool).reserved == 4 * MIB);
  lm_pool_destroy(pool);
}

/* Mutants: leave LM_TINY_MAX out of lm_zone_of; leave out lm_block_take_rest, or what it asks of the size. */
static void tiny_blocks_fill_pages(void) {
  lm_pool *pool = lm_pool_create(ctx, 0);
  uint8_t *large = at(pool, take(pool, 2 * MIB - 128 * KIB, a));
  EXPECT(at(pool, take(pool, 64 * KIB, a)) == large + 2 * MIB - 128 * KIB && pool_stats_of(pool).reserved == 2 * MIB);
  uint8_t *small = at(pool, take(pool, MIB, a)); /* half a page is left beside it, for another such block */
  EXPECT(at(pool, take(pool, 1, a)) == large + 2 * MIB - 64 * KIB && pool_stats_of(pool).reserved == 4 * MIB);
  take(pool, 512 * KIB, a);
  EXPECT(at(pool, take(pool, 1, a)) == small + MIB + 512 * KIB && pool_stats_of(pool).reserved == 4 * MIB);
  lm_pool_destroy(pool);
}

/* Mutants: find_pages begins at the start of a zone; it takes the first pages of a run. */
static void moves_the_last_pages(void) {
  lm_pool *pool = lm_pool_create(ctx, 0);
  uint64_t handles[7];
  uint8_t *pointers[7];
  for (int i = 0; i < 7; i++) {
    handles[i] = take(pool, 2 * MIB, a);
    pointers[i] = at(pool, handles[i]);
  }
  const int freed[] = {1, 2, 4, 5, 6};
  for (int i = 0; i < 5; i++) EXPECT(lm_pool_free(pool, handles[freed[i]], a) == LM_OK);
  for (int i = 0; i < 3; i++) take(pool, MIB, a); /* the pages of 5 and 6 */
  EXPECT(at(pool, take(pool, 4 * MIB, a)) == pointers[1] && at(pool, take(pool, 2 * MIB, a)) == pointers[4]);
  EXPECT(pool_stats_of(pool).reserved == 14 * MIB);
  lm_pool_destroy(pool);
}

int main(void) {
  ctx = open_device("sim");
  a = lm_stream_create(ctx, 0);
  test("lm_pool_alloc() takes the lowest block of the size class that fits best", fits_best);
  test("lm_pool_alloc() leaves the block at the end of the memory while others fit", leaves_the_end);
  test("lm_pool_alloc() puts tiny blocks into what others leave of a page", tiny_blocks_fill_pages);
  test("lm_pool_alloc() moves the pages at the end first", moves_the_last_pages);
  lm_stream_destroy(a);
  lm_ctx_destroy(ctx);
  return summary();
}

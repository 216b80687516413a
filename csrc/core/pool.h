/* pool.h: the parts of the memory pool.
 *
 * Memory comes from the system in segments. A segment is a list of blocks in address order, live or free, that covers it
 * without gaps. A free block has an owner: the stream in whose order it was freed, until that stream has passed the mark of
 * the free; then nobody. The owner may use the block at once, anybody else only after the mark. Each owner keeps its free
 * blocks in bins by size and in a list by mark. Two neighbours with the same owner are always one block. */
#ifndef LM_POOL_H
#define LM_POOL_H

#include "core.h"

#define LM_GRANULE UINT64_C(256)

/* Bins: one per granule count below 16, then 8 per power of two up to 2^48 bytes. */
#define LM_BIN_COUNT (16 + 8 * 36)

typedef struct lm_block lm_block;
typedef struct lm_segment lm_segment;

struct lm_block {
  lm_segment *segment;
  lm_block *before, *after;       /* by address */
  lm_block *bin_before, *bin_after;
  lm_block *older, *younger;      /* by mark, of an owner that is a stream */
  uint8_t *address;
  uint64_t bytes;                 /* multiple of LM_GRANULE */
  uint64_t requested;             /* of a live block */
  uint64_t mark;                  /* of a free block */
  uint32_t index, generation;     /* the handle; generation changes with every free */
  uint32_t owner;                 /* index into owners, of a free block */
  bool live;
  bool zoned;                     /* of a live block: it has red zones */
  bool leaving;                   /* of a live block with red zones: they are looked at before it is freed */
  uint64_t since;                 /* of a live block: when it was taken, on lm_clock_ms */
  char label[LM_LABEL_MAX];
};

struct lm_segment {
  lm_segment *next;
  uint8_t *memory;
  uint64_t bytes;
  lm_block *first;
};

typedef struct lm_owner {
  lm_stream *stream; /* NULL for owner 0 (nobody) and for slots that are not used */
  lm_block *oldest, *youngest;
  uint64_t bitmap[(LM_BIN_COUNT + 63) / 64];
  lm_block *bins[LM_BIN_COUNT];
} lm_owner;

enum { LM_NOBODY = 0, LM_ANYBODY = UINT32_MAX };

struct lm_pool {
  lm_ctx *ctx;
  pthread_mutex_t mutex;
  lm_segment *segments;
  lm_owner **owners; /* owners[0] is nobody */
  uint32_t owner_count, owner_capacity;
  lm_block **blocks; /* by handle index */
  uint32_t block_count, block_capacity;
  lm_block *spare; /* blocks in no segment, linked by `after` */
  lm_pool_stats stats; /* largest_free, total_free and fragmentation stay 0 here */
};

/* A series of free neighbours. */
typedef struct lm_run {
  lm_block *first, *last;
  uint64_t bytes;
} lm_run;

/* pool_blocks.c: all under pool->mutex --------------------------------------------------------------------------- */

/* lm_block_take: remove the smallest fitting block of an owner or of nobody from its lists; NULL if there is none. */
lm_block *lm_block_take(lm_pool *pool, uint32_t owner, uint64_t bytes);
/* lm_block_insert: put a free block into its owner's lists, joined with neighbours of the same owner. */
void lm_block_insert(lm_pool *pool, lm_block *block);
/* lm_block_remove: take a free block out of its owner's lists. */
void lm_block_remove(lm_pool *pool, lm_block *block);
/* lm_block_split: cut a block that was just removed from its lists to `bytes`; the rest becomes free with the same owner.
 * No rest is cut off when there is no heap memory to describe it. */
void lm_block_split(lm_pool *pool, lm_block *block, uint64_t bytes);
/* lm_run_find: the smallest run of free blocks that fits and belongs to nobody or to `owner` (LM_ANYBODY = to anyone). */
bool lm_run_find(lm_pool *pool, uint32_t owner, uint64_t bytes, lm_run *run);
/* lm_run_join: take a run out of all lists and make it one block. The part beyond `bytes` keeps its owner. */
lm_block *lm_run_join(lm_pool *pool, lm_run run, uint64_t bytes);
/* lm_settle: blocks whose mark has passed belong to nobody from now on, except those of one owner (LM_NOBODY: no
 * exception), which its stream can join with what it frees next. */
void lm_settle(lm_pool *pool, uint32_t except);
/* lm_owner_of: index of a stream, added if it is new; 0 with the failure reported. */
uint32_t lm_owner_of(lm_pool *pool, lm_stream *stream);
/* lm_segment_add: describe new memory as one free block of an owner that is in no list; NULL with the failure reported. */
lm_block *lm_segment_add(lm_pool *pool, uint32_t owner, uint8_t *memory, uint64_t bytes);
/* lm_segments_idle: unlink the segments without a live block. */
lm_segment *lm_segments_idle(lm_pool *pool);
/* lm_segment_forget: give the descriptions of an unlinked segment back. */
void lm_segment_forget(lm_pool *pool, lm_segment *segment);
/* lm_block_of: the live block of a handle, or NULL. */
lm_block *lm_block_of(lm_pool *pool, uint64_t handle);
static inline uint64_t lm_block_handle(const lm_block *block) {
  return (uint64_t)block->generation << 32 | (block->index + 1);
}

/* lm_block_data: where the user's bytes of a live block begin. */
static inline uint8_t *lm_block_data(const lm_block *block) {
  return block->zoned ? block->address + LM_ZONE : block->address;
}

/* pool_debug.c: debug mode --------------------------------------------------------------------------------------- */

/* lm_block_mark_zones: write the red zones of a block that was just taken, in the order of stream; under pool->mutex. */
void lm_block_mark_zones(lm_pool *pool, lm_block *block, lm_stream *stream);
/* lm_block_before_free: look at the red zones of a block, then poison it in the order of stream. Waits; not under a lock.
 * @return LM_OK, or LM_ERR_CORRUPT reported; a stale handle is left to the caller */
int32_t lm_block_before_free(lm_pool *pool, uint64_t handle, lm_stream *stream);

/* pool_report.c: under pool->mutex ------------------------------------------------------------------------------- */

/* lm_pool_free_bytes: the largest run of free blocks, and all of them. */
void lm_pool_free_bytes(lm_pool *pool, uint64_t *largest, uint64_t *total);
/* lm_pool_report: the out-of-memory failure with sizes and the ten largest owners by label. */
void lm_pool_report(lm_pool *pool, uint64_t requested, const char *label);

#endif

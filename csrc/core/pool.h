/* pool.h: the parts of the memory pool.
 *
 * A pool is one range of addresses, several times as large as the memory of the device. Memory is put behind its pages as
 * the pool grows, and pages that hold no live block move to where contiguous room is needed, so that what the pool holds is
 * little more than what is live. Half of the range is for small blocks, half for large ones: among small blocks that live
 * long there would be few whole pages left to move. Tiny blocks fill what is left over among the small ones, and else go with
 * the large ones, into the parts of pages that those leave: they must not cost a small block, mostly a fraction of a page, its
 * place.
 *
 * Such a zone is a list of blocks in address order that covers it without gaps: live, free, or unbacked (whole pages without
 * memory). A free block has an owner: the stream in whose order it was freed, until that stream has passed the mark of the
 * free; then nobody. The owner may use the block at once, anybody else only after the mark. Each owner keeps its free
 * blocks in bins by size and in a list by mark; the last bin is for the blocks that end where the memory ends, which are left
 * as they are while others fit. Two neighbours with the same owner are always one block. */
#ifndef LM_POOL_H
#define LM_POOL_H

#include "core.h"

#define LM_GRANULE UINT64_C(256)
#define LM_SMALL_MAX UINT64_C(0x100000) /* largest block of the zone for small ones: half a page */
#define LM_TINY_MAX UINT64_C(0x10000)   /* largest block that goes with the large ones where no small place is left over */

/* Bins: one per granule count below 16, 8 per power of two up to 2^41 bytes, and the last. */
#define LM_BIN_COUNT (16 + 8 * 29 + 1)

typedef struct lm_block lm_block;

struct lm_block {
  lm_block *before, *after;       /* by address */
  lm_block *bin_before, *bin_after;
  lm_block *older, *younger;      /* by mark, of an owner that is a stream */
  uint8_t *address;
  uint64_t bytes;                 /* multiple of LM_GRANULE */
  uint64_t requested;             /* of a live block */
  uint64_t mark;                  /* of a free block */
  uint32_t index, generation;     /* the handle; generation changes with every free */
  uint32_t owner;                 /* index into owners, of a free block; LM_UNBACKED */
  uint16_t bin;                   /* of a free block */
  uint8_t zone;
  bool live;
  bool moving;                    /* free or unbacked, in no list, while the driver is at it */
  bool zoned;                     /* of a live block: it has red zones */
  bool leaving;                   /* of a live block with red zones: they are looked at before it is freed */
  uint64_t since;                 /* of a live block: when it was taken, on lm_clock_ms */
  char label[LM_LABEL_MAX];
};

enum { LM_SMALL, LM_LARGE, LM_ZONES };

typedef struct lm_bins {
  uint64_t bitmap[(LM_BIN_COUNT + 63) / 64];
  lm_block *bins[LM_BIN_COUNT];
} lm_bins;

typedef struct lm_owner {
  lm_stream *stream; /* NULL for owner 0 (nobody) and for slots that are not used */
  lm_block *oldest, *youngest;
  lm_bins zones[LM_ZONES];
} lm_owner;

enum { LM_NOBODY = 0, LM_UNBACKED = UINT32_MAX - 1, LM_ANYBODY = UINT32_MAX };

struct lm_pool {
  lm_ctx *ctx;
  pthread_mutex_t mutex;
  uint8_t *memory;             /* the range; NULL until the first block is taken */
  uint64_t bytes;              /* of addresses */
  uint64_t moved;              /* bytes of pages that went from one place to another */
  bool fixed;                  /* no range but one reservation of the limit: the device cannot move pages */
  lm_block *zones[LM_ZONES];   /* the first block of each */
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

/* lm_zone_of: where a block of this size belongs. */
static inline uint8_t lm_zone_of(const lm_pool *pool, uint64_t bytes) {
  return bytes <= LM_TINY_MAX || bytes > LM_SMALL_MAX || pool->fixed ? LM_LARGE : LM_SMALL;
}
/* lm_block_take: remove a fitting block of an owner or of nobody from its lists: of the first bin that has one, the one at the
 * lowest address, so that pages at the end become free. NULL if there is none. */
lm_block *lm_block_take(lm_pool *pool, uint32_t owner, uint8_t zone, uint64_t bytes);
/* lm_block_take_rest: the same among the small ones, for a tiny block: NULL also if any small block would fit there. */
lm_block *lm_block_take_rest(lm_pool *pool, uint32_t owner, uint64_t bytes);
/* lm_block_insert: put a free or unbacked block into its owner's lists, joined with neighbours of the same owner. */
void lm_block_insert(lm_pool *pool, lm_block *block);
/* lm_block_remove: take a free block out of its owner's lists. */
void lm_block_remove(lm_pool *pool, lm_block *block);
/* lm_block_list: put a block into its owner's lists as it is. */
void lm_block_list(lm_pool *pool, lm_block *block);
/* lm_block_split: cut a block that was just removed from its lists to `bytes`; the rest becomes free with the same owner.
 * @return false, with the block as it was, when there is no heap memory to describe the rest */
bool lm_block_split(lm_pool *pool, lm_block *block, uint64_t bytes);
/* lm_block_add: describe memory as one block that is in no list and has no neighbours; NULL with the failure reported. */
lm_block *lm_block_add(lm_pool *pool, uint8_t zone, uint8_t *memory, uint64_t bytes);
/* lm_block_usable: free, and of nobody or of `owner` (LM_ANYBODY = of anyone). */
static inline bool lm_block_usable(const lm_block *block, uint32_t owner) {
  if (block->live || block->moving || block->owner == LM_UNBACKED) return false;
  return owner == LM_ANYBODY || block->owner == LM_NOBODY || block->owner == owner;
}
/* lm_run_find: the smallest run of free blocks of a zone that fits and is usable for `owner`. */
bool lm_run_find(lm_pool *pool, uint8_t zone, uint32_t owner, uint64_t bytes, lm_run *run);
/* lm_run_join: take a run out of all lists and make it one block. The part beyond `bytes` keeps its owner.
 * @return NULL when there is no heap memory to describe that part */
lm_block *lm_run_join(lm_pool *pool, lm_run run, uint64_t bytes);
/* lm_blocks_join: make one block of `owner`, in no list, of a series of neighbours that are in none. */
lm_block *lm_blocks_join(lm_pool *pool, lm_block *first, lm_block *last, uint32_t owner);
/* lm_settle: blocks whose mark has passed belong to nobody from now on, except those of one owner (LM_NOBODY: no
 * exception), which its stream can join with what it frees next. */
void lm_settle(lm_pool *pool, uint32_t except);
/* lm_owner_of: index of a stream, added if it is new; 0 with the failure reported. */
uint32_t lm_owner_of(lm_pool *pool, lm_stream *stream);
/* lm_block_of: the live block of a handle, or NULL. */
lm_block *lm_block_of(lm_pool *pool, uint64_t handle);
static inline uint64_t lm_block_handle(const lm_block *block) {
  return (uint64_t)block->generation << 32 | (block->index + 1);
}

/* lm_block_data: where the user's bytes of a live block begin. */
static inline uint8_t *lm_block_data(const lm_block *block) {
  return block->zoned ? block->address + LM_ZONE : block->address;
}

/* pool_pages.c: where memory comes from and goes to. Under pool->mutex, which they release while they wait for streams and
 * while the driver works. */

/* lm_pool_grow: room of `bytes` in a zone, with the memory it lacks: first that of whole pages which are free elsewhere and
 * usable for `owner`, after the host has waited for its stream, then new memory.
 * @return a block of the owner that is in no list and at least `bytes` long; NULL if limit or system do not allow it */
lm_block *lm_pool_grow(lm_pool *pool, uint32_t owner, uint8_t zone, uint64_t bytes);
/* lm_pool_settle_all: wait for what was freed so far; then it is nobody's. */
void lm_pool_settle_all(lm_pool *pool);
/* lm_pool_shrink: give pages that hold no live block back, after the streams that used them have passed. */
void lm_pool_shrink(lm_pool *pool);
/* lm_pages_free: bytes of the pages that hold no live block. */
uint64_t lm_pages_free(lm_pool *pool);

/* pool_debug.c: debug mode --------------------------------------------------------------------------------------- */

/* lm_block_mark_zones: write the red zones of a block that was just taken, in the order of stream; under pool->mutex. */
void lm_block_mark_zones(lm_pool *pool, lm_block *block, lm_stream *stream);
/* lm_block_before_free: look at the red zones of a block, then poison it in the order of stream. Waits; not under a lock.
 * @return LM_OK, or LM_ERR_CORRUPT reported; a stale handle is left to the caller */
int32_t lm_block_before_free(lm_pool *pool, uint64_t handle, lm_stream *stream);

/* pool_report.c: under pool->mutex ------------------------------------------------------------------------------- */

/* lm_pool_free_bytes: what is free, and the largest block that it could make: a run, or whole pages moved together. */
void lm_pool_free_bytes(lm_pool *pool, uint64_t *largest, uint64_t *total);
/* lm_pool_report: the out-of-memory failure with sizes and the ten largest owners by label. */
void lm_pool_report(lm_pool *pool, uint64_t requested, const char *label);

#endif

/* pool_test.h: what the tests of the pool's rules share. */
#ifndef LM_POOL_TEST_H
#define LM_POOL_TEST_H

#include "core_test.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * 1024)

static inline uint64_t take(lm_pool *pool, uint64_t bytes, lm_stream *stream) {
  uint64_t handle = lm_pool_alloc(pool, bytes, "test", stream);
  EXPECT(handle);
  return handle;
}

static inline void *at(lm_pool *pool, uint64_t handle) {
  void *pointer = lm_pool_pointer(pool, handle);
  EXPECT(pointer);
  return pointer;
}

#endif

/* runtime.h: what the backend's own files share: streams, events, graphs, memory and failures. Kernels see cuda.h only.
 *
 * Locks, in the order they may be taken: runtime.mutex, stream.mutex, state.mutex. No lock is held while waiting for the
 * device, and callbacks of a stream take state.mutex only and call nothing of CUDA. */
#ifndef LM_CUDA_RUNTIME_H
#define LM_CUDA_RUNTIME_H

#include <pthread.h>

#include <atomic>

#include "cuda.h"

/* Host work on its way through a stream. */
typedef struct lm_cuda_call {
  struct lm_cuda_call *next;
  struct lm_cuda_state *state;
  lm_host_fn fn;
  void *arg;
} lm_cuda_call;

/* What outlives a stream: its failure, which events and followers still ask for, and the calls on their way. */
typedef struct lm_cuda_state {
  lm_host host;
  std::atomic<int32_t> refs;
  std::atomic<int32_t> status;  /* first failure of host work in the stream; stays */
  std::atomic<int32_t> pending; /* calls that have not ended */
  pthread_mutex_t mutex;
  lm_cuda_call *spare; /* used again, so that a step makes no heap allocation */
} lm_cuda_state;

/* A mark that has not passed. An event is created once per slot and recorded again for later marks. */
typedef struct lm_cuda_slot {
  cudaEvent_t event;
  uint32_t waiting; /* threads that wait for it: it must not be recorded again before they return */
} lm_cuda_slot;

struct lm_backend_stream {
  lm_cuda *cuda;
  cudaStream_t handle;
  lm_cuda_state *state;
  lm_backend_stream *previous, *next; /* under runtime.mutex */
  std::atomic<int32_t> refs;          /* core's handle, graphs recorded with the workspace, whoever waits */
  std::atomic<bool> recording;
  std::atomic<uint64_t> enqueued; /* pieces of work so far */
  std::atomic<uint64_t> marked;   /* so many of them lie before the last mark; stored after `issued` */

  pthread_mutex_t mutex;
  std::atomic<uint64_t> passed; /* marks up to here have passed */
  uint64_t oldest;              /* marks that hold a slot: oldest .. issued, in slots[mark % capacity] */
  std::atomic<uint64_t> issued; /* changes under the mutex */
  lm_cuda_slot *slots;
  uint32_t capacity; /* a power of two */

  void *workspace;          /* under runtime.mutex */
  bool workspace_recorded;  /* the recording uses it */
};

struct lm_backend_event {
  lm_cuda *cuda;
  cudaEvent_t handle;
  pthread_mutex_t mutex;
  lm_cuda_state *state; /* of the stream that recorded it last; NULL = never recorded */
};

/* Memory given out, and how it goes back. */
typedef struct lm_cuda_memory {
  struct lm_cuda_memory *next;
  void *memory; /* what core knows */
  void *raw;
  uint64_t mapped; /* bytes of a mapping that was page-locked; 0 = from the runtime */
  bool pinned;
} lm_cuda_memory;

/* What a destroyed stream leaves behind until its work has ended; then its workspace may serve another stream. */
typedef struct lm_cuda_departed {
  struct lm_cuda_departed *next;
  cudaEvent_t end; /* NULL = has ended */
  void *workspace; /* NULL = none */
} lm_cuda_departed;

struct lm_cuda_runtime {
  pthread_mutex_t mutex;
  lm_backend_stream *streams; /* every stream that is not freed */
  lm_cuda_memory *memories;
  lm_cuda_departed *departed;
  cudaStream_t internal;         /* touches memory */
  std::atomic<int32_t> lost;     /* the cudaError_t after which the device answers nothing else; 0 = it works */
  std::atomic<const char *> lost_in; /* the call that saw it first */
  bool spin; /* more than one core: waiting briefly is cheaper than sleeping */
};

/* failure.cu ----------------------------------------------------------------------------------------------------- */

/* lm_cuda_fail: reports a failed call of CUDA for op and clears it, so that no later launch sees it. @return its status */
int32_t lm_cuda_fail(lm_cuda *cuda, cudaError_t error, const char *op);
/* lm_cuda_enter: makes the device current on the calling thread, which may be any. @return LM_OK, or the reported failure */
int32_t lm_cuda_enter(lm_cuda *cuda, const char *op);
/* lm_cuda_alloc: heap memory; NULL with the failure reported. */
void *lm_cuda_alloc(lm_cuda *cuda, uint64_t bytes, const char *op);

/* driver.cu ------------------------------------------------------------------------------------------------------ */

/* lm_cuda_driver_check: LM_OK if there is a driver and it is new enough, else the reported failure. */
int32_t lm_cuda_driver_check(const lm_host *host);

/* streams.cu ----------------------------------------------------------------------------------------------------- */

lm_backend_stream *lm_cuda_stream_create(lm_backend *base, int32_t priority);
void lm_cuda_stream_close(lm_backend *base, lm_backend_stream *stream);
void lm_cuda_stream_free(lm_backend *base, lm_backend_stream *stream);
uint64_t lm_cuda_stream_mark(lm_backend *base, lm_backend_stream *stream);
int32_t lm_cuda_stream_query(lm_backend *base, lm_backend_stream *stream, uint64_t mark);
int32_t lm_cuda_stream_wait(lm_backend *base, lm_backend_stream *stream, uint64_t mark);
int32_t lm_cuda_stream_follow(lm_backend *base, lm_backend_stream *stream, lm_backend_stream *other, uint64_t mark);
int32_t lm_cuda_stream_call(lm_backend *base, lm_backend_stream *stream, lm_host_fn fn, void *arg);
int32_t lm_cuda_synchronize(lm_backend *base);
/* lm_cuda_stream_order: follow without taking over a failure. The device is current. */
int32_t lm_cuda_stream_order(lm_backend_stream *stream, lm_backend_stream *other, uint64_t mark, const char *op);
void lm_cuda_stream_ref(lm_backend_stream *stream);
void lm_cuda_stream_unref(lm_backend_stream *stream);
void lm_cuda_state_unref(lm_cuda_state *state);
/* lm_cuda_carry: later work of stream counts as failed if the stream of state has failed by then. */
int32_t lm_cuda_carry(lm_backend_stream *stream, lm_cuda_state *state);
/* lm_cuda_enqueued: to be called after work was put into the stream. */
static inline void lm_cuda_enqueued(lm_backend_stream *stream) {
  if (!stream->recording.load(std::memory_order_relaxed)) stream->enqueued.fetch_add(1, std::memory_order_release);
}
/* lm_cuda_event_await: blocks until the event is reached; briefly turns before it sleeps. */
cudaError_t lm_cuda_event_await(lm_cuda *cuda, cudaEvent_t event);

/* events.cu ------------------------------------------------------------------------------------------------------ */

lm_backend_event *lm_cuda_event_create(lm_backend *base);
void lm_cuda_event_destroy(lm_backend *base, lm_backend_event *event);
int32_t lm_cuda_event_record(lm_backend *base, lm_backend_event *event, lm_backend_stream *stream);
int32_t lm_cuda_event_query(lm_backend *base, lm_backend_event *event);
int32_t lm_cuda_event_wait(lm_backend *base, lm_backend_event *event);
int32_t lm_cuda_event_elapsed(lm_backend *base, float *ms, lm_backend_event *start, lm_backend_event *end);
int32_t lm_cuda_event_follow(lm_backend *base, lm_backend_stream *stream, lm_backend_event *event);

/* graphs.cu ------------------------------------------------------------------------------------------------------ */

int32_t lm_cuda_graph_begin(lm_backend *base, lm_backend_stream *stream);
lm_backend_graph *lm_cuda_graph_end(lm_backend *base, lm_backend_stream *stream);
int32_t lm_cuda_graph_launch(lm_backend *base, lm_backend_graph *graph, lm_backend_stream *stream);
void lm_cuda_graph_destroy(lm_backend *base, lm_backend_graph *graph);
/* lm_cuda_graph_abandon: ends a recording and drops it. */
void lm_cuda_graph_abandon(lm_backend_stream *stream);

/* memory.cu ------------------------------------------------------------------------------------------------------ */

void *lm_cuda_mem_reserve(lm_backend *base, uint64_t bytes);
void lm_cuda_mem_release(lm_backend *base, void *memory, uint64_t bytes);
/* What the machine and the container can still give, the page cache included. */
uint64_t lm_cuda_host_available(void);
void *lm_cuda_pinned_reserve(lm_backend *base, uint64_t bytes, int32_t flags);
void lm_cuda_pinned_release(lm_backend *base, void *memory, uint64_t bytes);

/* ranges.cu ------------------------------------------------------------------------------------------------------ */

void *lm_cuda_range_reserve(lm_backend *base, uint64_t *bytes);
int32_t lm_cuda_range_commit(lm_backend *base, void *memory, uint64_t bytes);
void lm_cuda_range_decommit(lm_backend *base, void *memory, uint64_t bytes);
void lm_cuda_range_release(lm_backend *base, void *memory, uint64_t bytes);

/* managed.cu ----------------------------------------------------------------------------------------------------- */

void *lm_cuda_managed_reserve(lm_backend *base, uint64_t bytes);
void lm_cuda_managed_release(lm_backend *base, void *memory, uint64_t bytes);
int32_t lm_cuda_managed_advise(lm_backend *base, void *memory, uint64_t bytes, int32_t advice);
int32_t lm_cuda_managed_prefetch(lm_backend *base, lm_backend_stream *stream, void *memory, uint64_t bytes, int32_t to_host);
/* nvtx.cu -------------------------------------------------------------------------------------------------------- */

int32_t lm_cuda_profile_push(lm_backend *base, const char *name);
void lm_cuda_profile_pop(lm_backend *base);

/* workspace.cu --------------------------------------------------------------------------------------------------- */

/* lm_cuda_departed_add: the stream is about to be destroyed. */
void lm_cuda_departed_add(lm_backend_stream *stream);
/* lm_cuda_departed_free: waits for the work of destroyed streams and frees their workspaces. */
void lm_cuda_departed_free(lm_cuda *cuda);

#endif

/* backend.h: the parts of the CPU backend: its queues, events, graphs and memory. */
#ifndef LM_CPU_BACKEND_H
#define LM_CPU_BACKEND_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../core/backend.h"
#include "threads.h"

typedef struct lm_cpu_backend {
  lm_backend base;
  lm_host host;
  lm_cpu *cpu;
  bool spin; /* more than one core: waiting briefly is cheaper than sleeping */

  pthread_mutex_t mutex;
  pthread_cond_t ended;
  lm_backend_stream *streams; /* every stream that is not freed */
  int32_t running;            /* stream threads */
} lm_cpu_backend;

/* Commands of a stream. Those up to LM_COMMAND_FILL can be recorded. */
enum {
  LM_COMMAND_LAUNCH,
  LM_COMMAND_COPY,
  LM_COMMAND_FILL,
  LM_COMMAND_GRAPH,
  LM_COMMAND_FOLLOW,
  LM_COMMAND_RECORD,
  LM_COMMAND_CALL,
};

typedef struct lm_command {
  int32_t kind;
  int32_t value; /* kernel id, or the byte of a fill */
  union {
    struct {
      void *dst;
      const void *src;
      uint64_t bytes;
    } copy;
    struct {
      lm_backend_stream *other;
      uint64_t mark;
    } follow;
    struct {
      lm_backend_event *event;
      uint64_t ticket;
    } record;
    struct {
      lm_host_fn fn;
      void *arg;
    } call;
    lm_backend_graph *graph;
    uint64_t args[LM_KERNEL_ARGS_MAX / 8];
  } as;
} lm_command;

/* queue.c: one ring and one thread per stream -------------------------------------------------------------------- */

lm_backend_stream *lm_queue_create(lm_cpu_backend *backend);
/* lm_queue_close: the thread ends once the ring is empty, and frees the ring. */
void lm_queue_close(lm_backend_stream *queue);
void lm_queue_ref(lm_backend_stream *queue);
void lm_queue_unref(lm_backend_stream *queue);
#define LM_NO_MARK UINT64_MAX
/* lm_queue_push: enqueue, or record; waits while the ring is full. `bytes` of `as` are copied.
 * @return the mark after it, LM_NO_MARK if it could not be recorded for want of memory */
uint64_t lm_queue_push(lm_backend_stream *queue, int32_t kind, int32_t value, const void *as, uint32_t bytes);
uint64_t lm_queue_mark(lm_backend_stream *queue);
int32_t lm_queue_query(lm_backend_stream *queue, uint64_t mark);
int32_t lm_queue_wait(lm_backend_stream *queue, uint64_t mark);
int32_t lm_queue_follow(lm_backend_stream *queue, lm_backend_stream *other, uint64_t mark);
/* lm_queue_recording: exchange the graph that commands are recorded into; NULL = run them. @return the previous one */
lm_backend_graph *lm_queue_recording(lm_backend_stream *queue, lm_backend_graph *graph);
/* lm_queue_drain: wait until every stream has passed what it holds now. @return the first failure */
int32_t lm_queue_drain(lm_cpu_backend *backend);

/* backend.c ------------------------------------------------------------------------------------------------------ */

/* lm_command_run: what the queue's thread does. status is that of the stream. @return the stream's status from now on */
int32_t lm_command_run(lm_cpu_backend *backend, const lm_command *command, int32_t status);

/* events.c ------------------------------------------------------------------------------------------------------- */

lm_backend_event *lm_cpu_event_create(lm_backend *base);
void lm_cpu_event_destroy(lm_backend *base, lm_backend_event *event);
int32_t lm_cpu_event_record(lm_backend *base, lm_backend_event *event, lm_backend_stream *queue);
int32_t lm_cpu_event_query(lm_backend *base, lm_backend_event *event);
int32_t lm_cpu_event_wait(lm_backend *base, lm_backend_event *event);
int32_t lm_cpu_event_elapsed(lm_backend *base, float *ms, lm_backend_event *start, lm_backend_event *end);
int32_t lm_cpu_event_follow(lm_backend *base, lm_backend_stream *queue, lm_backend_event *event);
/* lm_cpu_event_reached: runs in stream order: take the time if this is still the latest record. */
void lm_cpu_event_reached(lm_backend_event *event, uint64_t ticket);

/* graphs.c ------------------------------------------------------------------------------------------------------- */

int32_t lm_cpu_graph_begin(lm_backend *base, lm_backend_stream *queue);
lm_backend_graph *lm_cpu_graph_end(lm_backend *base, lm_backend_stream *queue);
int32_t lm_cpu_graph_launch(lm_backend *base, lm_backend_graph *graph, lm_backend_stream *queue);
void lm_cpu_graph_destroy(lm_backend *base, lm_backend_graph *graph);
/* lm_cpu_graph_append: room for one more command; NULL when there is no memory, and then the recording is spoilt. */
lm_command *lm_cpu_graph_append(lm_backend_graph *graph);
int32_t lm_cpu_graph_run(lm_cpu_backend *backend, lm_backend_graph *graph, int32_t status);

/* host_memory.c -------------------------------------------------------------------------------------------------- */

/* lm_host_memory_take: page-aligned memory, touched. NULL with status and text reported for op. */
void *lm_host_memory_take(const lm_host *host, uint64_t bytes, int32_t status, const char *op);
void lm_host_memory_give(void *memory, uint64_t bytes);
/* lm_host_range_*: the ranges of the vtable. */
void *lm_host_range_reserve(const lm_host *host, uint64_t *bytes);
int32_t lm_host_range_commit(const lm_host *host, void *memory, uint64_t bytes);
void lm_host_range_decommit(void *memory, uint64_t bytes);
void lm_host_range_release(void *memory, uint64_t bytes);
/* lm_host_memory_total: bytes of the machine or the cgroup, whichever is less. */
uint64_t lm_host_memory_total(void);

#endif

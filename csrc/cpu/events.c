/* events.c: an event is a mark of the stream that recorded it last, and the time when that was reached. */
#define _GNU_SOURCE
#include <time.h>

#include "backend.h"

struct lm_backend_event {
  lm_host host;
  _Atomic int32_t refs; /* core's handle and RECORD commands on their way */
  pthread_mutex_t mutex;
  lm_backend_stream *queue; /* NULL = never recorded */
  uint64_t mark;
  uint64_t ticket; /* counts records: an older one on its way must not set the time */
  uint64_t nanoseconds;
};

static void event_unref(lm_backend_event *event) {
  if (atomic_fetch_sub_explicit(&event->refs, 1, memory_order_acq_rel) != 1) return;
  if (event->queue) lm_queue_unref(event->queue);
  pthread_mutex_destroy(&event->mutex);
  event->host.release(event);
}

lm_backend_event *lm_cpu_event_create(lm_backend *base) {
  const lm_host *host = &((lm_cpu_backend *)base)->host;
  lm_backend_event *event = host->alloc(host->owner, sizeof *event);
  if (!event) {
    host->fail(host->owner, LM_ERR_OUT_OF_MEMORY, "lm_event_create: out of host memory: %zu bytes of heap", sizeof *event);
    return NULL;
  }
  event->host = *host;
  atomic_store(&event->refs, 1);
  pthread_mutex_init(&event->mutex, NULL);
  return event;
}

void lm_cpu_event_destroy(lm_backend *base, lm_backend_event *event) {
  (void)base;
  event_unref(event);
}

int32_t lm_cpu_event_record(lm_backend *base, lm_backend_event *event, lm_backend_stream *queue) {
  (void)base;
  pthread_mutex_lock(&event->mutex);
  uint64_t ticket = ++event->ticket;
  pthread_mutex_unlock(&event->mutex);
  atomic_fetch_add_explicit(&event->refs, 1, memory_order_relaxed);
  lm_command command = {.as.record = {.event = event, .ticket = ticket}};
  /* Not under the event's mutex: a full ring waits for the thread, which may be about to take that mutex. */
  uint64_t mark = lm_queue_push(queue, LM_COMMAND_RECORD, 0, &command.as, sizeof command.as.record);

  lm_queue_ref(queue);
  lm_backend_stream *unused = queue;
  pthread_mutex_lock(&event->mutex);
  if (event->ticket == ticket) {
    unused = event->queue;
    event->queue = queue;
    event->mark = mark;
  }
  pthread_mutex_unlock(&event->mutex);
  if (unused) lm_queue_unref(unused);
  return LM_OK;
}

void lm_cpu_event_reached(lm_backend_event *event, uint64_t ticket) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  pthread_mutex_lock(&event->mutex);
  if (event->ticket == ticket) event->nanoseconds = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
  pthread_mutex_unlock(&event->mutex);
  event_unref(event);
}

/* The recorded point, with a reference on its queue; NULL if there is none. */
static lm_backend_stream *recorded(lm_backend_event *event, uint64_t *mark) {
  pthread_mutex_lock(&event->mutex);
  lm_backend_stream *queue = event->queue;
  *mark = event->mark;
  if (queue) lm_queue_ref(queue);
  pthread_mutex_unlock(&event->mutex);
  return queue;
}

int32_t lm_cpu_event_query(lm_backend *base, lm_backend_event *event) {
  (void)base;
  uint64_t mark;
  lm_backend_stream *queue = recorded(event, &mark);
  if (!queue) return LM_OK;
  int32_t status = lm_queue_query(queue, mark);
  lm_queue_unref(queue);
  return status;
}

int32_t lm_cpu_event_wait(lm_backend *base, lm_backend_event *event) {
  (void)base;
  uint64_t mark;
  lm_backend_stream *queue = recorded(event, &mark);
  if (!queue) return LM_OK;
  int32_t status = lm_queue_wait(queue, mark);
  lm_queue_unref(queue);
  return status;
}

int32_t lm_cpu_event_follow(lm_backend *base, lm_backend_stream *queue, lm_backend_event *event) {
  (void)base;
  uint64_t mark;
  lm_backend_stream *other = recorded(event, &mark);
  if (!other) return LM_OK;
  int32_t status = lm_queue_follow(queue, other, mark);
  lm_queue_unref(other);
  return status;
}

static uint64_t time_of(lm_backend_event *event) {
  uint64_t mark;
  lm_backend_stream *queue = recorded(event, &mark);
  if (!queue) return 0;
  bool reached = lm_queue_query(queue, mark) != LM_NOT_READY;
  lm_queue_unref(queue);
  pthread_mutex_lock(&event->mutex);
  uint64_t time = event->nanoseconds;
  pthread_mutex_unlock(&event->mutex);
  return reached ? time : 0;
}

int32_t lm_cpu_event_elapsed(lm_backend *base, float *ms, lm_backend_event *start, lm_backend_event *end) {
  const lm_host *host = &((lm_cpu_backend *)base)->host;
  uint64_t from = time_of(start), to = time_of(end);
  if (!from || !to) {
    return host->fail(host->owner, LM_ERR_STATE,
                      "lm_event_elapsed: %s was not reached yet or never recorded: wait for it first",
                      from ? "end" : "start");
  }
  *ms = (float)((double)(int64_t)(to - from) * 1e-6);
  return LM_OK;
}

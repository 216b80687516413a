/* streams.cu: streams, their marks and host work inside them.
 *
 * A mark is a number and, until it has passed, an event recorded where it was taken. Taking one where nothing was enqueued
 * since the last costs nothing, and asking for one that passed costs an atomic load; marks pass in order, so one answer settles
 * all before it. The slots grow to the most marks that were ever under way at once and are then used again. */
#include <sched.h>
#include <string.h>
#include <time.h>

#include "runtime.h"

#define FIRST_SLOTS 64u
#define SPIN_NANOSECONDS 50000u /* waking a thread takes about as long */

static lm_cuda *self(lm_backend *base) { return reinterpret_cast<lm_cuda *>(base); }

static lm_cuda_slot *slot_of(lm_backend_stream *stream, uint64_t mark) {
  return &stream->slots[mark & (stream->capacity - 1)];
}

static uint64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

cudaError_t lm_cuda_event_await(lm_cuda *cuda, cudaEvent_t event) {
  const uint64_t until = cuda->runtime->spin ? nanoseconds() + SPIN_NANOSECONDS : 0;
  do {
    const cudaError_t error = cudaEventQuery(event);
    if (error != cudaErrorNotReady) return error;
    (void)cudaGetLastError();
  } while (nanoseconds() < until);
  return cudaEventSynchronize(event);
}

/* State: what callbacks and events share with a stream ----------------------------------------------------------- */

void lm_cuda_state_unref(lm_cuda_state *state) {
  if (state->refs.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  for (lm_cuda_call *call = state->spare; call;) {
    lm_cuda_call *next = call->next;
    state->host.release(call);
    call = next;
  }
  pthread_mutex_destroy(&state->mutex);
  state->host.release(state);
}

/* Runs in stream order on a thread of the driver, also when the device is lost. */
static void CUDART_CB run_call(cudaStream_t, cudaError_t error, void *data) {
  lm_cuda_call *call = static_cast<lm_cuda_call *>(data);
  lm_cuda_state *state = call->state;
  int32_t status = state->status.load();
  if (status == LM_OK && error != cudaSuccess) status = LM_ERR_DEVICE;
  const int32_t result = call->fn(call->arg, status);
  int32_t none = LM_OK;
  if (result < 0) state->status.compare_exchange_strong(none, result);
  state->pending.fetch_sub(1);
  pthread_mutex_lock(&state->mutex);
  call->next = state->spare;
  state->spare = call;
  pthread_mutex_unlock(&state->mutex);
  lm_cuda_state_unref(state);
}

static int32_t enqueue_call(lm_backend_stream *stream, lm_host_fn fn, void *arg, const char *op) {
  lm_cuda_state *state = stream->state;
  pthread_mutex_lock(&state->mutex);
  lm_cuda_call *call = state->spare;
  if (call) state->spare = call->next;
  pthread_mutex_unlock(&state->mutex);
  if (!call) call = static_cast<lm_cuda_call *>(lm_cuda_alloc(stream->cuda, sizeof *call, op));
  if (!call) return LM_ERR_OUT_OF_MEMORY;
  *call = {NULL, state, fn, arg};
  state->refs.fetch_add(1);
  state->pending.fetch_add(1);
  /* Not cudaLaunchHostFunc: that one is dropped when the device is lost, and whoever waits for the call would wait for ever. */
  const cudaError_t error = cudaStreamAddCallback(stream->handle, run_call, call, 0);
  if (error == cudaSuccess) {
    lm_cuda_enqueued(stream);
    return LM_OK;
  }
  state->pending.fetch_sub(1);
  pthread_mutex_lock(&state->mutex);
  call->next = state->spare;
  state->spare = call;
  pthread_mutex_unlock(&state->mutex);
  state->refs.fetch_sub(1);
  return lm_cuda_fail(stream->cuda, error, op);
}

static int32_t carried(void *arg, int32_t) {
  lm_cuda_state *other = static_cast<lm_cuda_state *>(arg);
  const int32_t status = other->status.load();
  lm_cuda_state_unref(other);
  return status;
}

int32_t lm_cuda_carry(lm_backend_stream *stream, lm_cuda_state *other) {
  if (other == stream->state) return LM_OK;
  /* Host work is the only thing that fails one stream alone; without any under way the answer is known now. */
  if (other->pending.load() == 0) {
    int32_t none = LM_OK;
    const int32_t status = other->status.load();
    if (status) stream->state->status.compare_exchange_strong(none, status);
    return LM_OK;
  }
  other->refs.fetch_add(1);
  const int32_t status = enqueue_call(stream, carried, other, "lm_stream_wait_event");
  if (status) lm_cuda_state_unref(other);
  return status;
}

int32_t lm_cuda_stream_call(lm_backend *base, lm_backend_stream *stream, lm_host_fn fn, void *arg) {
  static const char op[] = "lm_stream_on_done";
  const int32_t status = lm_cuda_enter(self(base), op);
  return status ? status : enqueue_call(stream, fn, arg, op);
}

/* Life ----------------------------------------------------------------------------------------------------------- */

static void stream_release(lm_backend_stream *stream) {
  const lm_host host = stream->cuda->host;
  for (uint32_t i = 0; i < stream->capacity; i++) {
    if (stream->slots[i].event) (void)cudaEventDestroy(stream->slots[i].event);
  }
  if (stream->handle) (void)cudaStreamDestroy(stream->handle); /* work under way still ends */
  (void)cudaGetLastError();
  if (stream->state) lm_cuda_state_unref(stream->state);
  pthread_mutex_destroy(&stream->mutex);
  host.release(stream->slots);
  host.release(stream);
}

lm_backend_stream *lm_cuda_stream_create(lm_backend *base, int32_t priority) {
  static const char op[] = "lm_stream_create";
  lm_cuda *cuda = self(base);
  if (lm_cuda_enter(cuda, op)) return NULL;
  lm_backend_stream *stream = static_cast<lm_backend_stream *>(lm_cuda_alloc(cuda, sizeof *stream, op));
  if (!stream) return NULL;
  stream->cuda = cuda;
  stream->refs.store(1);
  stream->oldest = 1;
  pthread_mutex_init(&stream->mutex, NULL);
  stream->state = static_cast<lm_cuda_state *>(lm_cuda_alloc(cuda, sizeof *stream->state, op));
  if (stream->state) {
    stream->state->host = cuda->host;
    stream->state->refs.store(1);
    pthread_mutex_init(&stream->state->mutex, NULL);
    stream->slots = static_cast<lm_cuda_slot *>(lm_cuda_alloc(cuda, FIRST_SLOTS * sizeof *stream->slots, op));
  }
  if (!stream->slots) {
    stream_release(stream);
    return NULL;
  }
  stream->capacity = FIRST_SLOTS;
  int least = 0, greatest = 0;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (priority > least) priority = least;
  if (priority < greatest) priority = greatest;
  if (!error) error = cudaStreamCreateWithPriority(&stream->handle, cudaStreamNonBlocking, priority);
  if (error) {
    stream->handle = NULL;
    lm_cuda_fail(cuda, error, op);
    stream_release(stream);
    return NULL;
  }
  pthread_mutex_lock(&cuda->runtime->mutex);
  stream->next = cuda->runtime->streams;
  if (stream->next) stream->next->previous = stream;
  cuda->runtime->streams = stream;
  pthread_mutex_unlock(&cuda->runtime->mutex);
  return stream;
}

void lm_cuda_stream_ref(lm_backend_stream *stream) { stream->refs.fetch_add(1, std::memory_order_relaxed); }

/* runtime.mutex keeps a stream on the list until its last reference is gone, see lm_cuda_synchronize. */
void lm_cuda_stream_unref(lm_backend_stream *stream) {
  lm_cuda_runtime *runtime = stream->cuda->runtime;
  pthread_mutex_lock(&runtime->mutex);
  const bool last = stream->refs.fetch_sub(1, std::memory_order_acq_rel) == 1;
  if (last) {
    if (stream->previous) stream->previous->next = stream->next;
    else runtime->streams = stream->next;
    if (stream->next) stream->next->previous = stream->previous;
  }
  pthread_mutex_unlock(&runtime->mutex);
  if (!last) return;
  (void)lm_cuda_enter(stream->cuda, "lm_stream_destroy");
  lm_cuda_departed_add(stream);
  stream_release(stream);
}

void lm_cuda_stream_close(lm_backend *base, lm_backend_stream *stream) {
  (void)lm_cuda_enter(self(base), "lm_stream_destroy");
  lm_cuda_graph_abandon(stream);
}

void lm_cuda_stream_free(lm_backend *, lm_backend_stream *stream) { lm_cuda_stream_unref(stream); }

/* Marks ---------------------------------------------------------------------------------------------------------- */

static void pass(lm_backend_stream *stream, uint64_t mark) {
  if (mark > stream->passed.load(std::memory_order_relaxed)) stream->passed.store(mark, std::memory_order_release);
}

/* LM_NOT_READY, or what cudaEventQuery says of a mark that holds a slot. Without an event (it could not be made) the whole
 * stream answers: later than need be, and right. Under stream.mutex. */
static cudaError_t look(lm_backend_stream *stream, uint64_t mark) {
  const cudaEvent_t event = slot_of(stream, mark)->event;
  const cudaError_t error = event ? cudaEventQuery(event) : cudaStreamQuery(stream->handle);
  if (error == cudaErrorNotReady) (void)cudaGetLastError();
  if (error == cudaSuccess) pass(stream, mark);
  return error;
}

/* Drops the oldest marks that have passed and are not waited for. Under stream.mutex. */
static void reap(lm_backend_stream *stream) {
  while (stream->oldest <= stream->issued && slot_of(stream, stream->oldest)->waiting == 0 &&
         (stream->oldest <= stream->passed.load() || look(stream, stream->oldest) != cudaErrorNotReady)) {
    stream->oldest++;
  }
}

/* Makes room for one more mark. Under stream.mutex. @return false if the heap is exhausted */
static bool make_room(lm_backend_stream *stream) {
  if (stream->issued + 1 - stream->oldest < stream->capacity) return true;
  reap(stream);
  if (stream->issued + 1 - stream->oldest < stream->capacity) return true;
  const uint32_t larger = stream->capacity * 2;
  lm_host *host = &stream->cuda->host;
  lm_cuda_slot *slots = static_cast<lm_cuda_slot *>(host->alloc(host->owner, larger * sizeof *slots));
  if (!slots) return false;
  for (uint64_t mark = stream->oldest; mark <= stream->issued; mark++) slots[mark & (larger - 1)] = *slot_of(stream, mark);
  host->release(stream->slots);
  stream->slots = slots;
  stream->capacity = larger;
  return true;
}

/* Nothing is before a new mark that is not before the last one; without a lock, because every alloc and free of a pool asks. */
static bool is_marked(const lm_backend_stream *stream) {
  return stream->marked.load(std::memory_order_acquire) >= stream->enqueued.load(std::memory_order_acquire) ||
         stream->recording.load();
}

uint64_t lm_cuda_stream_mark(lm_backend *base, lm_backend_stream *stream) {
  if (is_marked(stream)) return stream->issued.load(std::memory_order_acquire);
  pthread_mutex_lock(&stream->mutex);
  if (is_marked(stream)) { /* by another thread meanwhile */
    const uint64_t same = stream->issued;
    pthread_mutex_unlock(&stream->mutex);
    return same;
  }
  (void)lm_cuda_enter(self(base), "mark");
  while (!make_room(stream)) { /* no memory for more marks: wait for the oldest */
    const uint64_t oldest = stream->oldest;
    pthread_mutex_unlock(&stream->mutex);
    (void)lm_cuda_stream_wait(base, stream, oldest);
    pthread_mutex_lock(&stream->mutex);
  }
  const uint64_t enqueued = stream->enqueued.load(std::memory_order_acquire);
  const uint64_t mark = stream->issued + 1;
  lm_cuda_slot *slot = slot_of(stream, mark);
  cudaError_t error = cudaSuccess;
  if (!slot->event) error = cudaEventCreateWithFlags(&slot->event, cudaEventDisableTiming | cudaEventBlockingSync);
  if (error) slot->event = NULL;
  else error = cudaEventRecord(slot->event, stream->handle);
  if (error && slot->event) {
    (void)cudaEventDestroy(slot->event);
    slot->event = NULL;
  }
  if (error) (void)lm_cuda_fail(stream->cuda, error, "mark");
  stream->issued.store(mark, std::memory_order_release);
  stream->marked.store(enqueued, std::memory_order_release);
  pthread_mutex_unlock(&stream->mutex);
  return mark;
}

int32_t lm_cuda_stream_query(lm_backend *base, lm_backend_stream *stream, uint64_t mark) {
  static const char op[] = "lm_stream_query";
  if (mark <= stream->passed.load(std::memory_order_acquire)) return stream->state->status.load();
  const int32_t status = lm_cuda_enter(self(base), op);
  if (status) return status;
  pthread_mutex_lock(&stream->mutex);
  const cudaError_t error = mark < stream->oldest ? cudaSuccess : look(stream, mark);
  pthread_mutex_unlock(&stream->mutex);
  if (error == cudaErrorNotReady) return LM_NOT_READY;
  return error ? lm_cuda_fail(stream->cuda, error, op) : stream->state->status.load();
}

int32_t lm_cuda_stream_wait(lm_backend *base, lm_backend_stream *stream, uint64_t mark) {
  static const char op[] = "lm_stream_wait";
  lm_cuda *cuda = self(base);
  if (mark <= stream->passed.load(std::memory_order_acquire)) return stream->state->status.load();
  const int32_t status = lm_cuda_enter(cuda, op);
  if (status) return status;
  pthread_mutex_lock(&stream->mutex);
  if (mark < stream->oldest) {
    pthread_mutex_unlock(&stream->mutex);
    return stream->state->status.load();
  }
  slot_of(stream, mark)->waiting++;
  const cudaEvent_t event = slot_of(stream, mark)->event;
  pthread_mutex_unlock(&stream->mutex);
  const cudaError_t error = event ? lm_cuda_event_await(cuda, event) : cudaStreamSynchronize(stream->handle);
  pthread_mutex_lock(&stream->mutex);
  slot_of(stream, mark)->waiting--; /* the slots may have moved meanwhile */
  if (error == cudaSuccess) pass(stream, mark);
  pthread_mutex_unlock(&stream->mutex);
  return error ? lm_cuda_fail(cuda, error, op) : stream->state->status.load();
}

int32_t lm_cuda_stream_order(lm_backend_stream *stream, lm_backend_stream *other, uint64_t mark, const char *op) {
  if (stream == other || mark <= other->passed.load(std::memory_order_acquire)) return LM_OK;
  cudaError_t error = cudaSuccess;
  pthread_mutex_lock(&other->mutex);
  if (mark >= other->oldest) {
    const cudaEvent_t event = slot_of(other, mark)->event;
    error = event ? cudaStreamWaitEvent(stream->handle, event, 0) : cudaStreamSynchronize(other->handle);
  }
  pthread_mutex_unlock(&other->mutex);
  lm_cuda_enqueued(stream);
  return error ? lm_cuda_fail(stream->cuda, error, op) : LM_OK;
}

int32_t lm_cuda_stream_follow(lm_backend *base, lm_backend_stream *stream, lm_backend_stream *other, uint64_t mark) {
  static const char op[] = "lm_stream_wait_event";
  int32_t status = lm_cuda_enter(self(base), op);
  if (!status) status = lm_cuda_stream_order(stream, other, mark, op);
  return status ? status : lm_cuda_carry(stream, other->state);
}

int32_t lm_cuda_synchronize(lm_backend *base) {
  lm_cuda_runtime *runtime = self(base)->runtime;
  int32_t status = LM_OK;
  /* Stream by stream: waiting for the whole device would spoil a recording that another thread makes. */
  pthread_mutex_lock(&runtime->mutex);
  lm_backend_stream *stream = runtime->streams;
  if (stream) lm_cuda_stream_ref(stream);
  pthread_mutex_unlock(&runtime->mutex);
  while (stream) {
    const int32_t one = lm_cuda_stream_wait(base, stream, lm_cuda_stream_mark(base, stream));
    if (status == LM_OK) status = one;
    pthread_mutex_lock(&runtime->mutex);
    lm_backend_stream *next = stream->next;
    if (next) lm_cuda_stream_ref(next); /* keeps it on the list while the mutex is released */
    pthread_mutex_unlock(&runtime->mutex);
    lm_cuda_stream_unref(stream);
    stream = next;
  }
  return status;
}

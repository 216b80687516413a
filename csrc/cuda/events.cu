/* events.cu: events are those of CUDA, with timing; they also remember whose stream recorded them last, for its failure. */
#include "runtime.h"

static lm_cuda *self(lm_backend *base) { return reinterpret_cast<lm_cuda *>(base); }

lm_backend_event *lm_cuda_event_create(lm_backend *base) {
  static const char op[] = "lm_event_create";
  lm_cuda *cuda = self(base);
  if (lm_cuda_enter(cuda, op)) return NULL;
  lm_backend_event *event = static_cast<lm_backend_event *>(lm_cuda_alloc(cuda, sizeof *event, op));
  if (!event) return NULL;
  const cudaError_t error = cudaEventCreateWithFlags(&event->handle, cudaEventBlockingSync);
  if (error) {
    lm_cuda_fail(cuda, error, op);
    cuda->host.release(event);
    return NULL;
  }
  event->cuda = cuda;
  pthread_mutex_init(&event->mutex, NULL);
  return event;
}

void lm_cuda_event_destroy(lm_backend *base, lm_backend_event *event) {
  (void)lm_cuda_enter(self(base), "lm_event_destroy");
  (void)cudaEventDestroy(event->handle); /* a record or wait under way still completes */
  (void)cudaGetLastError();
  if (event->state) lm_cuda_state_unref(event->state);
  pthread_mutex_destroy(&event->mutex);
  event->cuda->host.release(event);
}

int32_t lm_cuda_event_record(lm_backend *base, lm_backend_event *event, lm_backend_stream *stream) {
  static const char op[] = "lm_event_record";
  const int32_t status = lm_cuda_enter(self(base), op);
  if (status) return status;
  pthread_mutex_lock(&event->mutex);
  const cudaError_t error = cudaEventRecord(event->handle, stream->handle);
  lm_cuda_state *unused = NULL;
  if (error == cudaSuccess) {
    stream->state->refs.fetch_add(1);
    unused = event->state;
    event->state = stream->state;
  }
  pthread_mutex_unlock(&event->mutex);
  if (unused) lm_cuda_state_unref(unused);
  if (error) return lm_cuda_fail(event->cuda, error, op);
  lm_cuda_enqueued(stream);
  return LM_OK;
}

/* The state of the stream that recorded the event, with a reference; NULL if it was never recorded. */
static lm_cuda_state *recorded(lm_backend_event *event) {
  pthread_mutex_lock(&event->mutex);
  lm_cuda_state *state = event->state;
  if (state) state->refs.fetch_add(1);
  pthread_mutex_unlock(&event->mutex);
  return state;
}

/* What a reached event reports: the failure of its stream. Drops the reference. */
static int32_t outcome(lm_backend_event *event, lm_cuda_state *state, cudaError_t error, const char *op) {
  const int32_t status = error ? lm_cuda_fail(event->cuda, error, op) : state->status.load();
  lm_cuda_state_unref(state);
  return status;
}

int32_t lm_cuda_event_query(lm_backend *base, lm_backend_event *event) {
  static const char op[] = "lm_event_query";
  const int32_t status = lm_cuda_enter(self(base), op);
  if (status) return status;
  lm_cuda_state *state = recorded(event);
  return state ? outcome(event, state, cudaEventQuery(event->handle), op) : LM_OK;
}

int32_t lm_cuda_event_wait(lm_backend *base, lm_backend_event *event) {
  static const char op[] = "lm_event_wait";
  const int32_t status = lm_cuda_enter(self(base), op);
  if (status) return status;
  lm_cuda_state *state = recorded(event);
  return state ? outcome(event, state, lm_cuda_event_await(event->cuda, event->handle), op) : LM_OK;
}

int32_t lm_cuda_event_elapsed(lm_backend *base, float *ms, lm_backend_event *start, lm_backend_event *end) {
  static const char op[] = "lm_event_elapsed";
  lm_cuda *cuda = self(base);
  const int32_t status = lm_cuda_enter(cuda, op);
  if (status) return status;
  lm_backend_event *const both[2] = {start, end};
  for (lm_backend_event *event : both) {
    lm_cuda_state *state = recorded(event);
    const cudaError_t error = state ? cudaEventQuery(event->handle) : cudaErrorNotReady;
    if (state) lm_cuda_state_unref(state);
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return cuda->host.fail(cuda->host.owner, LM_ERR_STATE,
                             "%s: %s was not reached yet or never recorded: wait for it first", op,
                             event == start ? "start" : "end");
    }
    if (error) return lm_cuda_fail(cuda, error, op);
  }
  const cudaError_t error = cudaEventElapsedTime(ms, start->handle, end->handle);
  return error ? lm_cuda_fail(cuda, error, op) : LM_OK;
}

int32_t lm_cuda_event_follow(lm_backend *base, lm_backend_stream *stream, lm_backend_event *event) {
  static const char op[] = "lm_stream_wait_event";
  int32_t status = lm_cuda_enter(self(base), op);
  if (status) return status;
  lm_cuda_state *state = recorded(event);
  if (!state) return LM_OK;
  const cudaError_t error = cudaStreamWaitEvent(stream->handle, event->handle, 0);
  lm_cuda_enqueued(stream);
  status = error ? lm_cuda_fail(stream->cuda, error, op) : lm_cuda_carry(stream, state);
  lm_cuda_state_unref(state);
  return status;
}

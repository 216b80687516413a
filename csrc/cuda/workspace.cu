/* workspace.cu: the workspaces of streams, and what is left of streams that were destroyed before their work had ended. */
#include "runtime.h"

static bool ended(lm_cuda_departed *item) {
  if (!item->end) return true;
  const cudaError_t error = cudaEventQuery(item->end);
  if (error) (void)cudaGetLastError();
  if (error == cudaErrorNotReady) return false;
  (void)cudaEventDestroy(item->end);
  item->end = NULL;
  return true;
}

/* Forgets what has ended; takes a workspace among it if one is wanted. Under runtime.mutex. */
static void *sweep(lm_cuda *cuda, bool want) {
  void *found = NULL;
  for (lm_cuda_departed **link = &cuda->runtime->departed; *link;) {
    lm_cuda_departed *item = *link;
    if (ended(item) && want && item->workspace) {
      found = item->workspace;
      item->workspace = NULL;
      want = false;
    }
    if (item->end || item->workspace) {
      link = &item->next;
    } else {
      *link = item->next;
      cuda->host.release(item);
    }
  }
  return found;
}

void *lm_cuda_workspace(lm_cuda *cuda, cudaStream_t handle) {
  lm_cuda_runtime *runtime = cuda->runtime;
  void *memory = NULL;
  if (cuda->workspace_bytes == 0) return NULL;
  pthread_mutex_lock(&runtime->mutex);
  lm_backend_stream *stream = runtime->streams;
  while (stream && stream->handle != handle) stream = stream->next;
  if (stream) {
    if (!stream->workspace) stream->workspace = sweep(cuda, true);
    if (!stream->workspace && cudaMalloc(&stream->workspace, cuda->workspace_bytes) != cudaSuccess) {
      (void)cudaGetLastError();
      stream->workspace = NULL;
    }
    if (stream->recording.load()) stream->workspace_recorded = true;
    memory = stream->workspace;
  }
  pthread_mutex_unlock(&runtime->mutex);
  return memory;
}

void lm_cuda_departed_add(lm_backend_stream *stream) {
  lm_cuda *cuda = stream->cuda;
  lm_cuda_runtime *runtime = cuda->runtime;
  const bool busy = cudaStreamQuery(stream->handle) == cudaErrorNotReady;
  cudaEvent_t end = NULL;
  lm_cuda_departed *item = NULL;
  if (busy || stream->workspace) item = static_cast<lm_cuda_departed *>(cuda->host.alloc(cuda->host.owner, sizeof *item));
  if (busy && item && cudaEventCreateWithFlags(&end, cudaEventDisableTiming | cudaEventBlockingSync) == cudaSuccess &&
      cudaEventRecord(end, stream->handle) != cudaSuccess) {
    (void)cudaEventDestroy(end);
    end = NULL;
  }
  /* Nothing to remember it by: wait here instead. */
  if (busy && !end) (void)cudaStreamSynchronize(stream->handle);
  if (!item && stream->workspace) (void)cudaFree(stream->workspace);
  (void)cudaGetLastError();
  pthread_mutex_lock(&runtime->mutex);
  if (item) {
    *item = {runtime->departed, end, stream->workspace};
    runtime->departed = item;
  }
  (void)sweep(cuda, false);
  pthread_mutex_unlock(&runtime->mutex);
  stream->workspace = NULL;
}

void lm_cuda_departed_free(lm_cuda *cuda) {
  while (cuda->runtime->departed) {
    lm_cuda_departed *item = cuda->runtime->departed;
    cuda->runtime->departed = item->next;
    if (item->end) {
      (void)cudaEventSynchronize(item->end);
      (void)cudaEventDestroy(item->end);
    }
    if (item->workspace) (void)cudaFree(item->workspace);
    cuda->host.release(item);
  }
  (void)cudaGetLastError();
}

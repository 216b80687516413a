/* graphs.cu: recording by stream capture, replay by one launch.
 *
 * Capture is relaxed: a runtime's finalizer may free memory on any thread while a step is recorded, which the stricter modes
 * answer by spoiling the recording. A graph may use the workspace of the stream it was recorded on, its home; replayed in
 * another stream it runs after what home holds and before what home gets later. */
#include "runtime.h"

struct lm_backend_graph {
  lm_cuda *cuda;
  cudaGraphExec_t exec;
  lm_backend_stream *home; /* NULL = uses no workspace */
  pthread_mutex_t mutex;   /* CUDA allows one launch of a graph at a time */
};

static lm_cuda *self(lm_backend *base) { return reinterpret_cast<lm_cuda *>(base); }

int32_t lm_cuda_graph_begin(lm_backend *base, lm_backend_stream *stream) {
  static const char op[] = "lm_graph_begin";
  const int32_t status = lm_cuda_enter(self(base), op);
  if (status) return status;
  (void)lm_cuda_stream_mark(base, stream); /* later marks cannot be taken before the recording ends */
  stream->workspace_recorded = false;
  stream->recording.store(true);
  const cudaError_t error = cudaStreamBeginCapture(stream->handle, cudaStreamCaptureModeRelaxed);
  if (error == cudaSuccess) return LM_OK;
  stream->recording.store(false);
  return lm_cuda_fail(stream->cuda, error, op);
}

static cudaError_t end_capture(lm_backend_stream *stream, cudaGraph_t *graph) {
  *graph = NULL;
  const cudaError_t error = cudaStreamEndCapture(stream->handle, graph);
  stream->recording.store(false);
  if (error && *graph) {
    (void)cudaGraphDestroy(*graph);
    *graph = NULL;
  }
  return error;
}

void lm_cuda_graph_abandon(lm_backend_stream *stream) {
  if (!stream->recording.load()) return;
  cudaGraph_t graph;
  if (end_capture(stream, &graph) == cudaSuccess) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();
}

lm_backend_graph *lm_cuda_graph_end(lm_backend *base, lm_backend_stream *stream) {
  static const char op[] = "lm_graph_end";
  lm_cuda *cuda = self(base);
  if (lm_cuda_enter(cuda, op)) return NULL;
  cudaGraph_t recorded;
  cudaGraphExec_t exec = NULL;
  cudaError_t error = end_capture(stream, &recorded);
  if (!error) {
    error = cudaGraphInstantiate(&exec, recorded, 0);
    (void)cudaGraphDestroy(recorded);
  }
  /* What the device needs for it is taken now, not by the first launch. */
  if (!error) {
    error = cudaGraphUpload(exec, stream->handle);
    lm_cuda_enqueued(stream);
  }
  lm_backend_graph *graph = NULL;
  if (error) lm_cuda_fail(cuda, error, op);
  else graph = static_cast<lm_backend_graph *>(lm_cuda_alloc(cuda, sizeof *graph, op));
  if (!graph) {
    if (exec) (void)cudaGraphExecDestroy(exec);
    (void)cudaGetLastError();
    return NULL;
  }
  graph->cuda = cuda;
  graph->exec = exec;
  if (stream->workspace_recorded) {
    graph->home = stream;
    lm_cuda_stream_ref(stream);
  }
  pthread_mutex_init(&graph->mutex, NULL);
  return graph;
}

int32_t lm_cuda_graph_launch(lm_backend *base, lm_backend_graph *graph, lm_backend_stream *stream) {
  static const char op[] = "lm_graph_launch";
  lm_cuda *cuda = self(base);
  int32_t status = lm_cuda_enter(cuda, op);
  if (status || stream->state->status.load()) return status; /* a stream that failed skips its work */
  lm_backend_stream *home = graph->home != stream ? graph->home : NULL;
  if (home && home->recording.load()) {
    return cuda->host.fail(cuda->host.owner, LM_ERR_STATE,
                           "%s: the stream that the graph was recorded on records again: end that recording first", op);
  }
  if (home) status = lm_cuda_stream_order(stream, home, lm_cuda_stream_mark(base, home), op);
  if (status) return status;
  pthread_mutex_lock(&graph->mutex);
  const cudaError_t error = cudaGraphLaunch(graph->exec, stream->handle);
  pthread_mutex_unlock(&graph->mutex);
  if (error) return lm_cuda_fail(cuda, error, op);
  lm_cuda_enqueued(stream);
  return home ? lm_cuda_stream_order(home, stream, lm_cuda_stream_mark(base, stream), op) : LM_OK;
}

void lm_cuda_graph_destroy(lm_backend *base, lm_backend_graph *graph) {
  lm_cuda *cuda = self(base);
  (void)lm_cuda_enter(cuda, "lm_graph_destroy");
  (void)cudaGraphExecDestroy(graph->exec); /* launches under way still run */
  (void)cudaGetLastError();
  if (graph->home) lm_cuda_stream_unref(graph->home);
  pthread_mutex_destroy(&graph->mutex);
  cuda->host.release(graph);
}

/* graph.c: recording work and replaying it. A graph keeps the page-locked buffers that its copies use. */
#include "core.h"

struct lm_graph {
  lm_ctx *ctx;
  lm_backend_graph *handle;
  int32_t nodes;
  int32_t kernels;
  lm_pinned **pinned;
  uint32_t pinned_count;
};

int32_t lm_graph_begin(lm_stream *stream) {
  if (!stream) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = stream->ctx;
  int32_t status = lm_stream_check(ctx, stream, false, "lm_graph_begin");
  if (status) return status;
  status = ctx->api->graph_begin(ctx->backend, stream->handle);
  if (status) return status;
  atomic_store(&stream->nodes, 0);
  atomic_store(&stream->kernels, 0);
  atomic_store(&stream->recording, true);
  atomic_fetch_add(&ctx->recordings, 1);
  return LM_OK;
}

static void drop_pinned(lm_pinned **pinned, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) lm_pinned_unref(pinned[i]);
  lm_heap_release(pinned);
}

void lm_recording_drop(lm_stream *stream) {
  drop_pinned(stream->recorded, stream->recorded_count);
  stream->recorded = NULL;
  stream->recorded_count = stream->recorded_capacity = 0;
}

lm_graph *lm_graph_end(lm_stream *stream) {
  static const char op[] = "lm_graph_end";
  if (!stream) return NULL;
  lm_ctx *ctx = stream->ctx;
  if (!atomic_exchange(&stream->recording, false)) {
    lm_fail(ctx, LM_ERR_STATE, "%s: the stream does not record: call lm_graph_begin first", op);
    return NULL;
  }
  atomic_fetch_sub(&ctx->recordings, 1);
  lm_backend_graph *handle = ctx->api->graph_end(ctx->backend, stream->handle);
  lm_graph *graph = handle ? lm_heap_alloc(ctx, sizeof *graph, op) : NULL;
  if (!graph) {
    if (handle) ctx->api->graph_destroy(ctx->backend, handle);
    lm_recording_drop(stream);
    return NULL;
  }
  graph->ctx = ctx;
  graph->handle = handle;
  graph->nodes = atomic_load(&stream->nodes);
  graph->kernels = atomic_load(&stream->kernels);
  graph->pinned = stream->recorded;
  graph->pinned_count = stream->recorded_count;
  stream->recorded = NULL;
  stream->recorded_count = stream->recorded_capacity = 0;
  lm_ctx_ref(ctx);
  return graph;
}

int32_t lm_graph_launch(lm_graph *graph, lm_stream *stream) {
  if (!graph) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = graph->ctx;
  int32_t status = lm_stream_check(ctx, stream, false, "lm_graph_launch");
  if (status) return status;
  bool noted = true;
  if (graph->pinned_count) {
    pthread_mutex_lock(&ctx->mutex);
    for (uint32_t i = 0; i < graph->pinned_count && noted; i++) noted = lm_pinned_use(graph->pinned[i], stream);
    pthread_mutex_unlock(&ctx->mutex);
  }
  if (!noted) return LM_ERR_OUT_OF_MEMORY;
  lm_note(ctx, "lm_graph_launch", graph, 0, stream, NULL);
  status = ctx->api->graph_launch(ctx->backend, graph->handle, stream->handle);
  if (!status) atomic_fetch_add_explicit(&ctx->kernel_launches, (uint64_t)graph->kernels, memory_order_relaxed);
  return status;
}

int32_t lm_graph_nodes(lm_graph *graph) {
  return graph ? graph->nodes : LM_ERR_ARGUMENT;
}

void lm_graph_destroy(lm_graph *graph) {
  if (!graph) return;
  lm_ctx *ctx = graph->ctx;
  ctx->api->graph_destroy(ctx->backend, graph->handle);
  drop_pinned(graph->pinned, graph->pinned_count);
  lm_heap_release(graph);
  lm_ctx_unref(ctx);
}

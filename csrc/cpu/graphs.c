/* graphs.c: a graph of the CPU backend is the recorded commands in one array; a launch is one command that runs all. */
#include <string.h>

#include "backend.h"

struct lm_backend_graph {
  lm_host host;
  _Atomic int32_t refs; /* core's handle and launches on their way */
  lm_command *commands;
  uint32_t count, capacity;
  bool spoilt; /* a command could not be recorded */
};

static void graph_unref(lm_backend_graph *graph) {
  if (atomic_fetch_sub_explicit(&graph->refs, 1, memory_order_acq_rel) != 1) return;
  graph->host.release(graph->commands);
  graph->host.release(graph);
}

int32_t lm_cpu_graph_begin(lm_backend *base, lm_backend_stream *queue) {
  const lm_host *host = &((lm_cpu_backend *)base)->host;
  lm_backend_graph *graph = host->alloc(host->owner, sizeof *graph);
  if (!graph) {
    return host->fail(host->owner, LM_ERR_OUT_OF_MEMORY, "lm_graph_begin: out of host memory: %zu bytes of heap",
                      sizeof *graph);
  }
  graph->host = *host;
  atomic_store(&graph->refs, 1);
  lm_queue_recording(queue, graph);
  return LM_OK;
}

lm_command *lm_cpu_graph_append(lm_backend_graph *graph) {
  if (graph->count == graph->capacity && !graph->spoilt) {
    uint32_t larger = graph->capacity ? graph->capacity * 2 : 64;
    lm_command *grown = graph->host.alloc(graph->host.owner, larger * sizeof *grown);
    if (!grown) {
      graph->spoilt = true;
    } else {
      if (graph->count) memcpy(grown, graph->commands, graph->count * sizeof *grown);
      graph->host.release(graph->commands);
      graph->commands = grown;
      graph->capacity = larger;
    }
  }
  return graph->spoilt ? NULL : &graph->commands[graph->count++];
}

lm_backend_graph *lm_cpu_graph_end(lm_backend *base, lm_backend_stream *queue) {
  const lm_host *host = &((lm_cpu_backend *)base)->host;
  lm_backend_graph *graph = lm_queue_recording(queue, NULL);
  if (!graph || !graph->spoilt) return graph;
  host->fail(host->owner, LM_ERR_OUT_OF_MEMORY,
             "lm_graph_end: the recording is incomplete: out of host memory after %u nodes", graph->count);
  graph_unref(graph);
  return NULL;
}

int32_t lm_cpu_graph_launch(lm_backend *base, lm_backend_graph *graph, lm_backend_stream *queue) {
  (void)base;
  lm_command command = {.as.graph = graph};
  atomic_fetch_add_explicit(&graph->refs, 1, memory_order_relaxed);
  lm_queue_push(queue, LM_COMMAND_GRAPH, 0, &command.as, sizeof command.as.graph);
  return LM_OK;
}

int32_t lm_cpu_graph_run(lm_cpu_backend *backend, lm_backend_graph *graph, int32_t status) {
  for (uint32_t i = 0; i < graph->count; i++) status = lm_command_run(backend, &graph->commands[i], status);
  graph_unref(graph);
  return status;
}

void lm_cpu_graph_destroy(lm_backend *base, lm_backend_graph *graph) {
  (void)base;
  graph_unref(graph);
}

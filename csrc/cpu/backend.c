/* backend.c: the CPU device behind core's vtable: kernels on the worker threads, one queue per stream. */
#define _GNU_SOURCE
#include "backend.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kernels.h"

static lm_cpu_backend *self(lm_backend *base) {
  return (lm_cpu_backend *)base;
}

#define KERNEL_RUN(op)                                       \
  static void run_##op(lm_cpu *cpu, const void *args) {      \
    lm_cpu_##op(cpu, args);                                  \
  }
LM_KERNEL_MAP(KERNEL_RUN)

#define KERNEL_ROW(op) run_##op,
static void (*const kernels[LM_KERNEL_COUNT])(lm_cpu *cpu, const void *args) = {LM_KERNEL_MAP(KERNEL_ROW)};

int32_t lm_command_run(lm_cpu_backend *backend, const lm_command *command, int32_t status) {
  switch (command->kind) {
    case LM_COMMAND_LAUNCH:
      if (status == LM_OK) kernels[command->value](backend->cpu, command->as.args);
      return status;
    case LM_COMMAND_COPY:
      if (status == LM_OK) memmove(command->as.copy.dst, command->as.copy.src, command->as.copy.bytes);
      return status;
    case LM_COMMAND_FILL:
      if (status == LM_OK) memset(command->as.copy.dst, command->value, command->as.copy.bytes);
      return status;
    case LM_COMMAND_GRAPH:
      return lm_cpu_graph_run(backend, command->as.graph, status);
    case LM_COMMAND_FOLLOW: {
      int32_t other = lm_queue_wait(command->as.follow.other, command->as.follow.mark);
      lm_queue_unref(command->as.follow.other);
      return status ? status : other;
    }
    case LM_COMMAND_RECORD:
      lm_cpu_event_reached(command->as.record.event, command->as.record.ticket);
      return status;
    case LM_COMMAND_CALL: {
      int32_t result = command->as.call.fn(command->as.call.arg, status);
      return status ? status : result < 0 ? result : LM_OK;
    }
    default:
      return LM_ERR_INTERNAL;
  }
}

static int32_t pushed(lm_backend *base, uint64_t mark, const char *op) {
  if (mark != LM_NO_MARK) return LM_OK;
  const lm_host *host = &self(base)->host;
  return host->fail(host->owner, LM_ERR_OUT_OF_MEMORY, "%s: out of host memory while recording: end the recording", op);
}

static int32_t launch(lm_backend *base, lm_backend_stream *stream, int32_t kernel, const void *args, uint32_t size) {
  return pushed(base, lm_queue_push(stream, LM_COMMAND_LAUNCH, kernel, args, size), "launch");
}

static int32_t copy(lm_backend *base, lm_backend_stream *stream, void *dst, const void *src, uint64_t bytes) {
  lm_command command = {.as.copy = {.dst = dst, .src = src, .bytes = bytes}};
  return pushed(base, lm_queue_push(stream, LM_COMMAND_COPY, 0, &command.as, sizeof command.as.copy), "lm_mem_copy");
}

static int32_t fill(lm_backend *base, lm_backend_stream *stream, void *dst, int32_t value, uint64_t bytes) {
  lm_command command = {.as.copy = {.dst = dst, .bytes = bytes}};
  uint64_t mark = lm_queue_push(stream, LM_COMMAND_FILL, value & 0xff, &command.as, sizeof command.as.copy);
  return pushed(base, mark, "lm_mem_fill");
}

static int32_t stream_call(lm_backend *base, lm_backend_stream *stream, lm_host_fn fn, void *arg) {
  lm_command command = {.as.call = {.fn = fn, .arg = arg}};
  return pushed(base, lm_queue_push(stream, LM_COMMAND_CALL, 0, &command.as, sizeof command.as.call), "call");
}

/* All streams share the workers, so a priority changes nothing here. */
static lm_backend_stream *stream_create(lm_backend *base, int32_t priority) {
  (void)priority;
  return lm_queue_create(self(base));
}

static void stream_close(lm_backend *base, lm_backend_stream *stream) {
  lm_backend_graph *abandoned = lm_queue_recording(stream, NULL);
  if (abandoned) lm_cpu_graph_destroy(base, abandoned);
  lm_queue_close(stream);
}

static void stream_free(lm_backend *base, lm_backend_stream *stream) {
  (void)base;
  lm_queue_unref(stream);
}

static uint64_t stream_mark(lm_backend *base, lm_backend_stream *stream) {
  (void)base;
  return lm_queue_mark(stream);
}

static int32_t stream_query(lm_backend *base, lm_backend_stream *stream, uint64_t mark) {
  (void)base;
  return lm_queue_query(stream, mark);
}

static int32_t stream_wait(lm_backend *base, lm_backend_stream *stream, uint64_t mark) {
  (void)base;
  return lm_queue_wait(stream, mark);
}

static int32_t stream_follow(lm_backend *base, lm_backend_stream *stream, lm_backend_stream *other, uint64_t mark) {
  (void)base;
  return lm_queue_follow(stream, other, mark);
}

static int32_t synchronize(lm_backend *base) {
  return lm_queue_drain(self(base));
}

static void *mem_reserve(lm_backend *base, uint64_t bytes) {
  return lm_host_memory_take(&self(base)->host, bytes, LM_ERR_OUT_OF_MEMORY, "lm_mem_reserve");
}

static void *range_reserve(lm_backend *base, uint64_t *bytes) {
  return lm_host_range_reserve(&self(base)->host, bytes);
}

static int32_t range_commit(lm_backend *base, void *memory, uint64_t bytes) {
  return lm_host_range_commit(&self(base)->host, memory, bytes);
}

static void range_decommit(lm_backend *base, void *memory, uint64_t bytes) {
  (void)base;
  lm_host_range_decommit(memory, bytes);
}

static void range_release(lm_backend *base, void *memory, uint64_t bytes) {
  (void)base;
  lm_host_range_release(memory, bytes);
}

/* No mlock: copies here are memcpy, which needs no locked pages, and RLIMIT_MEMLOCK (8 MiB by default) would make ordinary
 * programs fail. The memory counts as page-locked, so that programs see the same figures as on a GPU. */
static void *pinned_reserve(lm_backend *base, uint64_t bytes, int32_t flags) {
  (void)flags;
  return lm_host_memory_take(&self(base)->host, bytes, LM_ERR_PINNED, "lm_pinned_create");
}

static void *managed_reserve(lm_backend *base, uint64_t bytes) {
  return lm_host_memory_take(&self(base)->host, bytes, LM_ERR_OUT_OF_MEMORY, "lm_managed_reserve");
}

/* Memory has one place here: advice changes nothing, and a prefetch is done when it is enqueued. */
static int32_t managed_advise(lm_backend *base, void *memory, uint64_t bytes, int32_t advice) {
  (void)base, (void)memory, (void)bytes, (void)advice;
  return LM_OK;
}

static int32_t managed_prefetch(lm_backend *base, lm_backend_stream *stream, void *memory, uint64_t bytes,
                                int32_t to_host) {
  (void)base, (void)stream, (void)memory, (void)bytes, (void)to_host;
  return LM_OK;
}

static void memory_release(lm_backend *base, void *memory, uint64_t bytes) {
  (void)base;
  lm_host_memory_give(memory, bytes);
}

/* Name of the processor as the system gives it, reduced to what needs no escaping in JSON. */
static void processor_name(char *name, size_t cap) {
  char line[256];
  snprintf(name, cap, "CPU");
  FILE *file = fopen("/proc/cpuinfo", "re");
  if (!file) return;
  while (fgets(line, sizeof line, file)) {
    char *colon = strchr(line, ':');
    if (strncmp(line, "model name", 10) != 0 || !colon) continue;
    size_t length = 0;
    for (const char *c = colon + 2; *c && *c != '\n' && length + 1 < cap; c++) {
      if (*c >= ' ' && *c < 127 && *c != '"' && *c != '\\') name[length++] = *c;
    }
    name[length] = 0;
    break;
  }
  fclose(file);
}

static int32_t info(lm_backend *base, char *text, uint64_t cap) {
  const lm_cpu *cpu = self(base)->cpu;
  char name[96];
  processor_name(name, sizeof name);
  return 1 + snprintf(text, cap,
                      "{\"kind\":\"cpu\",\"name\":\"%s\",\"threads\":%d,\"isa\":\"%s\",\"memoryTotal\":%llu,"
                      "\"memoryFree\":%llu,\"scratch\":%llu}",
                      name, lm_cpu_threads(cpu), lm_cpu_isa(cpu), (unsigned long long)lm_host_memory_total(),
                      (unsigned long long)lm_host_memory_available(), (unsigned long long)lm_cpu_scratch_bytes(cpu));
}

static void backend_free(lm_cpu_backend *backend) {
  lm_cpu_destroy(backend->cpu);
  pthread_cond_destroy(&backend->ended);
  pthread_mutex_destroy(&backend->mutex);
  backend->host.release(backend);
}

static void backend_close(lm_backend *base) {
  lm_cpu_backend *backend = self(base);
  pthread_mutex_lock(&backend->mutex);
  while (backend->running > 0) pthread_cond_wait(&backend->ended, &backend->mutex);
  pthread_mutex_unlock(&backend->mutex);
  backend_free(backend);
}

static const lm_backend_api api = {
    .version = LM_BACKEND_VERSION,
    .close = backend_close,
    .info = info,
    .synchronize = synchronize,
    .mem_reserve = mem_reserve,
    .mem_release = memory_release,
    .range_reserve = range_reserve,
    .range_commit = range_commit,
    .range_decommit = range_decommit,
    .range_release = range_release,
    .pinned_reserve = pinned_reserve,
    .pinned_release = memory_release,
    .stream_create = stream_create,
    .stream_close = stream_close,
    .stream_free = stream_free,
    .stream_mark = stream_mark,
    .stream_query = stream_query,
    .stream_wait = stream_wait,
    .stream_follow = stream_follow,
    .stream_call = stream_call,
    .launch = launch,
    .copy = copy,
    .fill = fill,
    .event_create = lm_cpu_event_create,
    .event_destroy = lm_cpu_event_destroy,
    .event_record = lm_cpu_event_record,
    .event_query = lm_cpu_event_query,
    .event_wait = lm_cpu_event_wait,
    .event_elapsed = lm_cpu_event_elapsed,
    .stream_wait_event = lm_cpu_event_follow,
    .graph_begin = lm_cpu_graph_begin,
    .graph_end = lm_cpu_graph_end,
    .graph_launch = lm_cpu_graph_launch,
    .graph_destroy = lm_cpu_graph_destroy,
    .managed_reserve = managed_reserve,
    .managed_release = memory_release,
    .managed_advise = managed_advise,
    .managed_prefetch = managed_prefetch,
};

lm_backend *lm_cpu_backend_open(const lm_host *host, int32_t threads) {
  lm_cpu_backend *backend = host->alloc(host->owner, sizeof *backend);
  if (backend) {
    backend->base.api = &api;
    backend->host = *host;
    backend->spin = sysconf(_SC_NPROCESSORS_ONLN) > 1;
    pthread_mutex_init(&backend->mutex, NULL);
    pthread_cond_init(&backend->ended, NULL);
    backend->cpu = lm_cpu_create(threads);
    if (backend->cpu) return &backend->base;
    backend_free(backend);
  }
  host->fail(host->owner, LM_ERR_OUT_OF_MEMORY, "lm_ctx_open: no memory or no threads for the CPU device: threads=%d",
             threads);
  return NULL;
}

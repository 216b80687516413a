/* backend.c: a simulated device: another backend with delays on its streams and failures on request, for tests.
 *
 * Everything is counted per context, so the same program fails at the same call in every run. A delay is host work put in
 * front of an operation on the wrapped stream, so the order of things stays that of the wrapped backend. */
#define _GNU_SOURCE
#include "files.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct lm_sim {
  lm_backend base;
  lm_host host;
  const lm_backend_api *api; /* of the wrapped backend */
  lm_backend *inner;
  lm_sim_options options;
  _Atomic uint64_t calls;
  _Atomic uint64_t operations;
  _Atomic uint32_t streams;
  pthread_mutex_t mutex;
  uint64_t pinned; /* page-locked now; under the mutex */
  lm_sim_files files;
} lm_sim;

struct lm_backend_stream {
  lm_backend_stream *inner;
  uint32_t delay; /* microseconds */
  _Atomic bool recording;
};

static lm_sim *self(lm_backend *base) {
  return (lm_sim *)base;
}

/* Counts a call. @return true if it is the one that fails; the failure is reported then */
static bool fails(lm_sim *sim, int32_t status, const char *call) {
  uint64_t count = atomic_fetch_add(&sim->calls, 1) + 1;
  if (count != sim->options.fail_at) return false;
  sim->host.fail(sim->host.owner, status, "%s: simulated failure of call %llu", call, (unsigned long long)count);
  return true;
}

static void sleep_for(uint64_t microseconds) {
  if (!microseconds) return;
  struct timespec time = {.tv_sec = (time_t)(microseconds / 1000000), .tv_nsec = (long)(microseconds % 1000000) * 1000};
  nanosleep(&time, NULL);
}

static int32_t delay(void *arg, int32_t status) {
  (void)status;
  sleep_for((uintptr_t)arg);
  return LM_OK;
}

static int32_t fault(void *arg, int32_t status) {
  lm_sim *sim = arg;
  (void)status;
  return sim->host.fail(sim->host.owner, LM_ERR_DEVICE,
                        "the device failed: simulated fault at operation %llu: its memory is lost, start the program again",
                        (unsigned long long)sim->options.fault_at);
}

/* What happens before a kernel, copy, fill or graph. */
static int32_t before(lm_sim *sim, lm_backend_stream *stream) {
  if (atomic_load(&stream->recording)) return LM_OK;
  int32_t status = LM_OK;
  if (stream->delay) {
    status = sim->api->stream_call(sim->inner, stream->inner, delay, (void *)(uintptr_t)stream->delay);
  }
  if (!status && atomic_fetch_add(&sim->operations, 1) + 1 == sim->options.fault_at) {
    status = sim->api->stream_call(sim->inner, stream->inner, fault, sim);
  }
  return status;
}

static void sim_close(lm_backend *base) {
  lm_sim *sim = self(base);
  sim->api->close(sim->inner);
  lm_sim_files_close(&sim->files);
  pthread_mutex_destroy(&sim->mutex);
  sim->host.release(sim);
}

static int32_t sim_info(lm_backend *base, char *text, uint64_t cap) {
  return self(base)->api->info(self(base)->inner, text, cap);
}

static int32_t sim_synchronize(lm_backend *base) {
  return self(base)->api->synchronize(self(base)->inner);
}

static void *sim_mem_reserve(lm_backend *base, uint64_t bytes) {
  if (fails(self(base), LM_ERR_OUT_OF_MEMORY, "mem_reserve")) return NULL;
  sleep_for(self(base)->options.driver_delay);
  return self(base)->api->mem_reserve(self(base)->inner, bytes);
}

/* Late only after the memory is back: by then another thread may have been given the same addresses. */
static void sim_mem_release(lm_backend *base, void *memory, uint64_t bytes) {
  self(base)->api->mem_release(self(base)->inner, memory, bytes);
  sleep_for(self(base)->options.driver_delay);
}

static void *sim_range_reserve(lm_backend *base, uint64_t *bytes) {
  lm_sim *sim = self(base);
  if (fails(sim, LM_ERR_OUT_OF_MEMORY, "range_reserve")) return NULL;
  if (!sim->options.no_ranges) return sim->api->range_reserve(sim->inner, bytes);
  sim->host.fail(sim->host.owner, LM_ERR_UNSUPPORTED, "range_reserve: the device cannot map memory page by page");
  return NULL;
}

static int32_t sim_range_commit(lm_backend *base, void *memory, uint64_t bytes) {
  if (fails(self(base), LM_ERR_OUT_OF_MEMORY, "range_commit")) return LM_ERR_OUT_OF_MEMORY;
  sleep_for(self(base)->options.driver_delay);
  return self(base)->api->range_commit(self(base)->inner, memory, bytes);
}

static void sim_range_decommit(lm_backend *base, void *memory, uint64_t bytes) {
  self(base)->api->range_decommit(self(base)->inner, memory, bytes);
  sleep_for(self(base)->options.driver_delay);
}

static void sim_range_release(lm_backend *base, void *memory, uint64_t bytes) {
  self(base)->api->range_release(self(base)->inner, memory, bytes);
}

static void unpin(lm_sim *sim, uint64_t bytes) {
  pthread_mutex_lock(&sim->mutex);
  sim->pinned -= bytes;
  pthread_mutex_unlock(&sim->mutex);
}

static void *sim_pinned_reserve(lm_backend *base, uint64_t bytes, int32_t flags) {
  lm_sim *sim = self(base);
  if (fails(sim, LM_ERR_PINNED, "pinned_reserve")) return NULL;
  sleep_for(sim->options.driver_delay);
  pthread_mutex_lock(&sim->mutex);
  uint64_t limit = sim->options.pinned_limit, pinned = sim->pinned;
  bool refused = limit && bytes > limit - pinned;
  if (!refused) sim->pinned += bytes;
  pthread_mutex_unlock(&sim->mutex);
  if (refused) {
    sim->host.fail(sim->host.owner, LM_ERR_PINNED,
                   "pinned_reserve: the system locks no more page-locked host memory: requested=%llu locked=%llu limit=%llu",
                   (unsigned long long)bytes, (unsigned long long)pinned, (unsigned long long)limit);
    return NULL;
  }
  void *memory = sim->api->pinned_reserve(sim->inner, bytes, flags);
  if (!memory) unpin(sim, bytes);
  return memory;
}

static void sim_pinned_release(lm_backend *base, void *memory, uint64_t bytes) {
  self(base)->api->pinned_release(self(base)->inner, memory, bytes);
  unpin(self(base), bytes);
}

static lm_backend_stream *sim_stream_create(lm_backend *base, int32_t priority) {
  lm_sim *sim = self(base);
  if (fails(sim, LM_ERR_DEVICE, "stream_create")) return NULL;
  lm_backend_stream *stream = sim->host.alloc(sim->host.owner, sizeof *stream);
  if (!stream) {
    sim->host.fail(sim->host.owner, LM_ERR_OUT_OF_MEMORY, "stream_create: out of host memory");
    return NULL;
  }
  stream->inner = sim->api->stream_create(sim->inner, priority);
  if (!stream->inner) {
    sim->host.release(stream);
    return NULL;
  }
  uint32_t index = atomic_fetch_add(&sim->streams, 1);
  stream->delay = index < sim->options.delay_count ? sim->options.delays[index] : 0;
  return stream;
}

static void sim_stream_close(lm_backend *base, lm_backend_stream *stream) {
  self(base)->api->stream_close(self(base)->inner, stream->inner);
}

static void sim_stream_free(lm_backend *base, lm_backend_stream *stream) {
  self(base)->api->stream_free(self(base)->inner, stream->inner);
  self(base)->host.release(stream);
}

static uint64_t sim_stream_mark(lm_backend *base, lm_backend_stream *stream) {
  return self(base)->api->stream_mark(self(base)->inner, stream->inner);
}

static int32_t sim_stream_query(lm_backend *base, lm_backend_stream *stream, uint64_t mark) {
  return self(base)->api->stream_query(self(base)->inner, stream->inner, mark);
}

static int32_t sim_stream_wait(lm_backend *base, lm_backend_stream *stream, uint64_t mark) {
  return self(base)->api->stream_wait(self(base)->inner, stream->inner, mark);
}

static int32_t sim_stream_follow(lm_backend *base, lm_backend_stream *stream, lm_backend_stream *other, uint64_t mark) {
  if (fails(self(base), LM_ERR_DEVICE, "stream_follow")) return LM_ERR_DEVICE;
  return self(base)->api->stream_follow(self(base)->inner, stream->inner, other->inner, mark);
}

static int32_t sim_stream_call(lm_backend *base, lm_backend_stream *stream, lm_host_fn fn, void *arg) {
  if (fails(self(base), LM_ERR_DEVICE, "stream_call")) return LM_ERR_DEVICE;
  return self(base)->api->stream_call(self(base)->inner, stream->inner, fn, arg);
}

static int32_t sim_launch(lm_backend *base, lm_backend_stream *stream, int32_t kernel, const void *args, uint32_t size) {
  if (fails(self(base), LM_ERR_DEVICE, "launch")) return LM_ERR_DEVICE;
  int32_t status = before(self(base), stream);
  return status ? status : self(base)->api->launch(self(base)->inner, stream->inner, kernel, args, size);
}

static int32_t sim_copy(lm_backend *base, lm_backend_stream *stream, void *dst, const void *src, uint64_t bytes) {
  if (fails(self(base), LM_ERR_DEVICE, "copy")) return LM_ERR_DEVICE;
  int32_t status = before(self(base), stream);
  return status ? status : self(base)->api->copy(self(base)->inner, stream->inner, dst, src, bytes);
}

static int32_t sim_fill(lm_backend *base, lm_backend_stream *stream, void *dst, int32_t value, uint64_t bytes) {
  if (fails(self(base), LM_ERR_DEVICE, "fill")) return LM_ERR_DEVICE;
  int32_t status = before(self(base), stream);
  return status ? status : self(base)->api->fill(self(base)->inner, stream->inner, dst, value, bytes);
}

static lm_backend_event *sim_event_create(lm_backend *base) {
  if (fails(self(base), LM_ERR_DEVICE, "event_create")) return NULL;
  return self(base)->api->event_create(self(base)->inner);
}

static void sim_event_destroy(lm_backend *base, lm_backend_event *event) {
  self(base)->api->event_destroy(self(base)->inner, event);
}

static int32_t sim_event_record(lm_backend *base, lm_backend_event *event, lm_backend_stream *stream) {
  if (fails(self(base), LM_ERR_DEVICE, "event_record")) return LM_ERR_DEVICE;
  return self(base)->api->event_record(self(base)->inner, event, stream->inner);
}

static int32_t sim_event_query(lm_backend *base, lm_backend_event *event) {
  return self(base)->api->event_query(self(base)->inner, event);
}

static int32_t sim_event_wait(lm_backend *base, lm_backend_event *event) {
  return self(base)->api->event_wait(self(base)->inner, event);
}

static int32_t sim_event_elapsed(lm_backend *base, float *ms, lm_backend_event *start, lm_backend_event *end) {
  return self(base)->api->event_elapsed(self(base)->inner, ms, start, end);
}

static int32_t sim_stream_wait_event(lm_backend *base, lm_backend_stream *stream, lm_backend_event *event) {
  if (fails(self(base), LM_ERR_DEVICE, "stream_wait_event")) return LM_ERR_DEVICE;
  return self(base)->api->stream_wait_event(self(base)->inner, stream->inner, event);
}

static int32_t sim_graph_begin(lm_backend *base, lm_backend_stream *stream) {
  if (fails(self(base), LM_ERR_DEVICE, "graph_begin")) return LM_ERR_DEVICE;
  int32_t status = self(base)->api->graph_begin(self(base)->inner, stream->inner);
  if (!status) atomic_store(&stream->recording, true);
  return status;
}

static lm_backend_graph *sim_graph_end(lm_backend *base, lm_backend_stream *stream) {
  atomic_store(&stream->recording, false);
  lm_backend_graph *graph = self(base)->api->graph_end(self(base)->inner, stream->inner);
  if (!graph || !fails(self(base), LM_ERR_DEVICE, "graph_end")) return graph;
  self(base)->api->graph_destroy(self(base)->inner, graph);
  return NULL;
}

static int32_t sim_graph_launch(lm_backend *base, lm_backend_graph *graph, lm_backend_stream *stream) {
  if (fails(self(base), LM_ERR_DEVICE, "graph_launch")) return LM_ERR_DEVICE;
  int32_t status = before(self(base), stream);
  return status ? status : self(base)->api->graph_launch(self(base)->inner, graph, stream->inner);
}

static void sim_graph_destroy(lm_backend *base, lm_backend_graph *graph) {
  self(base)->api->graph_destroy(self(base)->inner, graph);
}

static void *sim_managed_reserve(lm_backend *base, uint64_t bytes) {
  if (fails(self(base), LM_ERR_OUT_OF_MEMORY, "managed_reserve")) return NULL;
  return self(base)->api->managed_reserve(self(base)->inner, bytes);
}

static void sim_managed_release(lm_backend *base, void *memory, uint64_t bytes) {
  self(base)->api->managed_release(self(base)->inner, memory, bytes);
}

static int32_t sim_managed_advise(lm_backend *base, void *memory, uint64_t bytes, int32_t advice) {
  if (fails(self(base), LM_ERR_DEVICE, "managed_advise")) return LM_ERR_DEVICE;
  return self(base)->api->managed_advise(self(base)->inner, memory, bytes, advice);
}

static int32_t sim_managed_prefetch(lm_backend *base, lm_backend_stream *stream, void *memory, uint64_t bytes,
                                    int32_t to_host) {
  if (fails(self(base), LM_ERR_DEVICE, "managed_prefetch")) return LM_ERR_DEVICE;
  int32_t status = before(self(base), stream);
  if (status) return status;
  return self(base)->api->managed_prefetch(self(base)->inner, stream->inner, memory, bytes, to_host);
}

static int32_t sim_profile_push(lm_backend *base, const char *name) {
  const lm_sim *sim = self(base);
  return sim->api->profile_push ? sim->api->profile_push(sim->inner, name) : 0;
}

static void sim_profile_pop(lm_backend *base) {
  const lm_sim *sim = self(base);
  if (sim->api->profile_pop) sim->api->profile_pop(sim->inner);
}

static const lm_file_calls *sim_file_calls(lm_backend *base) {
  return &self(base)->files.calls;
}

static const lm_backend_api api = {
    .version = LM_BACKEND_VERSION,
    .close = sim_close,
    .info = sim_info,
    .synchronize = sim_synchronize,
    .mem_reserve = sim_mem_reserve,
    .mem_release = sim_mem_release,
    .range_reserve = sim_range_reserve,
    .range_commit = sim_range_commit,
    .range_decommit = sim_range_decommit,
    .range_release = sim_range_release,
    .pinned_reserve = sim_pinned_reserve,
    .pinned_release = sim_pinned_release,
    .stream_create = sim_stream_create,
    .stream_close = sim_stream_close,
    .stream_free = sim_stream_free,
    .stream_mark = sim_stream_mark,
    .stream_query = sim_stream_query,
    .stream_wait = sim_stream_wait,
    .stream_follow = sim_stream_follow,
    .stream_call = sim_stream_call,
    .launch = sim_launch,
    .copy = sim_copy,
    .fill = sim_fill,
    .event_create = sim_event_create,
    .event_destroy = sim_event_destroy,
    .event_record = sim_event_record,
    .event_query = sim_event_query,
    .event_wait = sim_event_wait,
    .event_elapsed = sim_event_elapsed,
    .stream_wait_event = sim_stream_wait_event,
    .graph_begin = sim_graph_begin,
    .graph_end = sim_graph_end,
    .graph_launch = sim_graph_launch,
    .graph_destroy = sim_graph_destroy,
    .managed_reserve = sim_managed_reserve,
    .managed_release = sim_managed_release,
    .managed_advise = sim_managed_advise,
    .managed_prefetch = sim_managed_prefetch,
    .profile_push = sim_profile_push,
    .profile_pop = sim_profile_pop,
    .file_calls = sim_file_calls,
};

lm_backend *lm_sim_backend_wrap(const lm_host *host, lm_backend *inner, const lm_sim_options *options) {
  lm_sim *sim = host->alloc(host->owner, sizeof *sim);
  if (!sim) {
    host->fail(host->owner, LM_ERR_OUT_OF_MEMORY, "lm_ctx_open: out of host memory");
    inner->api->close(inner);
    return NULL;
  }
  sim->base.api = &api;
  sim->host = *host;
  sim->api = inner->api;
  sim->inner = inner;
  sim->options = *options;
  pthread_mutex_init(&sim->mutex, NULL);
  lm_sim_files_open(&sim->files, host->file_calls, &sim->options);
  return &sim->base;
}

/* Reads digits. @return the end, or NULL if there is none or the number is too large */
static const char *read_number(const char *text, uint64_t *value) {
  if (*text < '0' || *text > '9') return NULL;
  char *end;
  *value = strtoull(text, &end, 10);
  return *value <= UINT32_MAX ? end : NULL;
}

int lm_sim_parse(const char *device, lm_sim_options *options) {
  memset(options, 0, sizeof *options);
  if (strcmp(device, "sim") == 0) return true;
  if (strncmp(device, "sim:", 4) != 0) return false;
  const struct {
    const char *name;
    uint64_t *value;
  } fields[] = {
      {"fail_at=", &options->fail_at},           {"fault_at=", &options->fault_at},
      {"heap_fail_at=", &options->heap_fail_at}, {"pinned_limit=", &options->pinned_limit},
      {"driver_delay=", &options->driver_delay}, {"no_ranges=", &options->no_ranges},
      {"file_fail_at=", &options->file_fail_at}, {"file_fails=", &options->file_fails},
      {"file_error=", &options->file_error},     {"file_most=", &options->file_most},
      {"file_kill_at=", &options->file_kill_at}};
  const size_t count = sizeof fields / sizeof *fields;
  const char *text = device + 4;
  for (;;) {
    if (strncmp(text, "delays=", 7) == 0) {
      text += 6;
      do {
        uint64_t value;
        text = options->delay_count < 16 ? read_number(text + 1, &value) : NULL;
        if (!text) return false;
        options->delays[options->delay_count++] = (uint32_t)value;
      } while (*text == '/');
    } else if (strncmp(text, "file_log=", 9) == 0) {
      size_t length = strcspn(text += 9, ",");
      if (length == 0 || length >= sizeof options->file_log) return false;
      memcpy(options->file_log, text, length);
      text += length;
    } else {
      size_t i = 0;
      while (i < count && strncmp(text, fields[i].name, strlen(fields[i].name)) != 0) i++;
      text = i < count ? read_number(text + strlen(fields[i].name), fields[i].value) : NULL;
      if (!text) return false;
    }
    if (*text == 0) return true;
    if (*text++ != ',') return false;
  }
}

/* notifier.c: completion callbacks.
 *
 * A callback finds its stream past everything that it was requested for, the posting itself included: whoever asks the
 * stream from inside it is told that it has ended.
 *
 * Callbacks do not run on the stream's own thread: one runtime (Deno) blocks the calling thread until its JavaScript
 * thread gets round to the callback, which would hold up the stream and, if JavaScript waits for that stream meanwhile,
 * never end. So the stream only posts, and one thread per context calls. That thread outlives the context if a callback
 * is still due: closing never waits for user code. */
#define _GNU_SOURCE
#include "core.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#define NO_MARK UINT64_MAX

struct lm_notice {
  lm_notice *next;
  lm_notifier *notifier;
  lm_stream *stream;      /* with a reference, and one on its context; NULL for work that belongs to no stream */
  _Atomic uint64_t mark;  /* the point after the posting; NO_MARK until it is known */
  lm_done_fn fn;
  uint64_t tag;
  int32_t status;
};

struct lm_notifier {
  pthread_mutex_t mutex;
  pthread_cond_t posted;
  lm_notice *first, **last; /* due, in the order of completion */
  lm_notice *spare;         /* used again, so that a step makes no heap allocation */
  uint64_t pending;       /* requested and not posted yet */
  bool closing;
};

static void notifier_free(lm_notifier *notifier) {
  for (lm_notice *item = notifier->spare; item;) {
    lm_notice *next = item->next;
    free(item);
    item = next;
  }
  pthread_cond_destroy(&notifier->posted);
  pthread_mutex_destroy(&notifier->mutex);
  free(notifier);
}

/* The posting runs inside the stream, so the stream passes it a moment later. */
static void settle(lm_notice *item) {
  if (!item->stream) return;
  lm_point point = {.stream = item->stream};
  while ((point.mark = atomic_load(&item->mark)) == NO_MARK) sched_yield();
  lm_point_wait(point);
  lm_ctx *ctx = item->stream->ctx;
  lm_stream_unref(item->stream);
  lm_ctx_unref(ctx);
}

static void *notifier_main(void *arg) {
  lm_notifier *notifier = arg;
  pthread_mutex_lock(&notifier->mutex);
  for (;;) {
    while (!notifier->first && !(notifier->closing && notifier->pending == 0)) {
      pthread_cond_wait(&notifier->posted, &notifier->mutex);
    }
    lm_notice *item = notifier->first;
    if (!item) break;
    notifier->first = item->next;
    if (!notifier->first) notifier->last = &notifier->first;
    pthread_mutex_unlock(&notifier->mutex);
    settle(item);
    /* Spare before the call: the next request may come before the callback has returned. */
    lm_done_fn fn = item->fn;
    uint64_t tag = item->tag;
    int32_t status = item->status;
    pthread_mutex_lock(&notifier->mutex);
    item->next = notifier->spare;
    notifier->spare = item;
    pthread_mutex_unlock(&notifier->mutex);
    fn(tag, status);
    pthread_mutex_lock(&notifier->mutex);
  }
  pthread_mutex_unlock(&notifier->mutex);
  notifier_free(notifier);
  return NULL;
}

/* Signals belong to the threads of the program, not to ours. */
static int start_detached(void *(*main)(void *), void *arg) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  pthread_t thread;
  int failed = pthread_create(&thread, NULL, main, arg);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (!failed) pthread_detach(thread);
  return failed;
}

static lm_notifier *notifier_create(lm_ctx *ctx) {
  lm_notifier *notifier = ctx->host.alloc(ctx, sizeof *notifier);
  if (!notifier) return NULL;
  pthread_mutex_init(&notifier->mutex, NULL);
  pthread_cond_init(&notifier->posted, NULL);
  notifier->last = &notifier->first;
  if (start_detached(notifier_main, notifier)) {
    notifier_free(notifier);
    return NULL;
  }
  return notifier;
}

lm_notice *lm_notice_reserve(lm_ctx *ctx, lm_done_fn fn, uint64_t tag, const char *op) {
  pthread_mutex_lock(&ctx->mutex);
  if (!ctx->notifier) ctx->notifier = notifier_create(ctx);
  lm_notifier *notifier = ctx->notifier;
  pthread_mutex_unlock(&ctx->mutex);
  if (!notifier) {
    lm_fail(ctx, LM_ERR_OUT_OF_MEMORY, "%s: no memory or no thread for the callback", op);
    return NULL;
  }
  pthread_mutex_lock(&notifier->mutex);
  lm_notice *item = notifier->spare;
  if (item) notifier->spare = item->next;
  pthread_mutex_unlock(&notifier->mutex);
  if (!item) item = lm_heap_alloc(ctx, sizeof *item, op);
  if (!item) return NULL;
  *item = (lm_notice){.notifier = notifier, .mark = NO_MARK, .fn = fn, .tag = tag};
  pthread_mutex_lock(&notifier->mutex);
  notifier->pending++;
  pthread_mutex_unlock(&notifier->mutex);
  return item;
}

void lm_notice_post(lm_notice *item, int32_t status) {
  lm_notifier *notifier = item->notifier;
  item->status = status;
  item->next = NULL;
  pthread_mutex_lock(&notifier->mutex);
  *notifier->last = item;
  notifier->last = &item->next;
  notifier->pending--;
  pthread_cond_signal(&notifier->posted);
  pthread_mutex_unlock(&notifier->mutex);
}

void lm_notice_drop(lm_notice *item) {
  if (!item) return;
  lm_notifier *notifier = item->notifier;
  pthread_mutex_lock(&notifier->mutex);
  notifier->pending--;
  item->next = notifier->spare;
  notifier->spare = item;
  pthread_mutex_unlock(&notifier->mutex);
}

/* Runs in stream order. */
static int32_t post(void *arg, int32_t status) {
  lm_notice_post(arg, status);
  return LM_OK;
}

int32_t lm_notifier_request(lm_stream *stream, lm_done_fn fn, uint64_t tag) {
  lm_ctx *ctx = stream->ctx;
  lm_notice *item = lm_notice_reserve(ctx, fn, tag, "lm_stream_on_done");
  if (!item) return LM_ERR_OUT_OF_MEMORY;
  item->stream = stream;
  lm_stream_ref(stream);
  lm_ctx_ref(ctx);
  int32_t status = ctx->api->stream_call(ctx->backend, stream->handle, post, item);
  if (status == LM_OK) {
    atomic_store(&item->mark, lm_stream_mark(stream));
    return LM_OK;
  }
  lm_stream_unref(stream);
  lm_ctx_unref(ctx); /* the caller holds one */
  lm_notice_drop(item);
  return status;
}

void lm_notifier_close(lm_notifier *notifier) {
  pthread_mutex_lock(&notifier->mutex);
  notifier->closing = true;
  pthread_cond_signal(&notifier->posted);
  pthread_mutex_unlock(&notifier->mutex);
}

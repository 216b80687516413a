/* The end of the process at any moment: nothing hangs, nothing crashes. Each case is a child process. */
#include "core_test.h"

#include <signal.h>
#include <sys/wait.h>

/* These children end on purpose without giving anything back. */
__attribute__((visibility("default"))) const char *__lsan_default_options(void);
const char *__lsan_default_options(void) {
  return "detect_leaks=0";
}

static lm_ctx *ctx;
static lm_stream *stream;
static uint8_t *memory;

static void busy(void) {
  ctx = open_device("cpu");
  stream = lm_stream_create(ctx, 0);
  memory = lm_mem_reserve(ctx, 8 << 20);
  for (int i = 0; i < 1000; i++) lm_mem_fill(ctx, memory, i, 8 << 20, stream);
}

static void leaves_work(void) {
  busy();
  exit(0);
}

static void leaves_idle_objects(void) {
  ctx = open_device("cpu");
  stream = lm_stream_create(ctx, 0);
  lm_pool *pool = lm_pool_create(ctx, 0);
  lm_pool_alloc(pool, 1000, "left", stream);
  lm_pinned_create(ctx, 1000, 0);
  exit(0);
}

static void leave_now(uint64_t tag, int32_t status) {
  (void)status;
  exit((int)tag);
}

static void leaves_from_callback(void) {
  ctx = open_device("cpu");
  stream = lm_stream_create(ctx, 0);
  lm_stream_on_done(stream, leave_now, 0);
  for (;;) sleep(1);
}

static gate never = GATE_CLOSED;

static void never_returns(uint64_t tag, int32_t status) {
  (void)tag;
  gate_pass(&never, status);
}

static void leaves_while_callback_blocks(void) {
  ctx = open_device("cpu");
  stream = lm_stream_create(ctx, 0);
  lm_stream_on_done(stream, never_returns, 0);
  gate_await(&never);
  lm_stream_destroy(stream);
  lm_ctx_destroy(ctx);
  exit(0);
}

static void *wait_for_it(void *arg) {
  lm_stream_wait(arg);
  return NULL;
}

static void leaves_while_others_wait(void) {
  busy();
  pthread_t thread;
  pthread_create(&thread, NULL, wait_for_it, stream);
  usleep(1000);
  exit(0);
}

static void is_terminated(void) {
  busy();
  kill(getpid(), SIGTERM);
  for (;;) sleep(1);
}

static volatile sig_atomic_t handled_by_main;
static pthread_t main_thread;

static void on_signal(int number) {
  (void)number;
  handled_by_main = pthread_equal(pthread_self(), main_thread) ? 1 : 2;
}

/* Signals go to threads of the program: ours block them all. */
static void leaves_signals_alone(void) {
  main_thread = pthread_self();
  signal(SIGUSR1, on_signal);
  busy();
  lm_stream_on_done(stream, never_returns, 0);
  for (int i = 0; i < 50; i++) {
    handled_by_main = 0;
    kill(getpid(), SIGUSR1);
    while (!handled_by_main) usleep(10);
    if (handled_by_main != 1) exit(3);
  }
  exit(0);
}

/* @return wait status of the child */
static int run(void (*body)(void)) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    alarm(60);
    body();
    _exit(99);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

static void with_work(void) { EXPECT(run(leaves_work) == 0); }
static void with_objects(void) { EXPECT(run(leaves_idle_objects) == 0); }
static void from_callback(void) { EXPECT(run(leaves_from_callback) == 0); }
static void with_blocked_callback(void) { EXPECT(run(leaves_while_callback_blocks) == 0); }
static void with_waiters(void) { EXPECT(run(leaves_while_others_wait) == 0); }
static void signals(void) { EXPECT(run(leaves_signals_alone) == 0); }

static void terminated(void) {
  int status = run(is_terminated);
  EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
}

int main(void) {
  test("exit() with work on its way ends the process cleanly", with_work);
  test("exit() with objects left ends the process cleanly", with_objects);
  test("exit() from a completion callback ends the process cleanly", from_callback);
  test("exit() while a completion callback blocks ends the process cleanly", with_blocked_callback);
  test("exit() while another thread waits for a stream ends the process cleanly", with_waiters);
  test("SIGTERM with work on its way ends the process at once", terminated);
  test("lm_* threads take no signals of the program", signals);
  return summary();
}

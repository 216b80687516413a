/* device.c: from the name of a device to an opened backend. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core.h"

#define CUDA_PLUGIN "libloramem_cuda.so"
#define SIM_PLUGIN "libloramem_sim.so"

/* beside_library: path of a file in the folder of this library. @return false if it does not fit */
static bool beside_library(char *path, size_t cap, const char *file) {
  Dl_info self;
  if (!dladdr((void *)(uintptr_t)lm_abi_version, &self) || !self.dli_fname) return false;
  const char *slash = strrchr(self.dli_fname, '/');
  int folder = slash ? (int)(slash - self.dli_fname) : 1;
  int length = snprintf(path, cap, "%.*s/%s", folder, slash ? self.dli_fname : ".", file);
  return length > 0 && (size_t)length < cap;
}

/* The plugin is never closed: it holds device state and threads that outlive any one context. */
static lm_backend *open_cuda(lm_ctx *ctx, int32_t index, int32_t threads) {
  char path[4096];
  if (!beside_library(path, sizeof path, CUDA_PLUGIN) || access(path, F_OK) != 0) {
    lm_fail(ctx, LM_ERR_NO_DEVICE,
            "lm_ctx_open: this build has no CUDA backend: " CUDA_PLUGIN
            " is not beside the library: build it with nvcc on the path, or use device \"cpu\"");
    return NULL;
  }
  void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void *symbol = plugin ? dlsym(plugin, "lm_backend_open") : NULL;
  if (!symbol) {
    const char *reason = dlerror();
    lm_fail(ctx, LM_ERR_DRIVER, "lm_ctx_open: the CUDA backend does not load: %s", reason ? reason : path);
    return NULL;
  }
  lm_backend_open_fn open;
  memcpy(&open, &symbol, sizeof open);
  /* Stands if a plugin of another version refuses without a text of its own. */
  lm_fail(ctx, LM_ERR_DRIVER, "lm_ctx_open: the CUDA backend is of another version: %s: build both again", path);
  return open(LM_BACKEND_VERSION, &ctx->host, index, threads);
}

/* The simulated device wraps the CPU. Test programs hold it, everybody else finds it beside the library. */
static bool sim_functions(lm_ctx *ctx, lm_sim_parse_fn *parse, lm_sim_wrap_fn *wrap) {
#ifdef LORAMEM_SIM
  (void)ctx;
  *parse = lm_sim_parse;
  *wrap = lm_sim_backend_wrap;
  return true;
#else
  char path[4096];
  void *plugin = NULL;
  if (beside_library(path, sizeof path, SIM_PLUGIN)) plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void *symbols[2] = {plugin ? dlsym(plugin, "lm_sim_parse") : NULL, plugin ? dlsym(plugin, "lm_sim_backend_wrap") : NULL};
  if (!symbols[0] || !symbols[1]) {
    lm_fail(ctx, LM_ERR_NO_DEVICE,
            "lm_ctx_open: this build has no simulated device: " SIM_PLUGIN
            " is not beside the library: it is part of test builds only: build with -DLORAMEM_SIM=ON, or use \"cpu\"");
    return false;
  }
  memcpy(parse, &symbols[0], sizeof *parse);
  memcpy(wrap, &symbols[1], sizeof *wrap);
  return true;
#endif
}

static lm_backend *open_sim(lm_ctx *ctx, const char *device, int32_t threads) {
  lm_sim_parse_fn parse;
  lm_sim_wrap_fn wrap;
  if (!sim_functions(ctx, &parse, &wrap)) return NULL;
  lm_sim_options options;
  if (!parse(device, &options)) {
    lm_fail(ctx, LM_ERR_ARGUMENT, "lm_ctx_open: the options of the simulated device are malformed: device=\"%.64s\"", device);
    return NULL;
  }
  ctx->heap_fail_at = options.heap_fail_at;
  lm_backend *inner = lm_cpu_backend_open(&ctx->host, threads);
  return inner ? wrap(&ctx->host, inner, &options) : NULL;
}

static bool parse_index(const char *text, int32_t *index) {
  if (*text < '0' || *text > '9') return false;
  char *end;
  unsigned long value = strtoul(text, &end, 10);
  *index = (int32_t)value;
  return *end == 0 && value < 1024;
}

static lm_backend *open_backend(lm_ctx *ctx, const char *device, int32_t threads) {
  int32_t index = 0;
  if (strcmp(device, "cpu") == 0) return lm_cpu_backend_open(&ctx->host, threads);
  if (strcmp(device, "cuda") == 0 || (strncmp(device, "cuda:", 5) == 0 && parse_index(device + 5, &index))) {
    return open_cuda(ctx, index, threads);
  }
  if (strcmp(device, "sim") == 0 || strncmp(device, "sim:", 4) == 0) return open_sim(ctx, device, threads);
  lm_fail(ctx, LM_ERR_NO_DEVICE, "lm_ctx_open: unknown device: device=\"%.64s\": use \"cpu\" or \"cuda:<n>\"", device);
  return NULL;
}

int32_t lm_device_open(lm_ctx *ctx, const char *device, int32_t threads) {
  lm_backend *backend = open_backend(ctx, device, threads);
  if (!backend) return ctx->error_status ? ctx->error_status : LM_ERR_INTERNAL;
  if (backend->api->version != LM_BACKEND_VERSION) {
    return lm_fail(ctx, LM_ERR_DRIVER, "lm_ctx_open: the backend is of another version: %u, wanted %u: build both again",
                   backend->api->version, LM_BACKEND_VERSION);
  }
  ctx->backend = backend;
  ctx->api = backend->api;
  lm_fail(ctx, LM_OK, "%s", "");
  return LM_OK;
}

const char *lm_device_list(void) {
  char path[4096];
  bool cuda = beside_library(path, sizeof path, CUDA_PLUGIN) && access(path, F_OK) == 0;
  return cuda ? "cpu, cuda" : "cpu";
}

int32_t lm_choices_time(lm_ctx *ctx, int32_t on) {
  if (!ctx) return LM_ERR_ARGUMENT;
  if (on != 0 && on != 1) return lm_fail(ctx, LM_ERR_ARGUMENT, "lm_choices_time: on is neither 0 nor 1: on=%d", on);
  return ctx->api->choices_time ? ctx->api->choices_time(ctx->backend, on) : LM_OK;
}

int32_t lm_choices_write(lm_ctx *ctx, void *buf, uint64_t cap) {
  if (!ctx) return LM_ERR_ARGUMENT;
  if (!buf) cap = 0;
  if (ctx->api->choices_write) return ctx->api->choices_write(ctx->backend, buf, cap);
  if (cap > 0) *(char *)buf = 0;
  return 1;
}

int32_t lm_choices_read(lm_ctx *ctx, const char *text) {
  if (!ctx) return LM_ERR_ARGUMENT;
  if (!text) return lm_fail(ctx, LM_ERR_ARGUMENT, "lm_choices_read: text is NULL");
  return ctx->api->choices_read ? ctx->api->choices_read(ctx->backend, text) : LM_OK;
}

/* snapshot.c: what a context holds, as JSON. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "core.h"

uint64_t lm_clock_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void lm_text_add(lm_text *text, const char *format, ...) {
  bool fits = text->length < text->cap;
  va_list values;
  va_start(values, format);
  int length = vsnprintf(fits ? text->buf + text->length : NULL, fits ? text->cap - text->length : 0, format, values);
  va_end(values);
  if (length > 0) text->length += (uint64_t)length;
}

void lm_text_string(lm_text *text, const char *string) {
  lm_text_add(text, "\"");
  for (const char *c = string; *c; c++) {
    if (*c == '"' || *c == '\\') lm_text_add(text, "\\%c", *c);
    else if ((unsigned char)*c < ' ') lm_text_add(text, "\\u%04x", (unsigned)*c);
    else lm_text_add(text, "%c", *c);
  }
  lm_text_add(text, "\"");
}

static const char *class_name(int32_t kind) {
  switch (kind) {
    case LM_RANGE_POOL:
      return "pool";
    case LM_RANGE_PINNED:
      return "pinned";
    case LM_RANGE_PAGEABLE:
      return "pageable";
    case LM_RANGE_MANAGED:
      return "managed";
    default:
      return "device";
  }
}

int32_t lm_ctx_snapshot(lm_ctx *ctx, void *buf, uint64_t cap) {
  typedef unsigned long long ull;
  if (!ctx) return LM_ERR_ARGUMENT;
  lm_retired_sweep(ctx, false);
  lm_text text = {.buf = buf, .cap = buf ? cap : 0};
  uint64_t now = lm_clock_ms();
  lm_text_add(&text, "{\"timeMs\":%llu,\"memory\":[", (ull)(now - ctx->opened));
  pthread_mutex_lock(&ctx->mutex);
  for (uint32_t i = 0; i < ctx->range_count; i++) {
    const lm_range *range = &ctx->ranges[i];
    lm_text_add(&text, "%s{\"class\":\"%s\",\"label\":", i ? "," : "", class_name(range->kind));
    lm_text_string(&text, range->label);
    lm_text_add(&text, ",\"bytes\":%llu,\"ageMs\":%llu}", (ull)(range->pages ? range->held : range->bytes), (ull)(now - range->since));
  }
  pthread_mutex_unlock(&ctx->mutex);
  lm_text_add(&text, "],\"operations\":");
  lm_debug_write(ctx, &text);
  lm_text_add(&text, "}");
  return (int32_t)(text.length + 1);
}

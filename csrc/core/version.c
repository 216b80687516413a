/* version.c: what this library is. */
#include <stdio.h>

#include "core.h"

#define LM_TEXT_(x) #x
#define LM_TEXT(x) LM_TEXT_(x)

#ifdef __clang__
#define LM_COMPILER "clang " LM_TEXT(__clang_major__) "." LM_TEXT(__clang_minor__)
#else
#define LM_COMPILER "gcc " LM_TEXT(__GNUC__) "." LM_TEXT(__GNUC_MINOR__)
#endif

uint32_t lm_abi_version(void) {
  return (uint32_t)LM_ABI_MAJOR << 16 | LM_ABI_MINOR;
}

uint64_t lm_header_hash(void) {
  return LORAMEM_HEADER_HASH;
}

int32_t lm_build_info(void *buf, uint64_t cap) {
  return 1 + snprintf(buf, buf ? cap : 0, "%s; %s; %s", LORAMEM_VERSION, lm_device_list(), LM_COMPILER);
}

void *lm_ptr_add(void *pointer, int64_t bytes) {
  return (void *)((uintptr_t)pointer + (uintptr_t)bytes);
}

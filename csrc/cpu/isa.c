/* isa.c: chooses the table of vector routines for this machine. */
#include <stdlib.h>
#include <string.h>

#include "cpu.h"

#ifdef __x86_64__
static int has_avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static int has_avx512(void) {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const lm_isa *lm_isa_choose(void) {
#ifdef __x86_64__
  const char *limit = getenv("LORAMEM_ISA"); /* an unknown name limits nothing */
  const int scalar = limit != NULL && strcmp(limit, "scalar") == 0;
  const int narrow = limit != NULL && strcmp(limit, "avx2") == 0;
  __builtin_cpu_init();
  if (!scalar && !narrow && has_avx512()) return &lm_isa_avx512;
  if (!scalar && has_avx2()) return &lm_isa_avx2;
#endif
  return &lm_isa_portable;
}

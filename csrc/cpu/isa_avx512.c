/* isa_avx512.c: the routines with AVX-512 F, BW, DQ and VL. Built with those flags; run only where CPUID has them. */
#ifdef __x86_64__
#define LM_SIMD_512
#define MR 14
#define LM_TABLE lm_isa_avx512
#define LM_TABLE_NAME "avx512"
#include <math.h>

#include "isa.h"
#include "optimizer.h"
#include "simd.h"

#include "isa_gemm.h"
#include "isa_rows.h"
#include "isa_attention.h"

#include "isa_table.h"
#else
typedef int lm_isa_avx512_unused; /* a translation unit may not be empty */
#endif

/* isa_avx2.c: the routines with AVX2, FMA and F16C. Built with those flags; run only where CPUID has them. */
#ifdef __x86_64__
#define LM_SIMD_256
#define MR 6
#define LM_TABLE lm_isa_avx2
#define LM_TABLE_NAME "avx2"
#include <math.h>

#include "isa.h"
#include "optimizer.h"
#include "simd.h"

#include "isa_gemm.h"
#include "isa_rows.h"
#include "isa_attention.h"

#include "isa_table.h"
#else
typedef int lm_isa_avx2_unused; /* a translation unit may not be empty */
#endif

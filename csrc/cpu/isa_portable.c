/* isa_portable.c: the routines in portable C, the level that every machine has. */
#define MR 4
#define LM_TABLE lm_isa_portable
#define LM_TABLE_NAME "scalar"
#include <math.h>

#include "isa.h"
#include "optimizer.h"
#include "simd.h"

#include "isa_gemm.h"
#include "isa_rows.h"
#include "isa_attention.h"

#include "isa_table.h"

/* cublaslt.cu: see cublaslt.h. Matrices are row-major here and column-major there: y^T = W x^T, so its left operand is our
 * right one, and its m, n, k are our columns, rows, depth. */
#include "cublaslt.h"

#include "gemm_choice.h"

#include <dlfcn.h>
#include <glob.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The part of the library's interface that is used. The numbers are its ABI, the same in versions 11 to 13. */
enum { COMPUTE_32F = 68, R_32F = 0, R_16F = 2, R_16BF = 14 };
enum { OP_N = 0, OP_T = 1 };
enum { DESC_TRANSA = 3, DESC_TRANSB = 4, DESC_EPILOGUE = 7, DESC_BIAS_POINTER = 8, DESC_BIAS_TYPE = 26 };
enum { EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4 };
enum { PREF_WORKSPACE = 1, PREF_REDUCTION = 3, PREF_ALIGN_A = 5, PREF_ALIGN_B = 6, PREF_ALIGN_C = 7, PREF_ALIGN_D = 8 };
/* Split sums in the compute type only: 16-bit partial sums lose accuracy, sums in place have no fixed order. */
enum { REDUCTION_NONE = 0, REDUCTION_COMPUTE_TYPE = 2 };

typedef struct lt_advice {
  lm_blas_algo algo;
  size_t workspace;
  int32_t state;
  float waves;
  int32_t reserved[4];
} lt_advice;
static_assert(sizeof(lt_advice) == 96, "the library's layout");

typedef struct lt_functions {
  size_t (*version)(void);
  int (*create)(void **handle);
  int (*destroy)(void *handle);
  int (*desc_create)(void **desc, int compute_type, int scale_type);
  int (*desc_set)(void *desc, int attribute, const void *value, size_t bytes);
  int (*desc_destroy)(void *desc);
  int (*layout_create)(void **layout, int type, uint64_t rows, uint64_t columns, int64_t pitch);
  int (*layout_destroy)(void *layout);
  int (*pref_create)(void **pref);
  int (*pref_set)(void *pref, int attribute, const void *value, size_t bytes);
  int (*pref_destroy)(void *pref);
  int (*advise)(void *handle, void *desc, void *a, void *b, void *c, void *d, void *pref, int wanted, lt_advice *advice, int *got);
  int (*matmul)(void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const lm_blas_algo *algo, void *workspace,
                size_t workspace_bytes, cudaStream_t stream);
} lt_functions;

static const char *const symbol_names[] = {
    "cublasLtGetVersion",          "cublasLtCreate",
    "cublasLtDestroy",             "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescSetAttribute", "cublasLtMatmulDescDestroy",
    "cublasLtMatrixLayoutCreate",  "cublasLtMatrixLayoutDestroy",
    "cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatmulPreferenceDestroy", "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmul"};
static_assert(sizeof symbol_names == sizeof(lt_functions), "one name per function");

/* What tells one choice from another. Compared as bytes, so it has no padding. */
typedef struct lt_key {
  int32_t form, type, y_type, residual, bias;
  int32_t rows, columns, depth;
  int32_t left_pitch, right_pitch, y_pitch, residual_pitch;
} lt_key;

enum { SHAPES = 256, CANDIDATES = LM_BLAS_CANDIDATES };

typedef struct lt_shape {
  lt_key key;
  void *desc, *a, *b, *c, *d;
  lm_blas_algo algo;
  int32_t candidates; /* 0 = the library cannot serve it */
} lt_shape;

struct lm_cuda_blas {
  lt_functions lt;
  void *handle; /* NULL = not usable, text says why */
  pthread_mutex_t mutex; /* guards shapes and their descriptors */
  int32_t count;
  char text[200];
  lt_shape shapes[SHAPES];
};

static int library_type(int32_t type) { return type == LM_F32 ? R_32F : type == LM_BF16 ? R_16BF : R_16F; }

/* Opening ------------------------------------------------------------------------------------------------------------ */

static void *open_in(const char *pattern, char *found, size_t cap) {
  glob_t matches;
  void *library = NULL;
  if (glob(pattern, 0, NULL, &matches) == 0) {
    for (size_t i = matches.gl_pathc; i-- > 0 && !library;) { /* the newest sorts last */
      library = dlopen(matches.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
      if (library) snprintf(found, cap, "%s", matches.gl_pathv[i]);
    }
  }
  globfree(&matches);
  return library;
}

static void *open_library(char *found, size_t cap) {
  static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  /* Where Python's packages and toolkits keep it, below one of the roots. */
  static const char *const folders[] = {
      "/lib/python3*/site-packages/nvidia/cu13/lib", "/lib/python3*/site-packages/nvidia/cublas/lib",
      "/lib/python3*/dist-packages/nvidia/cu13/lib", "/lib/python3*/dist-packages/nvidia/cublas/lib",
      "/lib",                                        "/lib64"};
  const char *const named = getenv("LORAMEM_CUBLASLT");
  if (named && *named) {
    snprintf(found, cap, "%s", named);
    return dlopen(named, RTLD_NOW | RTLD_LOCAL);
  }
  for (const char *name : names) { /* LD_LIBRARY_PATH and what ldconfig knows */
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library) {
      snprintf(found, cap, "%s", name);
      return library;
    }
  }
  char home[1024] = "";
  if (getenv("HOME")) snprintf(home, sizeof home, "%s/.local", getenv("HOME"));
  const char *const roots[] = {getenv("VIRTUAL_ENV"), getenv("CONDA_PREFIX"), getenv("CUDA_HOME"), getenv("CUDA_PATH"),
                               "/usr/local/cuda*", home, "/usr/local", "/usr", "/opt/conda"};
  for (const char *name : names)
    for (const char *root : roots) {
      if (!root || !*root) continue;
      for (const char *folder : folders) {
        char pattern[2048];
        snprintf(pattern, sizeof pattern, "%s%s/%s", root, folder, name);
        void *library = open_in(pattern, found, cap);
        if (library) return library;
      }
    }
  return NULL;
}

/* Shapes ------------------------------------------------------------------------------------------------------------- */

static void shape_release(const lt_functions *lt, lt_shape *s) {
  if (s->desc) lt->desc_destroy(s->desc);
  for (void *layout : {s->a, s->b, s->c, s->d})
    if (layout) lt->layout_destroy(layout);
  s->desc = s->a = s->b = s->c = s->d = NULL;
}

static lt_key key_of(const lm_gemm *g) {
  const lm_gemm_part &p = g->part[0];
  lt_key key = {g->form, p.left[0].type, g->y_type, p.residual != NULL, p.bias != NULL, g->rows, p.columns, p.depth[0],
                p.left[0].pitch, p.right[0].pitch, g->y_pitch, p.residual ? g->residual_pitch : g->y_pitch};
  return key;
}

static bool shape_describe(const lt_functions *lt, lt_shape *s) {
  const lt_key &k = s->key;
  const int type = library_type(k.type), y_type = library_type(k.y_type);
  const int32_t trans = k.form == LM_NT ? OP_T : OP_N, plain = OP_N;
  const uint32_t epilogue = k.bias ? EPILOGUE_BIAS : EPILOGUE_DEFAULT;
  const uint64_t a_rows = k.form == LM_NT ? k.depth : k.columns, a_columns = k.form == LM_NT ? k.columns : k.depth;
  return lt->desc_create(&s->desc, COMPUTE_32F, R_32F) == 0 && lt->desc_set(s->desc, DESC_TRANSA, &trans, 4) == 0 &&
         lt->desc_set(s->desc, DESC_TRANSB, &plain, 4) == 0 && lt->desc_set(s->desc, DESC_EPILOGUE, &epilogue, 4) == 0 &&
         (!k.bias || lt->desc_set(s->desc, DESC_BIAS_TYPE, &y_type, 4) == 0) &&
         lt->layout_create(&s->a, type, a_rows, a_columns, k.right_pitch) == 0 &&
         lt->layout_create(&s->b, type, k.depth, k.rows, k.left_pitch) == 0 &&
         lt->layout_create(&s->c, y_type, k.columns, k.rows, k.residual_pitch) == 0 &&
         lt->layout_create(&s->d, y_type, k.columns, k.rows, k.y_pitch) == 0;
}

static int32_t ask_advice(lm_cuda_blas *blas, lt_shape *s, uint64_t workspace_bytes, lt_advice advice[CANDIDATES]) {
  const lt_functions *lt = &blas->lt;
  void *pref = NULL;
  int32_t got = 0;
  if (lt->pref_create(&pref) != 0) return 0;
  const uint32_t reduction = REDUCTION_NONE | REDUCTION_COMPUTE_TYPE, align = 16;
  bool ok = lt->pref_set(pref, PREF_WORKSPACE, &workspace_bytes, 8) == 0 && lt->pref_set(pref, PREF_REDUCTION, &reduction, 4) == 0;
  for (const int attribute : {PREF_ALIGN_A, PREF_ALIGN_B, PREF_ALIGN_C, PREF_ALIGN_D})
    ok = ok && lt->pref_set(pref, attribute, &align, 4) == 0;
  if (!ok || lt->advise(blas->handle, s->desc, s->a, s->b, s->c, s->d, pref, CANDIDATES, advice, &got) != 0) got = 0;
  lt->pref_destroy(pref);
  int32_t usable = 0;
  for (int32_t i = 0; i < got; i++)
    if (advice[i].state == 0 && advice[i].workspace <= workspace_bytes) advice[usable++] = advice[i];
  return usable;
}

static int run_algo(lm_cuda_blas *blas, lt_shape *s, const lm_gemm *g, const lm_blas_algo *algo, void *workspace,
                    uint64_t workspace_bytes, cudaStream_t stream) {
  const lm_gemm_part &p = g->part[0];
  const float alpha = p.factor, beta = p.residual ? 1.0f : 0.0f;
  if (p.bias && blas->lt.desc_set(s->desc, DESC_BIAS_POINTER, &p.bias, sizeof p.bias) != 0) return -1;
  return blas->lt.matmul(blas->handle, s->desc, &alpha, p.right[0].data, s->a, p.left[0].data, s->b, &beta,
                         p.residual ? p.residual : p.y, s->c, p.y, s->d, algo, workspace, workspace_bytes, stream);
}

/* The mutex is held. @return NULL if the library cannot serve the shape */
static lt_shape *find_shape(const lm_cuda *cuda, const lm_gemm *g, uint64_t workspace_bytes) {
  lm_cuda_blas *const blas = cuda->blas;
  const lt_key key = key_of(g);
  lt_shape *s = blas->shapes;
  while (s < blas->shapes + blas->count && memcmp(&s->key, &key, sizeof key) != 0) s++;
  if (s == blas->shapes + blas->count) {
    if (blas->count == SHAPES) return NULL;
    *s = (lt_shape){};
    s->key = key;
    lt_advice advice[CANDIDATES];
    if (shape_describe(&blas->lt, s)) s->candidates = ask_advice(blas, s, workspace_bytes, advice);
    if (s->candidates > 0 && !lm_cuda_choice_algo(cuda, g, &s->algo)) s->algo = advice[0].algo;
    blas->count++;
  }
  return s->candidates > 0 ? s : NULL;
}

bool lm_cuda_blas_can(const lm_cuda *cuda, const lm_gemm *g) {
  if (!cuda->blas || !cuda->blas->handle || g->form == LM_TN || g->y_index) return false;
  if (g->part[1].columns || g->part[2].columns) return false;
  const lm_gemm_part &p = g->part[0];
  const int32_t type = p.left[0].type, y_size = g->y_type == LM_F32 ? 4 : 2;
  if (p.depth[1] != 0 || type == LM_F32 || p.right[0].type != type || (g->y_type != type && g->y_type != LM_F32)) return false;
  if (p.bias && (g->bias_type != g->y_type || (uintptr_t)p.bias % 16 != 0)) return false;
  uint64_t places = (uintptr_t)p.left[0].data | (uintptr_t)p.right[0].data | (uintptr_t)p.y | (uintptr_t)p.residual |
                    (uint64_t)p.left[0].pitch * 2 | (uint64_t)p.right[0].pitch * 2 | (uint64_t)g->y_pitch * y_size;
  if (p.residual) places |= (uint64_t)g->residual_pitch * y_size;
  return places % 16 == 0;
}

cudaError_t lm_cuda_blas_gemm(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream) {
  lm_cuda_blas *blas = cuda->blas;
  if (!workspace) workspace_bytes = 0;
  pthread_mutex_lock(&blas->mutex);
  lt_shape *s = find_shape(cuda, g, workspace_bytes);
  int status = -1;
  if (s) {
    status = run_algo(blas, s, g, &s->algo, workspace, workspace_bytes, stream);
    if (status != 0) s->candidates = 0; /* not asked again; the own product serves from now on */
  }
  pthread_mutex_unlock(&blas->mutex);
  const cudaError_t error = cudaGetLastError();
  return error ? error : status == 0 ? cudaSuccess : cudaErrorNotSupported;
}

int32_t lm_cuda_blas_candidates(lm_cuda *cuda, const lm_gemm *g, uint64_t workspace_bytes, lm_blas_algo *algos) {
  lt_advice advice[CANDIDATES];
  pthread_mutex_lock(&cuda->blas->mutex);
  lt_shape *s = find_shape(cuda, g, workspace_bytes);
  const int32_t count = s ? ask_advice(cuda->blas, s, workspace_bytes, advice) : 0;
  pthread_mutex_unlock(&cuda->blas->mutex);
  for (int32_t i = 0; i < count; i++) algos[i] = advice[i].algo;
  return count;
}

void lm_cuda_blas_select(lm_cuda *cuda, const lm_gemm *g, uint64_t workspace_bytes, const lm_blas_algo *algo) {
  pthread_mutex_lock(&cuda->blas->mutex);
  lt_shape *s = find_shape(cuda, g, workspace_bytes);
  if (s) s->algo = *algo;
  pthread_mutex_unlock(&cuda->blas->mutex);
}

const char *lm_cuda_blas_text(const lm_cuda *cuda) {
  return cuda->blas ? cuda->blas->text : "own kernels: no memory for the state";
}

/* Self-test ----------------------------------------------------------------------------------------------------------- */

/* Two products with every feature that is used, against the own kernel. @return NULL if they agree, else what is wrong */
static const char *self_test(lm_cuda *cuda) {
  enum { ROWS = 72, COLUMNS = 136, DEPTH = 200, PITCH = 208, COUNT = ROWS * PITCH, RIGHT = DEPTH * PITCH };
  static const char no_memory[] = "no memory for its self-test";
  const uint64_t workspace_bytes = 4u << 20, bytes = (uint64_t)(COUNT * 5 + RIGHT + PITCH) * 2;
  uint16_t *host = (uint16_t *)malloc(bytes);
  char *device = NULL;
  if (!host || cudaMalloc(&device, bytes + workspace_bytes) != cudaSuccess) {
    free(host);
    cudaGetLastError();
    return no_memory;
  }
  uint32_t random = 12345;
  for (uint64_t i = 0; i < bytes / 2; i++) { /* bf16 of either sign, 1/2 to 2 */
    random = random * 1664525u + 1013904223u;
    host[i] = (uint16_t)(0x3f00 + (random >> 24) + (random >> 8 & 0x8000));
  }
  uint16_t *const left = (uint16_t *)(device + workspace_bytes), *const right = left + COUNT, *const residual = right + RIGHT;
  uint16_t *const bias = residual + COUNT, *const own = bias + PITCH, *const theirs = own + COUNT;
  const char *wrong = cudaMemcpy(left, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess ? NULL : no_memory;
  for (int32_t form = LM_NT; form <= LM_NN && !wrong; form++) {
    lm_gemm g = {};
    g.form = form;
    g.rows = ROWS;
    g.y_pitch = g.residual_pitch = PITCH;
    g.y_type = g.bias_type = LM_BF16;
    lm_gemm_part &p = g.part[0];
    p.columns = COLUMNS;
    p.depth[0] = DEPTH;
    p.factor = 0.5f;
    p.left[0] = {left, PITCH, LM_BF16};
    p.right[0] = {right, PITCH, LM_BF16};
    p.residual = residual;
    p.bias = bias;
    p.y = own;
    cudaError_t error = lm_cuda_gemm_tensor(cuda, &g, LM_BF16, NULL, 0, 0);
    p.y = theirs;
    if (!error) error = lm_cuda_blas_gemm(cuda, &g, device, workspace_bytes, 0);
    if (error == cudaErrorNotSupported) wrong = "it has no algorithm for the self-test";
    else if (error || cudaMemcpy(host, own, 2 * COUNT * 2, cudaMemcpyDeviceToHost) != cudaSuccess) wrong = "its self-test failed";
    double distance = 0, norm = 0;
    for (int r = 0; r < ROWS && !wrong; r++)
      for (int c = 0; c < COLUMNS; c++) {
        const uint32_t a = (uint32_t)host[r * PITCH + c] << 16, b = (uint32_t)host[COUNT + r * PITCH + c] << 16;
        float x, y;
        memcpy(&x, &a, 4), memcpy(&y, &b, 4);
        distance += ((double)x - y) * ((double)x - y), norm += (double)x * x;
      }
    if (!wrong && !(norm > 0 && distance <= 1e-5 * norm)) wrong = "its results differ from the own kernel's";
  }
  cudaGetLastError();
  cudaFree(device);
  free(host);
  return wrong;
}

static void stop_library(lm_cuda_blas *blas) {
  for (int32_t i = 0; i < blas->count; i++) shape_release(&blas->lt, &blas->shapes[i]);
  blas->count = 0;
  if (blas->handle) blas->lt.destroy(blas->handle);
  blas->handle = NULL;
}

void lm_cuda_blas_close(lm_cuda *cuda) {
  lm_cuda_blas *blas = cuda->blas;
  if (!blas) return;
  lm_cuda_choices_close(cuda);
  stop_library(blas);
  pthread_mutex_destroy(&blas->mutex);
  cuda->host.release(blas);
  cuda->blas = NULL;
}

void lm_cuda_blas_open(lm_cuda *cuda) {
  /* The vendor's advice for its workspace; the own split products use the same memory. */
  cuda->workspace_bytes = cuda->capability >= 90 ? 32u << 20 : 8u << 20;
  cuda->blas = (lm_cuda_blas *)cuda->host.alloc(cuda->host.owner, sizeof(lm_cuda_blas));
  lm_cuda_blas *blas = cuda->blas;
  if (!blas) return;
  pthread_mutex_init(&blas->mutex, NULL);
  lm_cuda_choices_open(cuda);
  const char *const named = getenv("LORAMEM_CUBLASLT");
  if (named && strcmp(named, "off") == 0) {
    snprintf(blas->text, sizeof blas->text, "own kernels: LORAMEM_CUBLASLT is off");
    return;
  }
  char found[160] = "";
  void *library = open_library(found, sizeof found);
  if (!library) {
    snprintf(blas->text, sizeof blas->text, "own kernels: cuBLASLt was not found%s%s", *found ? ": " : "", found);
    return;
  }
  for (size_t i = 0; i < sizeof symbol_names / sizeof *symbol_names; i++) {
    void *symbol = dlsym(library, symbol_names[i]);
    if (!symbol) {
      snprintf(blas->text, sizeof blas->text, "own kernels: %s has no %s", found, symbol_names[i]);
      return;
    }
    memcpy((char *)&blas->lt + i * sizeof symbol, &symbol, sizeof symbol);
  }
  if (blas->lt.create(&blas->handle) != 0) {
    blas->handle = NULL;
    cudaGetLastError();
    snprintf(blas->text, sizeof blas->text, "own kernels: %s does not start on this device", found);
    return;
  }
  const char *const wrong = self_test(cuda);
  if (wrong) {
    snprintf(blas->text, sizeof blas->text, "own kernels: %s: %s", found, wrong);
    stop_library(blas);
    return;
  }
  snprintf(blas->text, sizeof blas->text, "cuBLASLt %zu (%s)", blas->lt.version(), found);
}

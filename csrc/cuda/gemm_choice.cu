/* gemm_choice.cu: see gemm_choice.h. */
#include "gemm_choice.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cublaslt.h"

enum { CHOICES = 256, TIMED = 5, FILL_THREADS = 256 };

/* What tells one product from another. Compared as bytes, so it has no padding. */
typedef struct choice_key {
  int32_t form, type, y_type, residual, bias;
  int32_t rows, columns, depth, ranks;
  int32_t left_pitch, right_pitch, y_pitch, residual_pitch;
} choice_key;
enum { KEY_FIELDS = sizeof(choice_key) / sizeof(int32_t) };

typedef struct choice {
  choice_key key;
  int32_t library;
  lm_blas_algo algo;
} choice;

struct lm_cuda_choices {
  pthread_mutex_t mutex;
  bool timing;
  int32_t count;
  choice all[CHOICES];
};

void lm_cuda_choices_open(lm_cuda *cuda) {
  cuda->choices = (lm_cuda_choices *)cuda->host.alloc(cuda->host.owner, sizeof(lm_cuda_choices));
  if (cuda->choices) pthread_mutex_init(&cuda->choices->mutex, NULL);
}

void lm_cuda_choices_close(lm_cuda *cuda) {
  if (!cuda->choices) return;
  pthread_mutex_destroy(&cuda->choices->mutex);
  cuda->host.release(cuda->choices);
  cuda->choices = NULL;
}

void lm_cuda_choices_time(lm_cuda *cuda, bool on) {
  if (!cuda->choices) return;
  pthread_mutex_lock(&cuda->choices->mutex);
  cuda->choices->timing = on;
  pthread_mutex_unlock(&cuda->choices->mutex);
}

static choice_key key_of(const lm_gemm *g, int32_t ranks) {
  const lm_gemm_part &p = g->part[0];
  return {g->form, p.left[0].type, g->y_type, p.residual != NULL, p.bias != NULL, g->rows, p.columns, p.depth[0], ranks,
          p.left[0].pitch, p.right[0].pitch, g->y_pitch, p.residual ? g->residual_pitch : g->y_pitch};
}

/* The mutex is held. */
static choice *find(lm_cuda_choices *choices, const choice_key &key) {
  for (int32_t i = 0; i < choices->count; i++)
    if (memcmp(&choices->all[i].key, &key, sizeof key) == 0) return &choices->all[i];
  return NULL;
}

int32_t lm_cuda_choice_of(const lm_cuda *cuda, const lm_gemm *base, int32_t ranks) {
  lm_cuda_choices *choices = cuda->choices;
  if (!choices || choices->count == 0) return -1;
  pthread_mutex_lock(&choices->mutex);
  const choice *found = find(choices, key_of(base, ranks));
  const int32_t library = found ? found->library : -1;
  pthread_mutex_unlock(&choices->mutex);
  return library;
}

/* Timing ------------------------------------------------------------------------------------------------------------- */

/* Numbers of either sign below 1: a product of zeros or of equal numbers runs faster than one of data. */
template <typename T>
__global__ void fill_random(T *x, int32_t rows, int32_t columns, int32_t pitch) {
  const int64_t count = (int64_t)rows * columns;
  for (int64_t i = (int64_t)blockIdx.x * FILL_THREADS + threadIdx.x; i < count; i += (int64_t)gridDim.x * FILL_THREADS) {
    uint32_t h = (uint32_t)i * 2654435761u;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
    x[i / columns * pitch + i % columns] = lm_from_float<T>((float)(h >> 8) / 8388608.0f - 1.0f);
  }
}

static cudaError_t fill(const lm_cuda *cuda, const lm_matrix &m, int32_t rows, int32_t columns, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  LM_CUDA_BY_TYPE(m.type, T, error = lm_cuda_launch<fill_random<T>>(8 * cuda->sm_count, FILL_THREADS, 0, stream,
                                                                    (T *)const_cast<void *>(m.data), rows, columns, m.pitch));
  return error;
}

static cudaError_t fill_operands(const lm_cuda *cuda, const lm_gemm *g, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (const lm_gemm_part &p : g->part)
    for (int i = 0; i < 2 && !error; i++) {
      if (p.columns == 0 || p.depth[i] == 0) continue;
      const bool nt = g->form == LM_NT;
      error = fill(cuda, p.left[i], g->rows, p.depth[i], stream);
      if (!error) error = fill(cuda, p.right[i], nt ? p.columns : p.depth[i], nt ? p.depth[i] : p.columns, stream);
    }
  return error;
}

/* The median of TIMED runs in milliseconds; -1 if one fails. The first run, which loads the kernel, does not count. */
template <typename Fn>
static float time_of(cudaEvent_t from, cudaEvent_t to, cudaStream_t stream, Fn fn) {
  float ms[TIMED];
  for (int i = -1; i < TIMED; i++) {
    float now = 0;
    if (cudaEventRecord(from, stream) || fn() || cudaEventRecord(to, stream) || cudaEventSynchronize(to) ||
        cudaEventElapsedTime(&now, from, to)) {
      (void)cudaGetLastError();
      return -1;
    }
    if (i < 0) continue;
    int place = i;
    for (; place > 0 && ms[place - 1] > now; place--) ms[place] = ms[place - 1];
    ms[place] = now;
  }
  return ms[TIMED / 2];
}

static choice measure(lm_cuda *cuda, const lm_gemm *fused, const lm_gemm *term, const lm_gemm *base, int32_t ranks, void *workspace,
                      uint64_t workspace_bytes, cudaStream_t stream) {
  choice best = {key_of(base, ranks), 0, {}};
  cudaEvent_t from = NULL, to = NULL;
  /* All rows, whatever memory says before there is data. */
  lm_gemm own = *fused, apart = term ? *term : *fused, whole = *base;
  own.live = apart.live = whole.live = NULL;
  if (cudaEventCreate(&from) || cudaEventCreate(&to) || fill_operands(cuda, &own, stream)) {
    (void)cudaGetLastError();
  } else {
    const auto by_own = [&](const lm_gemm *g) {
      return time_of(from, to, stream, [&] { return lm_cuda_gemm_own(cuda, g, workspace, workspace_bytes, stream); });
    };
    const float own_ms = by_own(&own), term_ms = term ? by_own(&apart) : 0;
    lm_blas_algo algos[LM_BLAS_CANDIDATES];
    const int32_t count = lm_cuda_blas_candidates(cuda, &whole, workspace_bytes, algos);
    float library_ms = -1;
    for (int32_t i = 0; i < count; i++) {
      lm_cuda_blas_select(cuda, &whole, workspace_bytes, &algos[i]);
      const float ms = time_of(from, to, stream, [&] { return lm_cuda_blas_gemm(cuda, &whole, workspace, workspace_bytes, stream); });
      if (ms < 0 || (library_ms >= 0 && ms >= library_ms)) continue;
      library_ms = ms;
      best.algo = algos[i];
    }
    best.library = library_ms >= 0 && term_ms >= 0 && (own_ms < 0 || library_ms + term_ms < own_ms);
    if (library_ms >= 0) lm_cuda_blas_select(cuda, &whole, workspace_bytes, &best.algo);
  }
  if (from) (void)cudaEventDestroy(from);
  if (to) (void)cudaEventDestroy(to);
  return best;
}

void lm_cuda_gemm_time(lm_cuda *cuda, const lm_gemm *fused, const lm_gemm *term, const lm_gemm *base, int32_t ranks,
                       void *workspace, uint64_t workspace_bytes, cudaStream_t stream) {
  lm_cuda_choices *choices = cuda->choices;
  if (!choices || !choices->timing || !lm_cuda_gemm_library_worth(cuda, base)) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusActive;
  if (cudaStreamIsCapturing(stream, &capture) || capture != cudaStreamCaptureStatusNone) return;
  if (!workspace) workspace_bytes = 0;
  if (lm_cuda_choice_of(cuda, base, ranks) >= 0) return;
  const choice made = measure(cuda, fused, term, base, ranks, workspace, workspace_bytes, stream);
  pthread_mutex_lock(&choices->mutex);
  if (choices->count < CHOICES && !find(choices, made.key)) choices->all[choices->count++] = made;
  pthread_mutex_unlock(&choices->mutex);
}

/* Text --------------------------------------------------------------------------------------------------------------- */

/* The device and the library that choices are good for. */
static void title_of(const lm_cuda *cuda, char (&title)[512]) {
  snprintf(title, sizeof title, "loramem products 1: %s, %d multiprocessors, %llu bytes, %s", cuda->properties.name, cuda->sm_count,
           (unsigned long long)cuda->workspace_bytes, lm_cuda_blas_text(cuda));
}

int32_t lm_cuda_choices_write(lm_cuda *cuda, char *text, uint64_t cap) {
  lm_cuda_choices *choices = cuda->choices;
  uint64_t length = 0;
  const auto put = [&](const char *piece) {
    const uint64_t size = strlen(piece);
    if (length + size < cap) memcpy(text + length, piece, size + 1);
    length += size;
  };
  if (cap > 0) text[0] = 0;
  if (!choices) return 1;
  pthread_mutex_lock(&choices->mutex);
  if (choices->count > 0) {
    char title[512];
    title_of(cuda, title);
    put(title);
    put("\n");
  }
  for (int32_t i = 0; i < choices->count; i++) {
    const choice &c = choices->all[i];
    int32_t fields[KEY_FIELDS];
    memcpy(fields, &c.key, sizeof fields);
    char piece[32];
    for (const int32_t field : fields) snprintf(piece, sizeof piece, "%d ", field), put(piece);
    put(c.library ? "library" : "own");
    for (const uint64_t word : c.algo.data) snprintf(piece, sizeof piece, " %" PRIx64, word), put(piece);
    put("\n");
  }
  pthread_mutex_unlock(&choices->mutex);
  return (int32_t)(length + 1);
}

/* One line, of which at points at the start and then at the end. */
static bool read_line(const char *&at, choice &c) {
  int32_t fields[KEY_FIELDS];
  int used = 0;
  for (int32_t &field : fields) {
    if (sscanf(at, "%d %n", &field, &used) != 1) return false;
    at += used;
  }
  memcpy(&c.key, fields, sizeof fields);
  char who[16];
  if (sscanf(at, "%15s%n", who, &used) != 1) return false;
  at += used;
  c.library = strcmp(who, "library") == 0;
  if (!c.library && strcmp(who, "own") != 0) return false;
  for (uint64_t &word : c.algo.data) {
    if (sscanf(at, " %" SCNx64 "%n", &word, &used) != 1) return false;
    at += used;
  }
  return *at == '\n';
}

bool lm_cuda_choices_read(lm_cuda *cuda, const char *text) {
  lm_cuda_choices *choices = cuda->choices;
  if (!*text) return true;
  static const char start[] = "loramem products 1: ";
  const char *const end = strchr(text, '\n');
  if (strncmp(text, start, sizeof start - 1) != 0 || !end) return false;
  char title[512];
  title_of(cuda, title);
  const bool ours = choices && strlen(title) == (size_t)(end - text) && memcmp(title, text, (size_t)(end - text)) == 0;
  for (int turn = 0; turn < 2; turn++) { /* first whether all of it is understood */
    for (const char *at = end + 1; *at; at++) {
      choice c = {};
      if (!read_line(at, c)) return false;
      if (turn == 0 || !ours) continue;
      pthread_mutex_lock(&choices->mutex);
      choice *known = find(choices, c.key);
      if (!known && choices->count < CHOICES) known = &choices->all[choices->count++];
      if (known) *known = c;
      pthread_mutex_unlock(&choices->mutex);
    }
  }
  return true;
}

/* lm_cuda_choice_algo: see cublaslt.h */
bool lm_cuda_choice_algo(const lm_cuda *cuda, const lm_gemm *base, lm_blas_algo *algo) {
  lm_cuda_choices *choices = cuda->choices;
  if (!choices) return false;
  pthread_mutex_lock(&choices->mutex);
  choice_key key = key_of(base, 0);
  const choice *found = NULL;
  for (int32_t i = 0; i < choices->count && !found; i++) { /* the algorithm does not depend on the LoRA term */
    key.ranks = choices->all[i].key.ranks;
    if (choices->all[i].library && memcmp(&choices->all[i].key, &key, sizeof key) == 0) found = &choices->all[i];
  }
  if (found) *algo = found->algo;
  pthread_mutex_unlock(&choices->mutex);
  return found != NULL;
}

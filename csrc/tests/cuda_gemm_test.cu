/* cuda_gemm_test.cu: every matrix product kernel (SIMT, few rows, few steps, mma.sync tiles, wgmma, cuBLASLt) against sums in double
 * precision on the device: forms, types, odd sizes and places, two operands, parts, bias, residual, fewer live rows, split
 * contractions. Built with csrc/cuda/gemm*.cu and cublaslt.cu. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "../cuda/cublaslt.h"
#include "../cuda/gemm_choice.h"

__attribute__((weak)) lm_cuda_kernel *lm_cuda_kernels;

static int passed, failed;
#define CHECK(condition, ...)                     \
  do {                                            \
    if (condition) {                              \
      passed++;                                   \
    } else if (failed++ < 60) {                   \
      printf("%s:%d: ", __FILE__, __LINE__);      \
      printf(__VA_ARGS__);                        \
      printf("\n");                               \
    }                                             \
  } while (0)
#define CUDA(call)                                                                       \
  do {                                                                                   \
    const cudaError_t e = (call);                                                        \
    if (e) {                                                                             \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e));       \
      printf("%d passed, %d failed\n", passed, failed + 1);                              \
      exit(1);                                                                           \
    }                                                                                    \
  } while (0)

static const char *const type_names[] = {"f32", "bf16", "f16"};
static const char *const form_names[] = {"NT", "NN", "TN"};

/* Device side ---------------------------------------------------------------------------------------------------------- */

__device__ static double element(const lm_matrix &m, int64_t line, int64_t column) {
  const int64_t i = line * m.pitch + column;
  if (m.type == LM_F32) return ((const float *)m.data)[i];
  if (m.type == LM_BF16) return __bfloat162float(((const __nv_bfloat16 *)m.data)[i]);
  return __half2float(((const __half *)m.data)[i]);
}

/* One thread per element of one part. */
__global__ void reference(lm_gemm g, int part, int64_t live_count, double *want) {
  const lm_gemm_part &p = g.part[part];
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (int64_t)g.rows * p.columns) return;
  const int64_t r = i / p.columns, c = i % p.columns;
  double sum = 0;
  for (int o = 0; o < 2; o++) {
    const int64_t depth = g.form == LM_TN && o == 0 ? live_count : p.depth[o];
    for (int64_t k = 0; k < depth; k++) {
      const double a = g.form == LM_TN ? element(p.left[o], k, r) : element(p.left[o], r, k);
      const double b = g.form == LM_NT ? element(p.right[o], c, k) : element(p.right[o], k, c);
      sum += a * b;
    }
  }
  sum *= p.factor;
  if (p.bias) sum += element({p.bias, 0, g.bias_type}, 0, c);
  if (p.residual) sum += element({p.residual, g.residual_pitch, g.y_type}, r, c);
  want[i] = sum;
}

__global__ void fill(void *data, int type, int64_t count, int64_t pitch, int64_t width, int64_t good, uint32_t seed, float scale) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
    uint32_t h = (uint32_t)i * 2654435761u + seed * 40503u;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
    const bool inside = i % pitch < width && i / pitch < good;
    const float x = inside ? ((float)(h >> 8) / 8388608.0f - 1.0f) * scale : __int_as_float(0x7fc00000);
    if (type == LM_F32) ((float *)data)[i] = x;
    else if (type == LM_BF16) ((__nv_bfloat16 *)data)[i] = __float2bfloat16(x);
    else ((__half *)data)[i] = __float2half(x);
  }
}

/* Memory: one arena, poison in front of every array's content. -------------------------------------------------------- */

static char *arena;
static size_t arena_used;
enum : size_t { ARENA = (size_t)3 << 30 };

static void *take(size_t bytes) {
  char *memory = arena + arena_used;
  arena_used += (bytes + 511) / 256 * 256;
  if (arena_used > ARENA) {
    printf("the arena is too small\n");
    exit(1);
  }
  return memory;
}

static size_t size_of(int32_t type) { return type == LM_F32 ? 4 : 2; }

static lm_matrix random_matrix(int32_t type, int64_t lines, int64_t width, int64_t gap, int64_t good, int offset, float scale) {
  static uint32_t seed = 1;
  const int64_t pitch = width + gap, count = lines ? (lines - 1) * pitch + width : 0;
  char *data = (char *)take((size_t)(count + offset) * size_of(type)) + (size_t)offset * size_of(type);
  if (count) fill<<<256, 256>>>(data, type, count, pitch, width, good, seed++, scale);
  CUDA(cudaGetLastError());
  return {data, (int32_t)pitch, type};
}

/* Cases ---------------------------------------------------------------------------------------------------------------- */

struct product {
  int32_t form, rows, live, columns[3], depth[3][2];
  int32_t gap, offset;
  int32_t options; /* 1 bias, 2 residual, 4 in place, 8 f32 result, 16 index of rows, 32 factors */
};

static const product products[] = {
    {LM_NT, 1, 1, {1, 0, 0}, {{1, 0}}, 0, 0, 0},
    {LM_NT, 5, 3, {33, 2, 0}, {{70, 5}, {9, 0}}, 3, 1, 3},
    {LM_NT, 8, 8, {1000, 24, 8}, {{896, 16}, {896, 0}, {896, 8}}, 0, 0, 35},
    {LM_NT, 63, 63, {65, 0, 0}, {{31, 0}}, 1, 0, 3},
    {LM_NT, 64, 64, {64, 0, 0}, {{32, 0}}, 0, 0, 0},
    {LM_NT, 65, 64, {129, 0, 0}, {{40, 8}}, 8, 8, 5},
    {LM_NT, 127, 127, {127, 0, 0}, {{127, 0}}, 0, 0, 8},
    {LM_NT, 128, 1, {256, 128, 128}, {{64, 16}, {64, 16}, {64, 16}}, 0, 0, 32},
    {LM_NT, 129, 129, {136, 8, 264}, {{200, 24}, {200, 0}, {200, 72}}, 8, 0, 3},
    {LM_NT, 300, 257, {520, 0, 0}, {{1000, 0}}, 0, 0, 18},
    {LM_NT, 512, 512, {48, 0, 0}, {{2048, 0}}, 0, 0, 32},
    {LM_NT, 1024, 1024, {16, 16, 0}, {{896, 0}, {896, 0}}, 0, 0, 32},
    {LM_NT, 1024, 1000, {1152, 0, 0}, {{896, 48}}, 0, 0, 1},
    {LM_NT, 1024, 1024, {3000, 0, 0}, {{512, 0}}, 0, 0, 2},
    {LM_NN, 1, 1, {1, 0, 0}, {{1, 0}}, 0, 0, 0},
    {LM_NN, 3, 2, {70, 0, 0}, {{33, 5}}, 3, 1, 2},
    {LM_NN, 64, 64, {64, 0, 0}, {{64, 0}}, 0, 0, 0},
    {LM_NN, 65, 65, {136, 0, 0}, {{40, 16}}, 0, 8, 4},
    {LM_NN, 127, 126, {130, 0, 0}, {{129, 3}}, 0, 0, 8},
    {LM_NN, 129, 129, {320, 0, 0}, {{200, 24}}, 8, 0, 3},
    {LM_NN, 513, 512, {896, 0, 0}, {{1152, 48}}, 0, 0, 0},
    {LM_NN, 256, 250, {896, 0, 0}, {{16000, 0}}, 0, 0, 16},
    {LM_NN, 1024, 1024, {16, 16, 16}, {{1024, 0}, {128, 0}, {128, 0}}, 0, 0, 32},
    {LM_NN, 2048, 2048, {2048, 0, 0}, {{640, 0}}, 0, 0, 6},
    /* More tiles than multiprocessors, most with a last wave that is split; with a residual, a bias, both or neither. */
    {LM_NT, 2048, 2048, {4608, 0, 0}, {{1024, 16}}, 0, 0, 0},
    {LM_NT, 1024, 800, {3328, 1280, 520}, {{512, 8}, {512, 8}, {512, 0}}, 8, 0, 33},
    {LM_NT, 1100, 1023, {4096, 0, 0}, {{640, 0}}, 0, 0, 11},
    {LM_NN, 2048, 2000, {4608, 0, 0}, {{1024, 16}}, 0, 0, 0},
    {LM_NN, 1100, 700, {5000, 0, 0}, {{520, 24}}, 0, 8, 2},
    {LM_NN, 384, 384, {12800, 0, 0}, {{768, 0}}, 0, 0, 16},
    {LM_NT, 64, 64, {8, 0, 0}, {{2, 0}}, 6, 0, 0},
    {LM_NT, 300, 257, {520, 8, 264}, {{16, 0}, {64, 0}, {8, 0}}, 0, 0, 35},
    {LM_NT, 1000, 999, {2048, 512, 520}, {{24, 0}, {24, 0}, {24, 0}}, 8, 8, 32},
    {LM_NN, 129, 100, {1032, 0, 0}, {{34, 0}}, 8, 0, 33},
    {LM_NN, 513, 512, {896, 0, 0}, {{48, 0}}, 0, 0, 6},
    {LM_NN, 4096, 4095, {1024, 0, 0}, {{16, 0}}, 0, 0, 0},
    {LM_TN, 1, 1, {1, 0, 0}, {{1, 0}}, 0, 0, 8},
    {LM_TN, 5, 60, {70, 0, 0}, {{63, 0}}, 3, 1, 14},
    {LM_TN, 16, 129, {64, 0, 0}, {{129, 0}}, 0, 0, 14},
    {LM_TN, 48, 0, {896, 0, 0}, {{512, 0}}, 0, 0, 14},
    {LM_TN, 48, 4000, {896, 0, 0}, {{4096, 0}}, 0, 0, 14},
    {LM_TN, 1000, 1025, {24, 0, 0}, {{2048, 0}}, 8, 0, 14},
    {LM_TN, 192, 512, {520, 0, 0}, {{512, 0}}, 0, 0, 8},
};

enum path { SIMT, FEW, SHORT, TILES, SMALL_SHARED, HOPPER, LIBRARY, CHOICE, PATHS };
static const char *const path_names[] = {"simt", "few rows", "short", "mma", "mma in 64 KB", "wgmma", "cuBLASLt", "the choice"};

static int counts[PATHS];

/* cudaErrorNotSupported: this path does not take the product. */
static cudaError_t launch(lm_cuda *cuda, path p, const lm_gemm *g, int32_t type, void *workspace, uint64_t bytes) {
  const int32_t shared = cuda->shared_max;
  cudaError_t error = cudaErrorNotSupported;
  bool aligned = true, mixed = false;
  for (const lm_gemm_part &part : g->part)
    for (int o = 0; o < 2; o++) {
      if (part.columns == 0 || part.depth[o] == 0) continue;
      mixed = mixed || part.left[o].type != type || part.right[o].type != type;
      for (const lm_matrix *m : {&part.left[o], &part.right[o]})
        aligned = aligned && ((uintptr_t)m->data | (uint64_t)m->pitch * 2) % 16 == 0;
    }
  switch (p) {
    case SIMT: return lm_cuda_gemm_simt(cuda, g, workspace, bytes, 0);
    case FEW:
      if (g->form == LM_NT && g->rows <= LM_FEW_ROWS) error = lm_cuda_gemm_few_rows(cuda, g, 0);
      return error;
    case SHORT:
      if (type != LM_F32 && !mixed && lm_cuda_gemm_short_can(g, type)) error = lm_cuda_gemm_short(cuda, g, type, 0);
      return error;
    case TILES:
    case SMALL_SHARED: /* too little for wgmma, or also for the large tile */
      if (type == LM_F32 || mixed) return error;
      cuda->shared_max = p == TILES ? 101376 : 65536;
      error = lm_cuda_gemm_tensor(cuda, g, type, workspace, bytes, 0);
      cuda->shared_max = shared;
      return error;
    case HOPPER:
      if (type != LM_F32 && !mixed && aligned && lm_cuda_gemm_hopper_can(cuda, g))
        error = lm_cuda_gemm_hopper(cuda, g, type, workspace, bytes, 0);
      return error;
    case LIBRARY:
      if (lm_cuda_blas_can(cuda, g)) error = lm_cuda_blas_gemm(cuda, g, workspace, bytes, 0);
      return error;
    default: return lm_cuda_gemm(cuda, g, workspace, bytes, 0);
  }
}

static void test_product(lm_cuda *cuda, const product *h, int32_t type, int32_t right_type) {
  enum : uint64_t { WORKSPACE = 32u << 20 };
  arena_used = 0;
  const int32_t index = (int32_t)(h - products), y_type = h->options & 8 ? LM_F32 : type;
  void *const workspace = take(WORKSPACE);
  lm_gemm g = {};
  g.form = h->form;
  g.rows = h->rows;
  g.y_type = y_type;
  g.bias_type = index % 2 ? y_type : (type + 1) % 3;
  int64_t columns = 0;
  for (const int32_t c : h->columns) columns += c;
  g.y_pitch = g.residual_pitch = (int32_t)columns + h->gap;
  int32_t *const live = (int32_t *)take(4);
  const int32_t skip = 3, value = h->live + skip;
  CUDA(cudaMemcpy(live, &value, 4, cudaMemcpyHostToDevice));
  g.live = live;
  g.live_offset = skip;
  const int64_t good_rows = h->form == LM_TN ? h->rows : h->live; /* rows past the live ones are NaN */
  const size_t y_bytes = ((size_t)(h->rows - 1) * g.y_pitch + columns) * size_of(y_type);
  char *const y = (char *)take(y_bytes + 16) + (size_t)h->offset % 8 * size_of(y_type);
  const lm_matrix residual = random_matrix(y_type, h->rows, columns, h->gap, good_rows, h->offset, 1);
  const lm_matrix bias = random_matrix(g.bias_type, 1, columns, 0, 1, 0, 1);
  std::vector<int32_t> rows((size_t)h->rows);
  for (int32_t r = 0; r < h->rows; r++) rows[(size_t)r] = h->rows % 7 ? r * 7 % h->rows : r; /* each row once */
  if (h->options & 16) {
    int32_t *const device = (int32_t *)take(rows.size() * 4);
    CUDA(cudaMemcpy(device, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice));
    g.y_index = device;
  } else {
    for (int32_t r = 0; r < h->rows; r++) rows[(size_t)r] = r;
  }
  std::vector<std::vector<double>> want(3);
  int64_t column = 0;
  for (int i = 0; i < 3; i++) {
    lm_gemm_part &p = g.part[i];
    p.columns = h->columns[i];
    if (p.columns == 0) continue;
    p.factor = h->options & 32 ? 0.5f + (float)i : 1.0f;
    for (int o = 0; o < 2; o++) {
      const int32_t depth = p.depth[o] = h->depth[i][o];
      if (depth == 0) continue;
      const float scale = 1 / sqrtf((float)depth);
      if (h->form == LM_TN) p.left[o] = random_matrix(type, depth, h->rows, h->gap, h->live, h->offset, 1);
      else p.left[o] = random_matrix(type, h->rows, depth, h->gap, h->live, h->offset, 1);
      if (h->form == LM_NT) p.right[o] = random_matrix(right_type, p.columns, depth, h->gap, p.columns, h->offset, scale);
      else p.right[o] = random_matrix(right_type, depth, p.columns, h->gap, h->form == LM_TN ? h->live : depth, h->offset, scale);
    }
    if (h->options & 1) p.bias = (const char *)bias.data + (size_t)column * size_of(g.bias_type);
    if (h->options & 6) p.residual = (const char *)residual.data + (size_t)column * size_of(y_type);
    p.y = y + (size_t)column * size_of(y_type);
    const int64_t count = (int64_t)h->rows * p.columns;
    double *const device = (double *)take((size_t)count * 8);
    reference<<<(unsigned)((count + 255) / 256), 256>>>(g, i, h->form == LM_TN ? h->live : 0, device);
    CUDA(cudaGetLastError());
    want[(size_t)i].resize((size_t)count);
    CUDA(cudaMemcpy(want[(size_t)i].data(), device, (size_t)count * 8, cudaMemcpyDeviceToHost));
    if (h->options & 4) p.residual = p.y; /* the same values, in the result's place */
    column += p.columns;
  }
  std::vector<char> start(y_bytes, 0x5a), now(y_bytes), again(y_bytes);
  if (h->options & 4) CUDA(cudaMemcpy(start.data(), residual.data, y_bytes, cudaMemcpyDeviceToHost));
  const int64_t live_rows = h->form == LM_TN ? h->rows : h->live;
  for (int path = 0; path < PATHS; path++) {
    for (int turn = 0; turn < 2; turn++) {
      CUDA(cudaMemcpy(y, start.data(), y_bytes, cudaMemcpyHostToDevice));
      const cudaError_t error = launch(cuda, (enum path)path, &g, type, workspace, WORKSPACE);
      if (error == cudaErrorNotSupported) break;
      const std::string what = std::string(path_names[path]) + " " + form_names[h->form] + " product " + std::to_string(index) + " (" +
                               std::to_string(h->rows) + " x " + std::to_string(columns) + " x " + std::to_string(h->depth[0][0]) + ") " +
                               type_names[type] + " by " + type_names[right_type];
      CHECK(!error, "%s: launch: %s", what.c_str(), cudaGetErrorString(error));
      CUDA(cudaDeviceSynchronize());
      CUDA(cudaMemcpy(turn ? again.data() : now.data(), y, y_bytes, cudaMemcpyDeviceToHost));
      if (turn == 1) {
        CHECK(now == again, "%s: a second run gave other bits", what.c_str());
        break;
      }
      counts[path]++;
      double distance = 0, norm = 0;
      std::vector<char> masked = now;
      int64_t at = 0, bad_row = -1, bad_column = -1;
      double worst = 0;
      for (int i = 0; i < 3; i++) {
        for (int64_t r = 0; r < live_rows; r++)
          for (int64_t c = 0; c < h->columns[i]; c++) {
            const size_t place = ((size_t)rows[(size_t)r] * (size_t)g.y_pitch + (size_t)(at + c)) * size_of(y_type);
            double x;
            if (y_type == LM_F32) {
              float f;
              memcpy(&f, &now[place], 4);
              x = f;
            } else {
              uint16_t bits;
              memcpy(&bits, &now[place], 2);
              const uint32_t wide = (uint32_t)bits << 16;
              float f;
              memcpy(&f, &wide, 4);
              x = y_type == LM_BF16 ? f : (double)__half2float(__half(__half_raw{bits}));
            }
            const double p = want[(size_t)i][(size_t)(r * h->columns[i] + c)], d = fabs(x - p);
            distance += d * d, norm += p * p;
            if (!(d <= worst)) worst = d, bad_row = r, bad_column = at + c;
            memcpy(&masked[place], &start[place], size_of(y_type));
          }
        at += h->columns[i];
      }
      /* Rounding errors average out over many elements; a few may all be near half a unit. */
      const double spread = h->rows * at < 16 ? 2 : 1;
      const double step = spread * (y_type == LM_BF16 ? 0x1p-9 : y_type == LM_F16 ? 0x1p-12 : 1e-5);
      CHECK(norm == 0 ? distance == 0 : sqrt(distance / norm) <= 1.2 * step,
            "%s: norm-wise %.2e, limit %.2e, worst %.3g at row %lld column %lld", what.c_str(), sqrt(distance / norm), 1.2 * step, worst,
            (long long)bad_row, (long long)bad_column);
      if (path != LIBRARY && !(path == CHOICE && lm_cuda_gemm_library_pays(cuda, &g, 0)))
        CHECK(masked == start, "%s: wrote outside its rows", what.c_str());
    }
  }
  /* Last, because it overwrites the operands. */
  lm_cuda_choices_time(cuda, true);
  CUDA(lm_cuda_gemm(cuda, &g, workspace, WORKSPACE, 0));
  lm_cuda_choices_time(cuda, false);
}

/* Choices as text: read by another device state, they are the same; what is no such text changes nothing. */
static void test_choices(lm_cuda *cuda) {
  std::vector<char> text((size_t)lm_cuda_choices_write(cuda, NULL, 0)), again(text.size());
  lm_cuda_choices_write(cuda, text.data(), text.size());
  const bool library = strncmp(lm_cuda_blas_text(cuda), "cuBLASLt", 8) == 0;
  CHECK(library == (text.size() > 1), "choices are made where there is a library: %s", text.data());
  lm_cuda other = *cuda;
  other.blas = NULL, other.choices = NULL;
  lm_cuda_blas_open(&other);
  std::string broken = text.data();
  if (library) broken.resize(broken.size() - 3);
  for (const char *bad : {"nonsense", "loramem products 1: x", broken.c_str()})
    CHECK((!library && bad == broken.c_str()) || !lm_cuda_choices_read(&other, bad), "understood: %s", bad);
  CHECK(lm_cuda_choices_write(&other, NULL, 0) == 1, "a text that is not understood was taken over");
  CHECK(lm_cuda_choices_read(&other, "loramem products 1: another device\n"), "choices of another device are passed over");
  CHECK(lm_cuda_choices_read(&other, text.data()), "not understood: %s", text.data());
  CHECK(lm_cuda_choices_write(&other, again.data(), again.size()) == (int32_t)text.size() && again == text, "read back: %s", again.data());
  lm_cuda_blas_close(&other);
}

static void *host_alloc(void *, uint64_t bytes) { return calloc(1, bytes); }

int main(void) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("skipped: no CUDA device\n0 passed, 0 failed\n");
    return 0;
  }
  lm_cuda cuda = {};
  CUDA(cudaSetDevice(0));
  CUDA(cudaGetDeviceProperties(&cuda.properties, 0));
  cuda.host.alloc = host_alloc;
  cuda.host.release = free;
  cuda.capability = 10 * cuda.properties.major + cuda.properties.minor;
  cuda.sm_count = cuda.properties.multiProcessorCount;
  cuda.shared_max = (int32_t)cuda.properties.sharedMemPerBlockOptin;
  CUDA(cudaMalloc(&arena, ARENA));
  lm_cuda_blas_open(&cuda);
  printf("%s, sm_%d, %s\n", cuda.properties.name, cuda.capability, lm_cuda_blas_text(&cuda));
  for (int turn = 0; turn < 2; turn++) { /* first by estimates, then by what was timed meanwhile */
    for (const product &h : products)
      for (int32_t type = LM_F32; type <= LM_F16; type++)
        for (int32_t right = LM_F32; right <= LM_F16; right++)
          if (right == type || h.rows <= 129) test_product(&cuda, &h, type, right);
    test_choices(&cuda);
  }
  for (int p = 0; p < PATHS; p++) printf("%s: %d products\n", path_names[p], counts[p]);
  lm_cuda_blas_close(&cuda);
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

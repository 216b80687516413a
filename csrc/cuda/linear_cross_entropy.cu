/* linear_cross_entropy.cu: output head and loss over one chunk of the labelled rows.
 *   1  gathered = the chunk's rows of x          3  loss and gradient of each row of logits, in place
 *   2  logits = gathered W^T                     4  dx[row] = logits W
 * How many rows there are is read on the device; blocks beyond them end at once. */
#include "gemm_choice.h"
#include "kernels.h"

enum { GATHER_THREADS = 128, ROW_THREADS = 1024 };

struct loss_chunk {
  const lm_batch_header *batch;
  const lm_scaler *scaler; /* or NULL */
  const int32_t *label_rows, *label_ids; /* of the chunk */
  int32_t first, rows;                   /* rows: most in this chunk */
};

__device__ __forceinline__ int32_t chunk_live(const loss_chunk &c) {
  return max(0, min(c.batch->labelled - c.first, c.rows));
}

template <typename Word>
__global__ void __launch_bounds__(GATHER_THREADS)
    gather_labelled(Word *to, const Word *from, loss_chunk c, int32_t words, int64_t from_pitch, int32_t source_rows) {
  if ((int)blockIdx.x >= chunk_live(c)) return;
  const int32_t row = max(0, min(c.label_rows[blockIdx.x], source_rows - 1));
  const Word *const source = from + row * from_pitch;
  Word *const target = to + (int64_t)blockIdx.x * words;
  for (int32_t i = threadIdx.x; i < words; i += GATHER_THREADS) target[i] = source[i];
}

template <typename Word>
__global__ void __launch_bounds__(GATHER_THREADS)
    scatter_labelled(Word *to, const Word *from, loss_chunk c, int32_t words, int64_t to_pitch, int32_t target_rows) {
  if ((int)blockIdx.x >= chunk_live(c)) return;
  const int32_t row = max(0, min(c.label_rows[blockIdx.x], target_rows - 1));
  const Word *const source = from + (int64_t)blockIdx.x * words;
  Word *const target = to + row * to_pitch;
  for (int32_t i = threadIdx.x; i < words; i += GATHER_THREADS) target[i] = source[i];
}

/* A maximum and the sum of exp2(x - maximum): how rows of any length are summed without overflow. */
struct softmax_sum {
  float top, sum;
  __device__ __forceinline__ void join(const softmax_sum &other) {
    const float high = fmaxf(top, other.top);
    if (high == -INFINITY) return;
    sum = sum * exp2f(top - high) + other.sum * exp2f(other.top - high);
    top = high;
  }
};

/* Every thread gets the same bits. */
__device__ __forceinline__ softmax_sum block_join(softmax_sum s) {
  __shared__ softmax_sum warps[ROW_THREADS / 32];
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const softmax_sum other = {__shfl_down_sync(~0u, s.top, step), __shfl_down_sync(~0u, s.sum, step)};
    s.join(other);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
  __syncthreads();
  softmax_sum total = warps[0];
  for (int w = 1; w < ROW_THREADS / 32; w++) total.join(warps[w]);
  return total;
}

/* N elements at a time; with N = 1 rows may start anywhere. The row is read twice: once for its sum and, from the end on, so
 * that what L2 still holds comes first, once to be replaced by its gradient. */
template <typename T, int N>
__global__ void __launch_bounds__(ROW_THREADS) loss_rows(float *loss, T *logits, loss_chunk c, int32_t vocab, int32_t gradient) {
  constexpr float log2e = 1.4426950408889634f, ln2 = 0.6931471805599453f;
  if ((int)blockIdx.x >= chunk_live(c)) return;
  T *const row = logits + (int64_t)blockIdx.x * vocab;
  const int32_t id = c.label_ids[blockIdx.x], label = id >= 0 && id < vocab ? id : 0;
  const int32_t words = vocab / N;
  softmax_sum s = {-INFINITY, 0};
  for (int32_t i = threadIdx.x; i < words; i += ROW_THREADS) {
    float x[N];
    lm_load<N>(x, row + (int64_t)i * N);
    float high = x[0];
#pragma unroll
    for (int e = 1; e < N; e++) high = fmaxf(high, x[e]);
    high *= log2e;
    if (high > s.top) {
      s.sum *= exp2f(s.top - high);
      s.top = high;
    }
    if (s.top == -INFINITY) continue;
#pragma unroll
    for (int e = 0; e < N; e++) s.sum += exp2f(fmaf(x[e], log2e, -s.top));
  }
  const float right = lm_to_float(row[label]);
  s = block_join(s); /* its barrier also lies between this read of the label's logit and the writes below */
  if (threadIdx.x == 0) loss[c.first + blockIdx.x] = s.top * ln2 + logf(s.sum) - right;
  if (!gradient) return;
  const float weight = c.batch->loss_weight * (c.scaler ? c.scaler->scale : 1.0f), scale = weight / s.sum;
  for (int32_t i = words - 1 - (int32_t)threadIdx.x; i >= 0; i -= ROW_THREADS) {
    float x[N];
    lm_load<N>(x, row + (int64_t)i * N);
#pragma unroll
    for (int e = 0; e < N; e++) x[e] = exp2f(fmaf(x[e], log2e, -s.top)) * scale - (i * N + e == label ? weight : 0);
    lm_store<N>(row + (int64_t)i * N, x);
  }
}

template <typename T>
static cudaError_t launch_loss_rows(const lm_linear_cross_entropy_args *a, const loss_chunk &c, cudaStream_t stream) {
  T *const logits = static_cast<T *>(a->logits);
  const int32_t gradient = a->dx != nullptr;
  if (lm_aligned(logits, a->vocab, 16) && a->vocab % 8 == 0)
    return lm_cuda_launch<loss_rows<T, 8>>(c.rows, ROW_THREADS, 0, stream, a->loss, logits, c, a->vocab, gradient);
  return lm_cuda_launch<loss_rows<T, 1>>(c.rows, ROW_THREADS, 0, stream, a->loss, logits, c, a->vocab, gradient);
}

/* Rows of x to gathered, or rows of gathered to dx. */
static cudaError_t move_rows(const lm_linear_cross_entropy_args *a, const loss_chunk &c, bool gather, cudaStream_t stream) {
  const int64_t size = a->type == LM_F32 ? 4 : 2, bytes = a->width * size, pitch = (gather ? a->x_pitch : a->dx_pitch) * size;
  const void *const wide = gather ? a->x : a->dx;
  const bool whole = ((uintptr_t)a->gathered | (uintptr_t)wide | (uint64_t)bytes | (uint64_t)pitch) % 16 == 0;
  const auto launch = [&](auto word) {
    using Word = decltype(word);
    const int32_t words = (int32_t)(bytes / sizeof(Word));
    const int64_t words_pitch = pitch / (int64_t)sizeof(Word);
    Word *const dense = static_cast<Word *>(a->gathered);
    if (gather)
      return lm_cuda_launch<gather_labelled<Word>>(c.rows, GATHER_THREADS, 0, stream, dense, static_cast<const Word *>(a->x), c,
                                                   words, words_pitch, a->rows);
    return lm_cuda_launch<scatter_labelled<Word>>(c.rows, GATHER_THREADS, 0, stream, static_cast<Word *>(a->dx),
                                                  static_cast<const Word *>(dense), c, words, words_pitch, a->rows);
  };
  return whole ? launch(uint4{}) : launch(uint16_t{});
}

cudaError_t lm_cuda_linear_cross_entropy(lm_cuda *cuda, const lm_linear_cross_entropy_args *args, cudaStream_t stream) {
  const int64_t first = (int64_t)args->chunk * args->chunk_rows;
  if (first >= args->rows) return cudaSuccess; /* there are no more rows than that */
  loss_chunk c = {args->batch, args->scaler, args->label_rows + first, args->label_ids + first, (int32_t)first, args->chunk_rows};
  if (c.rows > args->rows - c.first) c.rows = args->rows - c.first;
  void *const workspace = lm_cuda_workspace(cuda, stream);
  cudaError_t error = move_rows(args, c, true, stream);
  if (error) return error;

  lm_gemm g = {};
  g.live = &args->batch->labelled;
  g.live_offset = c.first;
  g.form = LM_NT;
  g.rows = c.rows;
  g.y_pitch = args->vocab;
  g.y_type = args->type;
  g.part[0].columns = args->vocab;
  g.part[0].depth[0] = args->width;
  g.part[0].factor = 1.0f;
  g.part[0].left[0] = {args->gathered, args->width, args->type};
  g.part[0].right[0] = {args->w, args->w_pitch, args->w_type};
  g.part[0].y = args->logits;
  error = lm_cuda_gemm(cuda, &g, workspace, cuda->workspace_bytes, stream);
  if (error) return error;
  LM_CUDA_BY_TYPE(args->type, T, error = launch_loss_rows<T>(args, c, stream));
  if (error || !args->dx) return error;

  /* The library cannot write rows by index, so its result takes the place of the gathered rows first. */
  g.form = LM_NN;
  g.y_pitch = args->width;
  g.part[0].columns = args->width;
  g.part[0].depth[0] = args->vocab;
  g.part[0].left[0] = {args->logits, args->vocab, args->type};
  g.part[0].y = args->gathered;
  lm_cuda_gemm_time(cuda, &g, NULL, &g, 0, workspace, cuda->workspace_bytes, stream);
  if (lm_cuda_gemm_library_pays(cuda, &g, 0)) {
    error = lm_cuda_gemm_library(cuda, &g, workspace, cuda->workspace_bytes, stream);
    return error ? error : move_rows(args, c, false, stream);
  }
  g.y_pitch = args->dx_pitch;
  g.y_index = c.label_rows;
  g.part[0].y = args->dx;
  return lm_cuda_gemm(cuda, &g, workspace, cuda->workspace_bytes, stream);
}

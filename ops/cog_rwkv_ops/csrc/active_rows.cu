// Products with activations that are mostly zero: only the rows of the matrix that a token needs are read.
//
// A warp has a fixed slice of the rows and 256 columns, 8 a lane. It lists the rows of its slice that are active for
// any token, then streams them through a ring in shared memory and adds them up in their order. What is zero for a
// token changes nothing of its sum, so a token's result is the same beside any others.
#include "aligned.cuh"
#include "products_device.cuh"

namespace cog_rwkv {
namespace {

constexpr int kColumns = 256;            // of a block
constexpr int kBatch = 4, kBatches = 4;  // rows that are copied at a time, and how often ahead
constexpr int kTogether = 8;             // tokens whose sums are added over the warps at a time

// N: tokens, a power of two.
template <int N>
constexpr int rows_at_once = N <= 4 ? 256 : 128;

template <class T, int N>
struct ActiveMemory {
  union {
    alignas(16) unsigned char ring[kProductWarps][kBatches][kBatch][kColumns * 2];
    float sums[kProductWarps][N < kTogether ? N : kTogether][kColumns];
  };
  Vector<T, N> act[kProductWarps][rows_at_once<N>];
  uint16_t row[kProductWarps][rows_at_once<N>];  // counted from the first of the pass
};

struct ActiveArgs {
  const void *act, *value_t;
  float* partial;
  int64_t n, f, c;
};

union Eight {
  Piece piece;
  uint16_t bits[8];
};

// Lists the rows first to last - 1 that are not zero for all tokens, with their activations. Returns how many.
template <class T, int N>
__device__ __forceinline__ int list_active(const ActiveArgs& a, int64_t first, int64_t last, Vector<T, N>* act,
                                           uint16_t* row) {
  const int lane = threadIdx.x % 32;
  const int64_t mine = first + lane * 8;  // this lane looks at 8 rows
  Eight x[N];
#pragma unroll
  for (int t = 0; t < N; t++) {
    const bool inside = t < a.n && mine < last;
    x[t].piece = inside ? fresh_piece(static_cast<const T*>(a.act) + t * a.f + mine) : Piece{};
  }
  uint32_t active = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t any = 0;
#pragma unroll
    for (int t = 0; t < N; t++) any |= x[t].bits[i] & 0x7fffu;
    active |= (any != 0 ? 1u : 0u) << i;
  }
  int end = __popc(active);  // of this lane's places in the list
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, end, step);
    if (lane >= step) end += before;
  }
  int place = end - __popc(active);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if ((active >> i & 1) == 0) continue;
    uint16_t values[N];
#pragma unroll
    for (int t = 0; t < N; t++) values[t] = x[t].bits[i];
    row[place] = static_cast<uint16_t>(lane * 8 + i);
    memcpy(&act[place], values, sizeof(values));
    place++;
  }
  return __shfl_sync(0xffffffffu, end, 31);
}

// sums += the `count` listed rows, which are counted from `first`.
template <class T, int N>
__device__ __forceinline__ void add_active(float (&sums)[N][8], const ActiveArgs& a, int64_t first, int count,
                                           const Vector<T, N>* act, const uint16_t* row, uint32_t ring) {
  const int lane = threadIdx.x % 32;
  const int64_t column = int64_t{blockIdx.x} * kColumns + lane * 8;
  const T* from = static_cast<const T*>(a.value_t) + first * a.c + column;
  const bool inside = column < a.c;
  const auto copy_batch = [&](int batch) {
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int at = batch * kBatch + i;
      if (at < count) {
        const uint32_t to = ring + ((batch % kBatches * kBatch + i) * 32 + lane) * 16;
        copy_piece(to, inside ? from + row[at] * a.c : a.value_t, inside);
      }
    }
    end_step();
  };
  for (int batch = 0; batch < kBatches; batch++) copy_batch(batch);
  for (int batch = 0; batch * kBatch < count; batch++) {
    wait_for_steps<kBatches - 1>();
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int at = batch * kBatch + i;
      if (at < count) {
        union {
          Piece piece;
          T values[8];
        } weights = {shared_piece(ring + ((batch % kBatches * kBatch + i) * 32 + lane) * 16)};
        const Vector<T, N> x = act[at];
#pragma unroll
        for (int t = 0; t < N; t++) {
#pragma unroll
          for (int j = 0; j < 8; j++) {
            sums[t][j] = fmaf(static_cast<float>(x.values[t]), static_cast<float>(weights.values[j]), sums[t][j]);
          }
        }
      }
    }
    copy_batch(batch + kBatches);
  }
}

// Adds up the warps in their order and writes the block's part of its slice.
template <class T, int N>
__device__ __forceinline__ void write_slice(ActiveMemory<T, N>& shared, const ActiveArgs& a,
                                            const float (&sums)[N][8]) {
  constexpr int together = N < kTogether ? N : kTogether;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = int64_t{blockIdx.x} * kColumns + threadIdx.x;
#pragma unroll
  for (int t0 = 0; t0 < N; t0 += together) {
    __syncthreads();  // the ring, and the sums before these, have been read
#pragma unroll
    for (int t = 0; t < together; t++) {
#pragma unroll
      for (int j = 0; j < 8; j++) shared.sums[warp][t][lane * 8 + j] = sums[t0 + t][j];
    }
    __syncthreads();
    for (int t = 0; t < together; t++) {
      if (t0 + t >= a.n || column >= a.c) continue;
      float sum = shared.sums[0][t][threadIdx.x];
      for (int w = 1; w < kProductWarps; w++) sum += shared.sums[w][t][threadIdx.x];
      a.partial[(blockIdx.y * a.n + t0 + t) * a.c + column] = sum;
    }
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kProductThreads, N <= 8 ? 2 : 1) active_rows_kernel(ActiveArgs a) {
  static_assert(kColumns == kProductThreads && kColumns == 32 * 8);
  extern __shared__ __align__(32) unsigned char memory[];
  auto& shared = *reinterpret_cast<ActiveMemory<T, N>*>(memory);
  const int warp = threadIdx.x / 32;
  const int64_t chunks = a.f / kChunk, unit = int64_t{blockIdx.y} * kProductWarps + warp;
  const int64_t units = int64_t{gridDim.y} * kProductWarps;
  const int64_t begin = chunks * unit / units * kChunk, end = chunks * (unit + 1) / units * kChunk;
  wait_for_previous();
  let_next_begin();
  float sums[N][8] = {};
  for (int64_t first = begin; first < end; first += rows_at_once<N>) {
    const int64_t last = min(end, first + rows_at_once<N>);
    const int count = list_active<T, N>(a, first, last, shared.act[warp], shared.row[warp]);
    __syncwarp();
    add_active<T, N>(sums, a, first, count, shared.act[warp], shared.row[warp], shared_address(shared.ring[warp]));
    __syncwarp();  // the list has been read
  }
  write_slice<T, N>(shared, a, sums);
}

template <class T, int N>
void launch_active(const char* op, cudaStream_t stream, const ActiveArgs& a, int columns, int slices) {
  const auto kernel = active_rows_kernel<T, N>;
  constexpr int bytes = sizeof(ActiveMemory<T, N>);
  launch_chained(op, stream, kernel, dim3(columns, slices), dim3(kProductThreads), bytes, a);
}

template <class T>
void launch_active(const char* op, cudaStream_t stream, const ActiveArgs& a, int columns, int slices) {
  if (a.n == 1) return launch_active<T, 1>(op, stream, a, columns, slices);
  if (a.n == 2) return launch_active<T, 2>(op, stream, a, columns, slices);
  if (a.n <= 4) return launch_active<T, 4>(op, stream, a, columns, slices);
  if (a.n <= 8) return launch_active<T, 8>(op, stream, a, columns, slices);
  launch_active<T, 16>(op, stream, a, columns, slices);
}

}  // namespace

int active_rows(const char* op, cudaStream_t stream, ScalarType type, const void* act, const void* value_t,
                float* partial, int64_t n, int64_t f, int64_t c) {
  if (type != ScalarType::Half && type != ScalarType::BFloat16) fail(op, "value_t must be float16 or bfloat16");
  if (n < 1 || n > kMaxActiveRows) fail(op, "act has " + std::to_string(n) + " rows; it must have 1 to 16");
  if (f < 32 || f % 32 != 0 || c < 32 || c % 32 != 0 || c > int64_t{kColumns} * INT32_MAX) {
    fail(op, "value_t has shape [" + std::to_string(f) + ", " + std::to_string(c) + "]; both must be multiples of 32");
  }
  if (!aligned16(act, value_t)) fail(op, "act and value_t must lie on 16-byte boundaries");
  const int64_t columns = (c + kColumns - 1) / kColumns, chunks = f / kChunk;
  const int64_t fill = device_attribute(op, cudaDevAttrMultiProcessorCount) / columns;
  const int64_t most = std::min<int64_t>(kMaxSlices, (chunks + kProductWarps - 1) / kProductWarps);
  const int slices = static_cast<int>(std::clamp<int64_t>(fill, 1, most));
  const ActiveArgs args{act, value_t, partial, n, f, c};
  if (type == ScalarType::Half) {
    launch_active<Half>(op, stream, args, static_cast<int>(columns), slices);
  } else {
    launch_active<BFloat16>(op, stream, args, static_cast<int>(columns), slices);
  }
  return slices;
}

}  // namespace cog_rwkv

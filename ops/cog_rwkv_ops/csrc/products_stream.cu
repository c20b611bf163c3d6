// Products of up to 8 tokens: the weights as fast as memory gives them.
//
// The warps of a block share the columns of a tile of 16 rows, so that the activations of a warp's columns stay in its
// registers from tile to tile, and each block reads them once. The weights run through a ring in shared memory, which
// begins to fill before the kernel before this one has ended.
#include "products_kernels.cuh"

namespace cog_rwkv {
namespace {

constexpr int kRows = 16;    // of a weight, in a tile
constexpr int kTokens = 8;   // columns of the tensor cores' results
constexpr int kSlots = 10;   // of the ring of a warp
constexpr int kHeld = 16;    // chunks of activations in registers: 4096 columns over 8 warps
constexpr int kStride = 20;  // floats from token to token in a warp's sums: no two lanes meet in a bank

struct ChunksOfWarp {
  __device__ __forceinline__ RowRange operator()(const Product& job, const WarpPlan& plan) const {
    const uint32_t part = threadIdx.x / 32 & ((1u << plan.log_split) - 1);
    return part_of(static_cast<uint32_t>(job.k) / kChunk, part, plan.log_split);
  }
};

using Ring = WeightRing<kRows, kSlots, ChunksOfWarp>;

struct StreamMemory {
  alignas(16) unsigned char ring[kProductWarps][Ring::bytes];
  alignas(16) float sums[2][kProductWarps][kTokens * kStride];
  WarpPlan plans[kMaxProducts];
};

// The activations of `count` chunks from `chunk` on, at most kHeld, of token lane / 4.
template <class T>
__device__ __forceinline__ void load_activations(Piece (&held)[kHeld], const Product& job, int n, uint32_t chunk,
                                                 uint32_t count) {
  const int lane = threadIdx.x % 32, token = lane / 4;
  const T* x = static_cast<const T*>(job.x) + token * job.k + chunk * kChunk + lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    held[i] = token < n && i < static_cast<int>(count) ? fresh_piece(x + i * kChunk) : Piece{};
  }
}

// The sums of one warp into shared memory, [token][row].
__device__ __forceinline__ void put_sums(float* to, const float (&sums)[4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, token = lane % 4 * 2;
  to[token * kStride + g] = sums[0];
  to[(token + 1) * kStride + g] = sums[1];
  to[token * kStride + g + 8] = sums[2];
  to[(token + 1) * kStride + g + 8] = sums[3];
}

// Adds up the warps that shared columns, in their order, and writes the results of a round.
template <class T>
__device__ __forceinline__ void write_round(const Product& job, const WarpPlan& plan, uint32_t round, int n,
                                            const float (&sums)[kProductWarps][kTokens * kStride]) {
  constexpr int quads = kRows / 4;
  const int split = 1 << plan.log_split, items = kProductWarps / split * kTokens * quads;
  for (int item = threadIdx.x; item < items; item += kProductThreads) {
    const int quad = item % quads, token = item / quads % kTokens, warp = item / (quads * kTokens) * split;
    const RowRange tile = plan.tile_of(round, warp);
    const uint32_t row = tile.begin + quad * 4;
    if (token >= n || row >= tile.end) continue;
    const int at = token * kStride + quad * 4;
    float4 sum = *reinterpret_cast<const float4*>(&sums[warp][at]);
    for (int i = 1; i < split; i++) {
      sum = add4(sum, *reinterpret_cast<const float4*>(&sums[warp + i][at]));
    }
    finish_rows<T>(job, sum, row, token);
  }
}

// sums = the weights of this warp's tile times its columns. Returns with the ring one tile further.
template <class T>
__device__ __forceinline__ void multiply_tile(float (&sums)[4], Ring& ring, Piece (&held)[kHeld], const Product& job,
                                              int n, const RowRange& chunks, bool first) {
  const uint32_t count = chunks.end - chunks.begin;
  for (uint32_t done = 0; done < count; done += kHeld) {
    if (first || count > kHeld) load_activations<T>(held, job, n, chunks.begin + done, count - done);
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      if (done + i < count) {
        Piece weights[2];
        ring.read(weights);
        multiply_32<T>(sums, weights[0], weights[1], held[i]);
        ring.go_on();
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kProductThreads, 2) stream_kernel(const __grid_constant__ ProductList list) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<StreamMemory*>(memory);
  const int warp = threadIdx.x / 32;
  plan_jobs(shared.plans, list, blockIdx.x, kRows, [](uint32_t k) { return column_split(k); });
  __syncthreads();
  Ring ring(list, shared.plans, ChunksOfWarp{}, shared.ring[warp]);
  wait_for_previous();
  let_next_begin();
  Piece held[kHeld];
  int turn = 0;  // two rooms for sums in turn: one barrier a round
  for (int i = 0; i < list.count; i++) {
    const Product& job = list.jobs[i];
    const WarpPlan& plan = shared.plans[i];
    const RowRange chunks = ChunksOfWarp{}(job, plan);
    for (uint32_t round = 0; round < plan.rounds; round++) {
      const RowRange tile = plan.tile_of(round, warp);
      float sums[4] = {};
      if (tile.end > tile.begin) multiply_tile<T>(sums, ring, held, job, list.n, chunks, round == 0);
      put_sums(shared.sums[turn][warp], sums);
      __syncthreads();
      write_round<T>(job, plan, round, list.n, shared.sums[turn]);
      turn ^= 1;
    }
  }
}

}  // namespace

size_t stream_shared_bytes() { return sizeof(StreamMemory); }

void stream_products(const char* op, cudaStream_t stream, ScalarType type, ProductList& list, uint64_t units,
                     int multiprocessors) {
  list.shares = share_units(units, multiprocessors);
  const auto kernel = type == ScalarType::Half ? stream_kernel<Half> : stream_kernel<BFloat16>;
  const int bytes = static_cast<int>(sizeof(StreamMemory));
  check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  launch_chained(op, stream, kernel, dim3(multiprocessors), dim3(kProductThreads), bytes, list);
}

}  // namespace cog_rwkv

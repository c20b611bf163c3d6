// The order of rows of a table: a counting sort of their ids by stretches of the table, in two kernels.
#include "order.h"

namespace cog_rwkv {
namespace {

constexpr int64_t kLeastRows = 4096, kMostRows = int64_t{1} << 31, kMostRowBytes = 512;
constexpr int kStretches = 1024, kThreads = 256, kEach = 8, kChunk = kThreads * kEach;

__device__ __forceinline__ int stretch_of(int64_t id, int shift) {
  return static_cast<int>(min(max(id >> shift, int64_t{0}), int64_t{kStretches - 1}));
}

// counts[s] += ids of stretch s.
__global__ void __launch_bounds__(kThreads)
    count_stretches_kernel(const int64_t* __restrict__ ids, int64_t n, int shift, uint32_t* __restrict__ counts) {
  __shared__ uint32_t here[kStretches];
  for (int s = threadIdx.x; s < kStretches; s += kThreads) here[s] = 0;
  __syncthreads();
  for (int k = 0; k < kEach; k++) {
    const int64_t i = blockIdx.x * int64_t{kChunk} + k * kThreads + threadIdx.x;
    if (i < n) atomicAdd(&here[stretch_of(ids[i], shift)], 1u);
  }
  __syncthreads();
  for (int s = threadIdx.x; s < kStretches; s += kThreads) {
    if (here[s]) atomicAdd(&counts[s], here[s]);
  }
}

// The sum of `mine` over the threads before this one.
__device__ __forceinline__ uint32_t sum_before(uint32_t mine) {
  __shared__ uint32_t sums[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t upto = mine;
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, upto, d);
    if (lane >= d) upto += other;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  uint32_t before = upto - mine;
  for (int w = 0; w < warp; w++) before += sums[w];
  return before;
}

// Each id gets a place in its stretch: behind those of the stretches before, behind what other blocks have `taken` of
// it, and behind those of its own block.
__global__ void __launch_bounds__(kThreads)
    order_rows_kernel(const int64_t* __restrict__ ids, int64_t n, int shift, const uint32_t* __restrict__ counts,
                      uint32_t* __restrict__ taken, uint32_t* __restrict__ places) {
  __shared__ uint32_t here[kStretches];
  for (int s = threadIdx.x; s < kStretches; s += kThreads) here[s] = 0;
  __syncthreads();
  int stretch[kEach];
  uint32_t rank[kEach];
#pragma unroll
  for (int k = 0; k < kEach; k++) {
    const int64_t i = blockIdx.x * int64_t{kChunk} + k * kThreads + threadIdx.x;
    stretch[k] = i < n ? stretch_of(ids[i], shift) : 0;
    rank[k] = i < n ? atomicAdd(&here[stretch[k]], 1u) : 0;
  }
  constexpr int kMine = kStretches / kThreads;
  const int first = threadIdx.x * kMine;
  uint32_t count[kMine], sum = 0;
#pragma unroll
  for (int s = 0; s < kMine; s++) sum += count[s] = counts[first + s];
  uint32_t begin = sum_before(sum);  // and every rank is taken
#pragma unroll
  for (int s = 0; s < kMine; s++) {
    const uint32_t some = here[first + s];
    here[first + s] = begin + (some ? atomicAdd(&taken[first + s], some) : 0);
    begin += count[s];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kEach; k++) {
    const int64_t i = blockIdx.x * int64_t{kChunk} + k * kThreads + threadIdx.x;
    if (i < n) places[here[stretch[k]] + rank[k]] = static_cast<uint32_t>(i);
  }
}

}  // namespace

RowOrder::RowOrder(const char* op, const Launch& launch, const Table& table, const Tensor& ids, bool on_host) {
  const int64_t n = ids.size(0);
  if (!on_host || n < kLeastRows || n > kMostRows || table.row_bytes > kMostRowBytes) return;
  int shift = 0;
  while ((table.rows - 1) >> shift >= kStretches) shift++;
  memory_ = empty_tensor(ids, {kStretches + (n + 1) / 2});  // two counters a stretch, then a place an id, of 32 bits
  auto* counts = static_cast<uint32_t*>(memory_->mutable_data_ptr());
  auto* places = counts + 2 * kStretches;
  check_cuda(op, cudaMemsetAsync(counts, 0, 2 * kStretches * sizeof(uint32_t), launch.stream));
  const auto* id = data<int64_t>(ids);
  const auto grid = static_cast<unsigned>((n + kChunk - 1) / kChunk);
  count_stretches_kernel<<<grid, kThreads, 0, launch.stream>>>(id, n, shift, counts);
  launch.check();
  order_rows_kernel<<<grid, kThreads, 0, launch.stream>>>(id, n, shift, counts, counts + kStretches, places);
  launch.check();
  places_ = places;
}

}  // namespace cog_rwkv

// The chunked scans on CUDA: how a sequence is cut into segments, and the launches.
#include "decay_chunks.h"

#include <utility>
#include <vector>

#include "aligned.cuh"
#include "decay_columns.cuh"
#include "decay_rows.cuh"

namespace cog_rwkv {
namespace {

template <bool reverse>
using Columns = ScanKind<false, reverse, false>;  // which w there is, is asked at run time
template <bool reverse>
using RowsDecay = ScanKind<true, reverse, false>;

constexpr int kThreads = 256;

// In place: from what a segment adds to M that begins as 0, and its decays, to M before the next segment.
__global__ void join_segments_kernel(const float* begin, float* states, const float* decays, int64_t size, int count) {
  constexpr int kState = kWide * kWide;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size; i += int64_t{gridDim.x} * kThreads) {
    const int64_t block = i / kState, corner = i % kState;
    float m = begin[i];
    for (int64_t place = block * count; place < (block + 1) * count; place++) {
      float& state = states[place * kState + corner];
      m = m * decays[place * kWide + corner % kWide] + state;
      state = m;
    }
  }
}

// What all segments of a head have found, for each key.
__global__ void sum_segments_kernel(const float* parts, float* out, int64_t size, int count) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size; i += int64_t{gridDim.x} * kThreads) {
    float sum = 0.0f;
    for (int64_t part = 0; part < count; part++) sum += parts[(i / kWide * count + part) * kWide + i % kWide];
    out[i] = sum;
  }
}

// Starts kernel<<<grid, threads, bytes>>>; `bytes` may be more than the 48 KiB that need no asking.
template <class Kernel, class... Arguments>
void start(const char* op, const Launch& launch, Kernel kernel, int64_t grid, int threads, int bytes,
           Arguments... arguments) {
  if (bytes > 0) check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<static_cast<unsigned>(grid), threads, bytes, launch.stream>>>(arguments...);
  launch.check();
}

// The segments of every sequence, and their states: two blocks of threads for each multiprocessor, or one in float32,
// whose tiles are larger.
class SegmentPlan {
 public:
  Segments segments{};
  int64_t heads;

  SegmentPlan(const char* op, int64_t batch_heads, int64_t tokens, bool constant, int blocks_each, const Tensor& like)
      : heads(batch_heads) {
    if (heads > INT32_MAX / 4) fail(op, "r: there are more than 2^29 heads to compute");
    const int64_t wanted = int64_t{blocks_each} * device_attribute(op, cudaDevAttrMultiProcessorCount) / heads;
    const int64_t tiles = (tokens + kTileTokens - 1) / kTileTokens, count = std::clamp<int64_t>(wanted, 1, tiles);
    segments.tokens = (tiles + count - 1) / count * kTileTokens;
    segments.count = static_cast<int>((tokens + segments.tokens - 1) / segments.tokens);
    segments.constant = constant;
    if (segments.count > 1) add_states(like);
  }

  // The same segments with other states.
  void add_states(const Tensor& like) {
    const int64_t places = heads * (segments.count - 1);
    states_.push_back(empty_tensor(like, {places, kWide * kWide + kWide}));
    segments.states = mutable_data<float>(states_.back());
    segments.decays = segments.states + places * kWide * kWide;
  }

 private:
  std::vector<Tensor> states_;
};

// M before every segment but the first, with s.p, s.q, s.w and s.begin.
template <class Kind, bool split, class T>
void find_states(const char* op, const Launch& launch, const Scan<T>& s, const SegmentPlan& plan) {
  const Segments& g = plan.segments;
  const int others = g.count - 1;
  if (others == 0) return;
  start(op, launch, chunk_columns_kernel<Kind, T, split, false>, plan.heads * others, kChunkThreads,
        sizeof(ColumnsShared<T>), s, g);
  const int64_t size = plan.heads * kWide * kWide;
  start(op, launch, join_segments_kernel, blocks(size, kThreads), kThreads, 0, s.begin, g.states, g.decays, size,
        others);
}

template <class Kind, bool split, class T>
void scan_columns(const char* op, const Launch& launch, const Scan<T>& s, const SegmentPlan& plan) {
  start(op, launch, chunk_columns_kernel<Kind, T, split, true>, plan.heads * plan.segments.count, kChunkThreads,
        sizeof(ColumnsShared<T>), s, plan.segments);
}

// `parts`: what the segments find for each key, [heads, count, 64], and `sum` of them; null where nothing is found.
template <class Kind, class T>
void scan_rows(const char* op, const Launch& launch, const Scan<T>& s, const SegmentPlan& plan, const float* parts,
               float* sum) {
  start(op, launch, chunk_rows_kernel<Kind, T>, plan.heads * plan.segments.count, kChunkThreads, sizeof(RowsShared<T>),
        s, plan.segments);
  if (sum == nullptr) return;
  const int64_t size = plan.heads * kWide;
  start(op, launch, sum_segments_kernel, blocks(size, kThreads), kThreads, 0, parts, sum, size, plan.segments.count);
}

template <class T>
constexpr int kBlocksEach = sizeof(T) == 4 ? 1 : 2;

}  // namespace

template <class T>
bool uses_chunks(const char* op, int64_t tokens) {
  constexpr size_t bytes = std::max(sizeof(ColumnsShared<T>), sizeof(RowsShared<T>));
  if (tokens < kDecayChunksFrom) return false;
  return device_attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin) >= static_cast<int>(bytes);
}

template <class T>
void chunk_forward(const char* op, const Launch& launch, const Scan<T>& for_y, int64_t batch, bool constant,
                   const Tensor& like) {
  if (batch * for_y.heads == 0) return;
  constexpr bool split = sizeof(T) == 4;
  const SegmentPlan plan(op, batch * for_y.heads, for_y.tokens, constant, kBlocksEach<T>, like);
  find_states<Columns<false>, split>(op, launch, for_y, plan);
  scan_columns<Columns<false>, split>(op, launch, for_y, plan);
}

template <class T>
void chunk_backward(const char* op, const Launch& launch, const Scan<T>& for_r, const Scan<T>& for_v,
                    const Scan<T>& for_k, int64_t batch, bool constant, const Tensor& like) {
  const int64_t heads = batch * for_r.heads;
  if (heads == 0) return;
  SegmentPlan plan(op, heads, for_r.tokens, constant, kBlocksEach<T>, like);
  const Tensor parts = empty_tensor(like, {heads, plan.segments.count, kWide});
  Scan<T> transposed = for_r;  // as for y: values are rows
  std::swap(transposed.p, transposed.q);
  find_states<Columns<false>, true>(op, launch, transposed, plan);
  plan.segments.d_u = plan.segments.d_w_sum = mutable_data<float>(parts);
  scan_rows<RowsDecay<false>>(op, launch, for_r, plan, plan.segments.d_u, for_r.d_u);
  plan.segments.after = plan.segments.states;
  if (plan.segments.count > 1) plan.add_states(like);
  find_states<Columns<true>, true>(op, launch, for_v, plan);
  scan_columns<Columns<true>, true>(op, launch, for_v, plan);
  scan_rows<RowsDecay<true>>(op, launch, for_k, plan, plan.segments.d_w_sum, constant ? for_k.d_w_sum : nullptr);
}

template bool uses_chunks<float>(const char*, int64_t);
template bool uses_chunks<Half>(const char*, int64_t);
template bool uses_chunks<BFloat16>(const char*, int64_t);
template void chunk_forward<float>(const char*, const Launch&, const Scan<float>&, int64_t, bool, const Tensor&);
template void chunk_forward<Half>(const char*, const Launch&, const Scan<Half>&, int64_t, bool, const Tensor&);
template void chunk_forward<BFloat16>(const char*, const Launch&, const Scan<BFloat16>&, int64_t, bool, const Tensor&);
template void chunk_backward<float>(const char*, const Launch&, const Scan<float>&, const Scan<float>&,
                                    const Scan<float>&, int64_t, bool, const Tensor&);
template void chunk_backward<Half>(const char*, const Launch&, const Scan<Half>&, const Scan<Half>&, const Scan<Half>&,
                                   int64_t, bool, const Tensor&);
template void chunk_backward<BFloat16>(const char*, const Launch&, const Scan<BFloat16>&, const Scan<BFloat16>&,
                                       const Scan<BFloat16>&, int64_t, bool, const Tensor&);

}  // namespace cog_rwkv

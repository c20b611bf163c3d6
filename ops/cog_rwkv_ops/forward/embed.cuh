// What a step begins with: rows of the embedding, by the tokens' ids, behind the first layer norm. In one kernel.
#pragma once

#include "../csrc/aligned.cuh"
#include "../csrc/table.cuh"
#include "rows.cuh"

namespace cog_rwkv {

constexpr int kEmbedThreads = 1024;  // at most: kEmbedFours times four channels each
constexpr int kEmbedFours = 2;

// T is the dtype of the table.
template <class T>
struct Embedding : NormRows {
  const T* table;         // rows `stride` apart; it may lie in host memory
  int64_t stride, count;  // of rows
  const int64_t* ids;     // [n]
  const float *weight, *bias;
  float* out;  // [n, c]
};

// A row of the table as it comes, so that nothing waits for it before it is used. NaN where the id has none.
template <class T>
struct TableRow {
  Vector<T, 4> fours[kEmbedFours];
  bool there;

  __device__ __forceinline__ void load(const Embedding<T>& p, const Channels<kEmbedFours>& channels, int64_t id) {
    there = id >= 0 && id < p.count;
    if (!there) return;
#pragma unroll
    for (int j = 0; j < kEmbedFours; j++) {
      if (channels.exists(j)) fours[j] = load_vector<T, 4>(p.table + id * p.stride + channels.channel(j));
    }
  }
  __device__ __forceinline__ float4 get(int j) const {
    const T* v = fours[j].values;
    return there ? make_float4(v[0], v[1], v[2], v[3]) : all4(nanf(""));
  }
};

// A block takes a token in every gridDim.x, and has the row of the next one on its way while it works on one.
template <class T>
__global__ void __launch_bounds__(kEmbedThreads) embed_kernel(const Embedding<T> p) {
  __shared__ GroupSums sums;
  const Channels<kEmbedFours> channels(p);
  const auto each = [&](auto f) {
#pragma unroll
    for (int j = 0; j < kEmbedFours; j++) {
      if (channels.exists(j)) f(j, channels.channel(j));
    }
  };
  float4 weight[kEmbedFours], bias[kEmbedFours];
  each([&](int j, uint32_t c) { weight[j] = float4_of(p.weight + c), bias[j] = float4_of(p.bias + c); });
  wait_for_previous();
  let_next_begin();
  const auto id_of = [&](uint32_t t) { return t < p.n ? p.ids[t] : -1; };
  TableRow<T> row;
  row.load(p, channels, id_of(blockIdx.x));
  int64_t next = id_of(blockIdx.x + gridDim.x);
  uint32_t round = 0;
#pragma unroll 1
  for (uint32_t t = blockIdx.x; t < p.n; t += gridDim.x, round++) {
    float4 x[kEmbedFours];
#pragma unroll
    for (int j = 0; j < kEmbedFours; j++) x[j] = channels.exists(j) ? row.get(j) : all4(0.0f);
    row.load(p, channels, next);
    next = id_of(t + 2 * gridDim.x);
    const RowScale scale = scale_of_row<false>(p, channels, x, sums, round);
    each([&](int j, uint32_t c) {
      store(p.out + size_t{t} * p.c + c,
            each4(scale(x[j]), weight[j], [](float value, float f) { return value * f; }) + bias[j]);
    });
  }
}

template <class T>
void launch_embed(const char* op, cudaStream_t stream, Embedding<T> p) {
  const uint32_t groups = (p.c + kGroup - 1) / kGroup, threads = (groups + kEmbedFours - 1) / kEmbedFours * 32;
  const int64_t beside = std::min<uint32_t>(kEmbedThreads / threads, 16);  // on a multiprocessor
  const int64_t together = device_attribute(op, cudaDevAttrMultiProcessorCount) * beside;
  p.parts = 1, p.inverse_c = 1.0f / static_cast<float>(p.c);
  launch_chained(op, stream, embed_kernel<T>, dim3(static_cast<unsigned>(std::min<int64_t>(p.n, together))),
                 dim3(threads), 0, p);
}

// float32 [n, C]: n and C are 1 or more, and their product less than 2^32.
inline Tensor embed(const char* op, const Launch& launch, const Tensor& ids, const Tensor& table,
                    const Tensor& norm_weight, const Tensor& norm_bias, float eps) {
  const Table layout = check_table(op, table);
  const char* from = table_on_device(op, table, layout, ids);
  if (alignment_bits(layout, from, from) % 16 != 0) {
    fail(op, "table must begin on a boundary of 16 bytes, and so must each row");
  }
  const Tensor index = as_contiguous(ids), weight = as_aligned(norm_weight), bias = as_aligned(norm_bias);
  Tensor x = empty_rows(norm_weight, ids, {ids.size(0), table.size(1)});
  dispatch_float_or_half(table.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    Embedding<T> p{};
    p.n = static_cast<uint32_t>(ids.size(0)), p.c = static_cast<uint32_t>(table.size(1)), p.eps = eps;
    p.table = reinterpret_cast<const T*>(from), p.stride = table.stride(0), p.count = layout.rows;
    p.ids = data<int64_t>(index), p.weight = data<float>(weight), p.bias = data<float>(bias);
    p.out = mutable_data<float>(x);
    launch_embed(op, launch.stream, p);
  });
  return x;
}

}  // namespace cog_rwkv

// The scans of decay_scan.h on CUDA: the matrix in registers, float32 throughout.
#pragma once

#include "aligned.cuh"
#include "decay_chunks.h"
#include "decay_scan.h"
#include "decay_scan_args.h"
#include "mma.cuh"
#include "reduce.cuh"

namespace cog_rwkv {

constexpr int kTile = 8;  // tokens at a time

template <class T>
struct ScanShared {
  alignas(16) T raw[5][kTile * kWide];  // p, q, x, z, w
  alignas(16) float p[kTile * kWide], q[kTile * kWide], x[kTile * kWide], z[kTile * kWide];
  alignas(16) float decay[kTile * kWide], log_decay[kTile * kWide], product[kTile * kWide];
  float out[kTile * kWide], d_w[kTile * kWide], bonus[kTile];
};

// Tokens t to t + n of a head, in the order in which they are taken: the i-th is at index(i).
struct ScanTile {
  int64_t first, stride;
  int n;
  __device__ int64_t at(int i, int column) const { return first + i * stride + column; }
};

template <class Kind, class T>
__device__ __forceinline__ ScanTile tile_at(const Scan<T>& s, int64_t sequence, int64_t head, int64_t done) {
  const int n = static_cast<int>(min(s.tokens - done, int64_t{kTile}));
  const int64_t t = Kind::reverse ? s.tokens - 1 - done : done, stride = s.heads * kWide;
  return {((sequence * s.tokens + t) * s.heads + head) * kWide, Kind::reverse ? -stride : stride, n};
}

template <class Kind, class T>
__device__ __forceinline__ void start_tile(ScanShared<T>& shared, const Scan<T>& s, const ScanTile& tile) {
  constexpr int kPer16 = 16 / sizeof(T), kPieces = kWide / kPer16;
  for (int i = threadIdx.x; i < kTile * kPieces; i += blockDim.x) {
    const int row = i / kPieces, column = i % kPieces * kPer16, to = row * kWide + column;
    const bool inside = row < tile.n;
    const int64_t at = tile.at(inside ? row : 0, column);
    copy16(shared.raw[0] + to, s.p + at, inside);
    copy16(shared.raw[1] + to, s.q + at, inside);
    copy16(shared.raw[2] + to, s.x + at, inside);
    if constexpr (Kind::rows) copy16(shared.raw[3] + to, s.z + at, inside);
    if constexpr (!Kind::constant) copy16(shared.raw[4] + to, static_cast<const T*>(s.w) + at, inside);
  }
}

// From what was copied to float32, the decays, and the part of the bonus that all rows share.
template <class Kind, class T>
__device__ __forceinline__ void widen_tile(ScanShared<T>& shared, const Scan<T>& s, const ScanTile& tile,
                                           int64_t head) {
  for (int i = threadIdx.x; i < kTile * kWide; i += blockDim.x) {
    const int column = i % kWide;
    shared.p[i] = static_cast<float>(shared.raw[0][i]);
    shared.q[i] = static_cast<float>(shared.raw[1][i]);
    shared.x[i] = static_cast<float>(shared.raw[2][i]);
    if constexpr (Kind::rows) shared.z[i] = static_cast<float>(shared.raw[3][i]);
    float w;
    if constexpr (Kind::constant) {
      w = static_cast<const float*>(s.w)[head * kWide + column];
    } else {
      w = static_cast<float>(shared.raw[4][i]);
    }
    const float log_decay = -expf(w);
    shared.decay[i] = expf(log_decay);
    if constexpr (Kind::rows && Kind::reverse) {
      shared.log_decay[i] = log_decay;
      shared.product[i] = i / kWide < tile.n ? s.product[tile.at(i / kWide, column)] : 0.0f;
    }
  }
  __syncthreads();
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  for (int t = threadIdx.x / 32; t < kTile; t += warps) {
    float sum = 0.0f;
    for (int column = lane; column < kWide; column += 32) {
      const float factor = Kind::rows ? 1.0f : s.u[head * kWide + column];
      sum += factor * shared.q[t * kWide + column] * shared.x[t * kWide + column];
    }
    sum = reduce_lanes(sum, Add{});
    if (lane == 0) shared.bonus[t] = sum;
  }
  __syncthreads();
}

// The thread's part of M: two rows, and of every 16 columns the four from 4 quarter on.
struct ScanPart {
  float m[2][16];
  int row, quarter;
};

template <class F>
__device__ __forceinline__ void each_of_part(ScanPart& part, F f) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int j = 0; j < 16; j++) f(part.m[i][j], part.row + i, j / 4 * 16 + part.quarter * 4 + j % 4);
  }
}

__device__ __forceinline__ void load_part(float (&to)[16], const float* row, int quarter) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float4 v = *reinterpret_cast<const float4*>(row + j * 16 + quarter * 4);
    to[4 * j] = v.x, to[4 * j + 1] = v.y, to[4 * j + 2] = v.z, to[4 * j + 3] = v.w;
  }
}

// One token: out[i] = (M x) of the thread's two rows, the same in the four threads that share them; then M goes on.
template <class Kind, class T>
__device__ __forceinline__ void scan_token(ScanPart& part, float (&out)[2], const ScanShared<T>& shared, int t) {
  float x[16], q[16], decay[16];
  load_part(x, shared.x + t * kWide, part.quarter);
  load_part(q, shared.q + t * kWide, part.quarter);
  if constexpr (!Kind::rows) load_part(decay, shared.decay + t * kWide, part.quarter);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float p = shared.p[t * kWide + part.row + i], row_decay = shared.decay[t * kWide + part.row + i];
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < 16; j++) {
      sums[j % 2] += part.m[i][j] * x[j];
      part.m[i][j] = part.m[i][j] * (Kind::rows ? row_decay : decay[j]) + p * q[j];
    }
    out[i] = reduce_lanes<4>(sums[0] + sums[1], Add{});
  }
}

// What follows the tokens: per row the gradient of u, and the running sum that gives that of w (see scan_gradients).
struct ScanSums {
  float d_u[2], d_w[2], flow[2];
};

template <class Kind, class T>
__device__ __forceinline__ void finish_token(ScanSums& sums, const float (&found)[2], ScanShared<T>& shared,
                                             const float (&u)[2], const ScanPart& part, int t) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int at = t * kWide + part.row + i;
    const float p = shared.p[at], bonus = shared.bonus[t];
    shared.out[at] = found[i] + (Kind::rows ? u[i] : 1.0f) * p * bonus;
    if constexpr (Kind::rows) {
      const float product = found[i] * shared.z[at];
      if constexpr (!Kind::reverse) {
        sums.d_u[i] += shared.z[at] * p * bonus;
        shared.d_w[at] = product;  // for the other scan
      } else {
        // With F = sum over values of dS S after a token: the log-decay has F - k d_k, and before it F is that + r d_r.
        const float d_log = sums.flow[i] - product, log_decay = shared.log_decay[at];
        const float d_w = log_decay > -100.0f ? d_log * log_decay : 0.0f;
        sums.flow[i] = d_log + shared.product[at];
        shared.d_w[at] = d_w;
        sums.d_w[i] += d_w;
      }
    }
  }
}

template <class Kind, class T>
__device__ __forceinline__ void write_tile(const ScanShared<T>& shared, const Scan<T>& s, const ScanTile& tile,
                                           int first_row, int rows) {
  for (int i = threadIdx.x; i < tile.n * rows; i += blockDim.x) {
    const int t = i / rows, row = first_row + i % rows;
    const int64_t to = tile.at(t, row);
    s.out[to] = static_cast<T>(shared.out[t * kWide + row]);
    if constexpr (Kind::rows && !Kind::reverse) s.product[to] = shared.d_w[t * kWide + row];
    if constexpr (Kind::rows && Kind::reverse && !Kind::constant)
      s.d_w[to] = static_cast<T>(shared.d_w[t * kWide + row]);
  }
}

// A block a sequence, head, and share of the rows of M: two threads a row.
template <class Kind, class T>
__global__ void scan_kernel(const Scan<T> s, int shares) {
  __shared__ ScanShared<T> shared;
  const int64_t block = blockIdx.x / shares, sequence = block / s.heads, head = block % s.heads;
  const int rows = kWide / shares, first_row = static_cast<int>(blockIdx.x % shares) * rows;
  const int64_t corner = block * kWide * kWide;
  ScanPart part{.row = first_row + static_cast<int>(threadIdx.x) / 4 * 2, .quarter = static_cast<int>(threadIdx.x) % 4};
  each_of_part(part, [&](float& m, int row, int column) {
    m = s.begin[corner + (Kind::rows ? column * kWide + row : row * kWide + column)];
  });
  ScanSums sums = {};
  float u[2];
  for (int i = 0; i < 2; i++) u[i] = s.u[head * kWide + part.row + i];
  if constexpr (Kind::rows && Kind::reverse) {
    each_of_part(part, [&](float& m, int row, int column) {
      sums.flow[row - part.row] += m * s.last[corner + row * kWide + column];
    });
    for (float& flow : sums.flow) flow = reduce_lanes<4>(flow, Add{});
  }
  if (s.tokens > 0) start_tile<Kind>(shared, s, tile_at<Kind>(s, sequence, head, 0));
  for (int64_t done = 0; done < s.tokens; done += kTile) {
    const ScanTile tile = tile_at<Kind>(s, sequence, head, done);
    wait_for_copies();
    __syncthreads();
    widen_tile<Kind>(shared, s, tile, head);
    if (done + kTile < s.tokens) start_tile<Kind>(shared, s, tile_at<Kind>(s, sequence, head, done + kTile));
    for (int t = 0; t < tile.n; t++) {
      float found[2];
      scan_token<Kind>(part, found, shared, t);
      if (part.quarter == 0) finish_token<Kind>(sums, found, shared, u, part, t);
    }
    __syncthreads();
    write_tile<Kind>(shared, s, tile, first_row, rows);
  }
  if (s.end != nullptr)
    each_of_part(part, [&](float& m, int row, int column) { s.end[corner + row * kWide + column] = m; });
  if (part.quarter != 0) return;
  for (int i = 0; i < 2; i++) {
    if constexpr (Kind::rows && !Kind::reverse) s.d_u[block * kWide + part.row + i] = sums.d_u[i];
    if constexpr (Kind::rows && Kind::reverse && Kind::constant) s.d_w_sum[block * kWide + part.row + i] = sums.d_w[i];
  }
}

template <class Kind, class T>
void launch_scan(const char* op, const Launch& launch, const Scan<T>& s, int64_t batch) {
  const int64_t heads = batch * s.heads;
  if (heads == 0) return;
  if (heads > INT32_MAX / 4) fail(op, "r: there are more than 2^29 heads to compute");
  const int multiprocessors = device_attribute(op, cudaDevAttrMultiProcessorCount);
  const int shares = heads < multiprocessors ? 4 : heads < 2 * multiprocessors ? 2 : 1;
  const int threads = 2 * kWide / shares;
  scan_kernel<Kind><<<static_cast<unsigned>(heads * shares), threads, 0, launch.stream>>>(s, shares);
  launch.check();
}

template <bool constant>
std::tuple<Tensor, Tensor> scan_forward_cuda(const char* op, const Tensor& r, const Tensor& w, const Tensor& k,
                                             const Tensor& v, const Tensor& u, const Tensor& state) {
  check_decay_scan(op, r, w, k, v, u, state, constant);
  const Launch launch(op, r);
  const Tensor in[4] = {as_aligned(r), as_aligned(w), as_aligned(k), as_aligned(v)};
  const Tensor bonus = as_contiguous(u), before = as_contiguous(state);
  const Tensor y = empty_tensor(r, r.sizes()), after = empty_tensor(state, state.sizes());
  dispatch_float_or_half(r.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const Scan<T> s{.p = data<T>(in[3]),
                    .q = data<T>(in[2]),
                    .x = data<T>(in[0]),
                    .w = in[1].const_data_ptr(),
                    .u = data<float>(bonus),
                    .begin = data<float>(before),
                    .end = mutable_data<float>(after),
                    .out = mutable_data<T>(y),
                    .tokens = r.size(1),
                    .heads = r.size(2)};
    if (uses_chunks<T>(op, s.tokens)) return chunk_forward(op, launch, s, r.size(0), constant, after);
    launch_scan<ScanKind<false, false, constant>>(op, launch, s, r.size(0));
  });
  return {y, after};
}

template <bool constant>
ScanGradients scan_backward_cuda(const char* op, const Tensor& d_y, const Tensor& d_end, const Tensor& r,
                                 const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& u,
                                 const Tensor& state) {
  check_decay_scan_backward(op, d_y, d_end, r, w, k, v, u, state, constant);
  const Launch launch(op, r);
  const Tensor rs = as_aligned(r), ws = as_aligned(w), ks = as_aligned(k), vs = as_aligned(v), ds = as_aligned(d_y);
  const Tensor bonus = as_contiguous(u), before = as_contiguous(state), after = as_contiguous(d_end);
  const int64_t batch = r.size(0), heads = r.size(2);
  const auto alike = [&] { return empty_tensor(r, r.sizes()); };
  const auto part = [&] { return empty_tensor(state, {batch, heads, kScanHead}); };
  const Tensor d_r = alike(), d_k = alike(), d_v = alike(), d_w = constant ? part() : alike(), d_u = part();
  const Tensor d_state = empty_tensor(state, state.sizes()), last = empty_tensor(state, state.sizes());
  const Tensor product = empty_tensor(state, r.sizes());
  dispatch_float_or_half(r.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const Scan<T> common{.w = ws.const_data_ptr(),
                         .u = data<float>(bonus),
                         .tokens = r.size(1),
                         .heads = heads,
                         .product = mutable_data<float>(product),
                         .last = data<float>(last),
                         .d_u = mutable_data<float>(d_u),
                         .d_w = constant ? nullptr : mutable_data<T>(d_w),
                         .d_w_sum = constant ? mutable_data<float>(d_w) : nullptr};
    const auto with = [&](const Tensor& p, const Tensor& q, const Tensor& x, const Tensor& out, const Tensor& begin) {
      Scan<T> s = common;
      s.p = data<T>(p), s.q = data<T>(q), s.x = data<T>(x), s.out = mutable_data<T>(out), s.begin = data<float>(begin);
      return s;
    };
    Scan<T> for_r = with(ks, vs, ds, d_r, before), for_k = with(rs, ds, vs, d_k, after);
    Scan<T> for_v = with(ds, rs, ks, d_v, after);
    for_r.z = data<T>(rs), for_r.end = mutable_data<float>(last);
    for_k.z = data<T>(ks), for_v.end = mutable_data<float>(d_state);
    if (uses_chunks<T>(op, common.tokens))
      return chunk_backward(op, launch, for_r, for_v, for_k, batch, constant, last);
    launch_scan<ScanKind<true, false, constant>>(op, launch, for_r, batch);
    launch_scan<ScanKind<false, true, constant>>(op, launch, for_v, batch);
    launch_scan<ScanKind<true, true, constant>>(op, launch, for_k, batch);
  });
  return {d_r, d_w, d_k, d_v, d_u, d_state};
}

}  // namespace cog_rwkv

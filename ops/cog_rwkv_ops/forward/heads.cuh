// All that happens inside a head while one token of each sequence is read: the keys and the in-context rate made
// ready, the WKV-7 step, the group norm, the bonus and the gate. (time_mix_prepare, wkv7_ and time_mix_output in one.)
#pragma once

#include "../csrc/chain.cuh"
#include "../wkv7/stepwise.cuh"

namespace cog_rwkv {

// W is the dtype of the activations, S that of the states.
template <class W, class S>
struct HeadStep {
  const W *r, *w, *k, *v, *a, *g, *v_mix;        // [n, heads, 64], before tanh', sigmoid and the like; v_mix null
  W* v_first;                                    // in the first layer, where v_first is written; else it is read
  const float *w0, *a0, *v0;                     // [heads, 64], to be added to w, a and v_mix
  const float *k_k, *k_a, *r_k, *weight, *bias;  // [heads, 64]
  S* state;                                      // rows of [heads, 64, 64], `stride` apart
  const int64_t* rows;                           // [n]
  W* out;                                        // [n, heads, 64]
  int64_t heads, pool_rows, stride;
  float eps;
};

// What a head's threads share, float32.
struct HeadInputs {
  float in[6][kHead];  // as stepwise.cuh has them: r, decay, k, v, -kk, kk * a
  float y[kHead];
  float weight[kHead], bias[kHead];  // of the group norm
};

// The weights of two channels of a head, lane and lane + 32, and what the end needs of a token's inputs.
struct HeadLane {
  float w0[2], a0[2], v0[2], k_k[2], k_a[2], r_k[2], gate[2], bonus;
};

template <class W, class S>
__device__ __forceinline__ void load_weights(const HeadStep<W, S>& p, HeadLane& l, HeadInputs& shared, int64_t head,
                                             int lane) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int64_t c = head * kHead + j * 32 + lane;
    l.w0[j] = p.w0[c], l.a0[j] = p.a0[c], l.v0[j] = p.v_mix == nullptr ? 0.0f : p.v0[c];
    l.k_k[j] = p.k_k[c], l.k_a[j] = p.k_a[c], l.r_k[j] = p.r_k[c];
    shared.weight[j * 32 + lane] = p.weight[c], shared.bias[j * 32 + lane] = p.bias[c];
  }
}

// By one warp: from the projections of a token's head to the inputs of the recurrence.
template <class W, class S>
__device__ __forceinline__ void prepare_head(const HeadStep<W, S>& p, HeadLane& l, HeadInputs& shared, int64_t at,
                                             int lane) {
  float kk[2], rate[2], squares = 0.0f, bonus = 0.0f;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int c = j * 32 + lane;
    const float r = static_cast<float>(p.r[at + c]), k = static_cast<float>(p.k[at + c]);
    float v = static_cast<float>(p.v[at + c]);
    if (p.v_mix == nullptr) {
      p.v_first[at + c] = static_cast<W>(v);
    } else {
      v += (static_cast<float>(p.v_first[at + c]) - v) * sigmoid(static_cast<float>(p.v_mix[at + c]) + l.v0[j]);
    }
    rate[j] = sigmoid(static_cast<float>(p.a[at + c]) + l.a0[j]);
    kk[j] = k * l.k_k[j];
    squares += kk[j] * kk[j];
    const float key = k * (1.0f + (rate[j] - 1.0f) * l.k_a[j]);
    bonus += r * key * l.r_k[j];
    l.gate[j] = static_cast<float>(p.g[at + c]);
    shared.in[kR][c] = r;
    shared.in[kW][c] = expf(-0.60653065971263342f * sigmoid(static_cast<float>(p.w[at + c]) + l.w0[j]));  // e^-0.5
    shared.in[kK][c] = key;
    shared.in[kV][c] = v;
  }
  l.bonus = reduce_lanes(bonus, Add{});
  const float scale = 1.0f / fmaxf(sqrtf(reduce_lanes(squares, Add{})), 1e-12f);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int c = j * 32 + lane;
    shared.in[kA][c] = -(kk[j] * scale);
    shared.in[kB][c] = kk[j] * scale * rate[j];
  }
}

// By the same warp: from the recurrence's output to what the output projection reads.
template <class W, class S>
__device__ __forceinline__ void finish_head(const HeadStep<W, S>& p, const HeadLane& l, const HeadInputs& shared,
                                            int64_t at, int lane) {
  float y[2] = {shared.y[lane], shared.y[lane + 32]};
  const float mean = reduce_lanes(y[0] + y[1], Add{}) * (1.0f / kHead);
  y[0] -= mean, y[1] -= mean;
  const float variance = reduce_lanes(y[0] * y[0] + y[1] * y[1], Add{}) * (1.0f / kHead);
  const float scale = 1.0f / sqrtf(variance + p.eps);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int c = j * 32 + lane;
    const float normal = y[j] * scale * shared.weight[c] + shared.bias[c];
    p.out[at + c] = static_cast<W>((normal + l.bonus * shared.in[kV][c]) * l.gate[j]);
  }
}

// A block a head of a token. The state does not depend on the kernel before, so it is on its way before the wait.
template <class W, class S>
__global__ void __launch_bounds__(kThreads, 4) head_step_kernel(const HeadStep<W, S> p) {
  __shared__ __align__(16) HeadInputs shared;
  const int64_t token = blockIdx.x / p.heads, head = blockIdx.x % p.heads, row = p.rows[token];
  const int thread = threadIdx.x, value = thread / 4, quarter = thread % 4;
  const bool ok = row >= 0 && row < p.pool_rows;
  S* state = p.state + (ok ? row : 0) * p.stride + (head * kHead + value) * kHead + quarter * 4;
  float4 s[4];
#pragma unroll
  for (int j = 0; j < 4; j++) s[j] = load4(state + j * 16, true);
  HeadLane lane_values;
  if (thread < 32) load_weights(p, lane_values, shared, head, thread);
  wait_for_previous();
  let_next_begin();
  const int64_t at = (token * p.heads + head) * kHead;
  if (thread < 32) prepare_head(p, lane_values, shared, at, thread);
  __syncthreads();
  const float* in = &shared.in[0][0];
  const float4* vectors = reinterpret_cast<const float4*>(in) + quarter;
  float removed = 0.0f, y = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; j++) removed += dot4(s[j], vectors[kA * 16 + j * 4]);
  removed = reduce_lanes<4>(removed, Add{});
  const float v = shared.in[kV][value];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    s[j] = step4(s[j], vectors[kW * 16 + j * 4], removed, vectors[kB * 16 + j * 4], v, vectors[kK * 16 + j * 4]);
    y += dot4(s[j], vectors[kR * 16 + j * 4]);
  }
  y = reduce_lanes<4>(y, Add{});
  if (quarter == 0) shared.y[value] = ok ? y : row == -1 ? 0.0f : nanf("");  // -1: norm_shift.cuh
  if (ok) {
#pragma unroll
    for (int j = 0; j < 4; j++) store4(state + j * 16, s[j], true);
  }
  __syncthreads();
  if (thread < 32) finish_head(p, lane_values, shared, at, thread);
}

template <class W, class S>
void head_steps(const char* op, cudaStream_t stream, const HeadStep<W, S>& p, int64_t n) {
  launch_chained(op, stream, head_step_kernel<W, S>, dim3(static_cast<unsigned>(n * p.heads)), dim3(kThreads), 0, p);
}

}  // namespace cog_rwkv

// wkv7 token by token: for decoding, and for sequences too short for chunks.
#pragma once

#include "../csrc/math.h"
#include "../csrc/reduce.cuh"
#include "work.cuh"

namespace cog_rwkv {

constexpr int kThreads = 256;       // four for each of the 64 values, with 16 keys each
constexpr int kInputs = 6 * kHead;  // of one token and head: r, w, k, v, a, b

// Of the keys that a thread holds, four at a time, at 16 * j + 4 * quarter.
__device__ __forceinline__ float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// s * decay + removed * b + value * k
__device__ __forceinline__ float4 step4(float4 s, float4 decay, float removed, float4 b, float value, float4 k) {
  return make_float4(s.x * decay.x + removed * b.x + value * k.x, s.y * decay.y + removed * b.y + value * k.y,
                     s.z * decay.z + removed * b.z + value * k.z, s.w * decay.w + removed * b.w + value * k.w);
}

// Value i of a token's inputs, as the recurrence wants it.
template <class T, class S>
__device__ __forceinline__ float load_input(const Wkv7<T, S>& p, int64_t token, int64_t head, int i) {
  const float x = static_cast<float>(p.in[i / kHead][(token * p.heads + head) * kHead + i % kHead]);
  return i / kHead == kW ? expf(-0.60653065971263342f * sigmoid(x)) : x;  // e^-0.5
}

// A block a sequence and head: it walks the tokens with the state in registers. The inputs of the next token are
// fetched while one is computed; two buffers in shared memory, so that one barrier a token is enough.
template <class T, class S>
__global__ void __launch_bounds__(kThreads) wkv7_kernel(const Wkv7<T, S> p) {
  __shared__ __align__(16) float buffers[2][kInputs];
  wait_for_previous();
  let_next_begin();
  const int64_t i = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  const Sequence s = sequence_of_block(p, i);
  if (p.rows != nullptr) fill_gaps(p, i, head, s.begin == s.end);
  const int thread = threadIdx.x, value = thread / 4, quarter = thread % 4;
  const bool lost = s.end - s.begin > p.longest && !p.is_candidate(s, i, p.longest + 1);  // to the kernels of long ones
  if (!s.row_ok || lost) return fill_nan(p, head, s.begin, s.end);
  if (!p.takes(s) || (s.begin == s.end && p.state == p.state_out)) return;

  const int64_t at = (head * kHead + value) * kHead + quarter * 4;
  float4 state[4];
#pragma unroll
  for (int j = 0; j < 4; j++) state[j] = load4(p.state + s.row * p.in_stride + at + j * 16, p.aligned);

  float next[2] = {0.0f, 0.0f};
  const bool second = thread + kThreads < kInputs;
  if (s.begin < s.end) {
    next[0] = load_input(p, s.begin, head, thread);
    if (second) next[1] = load_input(p, s.begin, head, thread + kThreads);
  }
  for (int64_t t = s.begin; t < s.end; t++) {
    float* in = buffers[(t - s.begin) % 2];
    in[thread] = next[0];
    if (second) in[thread + kThreads] = next[1];
    __syncthreads();
    if (t + 1 < s.end) {
      next[0] = load_input(p, t + 1, head, thread);
      if (second) next[1] = load_input(p, t + 1, head, thread + kThreads);
    }
    const float4* vectors = reinterpret_cast<const float4*>(in) + quarter;
    float removed = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) removed += dot4(state[j], vectors[kA * 16 + j * 4]);
    removed = reduce_lanes<4>(removed, Add{});
    const float v = in[kV * kHead + value];
    float y = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      state[j] =
          step4(state[j], vectors[kW * 16 + j * 4], removed, vectors[kB * 16 + j * 4], v, vectors[kK * 16 + j * 4]);
      y += dot4(state[j], vectors[kR * 16 + j * 4]);
    }
    y = reduce_lanes<4>(y, Add{});
    if (quarter == 0) p.y[(t * p.heads + head) * kHead + value] = static_cast<T>(y);
  }
#pragma unroll
  for (int j = 0; j < 4; j++) store4(p.state_out + s.row * p.out_stride + at + j * 16, state[j], p.aligned);
}

}  // namespace cog_rwkv

// A Fourier transform of N complex numbers inside one block: N / 16 threads, 16 numbers each in registers, exchanged
// through shared memory. Forward it decimates in frequency and leaves the numbers in an order of its own; the inverse
// takes them in that order, so no step only moves data. Each pass reads and writes the same places of a thread.
#pragma once

#include <cuda_runtime.h>

namespace cog_rwkv {

__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ float2 operator-(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
__device__ __forceinline__ float2 operator*(float2 a, float2 b) {
  return {fmaf(a.x, b.x, -a.y * b.y), fmaf(a.x, b.y, a.y * b.x)};
}

// e^(-2 pi i j / 16), or its conjugate for the inverse. Only called with j known to the compiler.
template <bool inverse>
__device__ __forceinline__ float2 root16(int j) {
  constexpr float c[10] = {1.0f,           0.9238795325f,  0.7071067812f,  0.3826834324f, 0.0f,
                           -0.3826834324f, -0.7071067812f, -0.9238795325f, -1.0f,         -0.9238795325f};
  constexpr float s[10] = {0.0f,          0.3826834324f, 0.7071067812f, 0.9238795325f, 1.0f,
                           0.9238795325f, 0.7071067812f, 0.3826834324f, 0.0f,          -0.3826834324f};
  return {c[j], inverse ? s[j] : -s[j]};
}

template <bool inverse>
__device__ __forceinline__ void dft4(float2& a, float2& b, float2& c, float2& d) {
  const float2 p = a + c, q = a - c, r = b + d, m = b - d;
  const float2 turned = inverse ? float2{-m.y, m.x} : float2{m.y, -m.x};  // times i or -i
  a = p + r;
  b = q + turned;
  c = p - r;
  d = q - turned;
}

// The transform of `size` numbers, a power of two up to 16, in the natural order.
template <int size, bool inverse>
__device__ __forceinline__ void dft(float2* v) {
  if constexpr (size == 2) {
    const float2 a = v[0];
    v[0] = a + v[1];
    v[1] = a - v[1];
  } else if constexpr (size == 4) {
    dft4<inverse>(v[0], v[1], v[2], v[3]);
  } else {
    constexpr int columns = size / 4;  // numbers columns * n + m: first over n, then over m
    float2 y[size];
#pragma unroll
    for (int m = 0; m < columns; m++) {
      dft4<inverse>(v[m], v[columns + m], v[2 * columns + m], v[3 * columns + m]);
#pragma unroll
      for (int k = 0; k < 4; k++)
        y[k * columns + m] = m * k ? v[k * columns + m] * root16<inverse>(m * k * (16 / size)) : v[k * columns + m];
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      dft<columns, inverse>(y + k * columns);
#pragma unroll
      for (int l = 0; l < columns; l++) v[k + 4 * l] = y[k * columns + l];
    }
  }
}

template <int N>
class BlockFft {
 public:
  static constexpr int threads = N / 16;
  static constexpr int shared_numbers = N + N / 16;

  __device__ explicit BlockFft(float2* shared) : shared_(shared) { roots<N, 0>(); }

  // v[j] is number thread + j * threads. All threads of the block call it, with nobody still reading `shared` but at
  // the places of an inverse before.
  __device__ __forceinline__ void forward(float2 (&v)[16]) const { forward_from<N, 0>(v); }

  // From the order that forward() leaves to the order that it takes, times N.
  __device__ __forceinline__ void inverse(float2 (&v)[16]) const { inverse_to<N, 0>(v); }

 private:
  float2* shared_;
  float2 root_[3];  // of this thread: e^(-2 pi i (thread % (M / 16)) / M), for each pass

  template <int M, int pass>
  __device__ __forceinline__ void roots() {
    if constexpr (M > 16) {
      float s, c;
      sincospif(-2.0f * static_cast<float>(threadIdx.x % (M / 16)) / M, &s, &c);
      root_[pass] = {c, s};
      roots<M / 16, pass + 1>();
    }
  }

  // One number of padding after each 16 keeps the threads of a warp on different banks in every pass.
  template <int M>
  __device__ __forceinline__ float2& place(int j) const {
    int at;
    if constexpr (M > 16) {
      constexpr int stride = M / 16;
      const int t = threadIdx.x;
      at = t / stride * M + t % stride + j * stride;
    } else {
      at = threadIdx.x * 16 + j;
    }
    return shared_[at + at / 16];
  }

  // v[j] *= root^j
  template <bool inverse>
  __device__ __forceinline__ static void twist(float2 (&v)[16], float2 root) {
    if (inverse) root.y = -root.y;
    const float2 two = root * root, three = two * root, four = two * two;
    const float2 eight = four * four, twelve = eight * four;
    const float2 low[4] = {{1.0f, 0.0f}, root, two, three};
    const float2 high[4] = {{1.0f, 0.0f}, four, eight, twelve};
#pragma unroll
    for (int j = 1; j < 16; j++) v[j] = v[j] * (j < 4 ? low[j] : j % 4 == 0 ? high[j / 4] : high[j / 4] * low[j % 4]);
  }

  template <int M, int pass>
  __device__ __forceinline__ void forward_from(float2 (&v)[16]) const {
    if constexpr (M > 16) {
      dft<16, false>(v);
      twist<false>(v, root_[pass]);
#pragma unroll
      for (int j = 0; j < 16; j++) place<M>(j) = v[j];
      __syncthreads();
#pragma unroll
      for (int j = 0; j < 16; j++) v[j] = place<M / 16>(j);
      forward_from<M / 16, pass + 1>(v);
    } else {
#pragma unroll
      for (int j = 0; j < 16; j += M) dft<M, false>(v + j);
    }
  }

  template <int M, int pass>
  __device__ __forceinline__ void inverse_to(float2 (&v)[16]) const {
    if constexpr (M > 16) {
      inverse_to<M / 16, pass + 1>(v);
#pragma unroll
      for (int j = 0; j < 16; j++) place<M / 16>(j) = v[j];
      __syncthreads();
#pragma unroll
      for (int j = 0; j < 16; j++) v[j] = place<M>(j);
      twist<true>(v, root_[pass]);
      dft<16, true>(v);
    } else {
#pragma unroll
      for (int j = 0; j < 16; j += M) dft<M, true>(v + j);
    }
  }
};

}  // namespace cog_rwkv

// norm_shift_ on the CPU, a token at a time. Read by each_cpu.h.
#include "../layer_norm/kernel.h"

// sum = x + delta, or x; normed = layer norm of the sum before it is rounded; row by row.
template <class T>
void norm_rows(const T* x, const T* delta, const float* weight, const float* bias, T* sum, float* normed, int64_t begin,
               int64_t end, int64_t c_size, float eps) {
  for (int64_t i = begin * c_size; i < end * c_size; i += 16) {
    const int64_t left = end * c_size - i;
    V total = load_upto(x + i, left);
    if (delta != nullptr) total = total + load_upto(delta + i, left);
    store_upto(sum + i, total, left);
    store_upto(normed + i, total, left);
  }
  layer_norm_rows(normed, weight, bias, normed, begin, end, c_size, eps);
}

// out[m][c] = now[c] + (before[c] - now[c]) * mix[m][c]; `out_stride` elements from one m to the next.
template <class T>
void shift_row(const float* now, const float* before, const float* mix, int64_t mixes, int64_t c_size, T* out,
               int64_t out_stride) {
  for (int64_t c = 0; c < c_size; c += 16) {
    const int64_t left = c_size - c;
    const V x = load_upto(now + c, left);
    const V step = load_upto(before + c, left) - x;
    for (int64_t m = 0; m < mixes; ++m) {
      store_upto(out + m * out_stride + c, fma(step, load_upto(mix + m * c_size + c, left), x), left);
    }
  }
}

// token_shift_ on the CPU, a token at a time. Read by each_cpu.h.

// out[m][c] = x[c] + (before[c] - x[c]) * mix[m][c]; `out_stride` elements from one m to the next.
template <class Before, class T>
void token_shift_row(const T* x, const Before* before, const float* mix, int64_t mixes, int64_t c_size, T* out,
                     int64_t out_stride) {
  for (int64_t c = 0; c < c_size; c += 16) {
    const int64_t left = c_size - c;
    const V now = load_upto(x + c, left);
    const V step = load_upto(before + c, left) - now;
    for (int64_t m = 0; m < mixes; ++m) {
      store_upto(out + m * out_stride + c, fma(step, load_upto(mix + m * c_size + c, left), now), left);
    }
  }
}

// layer_norm on the CPU, a row at a time. Read by each_cpu.h.

template <class T>
void layer_norm_rows(const T* x, const float* weight, const float* bias, T* out, int64_t begin, int64_t end,
                     int64_t c_size, float eps) {
  for (int64_t n = begin; n < end; ++n) {
    const T* row = x + n * c_size;
    V total = splat(0.0f);
    for (int64_t c = 0; c < c_size; c += 16) total = total + load_upto(row + c, c_size - c);
    const float mean = sum(total) / static_cast<float>(c_size);
    V squares = splat(0.0f);
    int64_t c = 0;
    for (; c + 16 <= c_size; c += 16) {
      const V d = load(row + c) - splat(mean);
      squares = fma(d, d, squares);
    }
    float variance = 0.0f;
    for (; c < c_size; ++c) {
      const float d = static_cast<float>(row[c]) - mean;
      variance += d * d;
    }
    variance = (sum(squares) + variance) / static_cast<float>(c_size);
    const V scale = splat(1.0f / __builtin_sqrtf(variance + eps));
    for (c = 0; c < c_size; c += 16) {
      const int64_t left = c_size - c;
      const V y = (load_upto(row + c, left) - splat(mean)) * scale;
      store_upto(out + n * c_size + c, fma(y, load_upto(weight + c, left), load_upto(bias + c, left)), left);
    }
  }
}

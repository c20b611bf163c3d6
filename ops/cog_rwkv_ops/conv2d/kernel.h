// CPU kernels of conv2d in float. Read by each_cpu.h.
//
// A sum runs over the taps and, within, over the channels (for the weight: over the pixels), one after the other, so
// it depends on nothing but its operands.

constexpr int kPixels = kAccumulators / 2;  // places computed at once, two V of channels each

// Places [begin, end) of a gather, channels o to o + 32 of one group. `panel` is [taps][depth][32]; `zeros` [depth].
inline void gather_block(const Gather<float>& a, int64_t group, int64_t o, const float* panel, const float* zeros,
                         int64_t begin, int64_t end) {
  const int64_t in_c = a.groups * a.depth, out_c = a.groups * a.width, left = a.width - o;
  for (int64_t at = begin; at < end; at += kPixels) {
    const int count = end - at < kPixels ? static_cast<int>(end - at) : kPixels;
    int64_t n[kPixels], y[kPixels], x[kPixels];
    for (int t = 0; t < kPixels; ++t) {
      const int64_t place = at + (t < count ? t : 0);
      x[t] = place % a.w.size, y[t] = place / a.w.size % a.h.size, n[t] = place / a.w.size / a.h.size;
    }
    V low[kPixels], high[kPixels];
    for (int t = 0; t < kPixels; ++t) low[t] = high[t] = splat(0.0f);
    const float* weights = panel;
    for (int i = 0; i < a.h.taps; ++i) {
      for (int j = 0; j < a.w.taps; ++j, weights += a.depth * 32) {
        const float* from[kPixels];
        bool any = false;
        for (int t = 0; t < kPixels; ++t) {
          const int64_t row = y[t] * a.h.step + a.h.first + i * a.h.tap_step;
          const int64_t column = x[t] * a.w.step + a.w.first + j * a.w.tap_step;
          const bool inside = row >= 0 && row < a.h.in_size && column >= 0 && column < a.w.in_size;
          from[t] =
              inside ? a.in + ((n[t] * a.h.in_size + row) * a.w.in_size + column) * in_c + group * a.depth : zeros;
          any |= inside;
        }
        if (!any) continue;
        for (int64_t d = 0; d < a.depth; ++d) {
          const V w0 = load(weights + d * 32), w1 = load(weights + d * 32 + 16);
          for (int t = 0; t < kPixels; ++t) {
            const V value = splat(from[t][d]);
            low[t] = fma(value, w0, low[t]);
            high[t] = fma(value, w1, high[t]);
          }
        }
      }
    }
    for (int t = 0; t < count; ++t) {
      const int64_t row = y[t] * a.h.out_step + a.h.out_first, column = x[t] * a.w.out_step + a.w.out_first;
      const int64_t first = group * a.width + o;
      float* to = a.out + ((n[t] * a.h.out_size + row) * a.w.out_size + column) * out_c + first;
      if (a.bias != nullptr) low[t] = low[t] + load_upto(a.bias + first, left);
      store_upto(to, low[t], left);
      if (left <= 16) continue;
      if (a.bias != nullptr) high[t] = high[t] + load_upto(a.bias + first + 16, left - 16);
      store_upto(to + 16, high[t], left - 16);
    }
  }
}

// The gradient of weight[k to k + count, tap (r, s), all channels]: the places of the output one after the other.
inline void weight_rows(const WeightArgs& a, int64_t k, int count, int64_t r, int64_t s) {
  const ConvSizes& z = *a.sizes;
  const int64_t c_group = z.c_group(), group = k / z.k_group();
  for (int64_t c = 0; c < c_group; c += 32) {
    V low[kPixels], high[kPixels];
    for (int t = 0; t < kPixels; ++t) low[t] = high[t] = splat(0.0f);
    const int64_t left = c_group - c;
    for (int64_t n = 0; n < z.n; ++n) {
      for (int64_t p = a.rows.first[r]; p < a.rows.last[r]; ++p) {
        const int64_t row = p * z.rows.stride - z.rows.padding + r * z.rows.dilation;
        const float* x = a.x + (n * z.h + row) * z.w * z.c + group * c_group + c;
        const float* gradient = a.gradient + (n * z.p + p) * z.q * z.k + k;
        for (int64_t q = a.columns.first[s]; q < a.columns.last[s]; ++q) {
          const float* from = x + (q * z.columns.stride - z.columns.padding + s * z.columns.dilation) * z.c;
          const V x0 = load_upto(from, left), x1 = left > 16 ? load_upto(from + 16, left - 16) : splat(0.0f);
          for (int t = 0; t < kPixels; ++t) {
            const V value = splat(gradient[q * z.k + (t < count ? t : 0)]);
            low[t] = fma(value, x0, low[t]);
            high[t] = fma(value, x1, high[t]);
          }
        }
      }
    }
    for (int t = 0; t < count; ++t) {
      float* to = a.out + (((k + t) * z.r + r) * z.s + s) * c_group + c;
      store_upto(to, low[t], left);
      if (left > 16) store_upto(to + 16, high[t], left - 16);
    }
  }
}

inline int pixels_at_once() { return kPixels; }

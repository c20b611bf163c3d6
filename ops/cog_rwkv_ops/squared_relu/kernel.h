// squared_relu_linear on the CPU. Read by each_cpu.h.
//
// The rows of weight_t are added up for T tokens at a time, only those where one of the T has an active neuron. The
// order is fixed: within each 128 neurons one after the other, and the sums of 128 one after the other. Leaving out
// zeros changes none of these sums while the weights are finite, so then a result does not depend on which tokens
// share a pass. (Zero times an infinite weight is NaN, for a token beside one that has the row read.)

constexpr int64_t kChunk = 128;

// The active neurons of T tokens: index[i], value[i * T + t] = relu(k)^2, and start[c], where chunk c begins in them.
// Tokens from `tokens` on are zero.
template <int T>
void active_neurons(const float* k, int64_t f_size, int64_t tokens, int32_t* index, float* value, int32_t* start) {
  int32_t count = 0;
  for (int64_t f = 0; f < f_size; ++f) {
    if (f % kChunk == 0) start[f / kChunk] = count;
    bool active = false;
    for (int t = 0; t < T; ++t) {
      const float x = t < tokens ? k[t * f_size + f] : 0.0f;
      const float positive = x <= 0.0f ? 0.0f : x;  // NaN stays
      value[count * T + t] = positive * positive;
      active = active || positive != 0.0f;
    }
    index[count] = static_cast<int32_t>(f);
    count += active;
  }
  start[(f_size + kChunk - 1) / kChunk] = count;
}

// total[t][0 .. 16 * columns] += the rows begin to end of the list, for `left` columns at the most.
template <int T, int columns, class W>
COG_RWKV_INLINE void add_rows(const ActiveNeurons& active, int64_t begin, int64_t end, const W* weight_t,
                              int64_t c_size, int64_t left, int64_t tokens, float* total) {
  constexpr int64_t kAhead = 12;
  V sums[T * columns];
#pragma GCC unroll 32  // in full, or the sums are kept in memory
  for (int i = 0; i < T * columns; ++i) sums[i] = splat(0.0f);
  for (int64_t i = begin; i < end; ++i) {
    const W* row = weight_t + active.index[i] * c_size;
    const W* later = weight_t + active.index[i + kAhead < active.count ? i + kAhead : i] * c_size;
#pragma GCC unroll 32
    for (int j = 0; j < columns; ++j) {
      if (j * 16 * sizeof(W) % 64 == 0) __builtin_prefetch(later + j * 16, 0, 2);
      const V w = columns == 1 ? load_upto(row, left) : load(row + j * 16);
      for (int t = 0; t < T; ++t) sums[t * columns + j] = fma(w, splat(active.value[i * T + t]), sums[t * columns + j]);
    }
  }
  for (int t = 0; t < T; ++t) {
    if (t >= tokens) break;
    float* to = total + t * c_size;
#pragma GCC unroll 32
    for (int j = 0; j < columns; ++j) {
      if (columns == 1) {
        store_upto(to, load_upto(to, left) + sums[t], left);
      } else {
        store(to + j * 16, load(to + j * 16) + sums[t * columns + j]);
      }
    }
  }
}

// Columns c to c1, the widest tiles first.
template <int T, int columns, class W>
COG_RWKV_INLINE void add_columns(const ActiveNeurons& active, int64_t begin, int64_t end, const W* weight_t,
                                 int64_t c_size, int64_t c, int64_t c1, int64_t tokens, float* total) {
  for (; c + 16 * columns <= c1; c += 16 * columns) {
    add_rows<T, columns>(active, begin, end, weight_t + c, c_size, c1 - c, tokens, total + c);
  }
  if constexpr (columns > 1) {
    add_columns<T, columns == 24 ? 16 : columns / 2>(active, begin, end, weight_t, c_size, c, c1, tokens, total);
  } else if (c < c1) {
    add_rows<T, 1>(active, begin, end, weight_t + c, c_size, c1 - c, tokens, total + c);
  }
}

// total[tokens][c0 .. c1] = relu(k)^2 weight_t, for `blocks` lists of T tokens each, `tokens` in all.
template <int T, class W>
void squared_relu_rows(const ActiveNeurons* active, int64_t blocks, int64_t tokens, const W* weight_t, int64_t f_size,
                       int64_t c_size, int64_t c0, int64_t c1, float* total) {
  // For one token as many as there are registers: its rows lie anywhere, and long pieces of them are read faster.
  constexpr int columns = T == 1 && kAccumulators == 16 ? 24 : kAccumulators >= T ? kAccumulators / T : 1;
  for (int64_t n = 0; n < tokens; ++n) {
    for (int64_t c = c0; c < c1; ++c) total[n * c_size + c] = 0.0f;
  }
  for (int64_t chunk = 0; chunk * kChunk < f_size; ++chunk) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t begin = active[b].start[chunk], end = active[b].start[chunk + 1];
      if (begin == end) continue;
      add_columns<T, columns>(active[b], begin, end, weight_t, c_size, c0, c1, tokens - b * T, total + b * T * c_size);
    }
  }
  for (int64_t n = 0; n < tokens; ++n) {  // no -0: it could come from a zero that was not left out
    for (int64_t c = c0; c < c1; ++c) total[n * c_size + c] += 0.0f;
  }
}

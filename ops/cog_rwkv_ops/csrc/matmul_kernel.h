// out[n][m] = bias[m] + sum over k of weight[m][k] * x[n][k], for a range of m and n. Read by each_cpu.h.
//
// Every sum has one order, whatever the range: lane i of a V takes the terms k = i, i + 16, i + 32, ... one after the
// other, and sum() adds the lanes. So a result depends neither on the number of rows of x nor on the threads.

// How many elements of the weight further on memory is fetched into the cache meanwhile: 16 rows, or 8192 elements and
// more where rows are short. A multiple of 16 rows, so that what is fetched is used when that many rows are done.
COG_RWKV_INLINE int64_t fetch_ahead(int64_t k_size) {
  return k_size == 0 ? 0 : 16 * k_size * (1 + 8191 / (16 * k_size));
}

// The lanes of the sums for R rows of the weight and T rows of x, lanes[t * R + r].
template <int R, int T, bool fetch, class W>
COG_RWKV_INLINE void matmul_tile(const W* weight, const float* x, int64_t k_size, V* lanes) {
  for (int i = 0; i < R * T; ++i) lanes[i] = splat(0.0f);
  int64_t k = 0, later = fetch_ahead(k_size);
  for (; k + 16 <= k_size; k += 16, later += 16) {
    asm("" : "+r"(later));  // a second index: GCC would rather keep a second pointer for every row, on the stack
    V xs[T];
    for (int t = 0; t < T; ++t) xs[t] = load(x + t * k_size + k);
    for (int r = 0; r < R; ++r) {
      const W* row = weight + r * k_size;
      if constexpr (fetch) __builtin_prefetch(row + later, 0, 2);
      const V ws = load(row + k);
      for (int t = 0; t < T; ++t) lanes[t * R + r] = fma(ws, xs[t], lanes[t * R + r]);
    }
  }
  if (k == k_size) return;
  for (int r = 0; r < R; ++r) {
    const V ws = load_part(weight + r * k_size + k, k_size - k);
    for (int t = 0; t < T; ++t) {
      lanes[t * R + r] = fma(ws, load_part(x + t * k_size + k, k_size - k), lanes[t * R + r]);
    }
  }
}

// `count` sums of lanes, 1 to 16.
template <int count>
COG_RWKV_INLINE void matmul_sums(const V* lanes, float* sums) {
  if (count == 16) {
    store(sums, sum16(lanes));
  } else {
    for (int i = 0; i < count; ++i) sums[i] = sum(lanes[i]);
  }
}

// R rows from m on, T rows of x from n on. `weight` is the row m, in its own type or widened.
template <int R, int T, bool fetch, class W>
COG_RWKV_INLINE void matmul_block(const MatmulArgs& a, const W* weight, int64_t m, int64_t n) {
  constexpr int step = T == 1 && R > 8 ? 8 : R;  // more than 8 rows at once are too many pointers
  V lanes[R * T];
  float sums[R * T];
  for (int r = 0; r < R; r += step) {
    matmul_tile<step, T, fetch>(weight + r * a.k_size, a.x + n * a.k_size, a.k_size, lanes + r);
  }
  matmul_sums<R * T>(lanes, sums);
  for (int t = 0; t < T; ++t) {
    float* out = a.out + (n + t) * a.m_size + m;
    for (int r = 0; r < R; ++r) {
      out[r] = a.bias == nullptr ? sums[t * R + r] : sums[t * R + r] + a.bias[m + r];
    }
  }
}

// `rows` rows from m on, T rows of x from n on.
template <int T, bool fetch, class W>
COG_RWKV_INLINE void matmul_columns(const MatmulArgs& a, const W* weight, int64_t m, int64_t rows, int64_t n) {
  constexpr int R = kAccumulators / T;
  int64_t r = 0;
  for (; r + R <= rows; r += R) matmul_block<R, T, fetch>(a, weight + r * a.k_size, m + r, n);
  for (; r < rows; ++r) matmul_block<1, T, false>(a, weight + r * a.k_size, m + r, n);
}

// `rows` rows from m on, against rows n0 to n1 of x. What comes after is fetched once, if at all.
template <bool fetch, class W>
void matmul_panel(const MatmulArgs& a, const W* weight, int64_t m, int64_t rows, int64_t n0, int64_t n1) {
  constexpr int T = kAccumulators >= 4 ? 4 : 2;
  int64_t n = n0;
  if (fetch && n + T <= n1) {
    matmul_columns<T, true>(a, weight, m, rows, n);
    n += T;
  }
  for (; n + T <= n1; n += T) matmul_columns<T, false>(a, weight, m, rows, n);
  if constexpr (T > 2) {
    for (; n + 2 <= n1; n += 2) matmul_columns<2, fetch>(a, weight, m, rows, n);
  }
  for (; n < n1; ++n) matmul_columns<1, fetch>(a, weight, m, rows, n);
}

// Rows m0 to m1 of `matrix` against rows n0 to n1 of x. `panel` has room for 8 rows of floats.
template <class W>
void matmul_range(const MatmulArgs& a, const W* matrix, int64_t m0, int64_t m1, int64_t n0, int64_t n1, float* panel) {
  const bool many = n1 - n0 >= 16;  // then it pays to widen a few rows once and keep them in the nearest cache
  const int64_t step = many ? 8 : n1 - n0 == 1 ? m1 - m0 : 16;
  for (int64_t m = m0; m < m1; m += step) {
    const int64_t rows = m1 - m < step ? m1 - m : step;
    const W* weight = matrix + m * a.k_size;
    if (!many) {
      matmul_panel<true>(a, weight, m, rows, n0, n1);
      continue;
    }
    const int64_t size = rows * a.k_size;
    for (int64_t i = 0; i < size; i += 16) store_upto(panel + i, load_upto(weight + i, size - i), size - i);
    matmul_panel<false>(a, panel, m, rows, n0, n1);
  }
}

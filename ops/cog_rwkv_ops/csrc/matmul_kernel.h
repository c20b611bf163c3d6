// out[n][m] = f(bias[m] + sum over k of weight[m][k] * x[n][k]), for a range of m and n. Read by each_cpu.h.
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

// sums[t * R + r] and the bias, to row n + t and column m + r of the result.
template <int R, int T>
COG_RWKV_INLINE void matmul_store(const MatmulArgs& a, const float* sums, int64_t m, int64_t n) {
  for (int t = 0; t < T; ++t) {
    float* out = a.out + (n + t) * a.m_size + m;
    for (int r = 0; r < R; ++r) {
      out[r] = a.bias == nullptr ? sums[t * R + r] : sums[t * R + r] + a.bias[m + r];
    }
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
  matmul_store<R, T>(a, sums, m, n);
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

// How many rows of the weight are taken at a time, for n rows of x. Where there are many it pays to widen 8 rows once
// and keep them in the nearest cache.
constexpr int64_t kManyRows = 16;

template <class W>
COG_RWKV_INLINE void matmul_rows(const MatmulArgs& a, const W* matrix, int64_t m0, int64_t m1, int64_t n0, int64_t n1,
                                 float* panel) {
  const bool many = n1 - n0 >= kManyRows;
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

// Block b of a row of packed_weight.h as floats.
inline void unpack_block(const uint8_t* row, const PackedTail& tail, int64_t b, float* out) {
  const PackedBlock block(row + b * kPackedBlockBytes, tail.base);
  for (int i = 0; i < 8; ++i) store(out + 16 * i, block.part(i));
  for (int i = 0; i < tail.patches; ++i) {
    const int64_t at = tail.patch[i].index - b * kPackedBlock;
    const uint32_t bits = static_cast<uint32_t>(tail.patch[i].bits) << 16;
    if (at >= 0 && at < kPackedBlock) memcpy(out + at, &bits, sizeof(bits));
  }
}

// How many bytes of packed rows further on are fetched into the cache meanwhile.
constexpr int64_t kPackedAhead = 16384;

COG_RWKV_INLINE void fetch_packed(const uint8_t* block) {
  for (int i = 0; i < 3; ++i) __builtin_prefetch(block + 64 * i + kPackedAhead, 0, 2);
}

inline void unpack_row(const uint8_t* row, int64_t k_size, float* out) {
  PackedTail tail;
  memcpy(&tail, row + k_size / kPackedBlock * kPackedBlockBytes, sizeof(tail));
  for (int64_t b = 0; b * kPackedBlock < k_size; ++b) {
    fetch_packed(row + b * kPackedBlockBytes);
    unpack_block(row, tail, b, out + b * kPackedBlock);
  }
}

// lanes[16 * t + r] of the sums for R packed rows and T rows of x, of which 16 floats of each lie side by side.
template <int R, int T>
COG_RWKV_INLINE void packed_tile(const uint8_t* matrix, int64_t row_bytes, const float* x, int64_t k_size, V* lanes) {
  PackedTail tails[R];
  for (int r = 0; r < R; ++r) {
    memcpy(&tails[r], matrix + (r + 1) * row_bytes - sizeof(PackedTail), sizeof(PackedTail));
    for (int t = 0; t < T; ++t) lanes[16 * t + r] = splat(0.0f);
  }
  for (int64_t b = 0; b * kPackedBlock < k_size; ++b) {
    for (int r = 0; r < R; ++r) {
      const uint8_t* row = matrix + r * row_bytes;
      const float* xs = x + b * kPackedBlock * T;
      fetch_packed(row + b * kPackedBlockBytes);
      V totals[T];
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) totals[t] = lanes[16 * t + r];
      if (tails[r].blocks >> (b % 16) & 1) {
        float weights[kPackedBlock];
        unpack_block(row, tails[r], b, weights);
        for (int i = 0; i < 8; ++i) {
          const V ws = load(weights + 16 * i);
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) totals[t] = fma(ws, load(xs + 16 * (T * i + t)), totals[t]);
        }
      } else {
        const PackedBlock block(row + b * kPackedBlockBytes, tails[r].base);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          const V ws = block.part(i);
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) totals[t] = fma(ws, load(xs + 16 * (T * i + t)), totals[t]);
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) lanes[16 * t + r] = totals[t];
    }
  }
}

// The 16 rows from m on, against T rows of x from n on.
template <int T>
COG_RWKV_INLINE void packed_block(const MatmulArgs& a, const uint8_t* rows, int64_t row_bytes, const float* x,
                                  int64_t m, int64_t n) {
  V lanes[16 * T];
  for (int r = 0; r < 16; r += 8) packed_tile<8, T>(rows + r * row_bytes, row_bytes, x, a.k_size, lanes + r);
  for (int t = 0; t < T; ++t) {
    float sums[16];
    matmul_sums<16>(lanes + 16 * t, sums);
    matmul_store<16, 1>(a, sums, m, n + t);
  }
}

// The rows m0 to m1 as far as they are whole sixteens, against n rows of x from n0 on, T at the most. Returns the next.
// `side_by_side` has room for those.
template <int T>
int64_t packed_few(const MatmulArgs& a, const uint8_t* matrix, int64_t row_bytes, int64_t m0, int64_t m1, int64_t n0,
                   int64_t n, float* side_by_side) {
  if constexpr (T > 1) {
    if (n < T) return packed_few<T - 1>(a, matrix, row_bytes, m0, m1, n0, n, side_by_side);
  }
  const float* x = a.x + n0 * a.k_size;
  for (int64_t k = 0; T > 1 && k < a.k_size; k += 16) {
    for (int t = 0; t < T; ++t) store(side_by_side + T * k + 16 * t, load(x + t * a.k_size + k));
  }
  if (T > 1) x = side_by_side;
  int64_t m = m0;
  for (; m + 16 <= m1; m += 16) packed_block<T>(a, matrix + m * row_bytes, row_bytes, x, m, n0);
  return m;
}

// The same sums as for rows that are not packed. For many rows of x the weight is unpacked first, 8 rows at a time; for
// few, each vector of weights is used as it is unpacked.
COG_RWKV_INLINE void matmul_packed(const MatmulArgs& a, const uint8_t* matrix, int64_t m0, int64_t m1, int64_t n0,
                                   int64_t n1, float* panel) {
  constexpr int few = kAccumulators >= 16 ? 8 : 1;
  const int64_t row_bytes = a.k_size / kPackedBlock * kPackedBlockBytes + static_cast<int64_t>(sizeof(PackedTail));
  int64_t m = m0;
  if (n1 - n0 <= few) m = packed_few<few>(a, matrix, row_bytes, m0, m1, n0, n1 - n0, panel);
  for (; m < m1; m += 8) {
    const int64_t rows = m1 - m < 8 ? m1 - m : 8;
    for (int64_t r = 0; r < rows; ++r) unpack_row(matrix + (m + r) * row_bytes, a.k_size, panel + r * a.k_size);
    matmul_panel<false>(a, panel, m, rows, n0, n1);
  }
}

COG_RWKV_INLINE void activate(const MatmulArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  for (int64_t n = n0; n < n1; ++n) {
    for (int64_t m = m0; m < m1; m += 16) {
      float* out = a.out + n * a.m_size + m;
      const V y = load_upto(out, m1 - m);
      store_upto(out, a.activation == Activation::tanh ? tanh(y) : sigmoid(y), m1 - m);
    }
  }
}

// Rows m0 to m1 of `matrix` against rows n0 to n1 of x. `panel` has room for 8 rows of floats.
template <class W>
void matmul_range(const MatmulArgs& a, const void* matrix, int64_t m0, int64_t m1, int64_t n0, int64_t n1,
                  float* panel) {
  if constexpr (sizeof(W) == 1) {
    matmul_packed(a, static_cast<const uint8_t*>(matrix), m0, m1, n0, n1, panel);
  } else {
    matmul_rows(a, static_cast<const W*>(matrix), m0, m1, n0, n1, panel);
  }
  if (a.activation != Activation::none) activate(a, m0, m1, n0, n1);
}

// wkv7 on the CPU: one head of one sequence, token by token. Read by each_cpu.h.

constexpr int kVectors = 4;  // V in a head of 64

// S <- S diag(decay) + (S a) b' + v k' and y = S r, for 16 rows (values) of the state, in two passes over them: the
// first for S a, the second for the rest.
COG_RWKV_INLINE void wkv7_values(float* s, const V* decay, const V* k, const V* a, const V* b, const V* r,
                                 const float* v, float* y) {
  V sums[16];
  for (int i = 0; i < 16; ++i) {
    const float* row = s + i * 64;
    sums[i] = load(row) * a[0];
    for (int j = 1; j < kVectors; ++j) sums[i] = fma(load(row + j * 16), a[j], sums[i]);
  }
  float removed[16];
  store(removed, sum16(sums));
  for (int i = 0; i < 16; ++i) {
    float* row = s + i * 64;
    const V sa = splat(removed[i]), value = splat(v[i]);
    for (int j = 0; j < kVectors; ++j) {
      const V next = fma(value, k[j], fma(sa, b[j], load(row + j * 16) * decay[j]));
      store(row + j * 16, next);
      sums[i] = j == 0 ? next * r[j] : fma(next, r[j], sums[i]);
    }
  }
  store(y, sum16(sums));
}

// Tokens begin to end of one head: element 0 of token t lies at t * stride. `state` is [64 values, 64 keys].
template <class T>
void wkv7_tokens(const T* r, const T* w, const T* k, const T* v, const T* a, const T* b, T* y, float* state,
                 int64_t begin, int64_t end, int64_t stride) {
  const V log_base = splat(-0.60653065971263342f);  // -e^-0.5
  for (int64_t t = begin; t < end; ++t) {
    const int64_t at = t * stride;
    V rs[kVectors], decay[kVectors], ks[kVectors], as[kVectors], bs[kVectors];
    float vs[64], ys[64];
    for (int j = 0; j < kVectors; ++j) {
      rs[j] = load(r + at + j * 16);
      decay[j] = exp(log_base * sigmoid(load(w + at + j * 16)));
      ks[j] = load(k + at + j * 16);
      as[j] = load(a + at + j * 16);
      bs[j] = load(b + at + j * 16);
      store(vs + j * 16, load(v + at + j * 16));
    }
    for (int i = 0; i < 64; i += 16) wkv7_values(state + i * 64, decay, ks, as, bs, rs, vs + i, ys + i);
    for (int j = 0; j < kVectors; ++j) store(y + at + j * 16, load(ys + j * 16));
  }
}

// The same for a state in any dtype: it is widened once before the tokens and rounded once after them.
template <class T, class S>
void wkv7_head(const T* r, const T* w, const T* k, const T* v, const T* a, const T* b, T* y, S* state, int64_t begin,
               int64_t end, int64_t stride) {
  if constexpr (sizeof(S) == sizeof(float)) {
    wkv7_tokens(r, w, k, v, a, b, y, state, begin, end, stride);
  } else if (begin < end) {
    float wide[64 * 64];
    for (int i = 0; i < 64 * 64; i += 16) store(wide + i, load(state + i));
    wkv7_tokens(r, w, k, v, a, b, y, wide, begin, end, stride);
    for (int i = 0; i < 64 * 64; i += 16) store(state + i, load(wide + i));
  }
}

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

constexpr int kSpan = 16;  // tokens between two kept states
constexpr int kStateSize = 64 * 64;

// What a token of a head has, as vectors.
struct Wkv7Token {
  V r[kVectors], w[kVectors], decay[kVectors], k[kVectors], a[kVectors], b[kVectors];
  float v[64];
};

template <class T>
COG_RWKV_INLINE void wkv7_load(Wkv7Token& x, const T* const* in, int64_t at) {
  const V log_base = splat(-0.60653065971263342f);  // -e^-0.5
  for (int j = 0; j < kVectors; ++j) {
    x.r[j] = load(in[0] + at + j * 16);
    x.w[j] = sigmoid(load(in[1] + at + j * 16));
    x.decay[j] = exp(log_base * x.w[j]);
    x.k[j] = load(in[2] + at + j * 16);
    store(x.v + j * 16, load(in[3] + at + j * 16));
    x.a[j] = load(in[4] + at + j * 16);
    x.b[j] = load(in[5] + at + j * 16);
  }
}

// after = before diag(decay) + removed b' + v k', with removed = before a.
COG_RWKV_INLINE void wkv7_next(float* after, float* removed, const float* before, const Wkv7Token& x) {
  for (int i = 0; i < 64; ++i) {
    const float* row = before + i * 64;
    V sums = load(row) * x.a[0];
    for (int j = 1; j < kVectors; ++j) sums = fma(load(row + j * 16), x.a[j], sums);
    removed[i] = sum(sums);
    const V sa = splat(removed[i]), value = splat(x.v[i]);
    for (int j = 0; j < kVectors; ++j)
      store(after + i * 64 + j * 16, fma(value, x.k[j], fma(sa, x.b[j], load(row + j * 16) * x.decay[j])));
  }
}

// Gradients of a token's r, w, k, v, a, b; d_state goes from the state after it to the one before it.
template <class T>
COG_RWKV_INLINE void wkv7_token_backward(T* const* out, float* d_state, const float* before, const float* after,
                                         const float* removed, const float* d_y, const Wkv7Token& x, int64_t at) {
  V d_r[kVectors], d_decay[kVectors], d_k[kVectors], d_a[kVectors], d_b[kVectors];
  float d_v[64];
  for (int j = 0; j < kVectors; ++j) d_r[j] = d_decay[j] = d_k[j] = d_a[j] = d_b[j] = splat(0.0f);
  for (int i = 0; i < 64; ++i) {
    float* d_row = d_state + i * 64;
    const V gradient = splat(d_y[i]), value = splat(x.v[i]), sa = splat(removed[i]);
    V d[kVectors], with_k = splat(0.0f), with_b = splat(0.0f);
    for (int j = 0; j < kVectors; ++j) {
      d[j] = fma(gradient, x.r[j], load(d_row + j * 16));
      d_r[j] = fma(gradient, load(after + i * 64 + j * 16), d_r[j]);
      with_k = fma(d[j], x.k[j], with_k);
      with_b = fma(d[j], x.b[j], with_b);
      d_k[j] = fma(value, d[j], d_k[j]);
      d_b[j] = fma(sa, d[j], d_b[j]);
    }
    d_v[i] = sum(with_k);
    const V d_removed = splat(sum(with_b));
    for (int j = 0; j < kVectors; ++j) {
      const V row = load(before + i * 64 + j * 16);
      d_decay[j] = fma(d[j], row, d_decay[j]);
      d_a[j] = fma(d_removed, row, d_a[j]);
      store(d_row + j * 16, fma(d_removed, x.a[j], d[j] * x.decay[j]));
    }
  }
  const V log_base = splat(-0.60653065971263342f), one = splat(1.0f);
  for (int j = 0; j < kVectors; ++j) {
    store(out[0] + at + j * 16, d_r[j]);
    store(out[1] + at + j * 16, d_decay[j] * x.decay[j] * log_base * x.w[j] * (one - x.w[j]));
    store(out[2] + at + j * 16, d_k[j]);
    store(out[3] + at + j * 16, load(d_v + j * 16));
    store(out[4] + at + j * 16, d_a[j]);
    store(out[5] + at + j * 16, d_b[j]);
  }
}

// The gradient of a head: `in` and `out` are r, w, k, v, a, b and their gradients, element 0 of token t at t * stride.
// d_state comes in as the gradient of the state after the last token and leaves as that of the one before the first,
// which is in `kept`, followed by room for the state before every kSpan-th token; `states` has room for kSpan + 1.
template <class T>
void wkv7_head_backward(const T* const* in, const T* d_y, T* const* out, float* d_state, float* kept, float* states,
                        int64_t tokens, int64_t stride) {
  Wkv7Token x;
  float removed[kSpan][64], gradient[64];
  for (int64_t t = 0; t < tokens; ++t) {
    const auto place = [&](int64_t i) {
      return i % kSpan == 0 ? kept + i / kSpan * kStateSize : states + i % kSpan * kStateSize;
    };
    wkv7_load(x, in, t * stride);
    wkv7_next(place(t + 1), removed[0], place(t), x);
  }
  for (int64_t first = (tokens - 1) / kSpan * kSpan; first >= 0 && tokens > 0; first -= kSpan) {
    const int count = static_cast<int>(tokens - first < kSpan ? tokens - first : kSpan);
    memcpy(states, kept + first / kSpan * kStateSize, kStateSize * sizeof(float));
    for (int t = 0; t < count; ++t) {
      wkv7_load(x, in, (first + t) * stride);
      wkv7_next(states + (t + 1) * kStateSize, removed[t], states + t * kStateSize, x);
    }
    for (int t = count - 1; t >= 0; --t) {
      const int64_t at = (first + t) * stride;
      wkv7_load(x, in, at);
      for (int j = 0; j < 64; j += 16) store(gradient + j, load(d_y + at + j));
      wkv7_token_backward(out, d_state, states + t * kStateSize, states + (t + 1) * kStateSize, removed[t], gradient, x,
                          at);
    }
  }
}

// wkv4 on the CPU: up to 16 channels of one sequence, token by token. Read by each_cpu.h.

COG_RWKV_INLINE V larger(V a, V b) { return where_less(a, b, b, a); }

// Sums a and b of what a channel has seen, both times e^-p.
struct Wkv4State {
  V a, b, p;
};

// The tokens before one, weighed against the token itself: y and what its gradient needs.
struct Wkv4Read {
  V y, own, q, scale;  // own: the token's share in the denominator; q: the exponent; scale: 1 / denominator
};

COG_RWKV_INLINE Wkv4Read wkv4_read(const Wkv4State& s, V u, V k, V v) {
  const V q = larger(s.p, u + k), before = exp(s.p - q), own = exp(u + k - q);
  const V scale = splat(1.0f) / fma(before, s.b, own);
  return {fma(before, s.a, own * v) * scale, own, q, scale};
}

// s decays by `rate`, and gets e^exponent times x and y.
COG_RWKV_INLINE void wkv4_add(Wkv4State& s, V rate, V exponent, V x, V y) {
  const V p = larger(s.p - rate, exponent), before = exp(s.p - rate - p), now = exp(exponent - p);
  s.a = fma(before, s.a, now * x);
  s.b = fma(before, s.b, now * y);
  s.p = p;
}

// `state` is [3, channels], as is `end`; `left` channels from these pointers on are the call's, 16 at most.
template <class T>
void wkv4_channels(const float* w, const float* u, const T* k, const T* v, const float* state, float* end, T* y,
                   int64_t tokens, int64_t channels, int64_t left) {
  const V rate = exp(load_upto(w, left)), bonus = load_upto(u, left);
  Wkv4State s{load_upto(state, left), load_upto(state + channels, left), load_upto(state + 2 * channels, left)};
  for (int64_t t = 0; t < tokens; ++t) {
    const V key = load_upto(k + t * channels, left), value = load_upto(v + t * channels, left);
    store_upto(y + t * channels, wkv4_read(s, bonus, key, value).y, left);
    wkv4_add(s, rate, key, value, splat(1.0f));
  }
  store_upto(end, s.a, left);
  store_upto(end + channels, s.b, left);
  store_upto(end + 2 * channels, s.p, left);
}

// The gradients. `kept` has room for 48 floats a token: the state before it. d is the gradient of the sums that the
// state stands for, times e^-(its exponent); `of_p` that of the exponent p as such, which the larger of two made.
template <class T>
void wkv4_channels_backward(const float* w, const float* u, const T* k, const T* v, const float* state, const T* d_y,
                            const float* d_end, float* d_w, float* d_u, T* d_k, T* d_v, float* d_state, float* kept,
                            int64_t tokens, int64_t channels, int64_t left) {
  const V rate = exp(load_upto(w, left)), bonus = load_upto(u, left), zero = splat(0.0f), one = splat(1.0f);
  const Wkv4State start{load_upto(state, left), load_upto(state + channels, left),
                        load_upto(state + 2 * channels, left)};
  Wkv4State s = start;
  for (int64_t t = 0; t < tokens; ++t) {
    store(kept + t * 48, s.a);
    store(kept + t * 48 + 16, s.b);
    store(kept + t * 48 + 32, s.p);
    wkv4_add(s, rate, load_upto(k + t * channels, left), load_upto(v + t * channels, left), one);
  }
  Wkv4State d{load_upto(d_end, left), load_upto(d_end + channels, left), zero - s.p};
  V of_p = load_upto(d_end + 2 * channels, left) - fma(d.a, s.a, d.b * s.b);
  V d_rate = zero, d_bonus = zero;
  for (int64_t t = tokens - 1; t >= 0; --t) {
    s = {load(kept + t * 48), load(kept + t * 48 + 16), load(kept + t * 48 + 32)};
    const V key = load_upto(k + t * channels, left), value = load_upto(v + t * channels, left);
    const Wkv4Read read = wkv4_read(s, bonus, key, value);
    const V gradient = load_upto(d_y + t * channels, left) * read.scale, later = exp(key + d.p);
    const V with_own = read.own * gradient * (value - read.y), older = s.p - rate;
    d_bonus = d_bonus + with_own;
    d_rate = d_rate - exp(older + d.p) * fma(d.a, s.a, d.b * s.b) - where_less(key, older, of_p, zero);
    store_upto(d_k + t * channels, fma(later, fma(value, d.a, d.b), with_own) + where_less(key, older, zero, of_p),
               left);
    store_upto(d_v + t * channels, fma(later, d.a, read.own * gradient), left);
    of_p = where_less(key, older, of_p, zero);
    wkv4_add(d, rate, zero - read.q, gradient, zero - gradient * read.y);
  }
  const V back = exp(d.p + start.p), d_a = d.a * back, d_b = d.b * back;
  store_upto(d_state, d_a, left);
  store_upto(d_state + channels, d_b, left);
  store_upto(d_state + 2 * channels, fma(d_a, start.a, d_b * start.b) + of_p, left);
  store_upto(d_w, d_rate * rate, left);
  store_upto(d_u, d_bonus, left);
}

// time_mix_prepare on the CPU: one head of one token. Read by each_cpu.h.

template <class T>
void time_mix_prepare_head(const PrepareArgs<T>& p, int64_t at, int64_t c) {
  V a[4], kk[4], squares = splat(0.0f);
  for (int j = 0; j < 4; ++j) {
    const int64_t i = at + j * 16;
    const V k = load(p.k + i);
    a[j] = sigmoid(load(p.a + i));
    kk[j] = k * load(p.k_k + c + j * 16);
    squares = fma(kk[j], kk[j], squares);
    store(p.k_out + i, k * fma(a[j] - splat(1.0f), load(p.k_a + c + j * 16), splat(1.0f)));
    V v = load(p.v + i);
    if (p.v_first != nullptr) v = fma(load(p.v_first + i) - v, sigmoid(load(p.v_mix + i)), v);
    store(p.v_out + i, v);
  }
  const float norm = __builtin_sqrtf(sum(squares));
  const V scale = splat(1.0f / (norm < 1e-12f ? 1e-12f : norm));
  for (int j = 0; j < 4; ++j) {
    const V unit = kk[j] * scale;
    store(p.minus_kk + at + j * 16, splat(0.0f) - unit);
    store(p.kk_a + at + j * 16, unit * a[j]);
  }
}

template <class T>
void time_mix_prepare_heads(const PrepareArgs<T>& p, int64_t begin, int64_t end, int64_t heads) {
  for (int64_t i = begin; i < end; ++i) time_mix_prepare_head(p, i * 64, i % heads * 64);
}

// time_mix_output on the CPU: one head of one token. Read by each_cpu.h.

template <class T>
void time_mix_output_head(const OutputArgs<T>& p, int64_t at, int64_t c) {
  V y[4], total = splat(0.0f), bonus = splat(0.0f), squares = splat(0.0f);
  for (int j = 0; j < 4; ++j) {
    const int64_t i = at + j * 16;
    y[j] = load(p.y + i);
    total = total + y[j];
    bonus = fma(load(p.r + i) * load(p.k + i), load(p.r_k + c + j * 16), bonus);
  }
  const V mean = splat(sum(total) * (1.0f / 64)), weight_of_v = splat(sum(bonus));
  for (int j = 0; j < 4; ++j) {
    y[j] = y[j] - mean;
    squares = fma(y[j], y[j], squares);
  }
  const V scale = splat(1.0f / __builtin_sqrtf(sum(squares) * (1.0f / 64) + p.eps));
  for (int j = 0; j < 4; ++j) {
    const int64_t i = at + j * 16;
    const V normal = fma(y[j] * scale, load(p.weight + c + j * 16), load(p.bias + c + j * 16));
    store(p.out + i, fma(weight_of_v, load(p.v + i), normal) * load(p.g + i));
  }
}

template <class T>
void time_mix_output_heads(const OutputArgs<T>& p, int64_t begin, int64_t end, int64_t heads) {
  for (int64_t i = begin; i < end; ++i) time_mix_output_head(p, i * 64, i % heads * 64);
}

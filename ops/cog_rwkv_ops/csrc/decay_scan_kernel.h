// The scans of decay_scan.h on the CPU: one head, token by token. Read by each_cpu.h.

constexpr int kScanVectors = 4;  // V in a head of 64

// What one scan reads and writes; element 0 of its t-th token lies at t * stride, which may be negative.
template <class T>
struct HeadScan {
  const T *p, *q, *x, *w;
  const float* w_constant;  // of the head, or null
  const float* u;           // of the head
  T* out;
  int64_t tokens, stride;
  // Where rows decay: see Scan in decay_scan.cuh.
  bool rows, reverse;
  const T* z;
  float *product, *d_u, *d_w_sum;
  const float* last;
  T* d_w;
};

// found = m x, then m <- m decayed, + p q'.
COG_RWKV_INLINE void scan_matrix(float* found, float* m, const V* x, const V* q, const float* p, const V* decay,
                                 const float* row_decay) {
  for (int i = 0; i < 64; ++i) {
    float* row = m + i * 64;
    const V value = splat(p[i]), factor = splat(row_decay ? row_decay[i] : 0.0f);
    V sums = splat(0.0f);
    for (int j = 0; j < kScanVectors; ++j) {
      const V before = load(row + j * 16);
      sums = fma(before, x[j], sums);
      store(row + j * 16, fma(value, q[j], before * (row_decay ? factor : decay[j])));
    }
    found[i] = sum(sums);
  }
}

template <class T>
COG_RWKV_INLINE void scan_widen(float* to, const T* from) {
  for (int j = 0; j < 64; j += 16) store(to + j, load(from + j));
}

template <class T>
void scan_head(const HeadScan<T>& s, float* m) {
  float flow[64], d_w_sum[64], d_u[64], found[64], p[64], z[64], log_decay[64], decays[64], d_w[64], out[64];
  for (int i = 0; i < 64; ++i) flow[i] = d_w_sum[i] = d_u[i] = z[i] = 0.0f;
  for (int i = 0; i < 64 && s.rows && s.reverse; ++i) {
    V sums = splat(0.0f);
    for (int j = 0; j < 64; j += 16) sums = fma(load(m + i * 64 + j), load(s.last + i * 64 + j), sums);
    flow[i] = sum(sums);
  }
  for (int64_t t = 0; t < s.tokens; ++t) {
    const int64_t at = t * s.stride;
    V q[kScanVectors], x[kScanVectors], decay[kScanVectors], shared = splat(0.0f);
    for (int j = 0; j < kScanVectors; ++j) {
      const V w = s.w_constant ? load(s.w_constant + j * 16) : load(s.w + at + j * 16);
      const V rate = splat(0.0f) - exp(w);
      decay[j] = exp(rate);
      store(log_decay + j * 16, rate);
      store(decays + j * 16, decay[j]);
      q[j] = load(s.q + at + j * 16);
      x[j] = load(s.x + at + j * 16);
      const V both = q[j] * x[j];
      shared = s.rows ? shared + both : fma(load(s.u + j * 16), both, shared);
    }
    const float bonus = sum(shared);
    scan_widen(p, s.p + at);
    if (s.rows) scan_widen(z, s.z + at);
    scan_matrix(found, m, x, q, p, decay, s.rows ? decays : nullptr);
    for (int i = 0; i < 64; ++i) {
      const float term = p[i] * bonus, product = found[i] * z[i];
      out[i] = found[i] + (s.rows ? s.u[i] * term : term);
      if (s.rows && !s.reverse) {
        d_u[i] += z[i] * term;
        s.product[at + i] = product;
      } else if (s.rows) {
        const float d_log = flow[i] - product;
        d_w[i] = log_decay[i] > -100.0f ? d_log * log_decay[i] : 0.0f;
        flow[i] = d_log + s.product[at + i];
        d_w_sum[i] += d_w[i];
      }
    }
    for (int j = 0; j < 64; j += 16) store(s.out + at + j, load(out + j));
    for (int j = 0; j < 64 && s.d_w; j += 16) store(s.d_w + at + j, load(d_w + j));
  }
  if (s.d_u) memcpy(s.d_u, d_u, sizeof(d_u));
  if (s.d_w_sum) memcpy(s.d_w_sum, d_w_sum, sizeof(d_w_sum));
}

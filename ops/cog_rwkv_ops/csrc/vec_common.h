// What is the same for every V: parts of 16, and the functions that the operators need. Read by each_cpu.h.

// 1 to 15 values, the other lanes 0: a vector's tail takes the same arithmetic as the rest.
template <class T>
COG_RWKV_INLINE V load_part(const T* p, int64_t count) {
  T buffer[16];
  memset(static_cast<void*>(buffer), 0, sizeof(buffer));
  memcpy(static_cast<void*>(buffer), p, count * sizeof(T));
  return load(buffer);
}

template <class T>
COG_RWKV_INLINE void store_part(T* p, V a, int64_t count) {
  T buffer[16];
  store(buffer, a);
  memcpy(static_cast<void*>(p), buffer, count * sizeof(T));
}

// The 16 values at p, or as many as are left.
template <class T>
COG_RWKV_INLINE V load_upto(const T* p, int64_t left) {
  return left >= 16 ? load(p) : load_part(p, left);
}

template <class T>
COG_RWKV_INLINE void store_upto(T* p, V a, int64_t left) {
  if (left >= 16) {
    store(p, a);
  } else {
    store_part(p, a, left);
  }
}

// e^x, about 1 ulp; 0 below -104, inf above 88.8; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln(2) / 2; e^r by its Taylor-like minimax polynomial; 2^n in two steps, as n may be -150.
COG_RWKV_INLINE V exp(V x) {
  x = where_less(x, splat(-104.0f), splat(-104.0f), x);
  x = where_less(splat(89.0f), x, splat(89.0f), x);
  const V n = nearest(x * splat(1.44269504089f));
  const V r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  V p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  const V half = nearest(n * splat(0.5f));
  return p * power_of_two(half) * power_of_two(n - half);
}

COG_RWKV_INLINE V sigmoid(V x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }

// A polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
COG_RWKV_INLINE V tanh(V x) {
  const V zero = splat(0.0f);
  const V size = where_less(x, zero, zero - x, x);
  const V far = splat(1.0f) - splat(2.0f) / (exp(size + size) + splat(1.0f));
  const V signed_far = where_less(x, zero, zero - far, far);
  const V s = x * x;
  V p = splat(-5.70498872745e-3f);
  p = fma(p, s, splat(2.06390887954e-2f));
  p = fma(p, s, splat(-5.37397155531e-2f));
  p = fma(p, s, splat(1.33314422036e-1f));
  p = fma(p, s, splat(-3.33332819422e-1f));
  const V near = fma(p * s, x, x);
  return where_less(size, splat(0.625f), near, signed_far);
}

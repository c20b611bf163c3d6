// V: 16 floats in one AVX-512 register. Read by each_cpu.h; vec_baseline.h lists what a V can do.

struct V {
  __m512 v;
};

constexpr int kAccumulators = 16;  // how many V of sums fit in registers beside what a product reads

COG_RWKV_INLINE V splat(float x) { return {_mm512_set1_ps(x)}; }
COG_RWKV_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
COG_RWKV_INLINE V load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
COG_RWKV_INLINE V load(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
COG_RWKV_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
COG_RWKV_INLINE void store(BFloat16* p, V a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_mov_epi32(even, nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
COG_RWKV_INLINE void store(Half* p, V a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
COG_RWKV_INLINE V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
COG_RWKV_INLINE V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
COG_RWKV_INLINE V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
COG_RWKV_INLINE V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
COG_RWKV_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
COG_RWKV_INLINE V where_less(V a, V b, V yes, V no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
COG_RWKV_INLINE V nearest(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
COG_RWKV_INLINE V power_of_two(V n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}

COG_RWKV_INLINE float sum(V a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The same additions as sum(), for 16 V at once: lane i of the result is sum(a[i]).
COG_RWKV_INLINE V sum16(const V* a) {
  __m512 b[8], c[4], d[2];
  for (int i = 0; i < 8; ++i) {  // b[i]: lanes j + (j + 8) of two of them, eight floats each
    const __m512 x = a[i < 4 ? i : i + 4].v, y = a[i < 4 ? i + 4 : i + 8].v;
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  }
  for (int i = 0; i < 4; ++i) {  // j + (j + 4), of four
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd));
  }
  for (int i = 0; i < 2; ++i) {  // j + (j + 2), of eight
    const __m512 x = c[2 * i], y = c[2 * i + 1];
    d[i] = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
  }
  return {_mm512_add_ps(_mm512_shuffle_ps(d[0], d[1], 0x88), _mm512_shuffle_ps(d[0], d[1], 0xdd))};
}

struct PackedBlock {
  __m512i low[2], codes, high;
  COG_RWKV_INLINE PackedBlock(const uint8_t* block, uint32_t base) {
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 128, 129, 130, 131, 132, 133, 134, 135);
    low[0] = _mm512_loadu_si512(block), low[1] = _mm512_loadu_si512(block + 64);
    codes = _mm512_loadu_si512(block + 128);
    high = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(base << 24)), _mm512_slli_epi32(steps, 24));
  }
  COG_RWKV_INLINE V part(int i) const {
    const int shift = 8 * (i % 4) - 16;
    const __m512i byte = shift < 0 ? _mm512_slli_epi32(low[i / 4], -shift) : _mm512_srli_epi32(low[i / 4], shift);
    const __m512i found = _mm512_permutexvar_epi32(_mm512_srli_epi32(codes, 4 * i), high);
    // found | (byte & mask)
    return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(found, byte, _mm512_set1_epi32(0xff0000), 0xf8))};
  }
};

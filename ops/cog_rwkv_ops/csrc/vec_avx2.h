// V: 16 floats in two AVX2 registers. Read by each_cpu.h; vec_baseline.h lists what a V can do.

struct V {
  __m256 lo, hi;
};

constexpr int kAccumulators = 4;  // how many V of sums fit in registers beside what a product reads

COG_RWKV_INLINE V splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
COG_RWKV_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
COG_RWKV_INLINE __m256 widen(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
COG_RWKV_INLINE __m256 widen(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
COG_RWKV_INLINE V load(const BFloat16* p) { return {widen(p), widen(p + 8)}; }
COG_RWKV_INLINE V load(const Half* p) { return {widen(p), widen(p + 8)}; }
COG_RWKV_INLINE void store(float* p, V a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
COG_RWKV_INLINE __m256i bfloat16_bits(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  const __m256 rounded =
      _mm256_blendv_ps(_mm256_castsi256_ps(even), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
  return _mm256_srli_epi32(_mm256_castps_si256(rounded), 16);
}
COG_RWKV_INLINE void store(BFloat16* p, V a) {
  const __m256i mixed = _mm256_packus_epi32(bfloat16_bits(a.lo), bfloat16_bits(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}
COG_RWKV_INLINE void store(Half* p, V a) {
  constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, kRounding));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, kRounding));
}
COG_RWKV_INLINE V operator+(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
COG_RWKV_INLINE V operator-(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
COG_RWKV_INLINE V operator*(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
COG_RWKV_INLINE V operator/(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
COG_RWKV_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
COG_RWKV_INLINE V where_less(V a, V b, V yes, V no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
COG_RWKV_INLINE V nearest(V a) {
  constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kRounding), _mm256_round_ps(a.hi, kRounding)};
}
COG_RWKV_INLINE __m256 power_of_two(__m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
COG_RWKV_INLINE V power_of_two(V n) { return {power_of_two(n.lo), power_of_two(n.hi)}; }

COG_RWKV_INLINE float sum(V a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

COG_RWKV_INLINE V sum16(const V* a) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = sum(a[i]);
  return load(sums);
}

struct PackedBlock {
  const uint8_t* block;
  __m256i exponents;
  COG_RWKV_INLINE PackedBlock(const uint8_t* from, uint32_t base) : block(from) {
    const __m256i steps = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    exponents = _mm256_slli_epi32(_mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(base)), steps), 24);
  }
  COG_RWKV_INLINE __m256 half(int i, int lane) const {
    const auto words = [&](int at) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + at + 4 * lane));
    };
    const __m256i code = _mm256_srli_epi32(words(128), 4 * i),
                  shifted = _mm256_srli_epi32(words(64 * (i / 4)), 8 * (i % 4));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
    const __m256i low = _mm256_slli_epi32(_mm256_and_si256(shifted, _mm256_set1_epi32(0xff)), 16);
    const __m256i high = _mm256_or_si256(sign, _mm256_permutevar8x32_epi32(exponents, code));
    return _mm256_castsi256_ps(_mm256_or_si256(high, low));
  }
  COG_RWKV_INLINE V part(int i) const { return {half(i, 0), half(i, 8)}; }
};

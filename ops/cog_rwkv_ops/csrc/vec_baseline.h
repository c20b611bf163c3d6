// V: 16 floats for any machine, as four vectors that the compiler maps to what the machine has. Read by each_cpu.h.
//
// What a V can do, here and in the other vec_*.h:
//   splat, load, store     one value in all lanes; 16 values of float, BFloat16 or Half, rounded to nearest even
//   + - * /, fma(a, b, c)  a * b + c (two roundings here, one where the machine has the instruction)
//   where_less(a, b, yes, no), nearest(a), power_of_two(n) for integers n in [-126, 127]
//   sum(a)                 of the lanes, in a fixed tree: i and i + 8, i and i + 4, i and i + 2, i and i + 1
//   sum16(a)               of 16 V at once, the same tree
//   PackedBlock(block, base).part(i)  weights 16 i to 16 i + 15 of a block of packed_weight.h, i from 0 to 7

typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourBits __attribute__((vector_size(16)));

struct V {
  Four q[4];
};

constexpr int kAccumulators = 2;  // how many V of sums fit in registers beside what a product reads

COG_RWKV_INLINE V splat(float x) {
  const Four f = {x, x, x, x};
  return {{f, f, f, f}};
}
COG_RWKV_INLINE V load(const float* p) {
  V a;
  memcpy(&a, p, sizeof(a));
  return a;
}
COG_RWKV_INLINE V load(const BFloat16* p) {
  int32_t bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i].x) << 16);
  V a;
  memcpy(&a, bits, sizeof(a));
  return a;
}
COG_RWKV_INLINE V load(const Half* p) {
  float x[16];
  for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(p[i]);
  return load(x);
}
COG_RWKV_INLINE void store(float* p, V a) { memcpy(p, &a, sizeof(a)); }
COG_RWKV_INLINE void store(BFloat16* p, V a) {
  float x[16];
  store(x, a);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<BFloat16>(x[i]);
}
COG_RWKV_INLINE void store(Half* p, V a) {
  float x[16];
  store(x, a);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<Half>(x[i]);
}
COG_RWKV_INLINE V operator+(V a, V b) {
  for (int i = 0; i < 4; ++i) a.q[i] += b.q[i];
  return a;
}
COG_RWKV_INLINE V operator-(V a, V b) {
  for (int i = 0; i < 4; ++i) a.q[i] -= b.q[i];
  return a;
}
COG_RWKV_INLINE V operator*(V a, V b) {
  for (int i = 0; i < 4; ++i) a.q[i] *= b.q[i];
  return a;
}
COG_RWKV_INLINE V operator/(V a, V b) {
  for (int i = 0; i < 4; ++i) a.q[i] /= b.q[i];
  return a;
}
COG_RWKV_INLINE V fma(V a, V b, V c) { return a * b + c; }
COG_RWKV_INLINE V where_less(V a, V b, V yes, V no) {
  for (int i = 0; i < 4; ++i) {
    const FourBits mask = a.q[i] < b.q[i];
    a.q[i] = (Four)((mask & (FourBits)yes.q[i]) | (~mask & (FourBits)no.q[i]));
  }
  return a;
}
COG_RWKV_INLINE V nearest(V a) {  // for |a| < 2^22
  const V shift = splat(12582912.0f);
  return (a + shift) - shift;
}
COG_RWKV_INLINE V power_of_two(V n) {
  for (int i = 0; i < 4; ++i) n.q[i] = (Four)((__builtin_convertvector(n.q[i], FourBits) + 127) << 23);
  return n;
}

COG_RWKV_INLINE float sum(V a) {
  const Four four = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

COG_RWKV_INLINE V sum16(const V* a) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = sum(a[i]);
  return load(sums);
}

struct PackedBlock {
  const uint8_t* block;
  uint32_t base;
  COG_RWKV_INLINE PackedBlock(const uint8_t* from, uint32_t row_base) : block(from), base(row_base) {}
  COG_RWKV_INLINE V part(int i) const {
    float out[16];
    for (int lane = 0; lane < 16; ++lane) {
      uint32_t word;
      memcpy(&word, block + 128 + 4 * lane, sizeof(word));
      const uint32_t code = word >> (4 * i), low = block[64 * (i / 4) + 4 * lane + i % 4];
      const uint32_t bits = (code & 8) << 28 | (base + (code & 7)) << 24 | low << 16;
      memcpy(out + lane, &bits, sizeof(bits));
    }
    return load(out);
  }
};

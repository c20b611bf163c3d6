// Packed bfloat16: a matrix of bfloat16 in 12 bits a weight, without loss. Reading it from memory is what decoding on
// a CPU waits for, and trained weights use few of bfloat16's 256 exponents: 16 neighbouring ones cover nearly all of a
// row.
//
// A row of K weights (K a multiple of 128) is K / 128 blocks and a tail. A weight's bits are s eeeeeeee mmmmmmm:
//  - its low byte, e mmmmmmm, lies in byte 64 (i / 64) + 4 (i % 16) + i % 64 / 16 of weight i's block, 128 bytes;
//  - its high byte, s eeeeeee, is four bits, s and eeeeeee - base, in the nibble i / 16 of 32-bit word i % 16 of the
//    64 bytes that follow. So a vector of 16 words holds what 16 neighbouring weights need, at the same bit.
//  - The tail is the row's base, and weights that are out of its range, as places and bits: 0 is one, usually.
#pragma once

#include <cstdint>

#include "check.h"

namespace cog_rwkv {

constexpr int64_t kPackedBlock = 128;       // weights
constexpr int64_t kPackedBlockBytes = 192;  // 12 bits each
constexpr int kMostPatches = 7;

struct PackedTail {
  uint8_t base;
  uint8_t patches;
  uint16_t blocks;  // bit i: block i, i + 16, i + 32 ... may hold one of the patched
  struct {
    uint16_t index, bits;
  } patch[kMostPatches];
};
static_assert(sizeof(PackedTail) == 32);

// Bytes of a row of k weights, or 0 where rows of that length cannot be packed.
inline int64_t packed_row_bytes(int64_t k) {
  if (k <= 0 || k % kPackedBlock != 0 || k > 65536) return 0;
  return k / kPackedBlock * kPackedBlockBytes + static_cast<int64_t>(sizeof(PackedTail));
}

// A row-major matrix of packed rows, as a type of weights for matmul_kernel.h.
struct PackedBFloat16 {
  uint8_t byte;
};

// `weight` is [M, k] in float32, float16 or bfloat16, or on the CPU that in packed rows; `x` is what it multiplies.
inline void check_weight(const char* op, const char* name, const Tensor& weight, const Tensor& x, int64_t k,
                         const char* what) {
  check_device(op, name, weight, "x", x);
  check_dim(op, name, weight, 2, what);
  const bool packed = x.is_cpu() && weight.scalar_type() == ScalarType::Byte && packed_row_bytes(k) > 0;
  if (!packed) check_float_or_half(op, name, weight);
  check_shape(op, name, weight, {weight.size(0), packed ? packed_row_bytes(k) : k}, what);
}

}  // namespace cog_rwkv

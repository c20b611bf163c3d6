// The shared memory of wkv7 in chunks by wgmma: 16 tokens of a head, as tiles that wgmma reads (csrc/wgmma.cuh), of
// lines of 32 floats. It takes no transposed operand in tf32, so each tile's lines run along the terms of its sums.
//
// What is a column of one product is a term of the next, and in a lane's registers terms 8 i + m and 8 i + m + 4 are
// columns 8 i + 2 m and 8 i + 2 m + 1. So terms have another order than columns: `term` below. Keys are columns of the
// state in an order such that the writers of a transposed tile meet in no bank: columns n and n + 16 of 32 are the keys
// 2 n and 2 n + 1.
#pragma once

#include "slot.cuh"

namespace cog_rwkv {

__device__ __forceinline__ constexpr int term(int column) {
  return (column & ~7) + (column & 7) / 2 + 4 * (column & 1);
}

struct Tiles {
  static constexpr int kLineBytes = 128, kTile = 32 * kLineBytes, kEight = 8 * kLineBytes;
  static constexpr int kRead = 0;                      // W, and r: two tiles, for 32 keys each; tokens are lines
  static constexpr int kReadR = kChunk * kLineBytes;   // of r in each of them
  static constexpr int kWrite = 2 * kTile;             // lines are keys, terms the tokens of k and then those of b
  static constexpr int kSmall = 4 * kTile;             // lines are tokens: A, and then P and Q side by side
  static constexpr int kSmallR = kChunk * kLineBytes;  // of P and Q
  static constexpr int kQ = 64;                        // of Q in a line
  static constexpr int kValues = 5 * kTile;            // v, in 16 bits
  static constexpr int kValueRow = 144;                // for the banks
  static constexpr int kDecay = kValues + kChunk * kValueRow;         // e^G, in the order of columns
  static constexpr int kKeys = kDecay + static_cast<int>(kHead) * 4;  // k, b for products between tokens; rows of terms
  static constexpr int kKeyRow = kRow * 4, kKeysApart = kChunk * kKeyRow + 64;
  static constexpr int kInverse = kKeys + 2 * kKeysApart;
  static constexpr int kBytes = (kInverse + kChunk * kSmallRow * 4 + 1023) / 1024 * 1024;

  unsigned char* base;
  template <class V>
  __device__ __forceinline__ V& at(int byte) const {
    return *reinterpret_cast<V*>(base + byte);
  }
  __device__ __forceinline__ float* inverse() const { return reinterpret_cast<float*>(base + kInverse); }
  // Row t of k or b. The upper half stands off for the sake of the banks.
  static __device__ __forceinline__ constexpr int key_row(int input, int t) {
    return kKeys + (input == kB ? kKeysApart : 0) + t * kKeyRow + t / 8 * 64;
  }
  // Where 16 bytes of an input lie before they are scaled: row t, of six inputs; the upper half's are exchanged.
  static __device__ __forceinline__ constexpr int raw(int input, int t, int piece) {
    if (input == kV) return kValues + t * kValueRow + piece * 16;
    if (input == kK || input == kB) return key_row(input, t) + piece * 16;
    const int lines = input == kR ? kRead + kReadR : input == kA ? kRead : kSmall;
    return lines + t * kLineBytes + (piece ^ t / 8 * 4) * 16;
  }
};

}  // namespace cog_rwkv

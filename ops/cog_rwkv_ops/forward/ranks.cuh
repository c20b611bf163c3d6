// The second halves of the low-rank projections, for the 64 channels of a head and few tokens, inside the block that
// needs them: the weights are in shared memory by the time the first halves are there, and a launch is saved.
#pragma once

#include "../csrc/ahead.cuh"
#include "../csrc/math.h"
#include "../csrc/mma.cuh"
#include "../csrc/mma16.cuh"

namespace cog_rwkv {

constexpr int kRankColumns = 8;  // tokens of one product of the tensor cores
enum RankJobs { kGateRank, kDecayRank, kRateRank, kMixRank, kRankJobs };

// W: float16 or bfloat16. `count`: 4, or 3 where values are not mixed.
template <class W>
struct RankList {
  struct {
    const W *weight, *hidden;  // [C, rank], [n, rank], on 16-byte boundaries
    int rank;                  // a multiple of 32
  } jobs[kRankJobs];
  int count;
};

// A row and what keeps the next one off its banks.
COG_RWKV_BOTH int rank_row(int rank) { return rank + 8; }

// Of the shared memory for `each` tokens: each job's weights and first halves, then results [jobs, each, 64].
template <class W>
size_t rank_bytes(const RankList<W>& list, int64_t each) {
  size_t values = kRankJobs * each * 64;
  for (int i = 0; i < list.count; i++) values += (64 + each) * rank_row(list.jobs[i].rank);
  return values * sizeof(W);
}

// The weights of head blockIdx.x, before the first halves are there: one group of copies.
template <class W>
__device__ __forceinline__ void start_rank_weights(const RankList<W>& list, W* memory, int each) {
  for (int i = 0; i < list.count; i++) {
    const int rank = list.jobs[i].rank, pieces = rank / 8;
    const W* const from = list.jobs[i].weight + int64_t{blockIdx.x} * 64 * rank;
    for (int j = threadIdx.x; j < 64 * pieces; j += blockDim.x) {
      copy_ahead<16>(memory + j / pieces * rank_row(rank) + j % pieces * 8, from + j * 8);
    }
    memory += (64 + each) * rank_row(rank);
  }
  end_group();
}

// Eight values of a first half: where they are, and where they go in shared memory.
template <class W>
struct RankPiece {
  const W* from;
  W* to;
};

// Of all jobs' pieces, `per_token` a token, number i. Counted from token `first`.
template <class W>
__device__ __forceinline__ RankPiece<W> hidden_piece(const RankList<W>& list, W* memory, int64_t first, int each,
                                                     int per_token, int i) {
  const int token = i / per_token;
  int piece = i - token * per_token;
  for (int job = 0;; job++) {
    const int rank = list.jobs[job].rank;
    if (piece < rank / 8) {
      return {list.jobs[job].hidden + (first + token) * rank + piece * 8,
              memory + (64 + token) * rank_row(rank) + piece * 8};
    }
    piece -= rank / 8;
    memory += (64 + each) * rank_row(rank);
  }
}

// The first halves of `mine` tokens, some pieces at a time. Not copies, as those would have to wait for what has been
// begun before them.
template <class W>
__device__ __forceinline__ void load_hidden(const RankList<W>& list, W* memory, int64_t first, int mine, int each) {
  constexpr int together = 4;
  int per_token = 0;
  for (int i = 0; i < list.count; i++) per_token += list.jobs[i].rank / 8;
  const int all = mine * per_token;
  for (int begin = threadIdx.x; begin < all; begin += together * blockDim.x) {
    uint4 values[together];
    W* to[together];
#pragma unroll
    for (int j = 0; j < together; j++) {
      const int i = begin + j * blockDim.x;
      if (i >= all) continue;
      const RankPiece<W> piece = hidden_piece(list, memory, first, each, per_token, i);
      values[j] = __ldcg(reinterpret_cast<const uint4*>(piece.from));
      to[j] = piece.to;
    }
#pragma unroll
    for (int j = 0; j < together; j++) {
      if (begin + j * blockDim.x < all) *reinterpret_cast<uint4*>(to[j]) = values[j];
    }
  }
}

// 16 channels of n tokens, kRankColumns at most, by a warp; `weights` [16, rank], `hidden` [n, rank], `out` [n, 64] of
// these channels on.
template <class W>
__device__ __forceinline__ void multiply_rank(const W* weights, const W* hidden, W* out, int rank, int n) {
  const int lane = threadIdx.x % 32, row = rank_row(rank);
  const W* const left = weights + lane % 16 * row + lane / 16 * 8;
  const W* const right = hidden + min(lane % 8, n - 1) * row + lane / 8 * 8;
  Sums even = {}, odd = {};
#pragma unroll 4
  for (int k = 0; k < rank; k += 32) {
    uint32_t a[2][4], b[4];
    load_matrices<false>(b, shared_address(right + k));
    load_matrices<false>(a[0], shared_address(left + k)), load_matrices<false>(a[1], shared_address(left + k + 16));
    mma<W>(even, a[0], b[0], b[1]);
    mma<W>(odd, a[1], b[2], b[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int channel = lane / 4 + i / 2 * 8, token = lane % 4 * 2 + i % 2;
    if (token < n) out[token * 64 + channel] = static_cast<W>(even[i] + odd[i]);
  }
}

// By all threads of a block, once the first halves are there, of `mine` tokens from `first` on. Of each team of `warps`
// warps the first eight multiply. `copies`: groups of others' copies that a thread has begun since, `most` or none.
// Returns the results, which are there for all.
template <int TEAMS, int warps, int most, class W>
__device__ __forceinline__ const W* finish_ranks(const RankList<W>& list, W* memory, int64_t first, int mine, int each,
                                                 uint32_t copies) {
  load_hidden(list, memory, first, mine, each);
  W* results = memory;
  for (int i = 0; i < list.count; i++) results += (64 + each) * rank_row(list.jobs[i].rank);
  if (copies == 0) {
    wait_for_all_but<0>();
  } else {
    wait_for_all_but<most>();
  }
  __syncthreads();
  const int team = threadIdx.x / (32 * warps), warp = threadIdx.x / 32 - team * warps, channel = warp % 4 * 16;
  W* at = memory;
  for (int i = 0; i < list.count; i++) {
    const int rank = list.jobs[i].rank, row = rank_row(rank);
    // Four warps have the gate, whose rank is about that of the others together.
    if (warp < 8 && warp / 4 == (i == kGateRank ? 0 : 1)) {
      for (int token = team * kRankColumns; token < mine; token += TEAMS * kRankColumns) {
        multiply_rank(at + channel * row, at + (64 + token) * row, results + (i * each + token) * 64 + channel, rank,
                      min(kRankColumns, mine - token));
      }
    }
    at += (64 + each) * row;
  }
  __syncthreads();
  return results;
}

}  // namespace cog_rwkv

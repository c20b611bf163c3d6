// How the tokens of heads.cuh's kernels are cut into blocks, and their launches.
#pragma once

#include "heads.cuh"

namespace cog_rwkv {

// How many tokens a block takes, where `most` blocks a head run at once: so that all have about as many.
inline int64_t tokens_each(int64_t n, int64_t most) {
  most = std::max<int64_t>(most, 1);
  return (n + most - 1) / most;
}

inline dim3 head_grid(int64_t heads, int64_t n, int64_t each) {
  return dim3(static_cast<unsigned>(heads), static_cast<unsigned>((n + each - 1) / each));
}

// Of a team that takes so many tokens.
template <class S>
size_t ring_bytes(int64_t tokens) {
  return std::min<int64_t>(tokens, kStatesAhead<S>) * kStateBytes<S>;
}

// Offsets of activations fit into 32 bits: the states of so many tokens are 64 times as large.
template <class W, class S>
void head_steps(const char* op, cudaStream_t stream, const HeadStep<W, S>& p, int64_t n, int multiprocessors) {
  const int64_t each = tokens_each(n, multiprocessors * kHeadBlocks<S> / p.heads);
  launch_chained(op, stream, head_step_kernel<W, S>, head_grid(p.heads, n, each), dim3(kHeadThreads),
                 ring_bytes<S>(each), p, static_cast<uint32_t>(n), static_cast<uint32_t>(each));
}

// How a launch that finishes ranks is cut: tokens of a block, its teams, and its shared memory, of which the first part
// is for the ranks and the rest for rings.
struct RankCut {
  int64_t each;
  int teams;
  size_t rank_bytes, ring_bytes;

  size_t bytes() const { return rank_bytes + teams * ring_bytes; }
};

// Two blocks a multiprocessor where they fit, as each has the weights of its head for itself.
template <class W>
RankCut cut_ranks(const RankList<W>& list, ScalarType state, int64_t heads, int64_t n, int multiprocessors) {
  constexpr size_t kHalf = 104 << 10;
  for (int beside = 2;; beside--) {
    const int64_t each = tokens_each(n, multiprocessors * beside / heads);
    const int teams = each > 1 ? 2 : 1;
    const int64_t tokens = (each + teams - 1) / teams;
    const size_t ring = state == ScalarType::Float ? ring_bytes<float>(tokens) : ring_bytes<Half>(tokens);
    const RankCut cut{each, teams, rank_bytes(list, each), ring};
    if (beside == 1 || cut.bytes() <= kHalf) return cut;
  }
}

template <class W, class S>
void head_steps(const char* op, cudaStream_t stream, const HeadStep<W, S>& p, const RankList<W>& list,
                const RankCut& cut, int64_t n) {
  const auto kernel = cut.teams == 1 ? head_step_ranks_kernel<1, W, S> : head_step_ranks_kernel<2, W, S>;
  launch_chained(op, stream, kernel, head_grid(p.heads, n, cut.each), dim3(cut.teams * kHeadThreads), cut.bytes(), p,
                 list, static_cast<uint32_t>(n), static_cast<uint32_t>(cut.each), static_cast<uint32_t>(cut.rank_bytes),
                 static_cast<uint32_t>(cut.ring_bytes));
}

}  // namespace cog_rwkv

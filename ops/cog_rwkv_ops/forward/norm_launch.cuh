// How norms are cut into blocks, and their launches.
#pragma once

#include "norm_few.cuh"

namespace cog_rwkv {

// The GPU that kernels are cut for.
struct NormDevice {
  int multiprocessors;
  bool clusters;  // rows may be shared; it also has the shared memory of Hopper
};

struct NormCut {
  uint32_t parts;  // blocks that share a row, a power of two
  unsigned threads;
  uint32_t each;    // tokens that a block walks through, so that it loads the weights once
  uint32_t stages;  // tokens whose rows have room in shared memory
  size_t bytes;     // of shared memory, for these

  int64_t runs(int64_t tokens) const { return (tokens + each - 1) / each; }
};

constexpr int64_t kNormRoom = 216 << 10;  // of a multiprocessor's shared memory

// What a multiprocessor moves, some 100 bytes a nanosecond, while the blocks of a cluster start together and tell each
// other their sums.
constexpr int64_t kWorthSharing = 48 << 10;

inline int64_t groups_of(const ResidualRows& p) { return (int64_t{p.c} + kGroup - 1) / kGroup; }

// Half the threads of all multiprocessors at most, as the blocks shall be there beside those of a product.
inline bool are_few(const ResidualRows& p, int64_t tokens, NormDevice device) {
  return tokens * groups_of(p) * 32 <= device.multiprocessors * (int64_t{kNormThreads} / 2);
}

// A row to a cluster: as many blocks as it must have; where tokens are few as many as there can be, if it has several
// anyway or is heavy.
template <class W>
NormCut cut_few(const NormShift<W>& p, int64_t tokens, int64_t mixes, NormDevice device) {
  const int64_t groups = groups_of(p), own = kFewThreads / 32;
  if (!device.clusters) return {1, static_cast<unsigned>((groups + 1) / 2 * 32), 1, 1, 0};
  int64_t parts = 1;
  while (groups > parts * own) parts *= 2;
  int64_t most = parts;
  while (most < std::min<int64_t>(groups, kMostInCluster) && 2 * most * tokens <= device.multiprocessors) most *= 2;
  const int64_t width = p.delta.rounded ? sizeof(W) : sizeof(float);
  const int64_t moved = p.c * (3 * sizeof(float) + p.delta.slices * width + mixes * sizeof(W));
  if (parts > 1 || moved - moved / most > kWorthSharing) parts = most;
  return {static_cast<uint32_t>(parts), static_cast<unsigned>((groups + parts - 1) / parts * 32), 1, 1, 0};
}

// Whether the rows of a block's next tokens can be on their way. `states`: one comes with each.
template <class W>
bool can_stage(const NormShift<W>& p, bool states, NormDevice device) {
  return device.clusters && groups_of(p) * 32 <= kNormThreads && RowRing<W>::bytes_of(p, states) <= kNormRoom;
}

// A row to a block: as many runs as blocks fit. `follow`: a run begins with the token before it again.
template <class W>
NormCut cut_many(const NormShift<W>& p, bool states, bool follow, NormDevice device) {
  const int64_t tokens = p.n, groups = groups_of(p), multiprocessors = device.multiprocessors;
  const bool staged = can_stage(p, states, device);
  const int64_t threads = (staged ? groups : (groups + 1) / 2) * 32, stage = RowRing<W>::bytes_of(p, states);
  const int64_t fit = staged ? std::clamp<int64_t>(kNormRoom / stage, 1, kNormThreads / threads) : 1;
  const int64_t blocks = staged ? fit : kNormThreads / threads;
  int64_t each = (tokens + multiprocessors * blocks - 1) / (multiprocessors * blocks);
  if (follow && tokens > multiprocessors) each = std::max<int64_t>(each, 2);  // not each token twice
  const int64_t runs = (tokens + each - 1) / each;
  const int64_t beside = std::min(blocks, (runs + multiprocessors - 1) / multiprocessors);
  const int64_t most = std::min<int64_t>(kMostStages, each + (follow ? 1 : 0));
  const int64_t stages = staged ? std::clamp<int64_t>(kNormRoom / (beside * stage), 1, most) : 1;
  return {1, static_cast<unsigned>(threads), static_cast<uint32_t>(each), static_cast<uint32_t>(stages),
          static_cast<size_t>(staged ? stages * stage : 0)};
}

template <class W, class... Arguments>
void launch_rows(const char* op, cudaStream_t stream, const NormCut& cut, int64_t tokens,
                 void (*kernel)(NormShift<W>, Arguments...), NormShift<W> p, Arguments... arguments) {
  const dim3 grid(static_cast<unsigned>(cut.runs(tokens) * cut.parts));
  p.parts = cut.parts, p.each = cut.each, p.stages = cut.stages;
  launch_chained_clusters(op, stream, cut.parts, kernel, grid, dim3(cut.threads), cut.bytes, p, arguments...);
}

// A norm with M mixes: 6 or 1. Returns what it left for the next one.
template <int M, class W>
LeftRows norm_shift(const char* op, cudaStream_t stream, const NormShift<W>& p, NormDevice device) {
  if (p.cu_seqlens != nullptr) {
    const bool staged = can_stage(p, false, device);
    const NormCut cut = cut_many(p, false, true, device);
    launch_rows(op, stream, cut, p.n, staged ? norm_walk_kernel<W, 1, M> : norm_walk_kernel<W, 2, M>, p);
    return {p.left, p.shift, cut.each};
  }
  if (can_stage(p, true, device) && !are_few(p, p.n, device)) {
    launch_rows(op, stream, cut_many(p, true, false, device), p.n, norm_each_kernel<W, M>, p);
  } else {
    const NormCut cut = cut_few(p, p.n, M, device);
    launch_rows(op, stream, cut, p.n, device.clusters ? norm_few_kernel<W, 1, M> : norm_few_kernel<W, 2, M>, p, false);
  }
  return {};
}

// `count` rows of layer norm, as norm_few_kernel says.
template <class W>
void norm_rows(const char* op, cudaStream_t stream, const NormShift<W>& p, int64_t count, bool last,
               NormDevice device) {
  const NormCut cut = cut_few(p, count, 1, device);
  launch_rows(op, stream, cut, count, device.clusters ? norm_few_kernel<W, 1, 0> : norm_few_kernel<W, 2, 0>, p, last);
}

}  // namespace cog_rwkv

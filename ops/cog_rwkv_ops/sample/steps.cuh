// The steps of a row that its blocks make together. Every thread of a block calls each of them.
#pragma once

#include "row.cuh"

namespace cog_rwkv::sampling {

// The likeliest id of the whole row, as Shared::best, and whether a logit of it is not finite.
template <class T, bool kCached>
__device__ uint64_t likeliest_of(const Part<T, kCached>& part, Shared& s, bool& bad) {
  const Team team = part.p.team;
  const uint64_t mine = warp_max(part.take(bad));
  if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = mine;
  const int any = __syncthreads_or(bad);
  if (threadIdx.x == 0) {
    uint64_t best = 0;
    for (int w = 0; w < kWarps; w++) best = s.warps[w] > best ? s.warps[w] : best;
    s.best = best;
    s.bad = any ? 1 : 0;
  }
  team.sync();
  bad = __any_sync(kAllLanes, team.by_lane(&s.bad) != 0);
  return warp_max(team.by_lane(&s.best));
}

// Adds up this block's ids of the cut, a bin each; their sum over all bins is returned. No other block sees the bins
// before the team's next barrier. What falls into the last bin is left out: an id that is in no other one is there.
template <bool kWeighed, class T, bool kCached>
__device__ uint64_t fill(const Part<T, kCached>& part, Shared& s, const Cut& cut) {
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) s.low[bin] = s.high[bin] = 0;
  __syncthreads();
  uint64_t sum = 0;
  part.each([&](int i) {
    const uint32_t far = part.distance_at(i);
    if (!cut.has(far)) return;
    const uint64_t amount = kWeighed ? weight(far, part.parameters.temperature) : 1;
    const int bin = cut.bin(far);
    sum += amount;
    if (bin < kBins - 1 && amount > 0) add(s, bin, amount);
  });
  return block_scan(sum, s.warps).total;
}

// This block's slice of the bins, added up over the blocks; the sum over the slice is returned.
__device__ inline uint64_t merge(const Team& team, Shared& s, uint64_t* merged) {
  const int bins = kBins / team.size;
  uint64_t sum = 0;
  for (int k = threadIdx.x; k < bins; k += kThreads) {
    const int bin = team.rank() * bins + k;
    uint32_t low[kMostBlocks], high[kMostBlocks];
#pragma unroll
    for (int r = 0; r < kMostBlocks; r++) {
      low[r] = r < team.size ? *team.peer(&s.low[bin], r) : 0;
      high[r] = r < team.size ? *team.peer(&s.high[bin], r) : 0;
    }
    uint64_t all = 0;
#pragma unroll
    for (int r = 0; r < kMostBlocks; r++) all += static_cast<uint64_t>(high[r]) << 32 | low[r];
    merged[k] = all;
    sum += all;
  }
  return block_scan(sum, s.warps).total;
}

// In s.bin the first bin at which the sum reaches `wanted`, or the last one; in s.before the sum over those before it.
__device__ inline void find(const Team& team, Shared& s, const uint64_t* merged, uint64_t wanted) {
  const int lane = threadIdx.x % 32, bins = kBins / team.size, share = bins / kThreads;
  const uint64_t mine = team.by_lane(&s.slice), upto = warp_scan(mine);
  const uint64_t all = __shfl_sync(kAllLanes, upto, 31);
  const unsigned reached = __ballot_sync(kAllLanes, lane < team.size && upto >= wanted);
  if (reached) {
    const int slice = __ffs(static_cast<int>(reached)) - 1;
    const uint64_t before = __shfl_sync(kAllLanes, upto - mine, slice);
    const uint64_t* const sums = team.peer(merged, slice) + threadIdx.x * share;
    uint64_t sum = 0;
    for (int k = 0; k < share; k++) sum += sums[k];
    uint64_t now = before + block_scan(sum, s.warps).upto - sum;
    if (now < wanted && now + sum >= wanted) {
      int k = 0;
      while (now + sums[k] < wanted) now += sums[k++];
      s.bin = slice * bins + static_cast<int>(threadIdx.x) * share + k;
      s.before = now;
    }
  } else if (threadIdx.x == 0) {
    s.bin = kBins - 1;
    s.before = all;
  }
  __syncthreads();
}

// The weights up to `limit` of each warp's segment, in s.warps; their sum is returned.
template <class T, bool kCached>
__device__ uint64_t sum_warps(const Part<T, kCached>& part, Shared& s, uint32_t limit) {
  uint64_t sum = 0;
  part.each([&](int i) {
    const uint32_t far = part.distance_at(i);
    if (far <= limit) sum += weight(far, part.parameters.temperature);
  });
  sum = warp_sum(sum);
  __syncthreads();  // whoever still reads s.warps
  if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = sum;
  __syncthreads();
  uint64_t all = 0;
  for (int w = 0; w < kWarps; w++) all += s.warps[w];
  return all;
}

// The id of this block at which the cumulated weights of sum_warps pass `at`, which is less than their sum.
template <class T, bool kCached>
__device__ int64_t locate(const Part<T, kCached>& part, Shared& s, uint32_t limit, uint64_t at) {
  int warp = 0;
  while (at >= s.warps[warp]) at -= s.warps[warp++];
  // The segment of that warp, each thread some ids that follow each other.
  const int from = part.begin + warp * part.segment, last = min(part.end, from + part.segment);
  const int share = (part.segment + kThreads - 1) / kThreads;
  const int first = from + static_cast<int>(threadIdx.x) * share, end = min(last, first + share);
  const auto weight_at = [&](int i) {
    const uint32_t far = part.distance_at(i);
    return far <= limit ? weight(far, part.parameters.temperature) : 0;
  };
  uint64_t sum = 0;
  for (int i = first; i < end; i++) sum += weight_at(i);
  const uint64_t upto = block_scan(sum, s.warps).upto;
  if (upto - sum <= at && at < upto) {
    uint64_t left = at - (upto - sum);
    int i = first;
    for (uint64_t now; left >= (now = weight_at(i)); i++) left -= now;
    s.id = i;
  }
  __syncthreads();
  return s.id;
}

}  // namespace cog_rwkv::sampling

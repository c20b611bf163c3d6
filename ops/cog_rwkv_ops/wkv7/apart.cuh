// wkv7 in chunks where heads are few: producers on multiprocessors of their own.
//
// The chunks of a head take longer to produce than to follow, and shares of a head would all produce the same ones. So
// here some blocks produce, each chunk once, and leave it in global memory, the first chunks of all heads first; the
// others follow, each a share of a head, and fetch chunks as soon as a flag says that they are there. Both run the code
// of chunked.cuh on the same numbers, so the result is the same, bit for bit.
//
// Producers wait for nobody, and are the first blocks of the grid: they are never kept from running by those who wait
// for them.
#pragma once

#include "../csrc/bulk.cuh"
#include "chunked.cuh"

namespace cog_rwkv {

// Chunk c of sequence i is the one at begin / 16 + i + c: no two meet, as a sequence's last chunk is the only one that
// may be short.
struct Shelf {
  float* chunks;    // [heads, places, Slot::kKept]
  uint32_t* flags;  // [heads, places]
  int places;       // tokens / 16 + sequences
  int producers;    // blocks
  int longest;      // chunks of the longest sequence, if not more

  __device__ int64_t at(const Sequence& s, int64_t i, int64_t head) const {
    return head * places + s.begin / kChunk + i;
  }
};

constexpr int kClearThreads = 256;

__global__ void __launch_bounds__(kClearThreads) wkv7_clear_kernel(uint32_t* flags, int count) {
  wait_for_previous();
  let_next_begin();
  const int i = blockIdx.x * kClearThreads + threadIdx.x;
  if (i < count) flags[i] = 0;
}

// A pair of warps takes every so-many-th chunk, in the order of chunks, sequences and heads. A chunk is on its way out
// while the inputs of the next one come in.
template <class T>
__device__ __forceinline__ void fill_shelf(const Wkv7<T, void>& p, const Shelf& shelf, const Slot& slot, int pair,
                                           int pairs, Team team) {
  const bool sends = team.part == 0 && team.lane == 0;
  const int heads = static_cast<int>(p.heads), each = static_cast<int>(p.batch) * heads, count = shelf.longest * each;
  uint32_t* sent = nullptr;
  for (int j = pair * shelf.producers + blockIdx.x; j < count; j += pairs * shelf.producers) {
    const int chunk = j / each, i = j % each / heads, head = j % heads;
    const Sequence s = sequence_of_block(p, i);
    const int64_t t = s.begin + chunk * kChunk, at = shelf.at(s, i, head) + chunk;
    if (!s.row_ok || !p.takes(s) || t >= s.end) continue;
    const int n = static_cast<int>(min(s.end - t, int64_t{kChunk}));
    if (sends && sent != nullptr) wait_for_reads();
    team.sync();
    start_copies(p, slot, t, n, head, 0, static_cast<int>(kHead), team);
    if (sends && sent != nullptr) publish(sent);
    wait_for_copies();
    team.sync();
    make_chunk<T, false>(slot, n, team);
    fence_bulk_shared();
    team.sync();
    if (sends) copy_out(shelf.chunks + at * Slot::kKept<T>, slot.base, Slot::kKept<T> * 4), sent = shelf.flags + at;
  }
  if (sends && sent != nullptr) publish(sent);
}

// A warp fetches the chunks of a head in turn, of two blocks together each one half for both: these have the same head.
// It asks for as many flags as it has lanes, once for all that are set.
template <class T>
__device__ __forceinline__ void fetch_chunks(const Shelf& shelf, const Sequence& s, int64_t first, Ring slots,
                                             Barriers& barriers, int lane) {
  constexpr uint32_t kBytes = Slot::kKept<T> * 4, kHalf = Slot::kKept<T> / 2;
  const int count = static_cast<int>((s.end - s.begin + kChunk - 1) / kChunk);
  const uint32_t rank = rank_in_cluster(slots.blocks);
  int ready = 0, turn = 0;
  uint32_t parity = 1;
  for (int chunk = 0; chunk < count; chunk++) {
    while (ready <= chunk) {
      const bool there = ready + lane < count && is_published(shelf.flags + first + ready + lane);
      const unsigned missing = ~__ballot_sync(0xffffffffu, there);
      ready += missing == 0 ? kWarp : __ffs(static_cast<int>(missing)) - 1;
    }
    wait(&barriers.empty[turn], parity);
    if (lane == 0) {
      const float* from = shelf.chunks + (first + chunk) * Slot::kKept<T>;
      float* const to = slots.at(turn).base;
      expect_bytes(&barriers.full[turn], kBytes);
      if (slots.blocks == 1) {
        copy_in(to, from, kBytes, &barriers.full[turn]);
      } else {
        copy_in_both(to + rank * kHalf, from + rank * kHalf, kBytes / 2, &barriers.full[turn]);
      }
    }
    if (++turn == slots.count) turn = 0, parity ^= 1;
  }
}

// First the blocks of producers, with `pairs` of warps; then a block a sequence, head and share of its values: 4 /
// shares pairs of consumers, a warp that fetches, and `slots` to fetch into. In clusters of two unless shares is 1.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    wkv7_apart_kernel(const Wkv7<T, void> p, ScalarType state_type, Shelf shelf, int shares, int pairs, int slots) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) float memory[];
  __shared__ Barriers barriers;
  wait_for_previous();
  let_next_begin();
  if (static_cast<int>(blockIdx.x) < shelf.producers) {
    const int warp = threadIdx.x / kWarp, pair = warp / 2;
    const Team team{1 + pair, warp % 2, static_cast<int>(threadIdx.x % kWarp)};
    if (pair < pairs) fill_shelf(p, shelf, Slot{memory + pair * Slot::kFloats}, pair, pairs, team);
    return;
  }
  const int64_t block = static_cast<int64_t>(blockIdx.x) - shelf.producers;
  const Ring ring{memory, Slot::kKept<T>, slots, shares > 1 ? 2 : 1};
  follow_share<T, false>(p, state_type, shares, block, ring, barriers, 1, [&](const Share& s, int pair, Team team) {
    const int64_t first = shelf.at(s.sequence, block / shares / p.heads, s.head);
    if (pair == 0 && team.part == 0) fetch_chunks<T>(shelf, s.sequence, first, ring, barriers, team.lane);
  });
#endif
}

}  // namespace cog_rwkv

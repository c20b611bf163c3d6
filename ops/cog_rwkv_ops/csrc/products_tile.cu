// Products of 9 to 64 tokens: every weight read once, every activation once a cluster of blocks.
//
// The blocks of a cluster share the columns, so that the activations of a block's columns fit into its shared memory;
// its warps share the rows, 32 at a time, whose weights run through a ring as in products_stream.cu. At the end of a
// round the blocks read each other's sums and add them in the order of the columns. Without clusters, before compute
// capability 9.0, a block takes all columns, and the activations come part by part.
#include <array>
#include <atomic>

#include "cluster.cuh"
#include "products_kernels.cuh"

namespace cog_rwkv {
namespace {

constexpr int kRows = 32;            // of a weight, in a tile
constexpr unsigned kMostBlocks = 8;  // of a cluster, on every GPU that has them

// TILES: of 8 tokens. SLOTS: of the ring of a warp. PANEL: chunks of activations in shared memory.
template <int TILES_, int SLOTS_, int PANEL_, int BLOCKS_>
struct TileShape {
  static constexpr int TILES = TILES_, SLOTS = SLOTS_, PANEL = PANEL_, BLOCKS = BLOCKS_, tokens = 8 * TILES;
};
// The first two leave room on a multiprocessor for a block of the next kernel.
using Shape16 = TileShape<2, 4, 32, 2>;
using Shape32 = TileShape<4, 3, 16, 2>;
using Shape64 = TileShape<8, 4, 16, 1>;

// Which chunks of a product a block of a cluster takes.
struct ChunksOfBlock {
  unsigned rank, log_blocks;

  __device__ __forceinline__ RowRange operator()(const Product& job, const WarpPlan&) const {
    return part_of(static_cast<uint32_t>(job.k) / kChunk, rank, log_blocks);
  }
};

template <class S>
using Ring = WeightRing<kRows, S::SLOTS, ChunksOfBlock>;

template <class S>
struct TileMemory {
  alignas(16) unsigned char ring[kProductWarps][Ring<S>::bytes];
  Piece panel[S::PANEL][S::tokens][4];                      // a chunk of a token is four pieces
  alignas(16) float sums[kProductWarps][S::tokens][kRows];  // see sum_at()
  WarpPlan plans[kMaxProducts];
};

// Where the sum of a row of a tile is, among those of its token: the rows of a warp's lanes would meet in a bank.
__device__ __forceinline__ int sum_at(int row, int token) { return row ^ (token / 2 % 4 * 8); }

// ---- the kernel

// The activations of `count` chunks from `chunk` on; zeros for the tokens behind the last.
template <class T, class S>
__device__ __forceinline__ void load_panel(Piece (&panel)[S::PANEL][S::tokens][4], const Product& job, int n,
                                           uint32_t chunk, uint32_t count) {
  Piece* to = &panel[0][0][0];
  const int pieces = static_cast<int>(count) * S::tokens * 4;
  const T* x = static_cast<const T*>(job.x) + chunk * kChunk;
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kProductThreads) {
    const int token = i / 4 % S::tokens, column = i / (4 * S::tokens) * static_cast<int>(kChunk) + i % 4 * 8;
    to[i] = token < n ? fresh_piece(x + token * job.k + column) : Piece{};
  }
}

// Two tiles of 16 rows by 8 tokens each.
template <class S>
using TileSums = float[S::TILES][2][4];

// sums += the next step of the weights times the activations of one chunk.
template <class T, class S>
__device__ __forceinline__ void multiply_step(TileSums<S>& sums, const Piece (&weights)[4],
                                              const Piece (&chunk)[S::tokens][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < S::TILES; t++) {
    const Piece x = chunk[8 * t + lane / 4][lane % 4];
    multiply_32<T>(sums[t][0], weights[0], weights[1], x);
    multiply_32<T>(sums[t][1], weights[2], weights[3], x);
  }
}

template <class S>
__device__ __forceinline__ void put_sums(float (&to)[S::tokens][kRows], const TileSums<S>& sums) {
  const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
  for (int t = 0; t < S::TILES; t++) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int token = 8 * t + lane % 4 * 2 + i % 2, row = i / 4 * 16 + i / 2 % 2 * 8 + g;
      to[token][sum_at(row, token)] = sums[t][i / 4][i % 4];
    }
  }
}

// This block's part of a round's results: adds up the blocks in their order, and writes.
template <class T, class S>
__device__ __forceinline__ void write_round(TileMemory<S>& shared, const Product& job, const WarpPlan& plan,
                                            uint32_t round, int n, const ChunksOfBlock& chunks) {
  constexpr int quads = kRows / 4;
  const unsigned blocks = 1u << chunks.log_blocks;
  const int items = kProductWarps * S::tokens * quads >> chunks.log_blocks, first = items * chunks.rank;
  for (int item = first + threadIdx.x; item < first + items; item += kProductThreads) {
    const int quad = item % quads, token = item / quads % S::tokens, warp = item / (quads * S::tokens);
    const RowRange tile = plan.tile_of(round, warp);
    const uint32_t row = tile.begin + quad * 4;
    if (token >= n || row >= tile.end) continue;
    const uint32_t at = shared_address(&shared.sums[warp][token][sum_at(quad * 4, token)]);
    float4 sum = cluster_load(at, 0, blocks);
    for (unsigned block = 1; block < blocks; block++) sum = add4(sum, cluster_load(at, block, blocks));
    finish_rows<T>(job, sum, row, token);
  }
}

// sums = this block's columns of a warp's tile. `first`: the activations of the job are not there yet. All threads of
// the block call it, also those without a tile.
template <class T, class S>
__device__ __forceinline__ void multiply_round(TileSums<S>& sums, Ring<S>& ring, TileMemory<S>& shared,
                                               const Product& job, int n, const RowRange& chunks, bool busy,
                                               bool first) {
  const uint32_t count = chunks.end - chunks.begin;
  for (uint32_t done = 0; done < count; done += S::PANEL) {
    const uint32_t here = min(count - done, uint32_t{S::PANEL});
    if (first || count > S::PANEL) {
      __syncthreads();  // all are done with what was there
      load_panel<T, S>(shared.panel, job, n, chunks.begin + done, here);
      __syncthreads();
    }
    if (!busy) continue;
    for (uint32_t i = 0; i < here; i++) {
      Piece weights[4];
      ring.read(weights);
      multiply_step<T, S>(sums, weights, shared.panel[i]);
      ring.go_on();
    }
  }
}

template <class T, class S>
__global__ void __launch_bounds__(kProductThreads, S::BLOCKS)
    tile_kernel(const __grid_constant__ ProductList list, unsigned log_blocks) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<TileMemory<S>*>(memory);
  const unsigned blocks = 1u << log_blocks;
  const ChunksOfBlock chunks_of{blockIdx.x & (blocks - 1), log_blocks};
  plan_jobs(shared.plans, list, blockIdx.x >> log_blocks, kRows, [](uint32_t) { return 0u; });
  __syncthreads();
  const int warp = threadIdx.x / 32;
  Ring<S> ring(list, shared.plans, chunks_of, shared.ring[warp]);
  wait_for_previous();
  let_next_begin();
  bool others_read = false;  // the blocks of the cluster may still be reading the sums of the last round
  for (int i = 0; i < list.count; i++) {
    const Product& job = list.jobs[i];
    const WarpPlan& plan = shared.plans[i];
    for (uint32_t round = 0; round < plan.rounds; round++) {
      const RowRange tile = plan.tile_of(round, warp);
      TileSums<S> sums = {};
      multiply_round<T, S>(sums, ring, shared, job, list.n, chunks_of(job, plan), tile.end > tile.begin, round == 0);
      if (others_read) cluster_wait(blocks);
      put_sums<S>(shared.sums[warp], sums);
      cluster_arrive(blocks);
      cluster_wait(blocks);
      write_round<T, S>(shared, job, plan, round, list.n, chunks_of);
      cluster_arrive(blocks);
      others_read = true;
    }
  }
  if (others_read) cluster_wait(blocks);  // nobody ends while others read its sums
}

// ---- on the host

// How many clusters the device runs at once, asked once for each.
template <class T, class S>
int known_clusters(const char* op, unsigned log_blocks) {
  static std::array<std::array<std::atomic<int>, 4>, 64> known{};  // count + 1
  int device = 0;
  check_cuda(op, cudaGetDevice(&device));
  std::atomic<int>& mine = known[device % known.size()][log_blocks];
  if (mine == 0)
    mine = 1 + clusters_at_once(op, tile_kernel<T, S>, 1u << log_blocks, kProductThreads, sizeof(TileMemory<S>));
  return mine - 1;
}

// The smallest clusters whose blocks keep their activations in shared memory, or the largest there are.
template <class T, class S>
unsigned log_cluster(const char* op, const ProductList& list, int multiprocessors) {
  int64_t chunks = 0;
  for (int i = 0; i < list.count; i++) chunks = std::max<int64_t>(chunks, list.jobs[i].k / kChunk);
  unsigned log_blocks = 0;
  if (plain_gpu()) return log_blocks;
  while ((2u << log_blocks) <= kMostBlocks && chunks > int64_t{S::PANEL} << log_blocks) log_blocks++;
  while (log_blocks > 0 && (multiprocessors >> log_blocks == 0 || known_clusters<T, S>(op, log_blocks) == 0)) {
    log_blocks--;
  }
  return log_blocks;
}

template <class T, class S>
void launch_tiles(const char* op, cudaStream_t stream, ProductList& list, uint64_t units, int multiprocessors) {
  const auto kernel = tile_kernel<T, S>;
  constexpr size_t bytes = sizeof(TileMemory<S>);
  check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  const unsigned log_blocks = log_cluster<T, S>(op, list, multiprocessors);
  int teams = multiprocessors >> log_blocks;
  if (log_blocks > 0) teams = std::min(teams, known_clusters<T, S>(op, log_blocks));
  list.shares = share_units(units, teams);
  launch_chained_clusters(op, stream, kernel, dim3(teams << log_blocks), dim3(kProductThreads), bytes, 1u << log_blocks,
                          list, log_blocks);
}

template <class S>
void launch_tiles(const char* op, cudaStream_t stream, ScalarType type, ProductList& list, uint64_t units,
                  int multiprocessors) {
  if (type == ScalarType::Half) return launch_tiles<Half, S>(op, stream, list, units, multiprocessors);
  launch_tiles<BFloat16, S>(op, stream, list, units, multiprocessors);
}

}  // namespace

size_t tile_shared_bytes(int64_t n) {
  return n <= Shape16::tokens   ? sizeof(TileMemory<Shape16>)
         : n <= Shape32::tokens ? sizeof(TileMemory<Shape32>)
                                : sizeof(TileMemory<Shape64>);
}

void tile_products(const char* op, cudaStream_t stream, ScalarType type, ProductList& list, uint64_t units,
                   int multiprocessors) {
  if (list.n <= Shape16::tokens) return launch_tiles<Shape16>(op, stream, type, list, units, multiprocessors);
  if (list.n <= Shape32::tokens) return launch_tiles<Shape32>(op, stream, type, list, units, multiprocessors);
  launch_tiles<Shape64>(op, stream, type, list, units, multiprocessors);
}

}  // namespace cog_rwkv

// Products of up to 8 tokens, on any GPU: the weights as fast as memory gives them.
//
// The warps of a block share the columns of a tile of 32 rows. Each warp's weights run through a ring of its own in
// shared memory, which begins to fill before the kernel before this one has ended; activations come from L2 into
// registers, some chunks ahead. The code is small on purpose: the kernels of a step take turns, and what does not stay
// in a multiprocessor's instruction cache is fetched anew at every launch.
#include "products_kernels.cuh"

namespace cog_rwkv {
namespace {

constexpr int kRows = 32;     // of a weight, in a tile
constexpr int kTokens = 8;    // columns of the tensor cores' results
constexpr int kColumns = 64;  // of a tile, in a step: whole lines of 128 bytes
constexpr int kSlots = 3;     // of the ring of a warp: a step each
constexpr int kAhead = 2;     // steps of activations in registers
constexpr int kStride = 36;   // floats from token to token in a warp's sums: no two lanes meet in a bank
constexpr int kStepBytes = kRows * kColumns * 2;

// What a warp has to do for one product.
struct WarpJob {
  const char* weight;       // its first tile's first row, at its first column
  int64_t row_bytes, jump;  // from row to row; from behind a tile's last column to the next tile's first
  uint32_t tiles, steps;    // of each tile
  int rows, tile, turn;     // left from its first tile on; of a tile; from one of its tiles to the next
  int column, columns;      // the first, and how many: a multiple of 32
};

struct StreamMemory {
  alignas(16) unsigned char ring[kProductWarps][kSlots * kStepBytes];
  alignas(16) float sums[2][kProductWarps][kTokens * kStride];
  WarpPlan plans[kMaxProducts];
  WarpJob jobs[kMaxProducts][kProductWarps];
};

__device__ __forceinline__ WarpJob warp_job(const Product& job, const WarpPlan& plan, uint32_t warp) {
  const uint32_t group = warp >> plan.log_split, groups = kProductWarps >> plan.log_split;
  const RowRange steps =
      part_of(divide_up(static_cast<uint32_t>(job.k), kColumns), warp & ((1u << plan.log_split) - 1), plan.log_split);
  const uint32_t turn = groups * plan.tile, first = plan.rows.begin + group * plan.tile;
  WarpJob mine{};
  mine.row_bytes = job.k * 2;
  mine.weight = static_cast<const char*>(job.weight) + first * mine.row_bytes + steps.begin * (kColumns * 2);
  mine.steps = steps.end - steps.begin, mine.column = static_cast<int>(steps.begin) * kColumns;
  mine.columns = static_cast<int>(min(job.k, int64_t{steps.end} * kColumns)) - mine.column;
  mine.jump = turn * mine.row_bytes - mine.steps * int64_t{kColumns * 2};
  mine.tiles = first < plan.rows.end ? divide_up(plan.rows.end - first, turn) : 0;
  mine.rows = static_cast<int>(plan.rows.end - first), mine.tile = static_cast<int>(plan.tile);
  mine.turn = static_cast<int>(turn);
  return mine;
}

// Where a piece of a row of a step is: the pieces of neighbouring rows that lanes read together lie in other banks.
__device__ __forceinline__ uint32_t piece_at(int row, int piece) { return row * 128 + (piece ^ (row & 1) << 2) * 16; }

// A warp's copies into its ring, one step of a tile after the other through all products.
struct Copies {
  const WarpJob (*jobs)[kProductWarps];
  int count, job, rows, shown;  // rows: left of the product; shown: of the tile
  uint32_t tiles, steps;        // left
  int columns;                  // left of the tile
  const char* from;

  __device__ __forceinline__ void next_tile() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (tiles > 0) {
      from += jobs[job][warp].jump, rows -= jobs[job][warp].turn;
    } else {
      do {
        if (++job >= count) return;
        tiles = jobs[job][warp].tiles;
      } while (tiles == 0);
      from = jobs[job][warp].weight + lane / 8 * jobs[job][warp].row_bytes + lane % 8 * 16;
      rows = jobs[job][warp].rows;
    }
    tiles--, steps = jobs[job][warp].steps, columns = jobs[job][warp].columns;
    shown = min(rows, jobs[job][warp].tile);
  }

  __device__ __forceinline__ void next(uint32_t to) {
    if (steps == 0 && job < count) next_tile();
    if (steps > 0) {
      const int lane = threadIdx.x % 32, row = lane / 8, piece = lane % 8;
      const int64_t four = 4 * jobs[job][threadIdx.x / 32].row_bytes;
      const bool inside = piece * 8 < columns;
#pragma unroll
      for (int i = 0; i < kRows / 4; i++) {
        copy_piece(to + piece_at(row + 4 * i, piece), from + i * four, inside && row + 4 * i < shown);
      }
      from += kColumns * 2, columns -= kColumns, steps--;
    }
    end_step();
  }
};

// The ring of a warp.
struct StreamRing {
  Copies copies;
  uint32_t begin, at;

  __device__ __forceinline__ void wait() const {
    wait_for_steps<kSlots - 1>();
    __syncwarp();
  }
  // This lane's pieces of half a step: of the rows lane / 4 + 8 i.
  __device__ __forceinline__ void read(Piece (&pieces)[kRows / 8], int half) const {
    const int row = threadIdx.x % 32 / 4, piece = threadIdx.x % 4 + 4 * half;
#pragma unroll
    for (int i = 0; i < kRows / 8; i++) pieces[i] = shared_piece(at + piece_at(row + 8 * i, piece));
  }
  __device__ __forceinline__ void go_on() {
    __syncwarp();  // all lanes have read what is written now
    copies.next(at);
    at += kStepBytes;
    if (at == begin + kSlots * kStepBytes) at = begin;
  }
};

// Sums of 32 rows by 8 tokens, two tiles of 16 rows.
using TileSums = float[2][4];

// sums = a tile of weights times its columns. `x`: this lane's part of the activations of those columns, null where
// there is no such token.
template <class T>
__device__ __forceinline__ void multiply_tile(TileSums& sums, StreamRing& ring, const T* x, const WarpJob& job) {
  Piece held[kAhead][2];
  const auto load = [&](Piece(&to)[2], int step) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = step * kColumns + half * 32;
      to[half] = x != nullptr && column < job.columns ? fresh_piece(x + column) : Piece{};
    }
  };
  const int count = static_cast<int>(job.steps);
#pragma unroll
  for (int i = 0; i < kAhead; i++) load(held[i], i);
#pragma unroll 1
  for (int done = 0; done < count; done += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (done + i >= count) break;
      ring.wait();
#pragma unroll
      for (int half = 0; half < 2; half++) {
        Piece weights[kRows / 8];
        ring.read(weights, half);
        multiply_32<T>(sums[0], weights[0], weights[1], held[i][half]);
        multiply_32<T>(sums[1], weights[2], weights[3], held[i][half]);
      }
      load(held[i], done + i + kAhead);
      ring.go_on();
    }
  }
}

// The sums of one warp into shared memory, [token][row].
__device__ __forceinline__ void put_sums(float* to, const TileSums& sums) {
  const int lane = threadIdx.x % 32, g = lane / 4, token = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    to[token * kStride + 16 * i + g] = sums[i][0];
    to[(token + 1) * kStride + 16 * i + g] = sums[i][1];
    to[token * kStride + 16 * i + g + 8] = sums[i][2];
    to[(token + 1) * kStride + 16 * i + g + 8] = sums[i][3];
  }
}

// Adds up the warps that shared columns, in their order, and writes the results of a round.
template <class T>
__device__ __forceinline__ void write_round(const Product& job, const WarpPlan& plan, uint32_t round, int n,
                                            const float (&sums)[kProductWarps][kTokens * kStride]) {
  const int split = 1 << plan.log_split, items = kProductWarps * kTokens * kRows >> plan.log_split;
#pragma unroll 1
  for (int item = threadIdx.x; item < items; item += kProductThreads) {
    const int local = item % kRows, token = item / kRows % kTokens, warp = item / (kRows * kTokens) << plan.log_split;
    const RowRange tile = plan.tile_of(round, warp);
    const uint32_t row = tile.begin + local;
    if (token >= n || row >= tile.end) continue;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kProductWarps; i++) {
      if (i < split) sum += sums[warp + i][token * kStride + local];
    }
    finish_row<T>(job, sum, row, token);
  }
}

template <class T>
__global__ void __launch_bounds__(kProductThreads, 2) stream_kernel(const __grid_constant__ ProductList list) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<StreamMemory*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  plan_jobs(shared.plans, list, blockIdx.x, kRows, [](uint32_t k) { return column_split(k); });
  __syncthreads();
  for (int i = threadIdx.x; i < list.count * kProductWarps; i += kProductThreads) {
    const int job = i / kProductWarps, one = i % kProductWarps;
    shared.jobs[job][one] = warp_job(list.jobs[job], shared.plans[job], one);
  }
  __syncthreads();
  StreamRing ring{{shared.jobs, list.count, -1, 0, 0, 0, 0, 0, nullptr}, shared_address(shared.ring[warp]), 0};
#pragma unroll 1
  for (int i = 0; i < kSlots; i++) ring.copies.next(ring.begin + i * kStepBytes);
  ring.at = ring.begin;
  wait_for_previous();
  let_next_begin();
  int turn = 0;  // two rooms for sums in turn: one barrier a round
#pragma unroll 1
  for (int i = 0; i < list.count; i++) {
    const Product& job = list.jobs[i];
    const WarpJob& mine = shared.jobs[i][warp];
    const T* x = static_cast<const T*>(job.x) + lane / 4 * job.k + mine.column + lane % 4 * 8;
    if (lane / 4 >= list.n) x = nullptr;
#pragma unroll 1
    for (uint32_t round = 0; round < shared.plans[i].rounds; round++) {
      TileSums sums = {};
      if (round < mine.tiles) multiply_tile<T>(sums, ring, x, mine);
      put_sums(shared.sums[turn][warp], sums);
      __syncthreads();
      write_round<T>(job, shared.plans[i], round, list.n, shared.sums[turn]);
      turn ^= 1;
    }
  }
}

}  // namespace

size_t stream_shared_bytes() { return sizeof(StreamMemory); }

void stream_products(const char* op, cudaStream_t stream, ScalarType type, ProductList& list, uint64_t units,
                     int multiprocessors) {
  list.shares = share_units(units, multiprocessors);
  const auto kernel = type == ScalarType::Half ? stream_kernel<Half> : stream_kernel<BFloat16>;
  const int bytes = static_cast<int>(sizeof(StreamMemory));
  launch_chained(op, stream, kernel, dim3(multiprocessors), dim3(kProductThreads), bytes, list);
}

}  // namespace cog_rwkv

// sample_: CUDA kernel and launch.

#include "steps.cuh"

namespace cog_rwkv {
namespace {

using namespace sampling;

// The least distance up to which amounts (with kWeighed the weights, else 1 an id) add up to wanted_of(their sum up to
// `limit`); `limit` where that is 0. `merged` has room for the bins of a slice. Every thread of the team gets it.
template <bool kWeighed, class T, bool kCached, class Wanted>
__device__ uint32_t threshold(const Part<T, kCached>& part, Shared& s, uint64_t* merged, uint32_t limit,
                              const Wanted& wanted_of) {
  const Team team = part.p.team;
  uint64_t wanted = 0;
  Cut cut = Cut::first(limit, part.parameters.temperature);
  for (bool first = true; cut.low < cut.high; first = false) {
    const uint64_t sum = fill<kWeighed>(part, s, cut);
    if (threadIdx.x == 0) s.all = sum;
    team.sync();
    if (first) {
      const uint64_t total = warp_sum(team.by_lane(&s.all));
      if (total == 0) return limit;
      wanted = wanted_of(total);
    }
    const uint64_t slice = merge(team, s, merged);
    if (threadIdx.x == 0) s.slice = slice;
    team.sync();
    find(team, s, merged, wanted);
    cut = cut.inside(s.bin);
    wanted -= s.before;
  }
  return cut.low;
}

// The id of the row in the block whose part has it, -1 in the others. `likeliest` where nothing weighs anything.
template <class T, bool kCached>
__device__ int64_t draw(const Part<T, kCached>& part, Shared& s, uint64_t* merged, int64_t likeliest) {
  const Team team = part.p.team;
  const Parameters& parameters = part.parameters;
  uint32_t limit = kInfinity;
  if (parameters.top_k > 0 && parameters.top_k < part.p.vocab) {
    limit = threshold<false>(part, s, merged, limit, [&](uint64_t) { return static_cast<uint64_t>(parameters.top_k); });
  }
  if (parameters.top_p < 1.0) {
    limit =
        threshold<true>(part, s, merged, limit, [&](uint64_t total) { return wanted_share(parameters.top_p, total); });
  }
  const uint64_t kept = sum_warps(part, s, limit);
  if (threadIdx.x == 0) s.kept = kept;
  team.sync();
  const uint64_t mine = team.by_lane(&s.kept), upto = warp_scan(mine);
  const uint64_t total = __shfl_sync(kAllLanes, upto, 31), before = __shfl_sync(kAllLanes, upto - mine, team.rank());
  if (total == 0) return likeliest;
  const uint64_t at = position(parameters.key, parameters.draws, total);
  if (at < before || at - before >= kept) return -1;
  return locate(part, s, limit, at - before);
}

template <class T, bool kCached>
__global__ void __launch_bounds__(kThreads, 4) sample_kernel(const __grid_constant__ Work<T> p) {
  __shared__ Shared s;
  extern __shared__ uint64_t merged[];
  const Team team = p.team;
  const bool speaks = team.rank() == 0 && threadIdx.x == 0;  // for the row
  const int64_t b = blockIdx.x / team.size, row = p.rows[b];
  if (row < 0 || row >= p.pool) {
    if (speaks) p.ids[b] = 0, p.finite[b] = false;
    return;
  }
  int64_t* const integers = p.integers + row * p.strides.integers;
  float* const counts = p.counts + row * p.strides.counts;
  const Parameters parameters(p.numbers + row * kNumbers, integers);
  Part<T, kCached> part(p, p.logits + b * p.vocab, counts, parameters,
                        reinterpret_cast<float*>(merged + kBins / team.size));
  bool bad;
  const uint64_t best = likeliest_of(part, s, bad);
  const bool finite = !bad && best != 0;
  int64_t id = best == 0 ? 0 : 0xffffffffu - static_cast<uint32_t>(best);
  part.top = value_of(static_cast<uint32_t>(best >> 32));
  if (finite && !parameters.greedy) id = draw(part, s, merged, id);
  __syncthreads();  // now that all counts were read
  if (parameters.counted) {
    part.template each<8>(
        [&](int i) { counts[i] = plus(times(__ldcg(counts + i), parameters.decay), i == id ? 1.0f : 0.0f); });
  }
  if (threadIdx.x == 0 && part.begin <= id && id < part.end) p.ids[b] = id;
  team.sync();  // nobody leaves while others read what it has in shared memory, or its row's draws
  if (speaks) p.finite[b] = finite, integers[kDraws] = parameters.draws + 1;
}

// Tells by its bounds whether it was compiled for what has clusters; code for 8.0 may run on 9.0 too.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define COG_RWKV_CLUSTERS 64
#else
#define COG_RWKV_CLUSTERS 32
#endif
__global__ void __launch_bounds__(COG_RWKV_CLUSTERS) has_clusters_kernel() {}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check_cuda(kName, cudaGetDevice(&device));
  check_cuda(kName, cudaDeviceGetAttribute(&value, which, device));
  return value;
}

constexpr int64_t kIdsOfBlock = 8192;  // of which a block takes no more where it can have others beside it

int team_size(int64_t vocab) {
  cudaFuncAttributes code{};
  check_cuda(kName, cudaFuncGetAttributes(&code, has_clusters_kernel));
  int size = 1;
  if (code.maxThreadsPerBlock != 64 || plain_gpu()) return size;
  while (size < kMostBlocks && vocab > size * kIdsOfBlock) size *= 2;
  return size;
}

template <class T, bool kCached>
void start(const Launch& launch, const Work<T>& work, int64_t batch, int64_t bytes) {
  const auto kernel = sample_kernel<T, kCached>;
  check_cuda(kName, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = work.team.size;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(batch * work.team.size);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = bytes;
  config.stream = launch.stream;
  config.attrs = &cluster;
  config.numAttrs = work.team.size > 1 ? 1 : 0;
  check_cuda(kName, cudaLaunchKernelEx(&config, kernel, work));
}

std::tuple<Tensor, Tensor> sample_cuda(const Tensor& logits, const Tensor& rows, const Tensor& allowed,
                                       const Tensor& numbers, const Tensor& integers, const Tensor& counts) {
  const Strides strides = check_sample(logits, rows, allowed, numbers, integers, counts);
  const Launch launch(kName, logits);
  const Tensor given = as_contiguous(logits), index = as_contiguous(rows), may = as_contiguous(allowed),
               number = as_contiguous(numbers);
  const int64_t batch = logits.size(0), vocab = logits.size(1);
  Tensor ids = empty_tensor(rows, {batch}), finite = empty_tensor(allowed, {batch});
  if (batch == 0) return {ids, finite};
  const Team team{team_size(vocab)};
  const int64_t merged = kBins / team.size * sizeof(uint64_t);
  const int64_t cached = merged + (vocab + team.size - 1) / team.size * sizeof(float);
  const int64_t room = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - static_cast<int64_t>(sizeof(Shared));
  dispatch_float_or_half(logits.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const Work<T> work{data<T>(given),
                       data<int64_t>(index),
                       data<bool>(may),
                       data<float>(number),
                       mutable_data<int64_t>(integers),
                       mutable_data<float>(counts),
                       mutable_data<int64_t>(ids),
                       mutable_data<bool>(finite),
                       vocab,
                       counts.size(0),
                       strides,
                       team};
    if (cached <= room) {
      start<T, true>(launch, work, batch, cached);
    } else {
      start<T, false>(launch, work, batch, merged);
    }
  });
  return {ids, finite};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("sample_", TORCH_BOX(&sample_cuda)); }

}  // namespace cog_rwkv

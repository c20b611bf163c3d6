// wide_products(): which tiles, and the launch.
#include "products_wide.h"

#include <array>
#include <cstdio>
#include <map>
#include <unordered_map>

#include "aligned.cuh"
#include "products_wide.cuh"

namespace cog_rwkv {
namespace {

// What a plan depends on.
using PlanKey = std::array<uint32_t, 4 + 2 * kMostJobs>;

PlanKey key_of(const WideJob* jobs, int count, uint32_t n, bool transposed, uint32_t most_parts, int device) {
  PlanKey key{n, transposed ? 1u : 0u, most_parts, static_cast<uint32_t>(device)};
  for (int i = 0; i < count; i++) key[4 + 2 * i] = jobs[i].m, key[5 + 2 * i] = jobs[i].k;
  return key;
}

// For tests and measurements: COG_RWKV_WIDE=rows,tokens,parts, the first two a size of kTileSizes. Ignored where it is
// impossible.
bool wanted_plan(const WideJob* jobs, int count, uint32_t n, uint32_t most_parts, WidePlan& plan) {
  const char* wanted = std::getenv("COG_RWKV_WIDE");
  TileSize tile{};
  uint32_t parts = 0;
  if (!wanted || std::sscanf(wanted, "%u,%u,%u", &tile.rows, &tile.tokens, &parts) != 3) return false;
  if (parts < 1 || parts > most_parts || parts > steps_of(jobs[0].k)) return false;
  for (const TileSize& size : kTileSizes) {
    if (size.rows != tile.rows || size.tokens != tile.tokens) continue;
    plan = make_plan(jobs, count, n, tile, parts);
    return true;
  }
  return false;
}

// The best plan, thought out once.
WidePlan plan_for(const WideJob* jobs, int count, uint32_t n, bool transposed, uint32_t most_parts, int device,
                  uint32_t multiprocessors) {
  constexpr size_t most = 4096;
  static thread_local std::map<PlanKey, WidePlan> known;
  WidePlan plan;
  if (wanted_plan(jobs, count, n, most_parts, plan)) return plan;
  const PlanKey key = key_of(jobs, count, n, transposed, most_parts, device);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  if (known.size() >= most) known.clear();
  return known[key] = best_wide_plan(jobs, count, n, transposed, most_parts, multiprocessors);
}

// All that the map of a matrix depends on, so that one of a tensor that has gone is never that of another.
struct MapKey {
  const void* data;
  int64_t columns, rows;
  uint32_t tile;
  ScalarType type;
  int device;

  bool operator==(const MapKey&) const = default;
};

struct MapHash {
  size_t operator()(const MapKey& key) const {
    uint64_t hash = reinterpret_cast<uintptr_t>(key.data) >> 4;
    for (const int64_t one : {key.columns, key.rows, int64_t{key.tile}}) {
      hash = (hash ^ static_cast<uint64_t>(one)) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

// The map of a matrix [rows, columns] in tiles of so many rows, encoded once: a layer's buffers are those of the last
// one, and weights stay where they are.
template <class T>
const CUtensorMap& map_for(const char* op, const void* data, int64_t columns, int64_t rows, uint32_t tile, int device) {
  constexpr size_t most = 4096;
  static thread_local std::unordered_map<MapKey, CUtensorMap, MapHash> known;
  constexpr auto type = std::is_same_v<T, Half> ? ScalarType::Half : ScalarType::BFloat16;
  const MapKey key{data, columns, rows, tile, type, device};
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  if (known.size() >= most) known.clear();
  return known[key] = matrix_map(op, static_cast<const T*>(data), columns, 1, rows, tile, false);
}

template <class T>
void describe(const char* op, WideList& list, bool transposed, int device) {
  const TileSize& tile = list.plan.tile;
  for (int i = 0; i < kMaxProducts && list.jobs[i].x != nullptr; i++) {
    const Product& job = list.jobs[i];
    list.weights[i] = transposed ? map_for<T>(op, job.weight, job.m, job.k, 64, device)
                                 : map_for<T>(op, job.weight, job.k, job.m, tile.rows, device);
    list.tokens[i] = map_for<T>(op, job.x, job.k, list.n, tile.tokens, device);
  }
}

}  // namespace

bool wide_possible(const char* op, const Product* jobs, int count, int64_t n) {
  if (n > 1 << 28 || !has_wgmma(op)) return false;
  int64_t rows = 0;
  for (int i = 0; i < count; i++) rows += jobs[i].m + 1024;
  return rows < (int64_t{1} << 42) / (n + 1024);  // their tiles are counted in 32 bits
}

int wide_products(const char* op, cudaStream_t stream, ScalarType type, const Product* jobs, int count, int64_t n) {
  int device = 0;
  check_cuda(op, cudaGetDevice(&device));
  WideList list{};
  std::copy_n(jobs, count, list.jobs);
  // The longest sums first, so that what is left at the end is short.
  std::stable_sort(list.jobs, list.jobs + count, [](const Product& a, const Product& b) { return a.k > b.k; });
  list.n = static_cast<int>(n);
  WideJob sizes[kMaxProducts];
  for (int i = 0; i < count; i++) {
    sizes[i] = {static_cast<uint32_t>(list.jobs[i].m), static_cast<uint32_t>(list.jobs[i].k)};
  }
  const uint32_t multiprocessors = device_attribute(op, cudaDevAttrMultiProcessorCount);
  const uint32_t most_parts = count == 1 ? std::clamp<uint32_t>(jobs[0].most_slices, 1, kMostParts) : 1;
  const bool transposed = jobs[0].transposed;
  list.plan = plan_for(sizes, count, static_cast<uint32_t>(n), transposed, most_parts, device, multiprocessors);
  if (type == ScalarType::Half) {
    describe<Half>(op, list, transposed, device);
    wide_launch_half(op, stream, list, transposed, multiprocessors);
  } else {
    describe<BFloat16>(op, list, transposed, device);
    wide_launch_bfloat16(op, stream, list, transposed, multiprocessors);
  }
  return static_cast<int>(list.plan.parts);
}

}  // namespace cog_rwkv

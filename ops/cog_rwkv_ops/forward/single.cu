// A step of one token in one kernel: whether it can be, and how it is cut.
#include <torch/csrc/stable/ops.h>

#include "../csrc/aligned.cuh"
#include "../csrc/wgmma.cuh"
#include "single/step.h"

namespace cog_rwkv {
namespace {

// Wider, a step waits for bytes, and the kernels of several tokens are as fast.
constexpr int64_t kMostWidth = 2048;

// For tests and measurements: COG_RWKV_SINGLE=0 takes the kernels of several tokens.
bool wanted() {
  const char* choice = std::getenv("COG_RWKV_SINGLE");
  return !choice || std::string_view(choice) != "0";
}

// g, w, a, v: as RankJobs numbers them. A layer alone has no v.
std::array<const Tensor*, kSecondJobs> downs(const TimeMixWeights& w) { return {&w.g1, &w.w1, &w.a1, &w.v1}; }

uint32_t rank_of(const ModelWeights& model, int job) {
  const LayerWeights& last = model.layers.back();
  return job == kSecondJobs - 1 && last.first ? 0 : static_cast<uint32_t>(downs(last.time)[job]->size(0));
}

// Whether all layers are alike.
bool even(const ModelWeights& model) {
  for (const LayerWeights& layer : model.layers) {
    for (int job = 0; job < (layer.first ? kSecondJobs - 1 : kSecondJobs); job++) {
      if (downs(layer.time)[job]->size(0) != rank_of(model, job)) return false;
    }
    if (layer.channel.key.size(0) != model.layers[0].channel.key.size(0)) return false;
  }
  return true;
}

uint32_t round_up(int64_t n, int64_t to) { return static_cast<uint32_t>((n + to - 1) / to * to); }

// Sizes, and who has which rows.
void set_sizes(Single& p, const ModelWeights& model, int64_t c, unsigned blocks) {
  p.layer_count = static_cast<uint32_t>(model.layers.size()), p.c = static_cast<uint32_t>(c);
  p.ffn = static_cast<uint32_t>(model.layers[0].channel.key.size(0));
  p.all_ranks = 0;
  for (int job = 0; job < kSecondJobs; job++) p.all_ranks += p.ranks[job] = rank_of(model, job);
  p.rows[kFirstStage] = 3 * p.c + p.all_ranks, p.rows[kOutputStage] = p.c, p.rows[kKeyStage] = p.ffn;
  p.rows[kHeadStage] = static_cast<uint32_t>(model.head.size(0));
  const int64_t most = kSlotBytes / (2 * c), each = int64_t{blocks} * 8;  // warps that share a stage's rows
  for (int i = 0; i < kStages; i++) {
    p.at_once[i] = static_cast<uint32_t>(std::clamp<int64_t>((p.rows[i] + each - 1) / each, 1, most));
  }
  p.slice = round_up((c + blocks - 1) / blocks, 4);
  // Then bytes are not what a step waits for, and rows that are there already are.
  p.values_ahead = c <= 1024;
}

// Vectors that a block multiplies in a stage: two or more.
uint32_t most_parts(const Single& p, unsigned blocks) {
  uint32_t most = 2;
  for (uint32_t layer = 0; layer < std::min(p.layer_count, 2u); layer++) {
    for (unsigned block = 0; block < blocks; block++) {
      uint32_t parts = 0;
      each_part(p, kFirstStage, layer, block, blocks, [&](const StagePart&) { parts++; });
      most = std::max(most, parts);
    }
  }
  return most;
}

SingleLayer layer_of(const LayerWeights& layer) {
  const TimeMixWeights& w = layer.time;
  const ChannelMixWeights& f = layer.channel;
  const auto raw = [&](const Tensor& t, bool there = true) { return there ? t.const_data_ptr() : nullptr; };
  const bool mixes = !layer.first;
  return {.norm_weight = {data<float>(w.norm_weight), data<float>(f.norm_weight)},
          .norm_bias = {data<float>(w.norm_bias), data<float>(f.norm_bias)},
          .mix = {data<float>(w.mix), data<float>(f.mix)},
          .first = {raw(w.receptance), raw(w.key), raw(w.value), raw(w.g1), raw(w.w1), raw(w.a1), raw(w.v1, mixes)},
          .second = {raw(w.g2), raw(w.w2), raw(w.a2), raw(w.v2, mixes)},
          .w0 = data<float>(w.w0),
          .a0 = data<float>(w.a0),
          .v0 = mixes ? data<float>(w.v0) : nullptr,
          .k_k = data<float>(w.k_k),
          .k_a = data<float>(w.k_a),
          .r_k = data<float>(w.r_k),
          .group_weight = data<float>(w.group_weight),
          .group_bias = data<float>(w.group_bias),
          .output = raw(w.output),
          .key = raw(f.key),
          .value_t = raw(f.value_t)};
}

// What flows between the stages, in one piece of memory.
Tensor set_room(Single& p, const Tensor& like) {
  const int64_t c = p.c, halves = round_up(5 * c + p.all_ranks, 8);
  const int64_t floats = 2 * c + 2 * kMostSums * c + 4 + halves / 2;
  const Tensor room = torch::stable::new_empty(like, {floats}, ScalarType::Float);
  p.stream = mutable_data<float>(room), p.middle = p.stream + c;
  p.sums = reinterpret_cast<uint64_t*>(p.middle + c), p.bad = p.sums + kMostSums * c;
  auto* half = reinterpret_cast<uint16_t*>(p.bad + 2);
  p.first = half, p.gated = half + c, p.projected = half + 2 * c;
  return room;
}

size_t vector_bytes(const Single& p, unsigned blocks) { return most_parts(p, blocks) * p.c * size_t{2}; }

}  // namespace

bool single_possible(const char* op, const ModelWeights& model, int64_t c) {
  if (!wanted() || !has_wgmma(op) || device_attribute(op, cudaDevAttrCooperativeLaunch) == 0) return false;
  // Another process's kernels could hold a multiprocessor while some blocks wait for the rest.
  if (device_attribute(op, cudaDevAttrMpsEnabled) != 0) return false;
  if (model.layers.empty() || model.layers.size() > kSingleLayers || c % 256 != 0 || c > kMostWidth) return false;
  if (!even(model)) return false;
  const auto blocks = static_cast<unsigned>(device_attribute(op, cudaDevAttrMultiProcessorCount));
  Single p{};
  set_sizes(p, model, c, blocks);
  const int64_t room = device_attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return c / 64 <= blocks && p.all_ranks <= 2 * c && std::max(p.c, p.ffn) / blocks + 1 <= kMostRows &&
         static_cast<int64_t>(kFixedBytes + vector_bytes(p, blocks)) <= room;
}

void single_step(const char* op, cudaStream_t stream, const ModelWeights& model, const SingleStep& step) {
  const auto blocks = static_cast<unsigned>(device_attribute(op, cudaDevAttrMultiProcessorCount));
  Single p{};
  set_sizes(p, model, step.x.size(1), blocks);
  for (size_t i = 0; i < model.layers.size(); i++) p.layers[i] = layer_of(model.layers[i]);
  p.norm_weight = data<float>(model.norm_weight), p.norm_bias = data<float>(model.norm_bias);
  p.head = model.head.const_data_ptr();
  p.x = data<float>(step.x), p.shift = mutable_data<float>(step.shift), p.wkv = step.wkv.mutable_data_ptr();
  p.row = data<int64_t>(step.row), p.logits = mutable_data<float>(step.logits);
  p.pool_rows = step.shift.size(2);
  p.head_bytes = (step.wkv.scalar_type() == ScalarType::Float ? 4 : 2) * 64 * 64;
  const Tensor room = set_room(p, step.x);
  const SingleCut cut{blocks, vector_bytes(p, blocks)};
  const auto launch = model.head.scalar_type() == ScalarType::Half ? launch_single_half : launch_single_bfloat16;
  launch(op, stream, step.wkv.scalar_type(), p, cut);
}

}  // namespace cog_rwkv

// forward_: the kernels of a step of the whole model, one after the other, without a word from the host in between.
#include "forward.h"

#include "../csrc/aligned.cuh"
#include "../csrc/model_weights.h"
#include "../csrc/products.cuh"
#include "../time_mix_output/time_mix_output.h"
#include "embed.cuh"
#include "heads_launch.cuh"
#include "norm_launch.cuh"
#include "prepare.cuh"
#include "single/step.h"

namespace cog_rwkv {
namespace {

constexpr const char* kOp = "forward_";
constexpr float kNormEps = 1e-5f, kGroupNormEps = 64e-5f;
constexpr int64_t kSparseTokens = 4;   // up to so many, value rows of neurons that no token uses are not read
constexpr int64_t kSliceTokens = 512;  // up to so many, the residual stream gets sums in slices, float32
constexpr int kSlices = 8;             // at most, of a product of more than kSparseTokens
constexpr int64_t kRankTokens = 8;     // up to so many, blocks of heads finish low-rank projections

// relu(k)^2 leaves float16 where k is above 255. So k is a quarter of itself there, and the product gets 16 times.
template <class W>
constexpr float kKeyScale = std::is_same_v<W, Half> ? 0.25f : 1.0f;

// For tests and measurements: COG_RWKV_RANKS=n, instead of kRankTokens.
int64_t rank_tokens() {
  const char* wanted = std::getenv("COG_RWKV_RANKS");
  return wanted ? std::atoll(wanted) : kRankTokens;
}

enum Mix { kMixR, kMixW, kMixK, kMixV, kMixA, kMixG };
enum Projection { kRecept, kDecay, kKey, kValue, kRate, kGate, kValueMix, kProjections };

// What flows from one kernel to the next. W: float16 or bfloat16.
struct Flow {
  Tensor x[2];       // float32 [n, c], in turns
  Tensor mixed;      // W [6, n, c]
  Tensor projected;  // W [7, n, c]
  Tensor hidden;     // W, what low-rank projections have in the middle: [n, rank] each, one after the other
  Tensor v_first, gated, keys, out;  // W [n, c], [n, c], [n, ffn], [n, c]
  Tensor partial;                    // float32 [slices, n, c]
  // Where sequences are packed:
  std::optional<Tensor> prepared;              // W [4, n, c]
  std::optional<Tensor> left;                  // float32 [2, batch, c], of time mix and channel mix
  std::optional<Tensor> r, w, g;               // of projected
  std::optional<Tensor> k, v, minus_kk, kk_a;  // of prepared

  // `like` is float32, `weight` W.
  Flow(const Tensor& like, const Tensor& weight, bool packed, int64_t batch, int64_t n, int64_t c, int64_t ranks,
       int64_t ffn) {
    const auto floats = [&](std::initializer_list<int64_t> s) { return empty_tensor(like, {s.begin(), s.end()}); };
    const auto halves = [&](std::initializer_list<int64_t> s) { return empty_rows(weight, like, s); };
    x[0] = floats({n, c}), x[1] = floats({n, c});
    mixed = halves({6, n, c}), projected = halves({kProjections, n, c}), hidden = halves({n * ranks});
    v_first = halves({n, c}), gated = halves({std::max(n, batch), c}), keys = halves({n, ffn}), out = halves({n, c});
    partial = floats({n <= kSparseTokens ? kMaxSlices : n <= kSliceTokens ? kSlices : 0, n, c});
    if (!packed) return;
    prepared = halves({4, n, c}), left = floats({2, batch, c});
    const auto part = [](const Tensor& t, int64_t i) { return torch::stable::select(t, 0, i); };
    r = part(projected, kRecept), w = part(projected, kDecay), g = part(projected, kGate);
    k = part(*prepared, 0), v = part(*prepared, 1), minus_kk = part(*prepared, 2), kk_a = part(*prepared, 3);
  }
};

Tensor first_rows(Tensor t, int64_t n) { return torch::stable::narrow(t, 0, 0, n); }

// Where the tokens belong. `cu_seqlens` null: a token each.
struct Tokens {
  int64_t n, c, batch, pool_rows;
  const int64_t *rows, *cu_seqlens;
};

template <class W>
class Forward {
 public:
  Forward(const Launch& launch, const ModelWeights& model, const Tensor& x, const Tensor& shift, const Tensor& wkv,
          const Tensor& rows, const std::optional<Tensor>& cu_seqlens, const Flow& flow)
      : stream_(launch.stream),
        model_(model),
        shift_(shift),
        wkv_(wkv),
        rows_(rows),
        cu_seqlens_(cu_seqlens),
        f_(flow),
        t_{x.size(0),     x.size(1),           rows.size(0),
           shift.size(2), data<int64_t>(rows), cu_seqlens ? data<int64_t>(*cu_seqlens) : nullptr},
        type_(model.head.scalar_type()),
        x_(data<float>(x)),
        gated_(first_rows(flow.gated, x.size(0))) {
    check_cuda(kOp, cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, x.get_device_index()));
    block_bytes_ = static_cast<size_t>(device_attribute(kOp, cudaDevAttrMaxSharedMemoryPerBlockOptin));
    const bool chains = ready_to_chain(kOp, reinterpret_cast<const void*>(norm_few_kernel<W, 1, 1>), 0);
    // 12.0 has clusters, but not the shared memory.
    device_ = {multiprocessors_, chains && !plain_gpu() && static_cast<int64_t>(block_bytes_) >= kNormRoom &&
                                     device_attribute(kOp, cudaDevAttrClusterLaunch) != 0};
  }

  void run(bool last_only, const Tensor& logits) {
    for (size_t layer = 0; layer < model_.layers.size(); layer++) {
      time_mix(static_cast<int64_t>(layer), model_.layers[layer]);
      channel_mix(static_cast<int64_t>(layer), model_.layers[layer].channel);
    }
    NormShift<W> end = norm(model_.norm_weight, model_.norm_bias);
    const int64_t count = logits.size(0);
    end.out = mutable_data<W>(f_.gated);
    norm_rows(kOp, stream_, end, count, last_only && cu_seqlens_.has_value(), device_);
    const Product head{end.out, data<W>(model_.head), nullptr, mutable_data<float>(logits), logits.size(1),
                       t_.c,    Epilogue::none,       true};
    products(kOp, stream_, type_, &head, 1, count);
  }

 private:
  void time_mix(int64_t layer, const LayerWeights& weights) {
    const TimeMixWeights& w = weights.time;
    shift<6>(layer, 0, w.norm_weight, w.norm_bias, w.mix, 1.0f);
    project(w, weights.first);
    if (cu_seqlens_) {
      read_heads(layer, w, weights.first);
    } else {
      dispatch_float_or_half(wkv_.scalar_type(),
                             [&](auto s) { step_heads<typename decltype(s)::type>(layer, w, weights.first); });
    }
    multiply(data<W>(gated_), w.output, false, 1.0f);
  }

  void channel_mix(int64_t layer, const ChannelMixWeights& w) {
    constexpr float scale = kKeyScale<W>, back = 1.0f / (scale * scale);
    shift<1>(layer, 1, w.norm_weight, w.norm_bias, w.mix, scale);
    const int64_t ffn = w.key.size(0);
    const Product key{mixed(0), data<W>(w.key),         nullptr, mutable_data<W>(f_.keys), ffn,
                      t_.c,     Epilogue::squared_relu, false};
    products(kOp, stream_, type_, &key, 1, t_.n);
    if (t_.n > kSparseTokens) return multiply(data<W>(f_.keys), w.value_t, true, back);
    float* partial = mutable_data<float>(f_.partial);
    const int slices = active_rows(kOp, stream_, type_, data<W>(f_.keys), data<W>(w.value_t), partial, t_.n, ffn, t_.c);
    delta_ = {partial, slices, false, back};
  }

  // What the residual stream gets: sums in slices, or W [n, c]. The weight is [c, k], or [k, c] where it is transposed.
  void multiply(const W* x, const Tensor& weight, bool transposed, float scale) {
    const bool sliced = t_.n <= kSliceTokens;
    Product job{.x = x, .weight = data<W>(weight), .m = t_.c, .k = weight.size(transposed ? 0 : 1)};
    job.out = sliced ? mutable_data<float>(f_.partial) : static_cast<void*>(mutable_data<W>(f_.out));
    job.float_out = sliced, job.transposed = transposed, job.most_slices = sliced ? kSlices : 1;
    const int slices = products(kOp, stream_, type_, &job, 1, t_.n);
    delta_ = {job.out, slices, !sliced, scale};
  }

  NormShift<W> norm(const Tensor& weight, const Tensor& bias) const {
    NormShift<W> p{};
    p.x = x_, p.delta = delta_;
    p.weight = data<float>(weight), p.bias = data<float>(bias);
    p.rows = t_.rows, p.cu_seqlens = t_.cu_seqlens;
    p.size = t_.n * t_.c;
    p.n = static_cast<uint32_t>(t_.n), p.c = static_cast<uint32_t>(t_.c);
    p.batch = t_.batch, p.pool_rows = t_.pool_rows, p.stride = t_.c;
    p.before = left_;
    p.eps = kNormEps, p.out_scale = 1.0f, p.inverse_c = 1.0f / static_cast<float>(t_.c);
    return p;
  }

  // Half 0 is the time mix's, with M = 6 mixes, 1 the channel mix's, with one.
  template <int M>
  void shift(int64_t layer, int64_t half, const Tensor& weight, const Tensor& bias, const Tensor& mix, float scale) {
    NormShift<W> p = norm(weight, bias);
    p.mix = data<float>(mix);
    p.shift = mutable_data<float>(shift_) + (2 * layer + half) * t_.pool_rows * t_.c;
    if (f_.left) p.left = mutable_data<float>(*f_.left) + half * t_.batch * t_.c;
    p.out = mutable_data<W>(f_.mixed), p.out_scale = scale;
    if (delta_.slices > 0) p.x_out = mutable_data<float>(f_.x[half]);
    left_ = norm_shift<M>(kOp, stream_, p, device_);
    if (p.x_out != nullptr) x_ = p.x_out;
  }

  void project(const TimeMixWeights& w, bool first) {
    Product jobs[kMaxProducts];
    int count = 0;
    const auto add = [&](const W* x, const Tensor& weight, W* out, Epilogue f) {
      jobs[count++] = {x, data<W>(weight), nullptr, out, weight.size(0), weight.size(1), f, false};
      return out + t_.n * weight.size(0);
    };
    add(mixed(kMixR), w.receptance, projected(kRecept), Epilogue::none);
    add(mixed(kMixK), w.key, projected(kKey), Epilogue::none);
    add(mixed(kMixV), w.value, projected(kValue), Epilogue::none);
    W* at = mutable_data<W>(f_.hidden);
    ranks_.count = 0;
    const auto add_ranks = [&](const W* x, const Tensor& down, const Tensor& up, Epilogue f) {
      ranks_.jobs[ranks_.count++] = {data<W>(up), at, static_cast<int>(up.size(1))};
      at = add(x, down, at, f);
    };
    add_ranks(mixed(kMixG), w.g1, w.g2, Epilogue::sigmoid);
    add_ranks(mixed(kMixW), w.w1, w.w2, Epilogue::tanh);
    add_ranks(mixed(kMixA), w.a1, w.a2, Epilogue::none);
    if (!first) add_ranks(mixed(kMixV), w.v1, w.v2, Epilogue::none);
    products(kOp, stream_, type_, jobs, count, t_.n);
    if (heads_finish_ranks()) return;
    constexpr Projection outs[kRankJobs] = {kGate, kDecay, kRate, kValueMix};
    for (count = 0; count < ranks_.count; count++) {
      const auto& job = ranks_.jobs[count];
      // step_heads adds the bias of the decay itself.
      const float* bias = count == kDecayRank && cu_seqlens_ ? data<float>(w.w0) : nullptr;
      jobs[count] = {job.hidden, job.weight, bias, projected(outs[count]), t_.c, job.rank, Epilogue::none, false};
    }
    products(kOp, stream_, type_, jobs, count, t_.n);
  }

  // Whether the second halves of the low-rank projections are left to head_step.
  bool heads_finish_ranks() const {
    if (cu_seqlens_ || t_.n > rank_tokens_) return false;
    const RankCut cut = rank_cut();
    return cut.bytes() + cut.teams * sizeof(HeadShared) <= block_bytes_;
  }
  RankCut rank_cut() const { return cut_ranks(ranks_, wkv_.scalar_type(), t_.c / kHead, t_.n, multiprocessors_); }

  // A token each.
  template <class S>
  void step_heads(int64_t layer, const TimeMixWeights& w, bool first) {
    const int64_t heads = t_.c / kHead, stride = t_.c * kHead;
    const HeadStep<W, S> p{.r = projected(kRecept),
                           .w = projected(kDecay),
                           .k = projected(kKey),
                           .v = projected(kValue),
                           .a = projected(kRate),
                           .g = projected(kGate),
                           .v_mix = first ? nullptr : projected(kValueMix),
                           .v_first = mutable_data<W>(f_.v_first),
                           .w0 = data<float>(w.w0),
                           .a0 = data<float>(w.a0),
                           .v0 = first ? nullptr : data<float>(w.v0),
                           .k_k = data<float>(w.k_k),
                           .k_a = data<float>(w.k_a),
                           .r_k = data<float>(w.r_k),
                           .weight = data<float>(w.group_weight),
                           .bias = data<float>(w.group_bias),
                           .state = mutable_data<S>(wkv_) + layer * t_.pool_rows * stride,
                           .rows = t_.rows,
                           .out = mutable_data<W>(f_.gated),
                           .heads = heads,
                           .pool_rows = t_.pool_rows,
                           .stride = stride,
                           .eps = kGroupNormEps};
    if (heads_finish_ranks()) {
      head_steps(kOp, stream_, p, ranks_, rank_cut(), t_.n);
    } else {
      head_steps(kOp, stream_, p, t_.n, multiprocessors_);
    }
  }

  // Packed sequences of any length, by the operators that are there for them.
  void read_heads(int64_t layer, const TimeMixWeights& w, bool first) {
    W* const made = mutable_data<W>(*f_.prepared);
    const int64_t size = t_.n * t_.c;
    const Prepare<W> p{.k = projected(kKey),
                       .v = projected(kValue),
                       .a = projected(kRate),
                       .v_mix = first ? nullptr : projected(kValueMix),
                       .v_first = mutable_data<W>(f_.v_first),
                       .a0 = data<float>(w.a0),
                       .v0 = first ? nullptr : data<float>(w.v0),
                       .k_k = data<float>(w.k_k),
                       .k_a = data<float>(w.k_a),
                       .k_out = made,
                       .v_out = made + size,
                       .minus_kk = made + 2 * size,
                       .kk_a = made + 3 * size,
                       .tokens = t_.n,
                       .heads = t_.c / kHead};
    prepare(kOp, stream_, p, multiprocessors_);
    const Tensor y = wkv7_packed_cuda(*f_.r, *f_.w, *f_.k, *f_.v, *f_.minus_kk, *f_.kk_a,
                                      torch::stable::select(wkv_, 0, layer), rows_, *cu_seqlens_);
    gated_ = time_mix_output_cuda(y, *f_.r, *f_.k, *f_.v, *f_.g, w.r_k, w.group_weight, w.group_bias, kGroupNormEps);
  }

  W* projected(int i) const { return mutable_data<W>(f_.projected) + i * t_.n * t_.c; }
  const W* mixed(int i) const { return data<W>(f_.mixed) + i * t_.n * t_.c; }

  cudaStream_t stream_;
  const ModelWeights& model_;
  const Tensor &shift_, &wkv_, &rows_;
  const std::optional<Tensor>& cu_seqlens_;
  const Flow& f_;
  const Tokens t_;
  const ScalarType type_;
  const int64_t rank_tokens_ = rank_tokens();
  int multiprocessors_ = 1;
  size_t block_bytes_ = 0;  // shared memory that a block can have
  NormDevice device_{};
  RankList<W> ranks_{};  // the second halves of the layer's low-rank projections
  const float* x_;       // the residual stream
  Delta delta_;          // and what is still to be added to it
  LeftRows left_;        // rows of shift state that the next norm puts in place
  Tensor gated_;         // what the output projection reads
};

// Matrices of one 16-bit type, and everything where loads of 16 bytes want it.
void check_weights(const ModelWeights& model) {
  const ScalarType type = model.head.scalar_type();
  if (type != ScalarType::Half && type != ScalarType::BFloat16) {
    fail(kOp, std::string("weights: the head has dtype ") + dtype_text(type) + "; it must be float16 or bfloat16");
  }
  const int32_t number = dtype_number(model.head);
  const auto check = [&](size_t layer, const char* name, const Tensor& t) {
    if (dtype_number(t) == number && aligned16(t.const_data_ptr())) return;
    fail(kOp, "layers[" + std::to_string(layer) + "]." + name + " must have the dtype of the head, " +
                  dtype_text(type) + ", and begin on a boundary of 16 bytes");
  };
  for (size_t i = 0; i < model.layers.size(); i++) {
    const TimeMixWeights& w = model.layers[i].time;
    check(i, "receptance", w.receptance), check(i, "key", w.key), check(i, "value", w.value);
    check(i, "w1", w.w1), check(i, "w2", w.w2), check(i, "a1", w.a1), check(i, "a2", w.a2);
    check(i, "g1", w.g1), check(i, "g2", w.g2), check(i, "output", w.output);
    if (!model.layers[i].first) check(i, "v1", w.v1), check(i, "v2", w.v2);
    check(i, "ffn.key", model.layers[i].channel.key), check(i, "ffn.value_t", model.layers[i].channel.value_t);
  }
}

Flow make_flow(const ModelWeights& model, const Tensor& x, bool packed, int64_t batch) {
  int64_t ranks = 0, ffn = 0;
  for (const LayerWeights& layer : model.layers) {
    const TimeMixWeights& w = layer.time;
    ranks = std::max(ranks, w.w1.size(0) + w.a1.size(0) + w.g1.size(0) + (layer.first ? 0 : w.v1.size(0)));
    ffn = std::max(ffn, layer.channel.key.size(0));
  }
  return Flow(x, model.head, packed, batch, x.size(0), x.size(1), ranks, ffn);
}

Tensor forward_cuda(const Tensor& ids, const Tensor& table, const Tensor& norm_weight, const Tensor& norm_bias,
                    const std::vector<Tensor>& weights, const Tensor& shift, const Tensor& wkv, const Tensor& rows,
                    const std::optional<Tensor>& cu_seqlens, bool last_only) {
  check_forward(ids, table, norm_weight, norm_bias, shift, wkv, rows, cu_seqlens);
  const int64_t n = ids.size(0), c = table.size(1), count = last_only ? rows.size(0) : n;
  if (c == 0 || c > kMostChannels) {
    fail(kOp, "table has shape " + shape_text(table) + "; C must be 64 to " + std::to_string(kMostChannels));
  }
  if (n * c >> 32 != 0) fail(kOp, "ids has shape " + shape_text(ids) + "; N * C must be below 2^32");
  if (!aligned16(shift.const_data_ptr(), wkv.const_data_ptr())) {
    fail(kOp, "shift and wkv must begin on boundaries of 16 bytes");
  }
  const Launch launch(kOp, ids);
  const ModelWeights model = read_model(kOp, weights, shift);
  check_weights(model);
  const Tensor row = as_contiguous(rows);
  const std::optional<Tensor> starts = as_contiguous(cu_seqlens);
  const Tensor logits = empty_tensor(shift, {count, model.head.size(0)});
  if (n == 0 || count == 0) return logits;
  const Tensor x = embed(kOp, launch, ids, table, norm_weight, norm_bias, kNormEps);
  if (n == 1 && !starts && single_possible(kOp, model, c)) {
    single_step(kOp, launch.stream, model, {x, shift, wkv, row, logits});
    return logits;
  }
  const Flow flow = make_flow(model, x, starts.has_value(), rows.size(0));
  const auto run = [&](auto w) {
    Forward<decltype(w)>(launch, model, x, shift, wkv, row, starts, flow).run(last_only, logits);
  };
  if (model.head.scalar_type() == ScalarType::Half) {
    run(Half{});
  } else {
    run(BFloat16{});
  }
  return logits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("forward_", TORCH_BOX(&forward_cuda)); }

}  // namespace cog_rwkv

// decode_: schema and CPU kernel. One token through all layers, on a team of threads that does not come apart between
// the pieces. The kernels are those of the operators, so the result has the bits that they would give.
#include <optional>

#include "../csrc/floats.h"
#include "../csrc/matmul.h"
#include "../csrc/model_weights.h"
#include "../csrc/packed.h"
#include "../csrc/team.h"
#include "../squared_relu/active.h"
#include "../time_mix_output/args.h"
#include "../time_mix_prepare/args.h"

#define COG_RWKV_KERNELS "../decode/kernel.h"
#include "../csrc/each_cpu.h"
#include "../squared_relu/work.h"

namespace cog_rwkv {
namespace {

constexpr int64_t kHead = 64;
constexpr float kNormEps = 1e-5f, kGroupNormEps = 64e-5f;
constexpr int64_t kRows = 4;  // units of 16 rows of a weight that are worth taking at a time

// A pool of rows on the host: [layers, ...]; one token of B sequences, whose rows are `row`.
template <class S>
struct Pool {
  float* shift;  // [layers, 2, rows, C]
  S* wkv;        // [layers, rows, heads, 64, 64]
  int64_t shift_layer, shift_half, shift_row, wkv_layer, wkv_row;
  const int64_t* row;

  float* last(int64_t layer, int64_t half, int64_t b) const {
    return shift + layer * shift_layer + half * shift_half + row[b] * shift_row;
  }
  S* state(int64_t layer, int64_t b, int64_t head) const {
    return wkv + layer * wkv_layer + row[b] * wkv_row + head * kHead * kHead;
  }
};

// What flows from one piece of work to the next, float32: [n, C] where nothing is said.
struct Flow {
  int64_t n, c, heads;
  Scratch memory;
  float *x, *normed, *mixed, *projected, *prepared, *v_first, *y, *gated, *delta, *hidden, *keys;

  Flow(int64_t tokens, int64_t width, int64_t ranks, int64_t ffn) : n(tokens), c(width), heads(width / kHead) {
    const int64_t size = n * c,
                  sizes[] = {size, size, 6 * size, 7 * size, 4 * size, size, size, size, size, n * ranks, n * ffn};
    float** const parts[] = {&x, &normed, &mixed, &projected, &prepared, &v_first, &y, &gated, &delta, &hidden, &keys};
    int64_t total = 0;
    for (int64_t one : sizes) total += (one + 15) / 16 * 16;
    memory = scratch(total);
    float* at = memory.get();
    for (size_t i = 0; i < std::size(sizes); i++) *parts[i] = at, at += (sizes[i] + 15) / 16 * 16;
  }

  float* projection(int64_t i) const { return projected + i * n * c; }
  float* mix(int64_t i) const { return mixed + i * n * c; }
};

MatmulJob job(const float* x, const Tensor& weight, const float* bias, float* out, int64_t n, int64_t m, int64_t k,
              Activation f = Activation::none) {
  return {{x, bias, out, n, m, k, f}, weight};
}

// The products of one layer.
struct LayerProducts {
  MatmulWork first, second, output, key;

  LayerProducts(const LayerWeights& w, const Flow& f)
      : first(projections(w.time, f, w.first)),
        second(expansions(w.time, f, w.first)),
        output({job(f.gated, w.time.output, nullptr, f.delta, f.n, f.c, f.c)}),
        key({job(f.mix(0), w.channel.key, nullptr, f.keys, f.n, w.channel.key.size(0), f.c)}) {}

  // The mixes are in the order r, w, k, v, a, g.
  static std::vector<MatmulJob> projections(const TimeMixWeights& w, const Flow& f, bool first) {
    std::vector<MatmulJob> jobs{job(f.mix(0), w.receptance, nullptr, f.projection(0), f.n, f.c, f.c),
                                job(f.mix(2), w.key, nullptr, f.projection(1), f.n, f.c, f.c),
                                job(f.mix(3), w.value, nullptr, f.projection(2), f.n, f.c, f.c)};
    float* to = f.hidden;
    const auto thin = [&](int64_t mix, const Tensor& down, Activation between) {
      jobs.push_back(job(f.mix(mix), down, nullptr, to, f.n, down.size(0), f.c, between));
      to += f.n * down.size(0);
    };
    thin(1, w.w1, Activation::tanh), thin(4, w.a1, Activation::none), thin(5, w.g1, Activation::sigmoid);
    if (!first) thin(3, w.v1, Activation::none);
    return jobs;
  }

  static std::vector<MatmulJob> expansions(const TimeMixWeights& w, const Flow& f, bool first) {
    std::vector<MatmulJob> jobs;
    const float* from = f.hidden;
    const auto wide = [&](int64_t to, const Tensor& up, const float* bias) {
      jobs.push_back(job(from, up, bias, f.projection(to), f.n, f.c, up.size(1)));
      from += f.n * up.size(1);
    };
    wide(3, w.w2, data<float>(w.w0)), wide(4, w.a2, data<float>(w.a0)), wide(5, w.g2, nullptr);
    if (!first) wide(6, w.v2, data<float>(w.v0));
    return jobs;
  }
};

template <class S>
class Decode {
 public:
  Decode(const ModelWeights& model, const Pool<S>& pool, const Flow& flow, float* logits)
      : model_(model), pool_(pool), f_(flow) {
    for (const LayerWeights& layer : model.layers) {
      products_.emplace_back(layer, flow);
      for (int64_t begin = 0; begin < f_.n; begin += SquaredReluWork::kTokens) {
        values_.emplace_back(layer.channel.value_t, std::min(SquaredReluWork::kTokens, f_.n - begin));
      }
    }
    head_.emplace(std::vector{job(f_.normed, model.head, nullptr, logits, f_.n, model.head.size(0), f_.c)});
  }

  void run() {
    Team team(static_cast<int64_t>(7 * products_.size() + 2 * values_.size()) + 2);
    team.run([&](Team::Member& member) {
      for (size_t layer = 0; layer < products_.size(); layer++) {
        time_mix(member, layer);
        channel_mix(member, layer);
      }
      member.share(f_.n, 1, [&](int64_t b, int64_t end) {
        norm(f_.x, f_.delta, data<float>(model_.norm_weight), data<float>(model_.norm_bias), f_.normed, b, end, f_.c,
             kNormEps);
      });
      member.share(head_->units(), kRows, [&](int64_t begin, int64_t end) { head_->run(begin, end); });
    });
  }

 private:
  void time_mix(Team::Member& member, int64_t layer) {
    const TimeMixWeights& w = model_.layers[layer].time;
    const LayerProducts& products = products_[layer];
    norm_and_shift(member, layer, 0, w.norm_weight, w.norm_bias, w.mix, layer == 0 ? nullptr : f_.delta);
    member.share(products.first.units(), kRows, [&](int64_t b, int64_t e) { products.first.run(b, e); });
    member.share(products.second.units(), 2 * kRows, [&](int64_t b, int64_t e) { products.second.run(b, e); });
    member.share(f_.n * f_.heads, 1, [&](int64_t b, int64_t e) { heads(w, layer, b, e); });
    member.share(products.output.units(), kRows, [&](int64_t b, int64_t e) { products.output.run(b, e); });
  }

  void channel_mix(Team::Member& member, int64_t layer) {
    const ChannelMixWeights& w = model_.layers[layer].channel;
    const int64_t ffn = w.key.size(0), pieces = static_cast<int64_t>(values_.size() / products_.size());
    norm_and_shift(member, layer, 1, w.norm_weight, w.norm_bias, w.mix, f_.delta);
    member.share(products_[layer].key.units(), kRows, [&](int64_t b, int64_t e) { products_[layer].key.run(b, e); });
    for (int64_t i = 0; i < pieces; i++) {
      SquaredReluWork& work = values_[layer * pieces + i];
      const int64_t first = i * SquaredReluWork::kTokens;
      member.share(work.blocks(), 1, [&](int64_t b, int64_t e) { work.find_active(f_.keys + first * ffn, b, e); });
      member.share(work.columns(), 4, [&](int64_t b, int64_t e) { work.multiply(f_.delta + first * f_.c, b, e); });
    }
  }

  void norm_and_shift(Team::Member& member, int64_t layer, int64_t half, const Tensor& weight, const Tensor& bias,
                      const Tensor& mix, const float* delta) {
    const auto shift = COG_RWKV_KERNEL(token_shift_row<float, float>);
    member.share(f_.n, 1, [&](int64_t begin, int64_t end) {
      norm(f_.x, delta, data<float>(weight), data<float>(bias), f_.normed, begin, end, f_.c, kNormEps);
      for (int64_t b = begin; b < end; b++) {
        float* last = pool_.last(layer, half, b);
        const float* now = f_.normed + b * f_.c;
        shift(now, last, data<float>(mix), mix.size(0), f_.c, f_.mixed + b * f_.c, f_.n * f_.c);
        std::copy_n(now, f_.c, last);
      }
    });
  }

  // All that happens inside a head, for the heads begin to end of all tokens.
  void heads(const TimeMixWeights& w, int64_t layer, int64_t begin, int64_t end) const {
    const int64_t size = f_.n * f_.c;
    float *k = f_.prepared, *minus_kk = k + size, *kk_a = k + 2 * size;
    float* v = layer == 0 ? f_.v_first : k + 3 * size;
    const PrepareArgs<float> prepare{f_.projection(1),
                                     f_.projection(2),
                                     f_.projection(4),
                                     layer == 0 ? nullptr : f_.v_first,
                                     layer == 0 ? nullptr : f_.projection(6),
                                     data<float>(w.k_k),
                                     data<float>(w.k_a),
                                     k,
                                     v,
                                     minus_kk,
                                     kk_a};
    const OutputArgs<float> output{f_.y,
                                   f_.projection(0),
                                   k,
                                   v,
                                   f_.projection(5),
                                   data<float>(w.r_k),
                                   data<float>(w.group_weight),
                                   data<float>(w.group_bias),
                                   f_.gated,
                                   kGroupNormEps};
    const auto prepare_heads = COG_RWKV_KERNEL(time_mix_prepare_heads<float>);
    const auto wkv = COG_RWKV_KERNEL(wkv7_head<float, S>);
    const auto output_heads = COG_RWKV_KERNEL(time_mix_output_heads<float>);
    prepare_heads(prepare, begin, end, f_.heads);
    for (int64_t i = begin; i < end; i++) {
      const int64_t b = i / f_.heads, h = i % f_.heads * kHead;
      wkv(f_.projection(0) + h, f_.projection(3) + h, k + h, v + h, minus_kk + h, kk_a + h, f_.y + h,
          pool_.state(layer, b, i % f_.heads), b, b + 1, f_.c);
    }
    output_heads(output, begin, end, f_.heads);
  }

  const ModelWeights& model_;
  const Pool<S>& pool_;
  const Flow& f_;
  std::vector<LayerProducts> products_;
  std::vector<SquaredReluWork> values_;
  std::optional<MatmulWork> head_;
  decltype(COG_RWKV_KERNEL(add_and_norm)) norm = COG_RWKV_KERNEL(add_and_norm);
};

void check_decode(const Tensor& x, const Tensor& shift, const Tensor& wkv, const Tensor& rows) {
  constexpr const char* op = "decode_";
  check_dtype(op, "x", x, {ScalarType::Float});
  check_dim(op, "x", x, 2, "[B, C]");
  const int64_t c = x.size(1);
  if (c % kHead != 0) fail(op, "x has shape " + shape_text(x) + "; C must be a multiple of 64, the head size");
  check_dtype(op, "shift", shift, {ScalarType::Float});
  check_device(op, "shift", shift, "x", x);
  check_dim(op, "shift", shift, 4, "[layers, 2, R, C]");
  check_shape(op, "shift", shift, {shift.size(0), 2, shift.size(2), c}, "[layers, 2, R, C] with C as in x");
  check_float_or_half(op, "wkv", wkv);
  check_device(op, "wkv", wkv, "x", x);
  check_shape(op, "wkv", wkv, {shift.size(0), shift.size(2), c / kHead, kHead, kHead},
              "[layers, R, C / 64, 64, 64] with layers and R as in shift");
  for (const auto& [name, pool] : {std::pair{"shift", shift}, std::pair{"wkv", wkv}}) {
    if (!pool.is_contiguous()) fail(op, std::string(name) + " must be contiguous: it is written in place");
  }
  check_dtype(op, "rows", rows, {ScalarType::Long});
  check_device(op, "rows", rows, "x", x);
  check_shape(op, "rows", rows, {x.size(0)}, "[B] with B as in x");
}

Tensor decode_cpu(const Tensor& x, const std::vector<Tensor>& weights, const Tensor& shift, const Tensor& wkv,
                  const Tensor& rows) {
  check_decode(x, shift, wkv, rows);
  const ModelWeights model = read_model("decode_", weights, shift);
  const Tensor tokens = as_contiguous(x), row = as_contiguous(rows);
  const int64_t n = x.size(0), c = x.size(1), pool_rows = shift.size(2);
  std::vector<int64_t> ends(n + 1);
  for (int64_t i = 0; i <= n; i++) ends[i] = i;
  check_packed_values("decode_", data<int64_t>(row), ends.data(), n, n, pool_rows);
  Tensor logits = empty_tensor(x, {n, model.head.size(0)});
  if (n == 0) return logits;
  int64_t ranks = 0, ffn = 0;
  for (const LayerWeights& layer : model.layers) {
    const TimeMixWeights& w = layer.time;
    ranks = std::max(ranks, w.w1.size(0) + w.a1.size(0) + w.g1.size(0) + (layer.first ? 0 : w.v1.size(0)));
    ffn = std::max(ffn, layer.channel.key.size(0));
  }
  const Flow flow(n, c, ranks, ffn);
  std::copy_n(data<float>(tokens), n * c, flow.x);
  std::fill_n(flow.delta, n * c, 0.0f);  // what the norm at the end adds, where there is no layer
  dispatch_float_or_half(wkv.scalar_type(), [&](auto type) {
    using S = typename decltype(type)::type;
    const Pool<S> pool{mutable_data<float>(shift),
                       mutable_data<S>(wkv),
                       2 * pool_rows * c,
                       pool_rows * c,
                       c,
                       pool_rows * c * kHead,
                       c * kHead,
                       data<int64_t>(row)};
    Decode<S>(model, pool, flow, mutable_data<float>(logits)).run();
  });
  return logits;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("decode_(Tensor x, Tensor[] weights, Tensor(a!) shift, Tensor(b!) wkv, Tensor rows) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("decode_", TORCH_BOX(&decode_cpu)); }

}  // namespace cog_rwkv

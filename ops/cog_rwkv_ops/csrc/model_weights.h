// The tensors of a whole model, in the order in which decode_ and forward_ take them, and their checks.
#pragma once

#include <string>
#include <vector>

#include "packed_weight.h"
#include "tensor.h"

namespace cog_rwkv {

struct TimeMixWeights {
  Tensor norm_weight, norm_bias, mix;
  Tensor receptance, key, value;
  Tensor w1, w2, w0, a1, a2, a0, g1, g2, v1, v2, v0;  // the first layer has no v1, v2, v0
  Tensor k_k, k_a, r_k, group_weight, group_bias, output;
};

struct ChannelMixWeights {
  Tensor norm_weight, norm_bias, mix, key, value_t;
};

struct LayerWeights {
  bool first;
  TimeMixWeights time;
  ChannelMixWeights channel;
};

struct ModelWeights {
  std::vector<LayerWeights> layers;
  Tensor norm_weight, norm_bias, head;
};

// Takes the tensors of the list one by one, each contiguous and as it must be.
class WeightReader {
 public:
  WeightReader(const char* op, const std::vector<Tensor>& list, const Tensor& x)
      : op_(op), list_(list), x_(x), c_(x.size(1)) {}

  Tensor vector(const char* name) { return vectors(name, {c_}, "[C] with C as in x"); }
  Tensor mixes(const char* name, int64_t count) { return vectors(name, {count, c_}, "[mixes, C] with C as in x"); }

  // [m, k] in float32, float16 or bfloat16, or packed. `m` of 0: any.
  Tensor product(const char* name, int64_t m, int64_t k) {
    const Tensor& t = next(name);
    const int32_t type = dtype_number(t);
    if ((type == bfloat16_ || type == float16_) && fits(t, {m > 0 ? m : t.size(0), k})) return t;
    if (type == packed_ && fits(t, {m > 0 ? m : t.size(0), packed_row_bytes(k)})) return t;
    const std::string label = where_ + name;
    check_weight(op_, label.c_str(), t, x_, k, "[M, K]");
    if (m > 0 && t.size(0) != m) {
      fail(op_, label + " has shape " + shape_text(t) + "; it must have " + std::to_string(m) + " rows");
    }
    return as_contiguous(t);
  }

  // The same, not packed.
  Tensor matrix(const char* name, int64_t m, int64_t k) {
    Tensor t = product(name, m, k);
    if (const int32_t type = dtype_number(t); type != bfloat16_ && type != float16_)
      check_float_or_half(op_, (where_ + name).c_str(), t);
    return t;
  }

  void begin_layer(int64_t layer) { where_ = "layers[" + std::to_string(layer) + "]."; }
  void end_layers() { where_.clear(); }
  void end() const {
    if (at_ == list_.size()) return;
    fail(op_, "weights has " + std::to_string(list_.size()) + " tensors; the layers of shift and the head need " +
                  std::to_string(at_));
  }

 private:
  const Tensor& next(const char* name) {
    if (at_ == list_.size()) fail(op_, "weights ends before " + where_ + name);
    return list_[at_++];
  }

  // What nearly always holds, without words for the case that it does not: there are hundreds of tensors a step.
  bool fits(const Tensor& t, std::initializer_list<int64_t> sizes) const {
    if (t.dim() != static_cast<int64_t>(sizes.size()) || !t.is_contiguous() || !same_device(t, x_)) return false;
    int64_t d = 0;
    for (int64_t size : sizes) {
      if (t.size(d++) != size) return false;
    }
    return true;
  }

  Tensor vectors(const char* name, std::initializer_list<int64_t> sizes, const char* what) {
    const Tensor& t = next(name);
    if (dtype_number(t) == float32_ && fits(t, sizes)) return t;
    const std::string label = where_ + name;
    check_dtype(op_, label.c_str(), t, {ScalarType::Float});
    check_device(op_, label.c_str(), t, "x", x_);
    check_shape(op_, label.c_str(), t, sizes, what);
    return as_contiguous(t);
  }

  const char* op_;
  const std::vector<Tensor>& list_;
  const Tensor& x_;
  int64_t c_;
  const int32_t float32_ = aoti_torch_dtype_float32(), bfloat16_ = aoti_torch_dtype_bfloat16(),
                float16_ = aoti_torch_dtype_float16(), packed_ = aoti_torch_dtype_uint8();
  size_t at_ = 0;
  std::string where_;
};

inline TimeMixWeights read_time_mix(WeightReader& read, int64_t c, bool first) {
  TimeMixWeights w;
  w.norm_weight = read.vector("ln1.weight"), w.norm_bias = read.vector("ln1.bias"), w.mix = read.mixes("mix", 6);
  w.receptance = read.product("receptance", c, c);
  w.key = read.product("key", c, c), w.value = read.product("value", c, c);
  const auto low_rank = [&](const char* down, const char* up, Tensor& to_down, Tensor& to_up) {
    to_down = read.matrix(down, 0, c);
    to_up = read.matrix(up, c, to_down.size(0));
  };
  low_rank("w1", "w2", w.w1, w.w2), w.w0 = read.vector("w0");
  low_rank("a1", "a2", w.a1, w.a2), w.a0 = read.vector("a0");
  low_rank("g1", "g2", w.g1, w.g2);
  if (!first) low_rank("v1", "v2", w.v1, w.v2), w.v0 = read.vector("v0");
  w.k_k = read.vector("k_k"), w.k_a = read.vector("k_a"), w.r_k = read.vector("r_k");
  w.group_weight = read.vector("ln_x.weight"), w.group_bias = read.vector("ln_x.bias");
  w.output = read.product("output", c, c);
  return w;
}

inline ChannelMixWeights read_channel_mix(WeightReader& read, int64_t c) {
  ChannelMixWeights w;
  w.norm_weight = read.vector("ln2.weight"), w.norm_bias = read.vector("ln2.bias"), w.mix = read.mixes("mix", 1);
  w.key = read.product("ffn.key", 0, c);
  w.value_t = read.matrix("ffn.value_t", w.key.size(0), c);
  return w;
}

inline ModelWeights read_model(const char* op, const std::vector<Tensor>& list, const Tensor& x, int64_t layers) {
  WeightReader read(op, list, x);
  ModelWeights model;
  const int64_t c = x.size(1);
  for (int64_t i = 0; i < layers; i++) {
    read.begin_layer(i);
    LayerWeights layer{i == 0, read_time_mix(read, c, i == 0), {}};
    layer.channel = read_channel_mix(read, c);
    model.layers.push_back(std::move(layer));
  }
  read.end_layers();
  model.norm_weight = read.vector("ln_out.weight"), model.norm_bias = read.vector("ln_out.bias");
  model.head = read.product("head", 0, c);
  read.end();
  return model;
}

}  // namespace cog_rwkv

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

// Takes the tensors of the list one by one, each contiguous and as it must be. `shift`, [layers, 2, R, C], has been
// checked: they are on its device.
class WeightReader {
 public:
  WeightReader(const char* op, const std::vector<Tensor>& list, const Tensor& shift)
      : op_(op), list_(list), shift_(shift), c_(shift.size(3)) {}

  Tensor vector(const char* name) { return vectors(name, {c_}, "[C] with C as in shift"); }
  Tensor mixes(const char* name, int64_t count) { return vectors(name, {count, c_}, "[mixes, C] with C as in shift"); }

  // [m, k] in float32, float16 or bfloat16, or packed. `m` of 0: any.
  Tensor product(const char* name, int64_t m, int64_t k) {
    const Tensor& t = next(name);
    const int32_t type = dtype_number(t);
    if ((type == bfloat16_ || type == float16_) && fits(t, {m > 0 ? m : t.size(0), k})) return t;
    if (type == packed_ && fits(t, {m > 0 ? m : t.size(0), packed_row_bytes(k)})) return t;
    const std::string label = where_ + name;
    check_device(op_, label.c_str(), t, "shift", shift_);
    check_weight(op_, label.c_str(), t, shift_, k, "[M, K]");
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

  // A low-rank projection: [rank, C], and then [C, rank].
  Tensor down(const char* name) {
    Tensor t = matrix(name, 0, c_);
    rank_ = t.size(0);
    return t;
  }
  Tensor up(const char* name) { return matrix(name, c_, rank_); }

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
    if (t.dim() != static_cast<int64_t>(sizes.size()) || !t.is_contiguous() || !same_device(t, shift_)) return false;
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
    check_device(op_, label.c_str(), t, "shift", shift_);
    check_shape(op_, label.c_str(), t, sizes, what);
    return as_contiguous(t);
  }

  const char* op_;
  const std::vector<Tensor>& list_;
  const Tensor& shift_;
  int64_t c_, rank_ = 0;
  const int32_t float32_ = aoti_torch_dtype_float32(), bfloat16_ = aoti_torch_dtype_bfloat16(),
                float16_ = aoti_torch_dtype_float16(), packed_ = aoti_torch_dtype_uint8();
  size_t at_ = 0;
  std::string where_;
};

// `none`: what a first layer has for what it has not. (A new Tensor for each would be memory of its own, which hundreds
// a step are too many for.)
inline TimeMixWeights read_time_mix(WeightReader& read, int64_t c, bool first, const Tensor& none) {
  return {.norm_weight = read.vector("ln1.weight"),
          .norm_bias = read.vector("ln1.bias"),
          .mix = read.mixes("mix", 6),
          .receptance = read.product("receptance", c, c),
          .key = read.product("key", c, c),
          .value = read.product("value", c, c),
          .w1 = read.down("w1"),
          .w2 = read.up("w2"),
          .w0 = read.vector("w0"),
          .a1 = read.down("a1"),
          .a2 = read.up("a2"),
          .a0 = read.vector("a0"),
          .g1 = read.down("g1"),
          .g2 = read.up("g2"),
          .v1 = first ? none : read.down("v1"),
          .v2 = first ? none : read.up("v2"),
          .v0 = first ? none : read.vector("v0"),
          .k_k = read.vector("k_k"),
          .k_a = read.vector("k_a"),
          .r_k = read.vector("r_k"),
          .group_weight = read.vector("ln_x.weight"),
          .group_bias = read.vector("ln_x.bias"),
          .output = read.product("output", c, c)};
}

inline ChannelMixWeights read_channel_mix(WeightReader& read, int64_t c) {
  const Tensor norm_weight = read.vector("ln2.weight"), norm_bias = read.vector("ln2.bias");
  const Tensor mix = read.mixes("mix", 1), key = read.product("ffn.key", 0, c);
  return {norm_weight, norm_bias, mix, key, read.matrix("ffn.value_t", key.size(0), c)};
}

// `shift`: [layers, 2, R, C], checked.
inline ModelWeights read_model(const char* op, const std::vector<Tensor>& list, const Tensor& shift) {
  WeightReader read(op, list, shift);
  ModelWeights model;
  const Tensor none;
  const int64_t layers = shift.size(0), c = shift.size(3);
  model.layers.reserve(layers);
  for (int64_t i = 0; i < layers; i++) {
    read.begin_layer(i);
    model.layers.push_back({i == 0, read_time_mix(read, c, i == 0, none), read_channel_mix(read, c)});
  }
  read.end_layers();
  model.norm_weight = read.vector("ln_out.weight"), model.norm_bias = read.vector("ln_out.bias");
  model.head = read.product("head", 0, c);
  read.end();
  return model;
}

}  // namespace cog_rwkv

// relu(k)^2 weight_t for up to 256 tokens on the CPU, in two pieces of work that threads share. The file that includes
// it has kernel.h among its COG_RWKV_KERNELS.
#pragma once

#include <algorithm>
#include <memory>

#include "../csrc/dtype.h"
#include "active.h"

namespace cog_rwkv {
namespace {

class SquaredReluWork {
 public:
  static constexpr int64_t kTokens = 256;  // at most

  // `weight_t`: contiguous [F, C].
  SquaredReluWork(const Tensor& weight_t, int64_t tokens)
      : weight_t_(weight_t),
        tokens_(tokens),
        at_once_(tokens < 3 ? tokens : 4),
        f_(weight_t.size(0)),
        c_(weight_t.size(1)),
        chunks_((f_ + 127) / 128),
        index_(new int32_t[blocks() * (f_ + 1)]),
        start_(new int32_t[blocks() * (chunks_ + 1)]),
        value_(new float[blocks() * (f_ + 1) * at_once_]),
        lists_(new ActiveNeurons[blocks()]) {}

  int64_t blocks() const { return (tokens_ + at_once_ - 1) / at_once_; }
  int64_t columns() const { return (c_ + 15) / 16; }

  // First: the active neurons of the blocks begin to end. k: [tokens, F].
  void find_active(const float* k, int64_t begin, int64_t end) {
    const auto kernel = at_once_ == 1   ? COG_RWKV_KERNEL(active_neurons<1>)
                        : at_once_ == 2 ? COG_RWKV_KERNEL(active_neurons<2>)
                                        : COG_RWKV_KERNEL(active_neurons<4>);
    for (int64_t b = begin; b < end; b++) {
      int32_t* index = index_.get() + b * (f_ + 1);
      int32_t* start = start_.get() + b * (chunks_ + 1);
      float* value = value_.get() + b * (f_ + 1) * at_once_;
      kernel(k + b * at_once_ * f_, f_, tokens_ - b * at_once_, index, value, start);
      lists_[b] = {index, value, start, start[chunks_]};
    }
  }

  // Then: the columns 16 * begin to 16 * end of the result [tokens, C].
  void multiply(float* out, int64_t begin, int64_t end) const {
    dispatch_float_or_half(weight_t_.scalar_type(), [&](auto type) {
      using W = typename decltype(type)::type;
      const auto kernel = at_once_ == 1   ? COG_RWKV_KERNEL(squared_relu_rows<1, W>)
                          : at_once_ == 2 ? COG_RWKV_KERNEL(squared_relu_rows<2, W>)
                                          : COG_RWKV_KERNEL(squared_relu_rows<4, W>);
      kernel(lists_.get(), blocks(), tokens_, data<W>(weight_t_), f_, c_, begin * 16, std::min(c_, end * 16), out);
    });
  }

 private:
  const Tensor& weight_t_;
  int64_t tokens_, at_once_, f_, c_, chunks_;
  std::unique_ptr<int32_t[]> index_, start_;
  std::unique_ptr<float[]> value_;
  std::unique_ptr<ActiveNeurons[]> lists_;
};

}  // namespace
}  // namespace cog_rwkv

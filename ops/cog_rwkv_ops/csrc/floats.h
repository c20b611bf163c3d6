// Scratch memory of CPU kernels that compute in float, whatever the dtype of a tensor.
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "dtype.h"

namespace cog_rwkv {

constexpr std::align_val_t kLine{64};  // bytes of a line of the cache, and of the longest vector

struct FreeScratch {
  void operator()(float* p) const { operator delete[](p, kLine); }
};
using Scratch = std::unique_ptr<float[], FreeScratch>;

// Room for `size` floats, not initialised, from the beginning of a line: a vector across two lines is read twice.
inline Scratch scratch(int64_t size) { return Scratch(size > 0 ? new (kLine) float[size] : nullptr); }

// The values of a contiguous tensor as floats: its own memory where they are, else a copy.
class Floats {
 public:
  explicit Floats(const Tensor& t) {
    if (t.scalar_type() == ScalarType::Float) {
      values_ = data<float>(t);
      return;
    }
    copy_ = scratch(t.numel());
    values_ = copy_.get();
    dispatch_float_or_half(t.scalar_type(), [&](auto type) {
      using T = typename decltype(type)::type;
      std::copy_n(data<T>(t), t.numel(), copy_.get());
    });
  }
  const float* get() const { return values_; }

 private:
  const float* values_;
  Scratch copy_;
};

// Where to put the values of a new, contiguous tensor as floats; write() rounds them where it holds other types.
class FloatsOut {
 public:
  explicit FloatsOut(const Tensor& t) : t_(t) {
    if (t.scalar_type() == ScalarType::Float) {
      values_ = mutable_data<float>(t);
    } else {
      copy_ = scratch(t.numel());
      values_ = copy_.get();
    }
  }
  float* get() { return values_; }

  void write() {
    if (!copy_) return;
    dispatch_float_or_half(t_.scalar_type(), [&](auto type) {
      using T = typename decltype(type)::type;
      std::copy_n(copy_.get(), t_.numel(), mutable_data<T>(t_));
    });
  }

 private:
  const Tensor& t_;
  float* values_;
  Scratch copy_;
};

}  // namespace cog_rwkv

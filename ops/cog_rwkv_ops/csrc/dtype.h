// From a tensor's dtype to a C++ type.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "check.h"

namespace cog_rwkv {

using Half = c10::Half;
using BFloat16 = c10::BFloat16;

// The type in which arithmetic is done: float for everything but double.
template <class T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};
template <class T>
using arithmetic_t = typename Arithmetic<T>::type;

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<T>{}) with T of the dtype: `dispatch(x.scalar_type(), [&](auto tag) { using T = typename
// decltype(tag)::type; ... })`. Check the dtype first: the error here does not name an argument.
template <class F>
void dispatch_float_or_half(ScalarType type, F&& f) {
  switch (type) {
    case ScalarType::Float:
      return f(Type<float>{});
    case ScalarType::Half:
      return f(Type<Half>{});
    case ScalarType::BFloat16:
      return f(Type<BFloat16>{});
    default:
      throw std::runtime_error("cog_rwkv: a dtype was not checked");
  }
}

template <class F>
void dispatch_floating(ScalarType type, F&& f) {
  if (type == ScalarType::Double) return f(Type<double>{});
  dispatch_float_or_half(type, f);
}

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace cog_rwkv

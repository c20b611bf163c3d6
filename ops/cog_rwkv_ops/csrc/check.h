// Checks of arguments. Every message begins with the operator and names the argument, because it is what the
// caller in Python reads: "cog_rwkv::add: b has shape [2, 3]; it must have the shape of a, [3, 2]".
//
// A check throws std::runtime_error, which PyTorch hands to Python as RuntimeError. Nothing aborts the process.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

namespace cog_rwkv {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Build messages only where the check failed: `if (!ok) fail(op, ...)`.
[[noreturn]] inline void fail(const char* op, const std::string& message) {
  throw std::runtime_error("cog_rwkv::" + std::string(op) + ": " + message);
}

inline std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); d++) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "]";
}

inline const char* dtype_text(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

inline std::string device_text(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  const char* type = t.is_cuda() ? "cuda" : "another device";
  return std::string(type) + ":" + std::to_string(t.get_device_index());
}

// PyTorch's own numbers of a dtype and a device: comparing them costs a fraction of Tensor::scalar_type() and device().
inline int32_t dtype_number(const Tensor& t) {
  int32_t number = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &number));
  return number;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  int32_t type[2], index[2];
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(a.get(), &type[0]));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(b.get(), &type[1]));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(a.get(), &index[0]));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(b.get(), &index[1]));
  return type[0] == type[1] && index[0] == index[1];
}

// `t` has one of `allowed`.
inline void check_dtype(const char* op, const char* name, const Tensor& t, std::initializer_list<ScalarType> allowed) {
  const ScalarType type = t.scalar_type();
  for (ScalarType a : allowed) {
    if (type == a) return;
  }
  std::string list;
  for (ScalarType a : allowed) {
    list += (list.empty() ? "" : ", ") + std::string(dtype_text(a));
  }
  fail(op, std::string(name) + " is " + dtype_text(type) + "; it must be " + list);
}

// What the elementwise operators take: float32, float16, bfloat16, float64.
inline void check_floating(const char* op, const char* name, const Tensor& t) {
  check_dtype(op, name, t, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Double});
}

// What the model's operators take: float32, float16, bfloat16.
inline void check_float_or_half(const char* op, const char* name, const Tensor& t) {
  check_dtype(op, name, t, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
}

inline void check_device(const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as) {
  if (!same_device(t, as))
    fail(op, std::string(name) + " is on " + device_text(t) + "; it must be on the device of " + as_name + ", " +
                 device_text(as));
}

inline void check_same_dtype(const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as) {
  if (dtype_number(t) != dtype_number(as))
    fail(op, std::string(name) + " is " + dtype_text(t.scalar_type()) + "; it must have the dtype of " + as_name +
                 ", " + dtype_text(as.scalar_type()));
}

// `t` has exactly these sizes; `what` says them in words: "[N, C] with C as in x".
inline void check_shape(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> sizes,
                        const char* what) {
  bool same = t.dim() == static_cast<int64_t>(sizes.size());
  int64_t d = 0;
  for (int64_t size : sizes) same = same && t.size(d++) == size;
  if (same) return;
  std::string wanted;
  for (int64_t size : sizes) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
  fail(op, std::string(name) + " has shape " + shape_text(t) + "; it must be " + what + " = [" + wanted + "]");
}

inline void check_dim(const char* op, const char* name, const Tensor& t, int64_t dim, const char* what) {
  if (t.dim() != dim) fail(op, std::string(name) + " has shape " + shape_text(t) + "; it must be " + what);
}

inline void check_same_shape(const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as) {
  bool same = t.dim() == as.dim();
  for (int64_t d = 0; same && d < t.dim(); d++) same = t.size(d) == as.size(d);
  if (!same)
    fail(op, std::string(name) + " has shape " + shape_text(t) + "; it must have the shape of " + as_name + ", " +
                 shape_text(as));
}

// Same device, dtype and shape.
inline void check_like(const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as) {
  check_device(op, name, t, as_name, as);
  check_same_dtype(op, name, t, as_name, as);
  check_same_shape(op, name, t, as_name, as);
}

}  // namespace cog_rwkv

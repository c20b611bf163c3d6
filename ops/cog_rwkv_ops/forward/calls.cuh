// Operators that forward_ calls by name, through PyTorch's dispatcher.
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "../csrc/cuda.cuh"
#include "../csrc/tensor.h"

namespace cog_rwkv {

template <size_t outputs, class... Arguments>
std::array<Tensor, outputs> call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, std::max(sizeof...(Arguments), outputs)> stack{torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  std::array<Tensor, outputs> results;
  for (size_t i = 0; i < outputs; i++) results[i] = torch::stable::detail::to<Tensor>(stack[i]);
  return results;
}

}  // namespace cog_rwkv

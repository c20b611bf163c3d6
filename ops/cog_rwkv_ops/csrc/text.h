// Arguments of operators that are text.
#pragma once

#include <string>

#include "tensor.h"

namespace cog_rwkv {

// The text of an argument `str`, whose handle is freed: to be called once, before anything that throws. (An argument
// std::string has torch::stable do this, which up to 2.13 at least leaks a copy of the text at every call.)
inline std::string take_string(StringHandle handle) {
  const char* text = nullptr;
  size_t length = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &text));
  std::string result(text, length);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return result;
}

}  // namespace cog_rwkv

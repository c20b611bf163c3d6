// What CUDA kernels share: device, stream, launch check, grid size, 16-byte loads.
//
// A launch looks like this; the guard and the stream are PyTorch's, so side streams, CUDA graphs and a device
// that is not the current one work:
//
//   Launch launch("name", x);
//   kernel<<<blocks(n, 256), 256, 0, launch.stream>>>(...);
//   launch.check();
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "check.h"
#include "dtype.h"

namespace cog_rwkv {

// A function of torch's CUDA library. That library is found at run time, among those that torch has loaded: a
// CPU build of torch has none to link against, and torch loads its libraries privately.
template <class F>
F* torch_cuda_function(const char* name) {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  void* found = library ? dlsym(library, name) : nullptr;
  if (!found) throw std::runtime_error(std::string("cog_rwkv: this torch has no ") + name + " in libtorch_cuda.so");
  return reinterpret_cast<F*>(found);
}

inline void check_cuda(const char* op, cudaError_t error) {
  if (error != cudaSuccess) fail(op, std::string("CUDA error: ") + cudaGetErrorString(error));
}

// For tests and measurements: COG_RWKV_GPU=plain takes what any GPU can do.
inline bool plain_gpu() {
  const char* wanted = std::getenv("COG_RWKV_GPU");
  return wanted && std::string_view(wanted) == "plain";
}

// Makes the device of `t` the current one while it lives, and holds the stream that PyTorch uses there.
class Launch {
 public:
  cudaStream_t stream = nullptr;

  Launch(const char* op, const Tensor& t) : op_(op), guard_(t.get_device_index()) {
    // Our CUDA runtime is linked in, so it keeps a current device of its own beside torch's.
    check_cuda(op, cudaSetDevice(t.get_device_index()));
    using GetStream = AOTITorchError(int32_t, void**);
    static GetStream* const get_stream = torch_cuda_function<GetStream>("aoti_torch_get_current_cuda_stream");
    void* current = nullptr;
    if (get_stream(t.get_device_index(), &current) != 0) fail(op, "PyTorch gave no current CUDA stream");
    stream = static_cast<cudaStream_t>(current);
  }

  // After every <<<>>>: a bad launch is reported here and not at some later call.
  void check() const { check_cuda(op_, cudaGetLastError()); }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
};

// Blocks for n items, `per_block` each, for kernels whose loop strides over the grid: enough to fill any GPU, and
// never more than a grid can hold, whatever n is.
inline unsigned blocks(int64_t n, int64_t per_block) {
  return static_cast<unsigned>(std::clamp<int64_t>((n + per_block - 1) / per_block, 1, 1 << 20));
}

// N values of T that are loaded and stored at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T values[N];
};

template <class T, int N>
__device__ __forceinline__ Vector<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

template <class T, int N>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, N>& v) {
  *reinterpret_cast<Vector<T, N>*>(to) = v;
}

// True where every pointer lies on a 16-byte boundary: a view may begin anywhere.
template <class... Pointer>
bool aligned16(const Pointer*... pointer) {
  return ((reinterpret_cast<uintptr_t>(pointer) | ... | uintptr_t{0}) & 15) == 0;
}

}  // namespace cog_rwkv

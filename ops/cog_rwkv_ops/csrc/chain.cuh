// Kernels that follow each other closely: on Hopper and later the next one may start while the last blocks of the one
// before it still run (programmatic dependent launch), so that it has read weights by the time its input is there.
//
// A kernel that is launched by `launch_chained` calls `wait_for_previous()` before it touches anything that an earlier
// kernel writes or reads: weights may be read before, activations may not, and nothing may be written.
// `let_next_begin()`, called after that, is when the next kernel's blocks may take their places.
// Every kernel of a chain waits, also one that would not need to: what it waits for includes all that is before that.
// As none begins before the one ahead of it has waited, a kernel may even read early what only the last but one wrote.
#pragma once

#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "cuda.cuh"

namespace cog_rwkv {

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Brings the line of 128 bytes around `address` into L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Whether the current device can overlap a kernel with the one before it; elsewhere they run one after the other. What
// the driver compiled from code for older devices does not wait, so it must not begin early either.
inline bool can_chain(const void* kernel, int device) {
  int major = 0;
  cudaFuncAttributes attributes;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9 &&
         cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

// Makes a kernel ready for launches on the current device, with so many bytes of shared memory or more. Returns whether
// it can overlap the one before it. What the driver is told and asked is remembered for each kernel and device, by all
// threads together, as the limit of one is that of the others: it takes longer than a launch, and a step is hundreds.
inline bool ready_to_chain(const char* op, const void* kernel, size_t shared_bytes) {
  struct Known {
    size_t shared_bytes;
    bool chains;
  };
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Known> kernels;
  int device = 0;
  check_cuda(op, cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  const auto found = kernels.find({kernel, device});
  if (found != kernels.end() && shared_bytes <= found->second.shared_bytes) return found->second.chains;
  // Two kernels share a multiprocessor only where they divide its memory into cache and shared memory alike.
  const auto carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
  check_cuda(op, cudaFuncSetAttribute(kernel, carveout, cudaSharedmemCarveoutMaxShared));
  const auto dynamic = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (shared_bytes > 0) check_cuda(op, cudaFuncSetAttribute(kernel, dynamic, static_cast<int>(shared_bytes)));
  const Known known{shared_bytes, can_chain(kernel, device)};
  kernels[{kernel, device}] = known;
  return known.chains;
}

template <class... Parameters>
void launch_chained(const char* op, cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                    size_t shared_bytes, std::type_identity_t<Parameters>... arguments) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  const bool chains = ready_to_chain(op, function, shared_bytes) && !plain_gpu();
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = chains ? 1 : 0;
  check_cuda(op, cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace cog_rwkv

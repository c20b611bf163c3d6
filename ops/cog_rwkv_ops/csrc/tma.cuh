// Hopper's copies of tiles (TMA): what they are told of a tensor, and the barriers on which their arrival is awaited.
#pragma once

#include <cuda.h>

#include <string>

#include "wgmma.cuh"

namespace cog_rwkv {

// ---- on the host

template <class F>
F* driver_function(const char* op, const char* name) {
  void* found = nullptr;
  check_cuda(op, cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, nullptr));
  if (!found) fail(op, std::string("this driver has no ") + name);
  return reinterpret_cast<F*>(found);
}

template <class T>
constexpr CUtensorMapDataType map_type() {
  return std::is_same_v<T, BFloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// A tensor [c][b][a] of three dimensions, contiguous, a the fastest; tiles of `rows` of c, or of b where `along_b`, by
// 64 of a. What lies outside is zero.
template <class T>
CUtensorMap matrix_map(const char* op, const T* data, int64_t a, int64_t b, int64_t c, uint32_t rows, bool along_b) {
  static auto* const encode = driver_function<decltype(cuTensorMapEncodeTiled)>(op, "cuTensorMapEncodeTiled");
  CUtensorMap map;
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(a), static_cast<cuuint64_t>(b), static_cast<cuuint64_t>(c)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(a) * sizeof(T), static_cast<cuuint64_t>(a * b) * sizeof(T)};
  const cuuint32_t box[3] = {kLine, along_b ? rows : 1, along_b ? 1 : rows}, steps[3] = {1, 1, 1};
  const CUresult result =
      encode(&map, map_type<T>(), 3, const_cast<T*>(data), size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail(op, "cuTensorMapEncodeTiled gave error " + std::to_string(result));
  return map;
}

// One dimension of a grid over images: place i of `size` reads at i * step + first, and up to 255 further on.
struct MapLine {
  int64_t in_size, size, step, first;

  int last() const { return static_cast<int>(first + (size - 1) * step - (in_size - 1)); }
  bool possible() const { return step <= 8 && first >= -128 && first <= 127 && last() >= -128 && last() <= 127; }
};

// Images [n][h][w][c]; tiles of `places` consecutive places of the grid, over the images, by 64 channels.
template <class T>
CUtensorMap image_map(const char* op, const T* data, int64_t n, int64_t c, const MapLine& h, const MapLine& w,
                      uint32_t places) {
  static auto* const encode = driver_function<decltype(cuTensorMapEncodeIm2col)>(op, "cuTensorMapEncodeIm2col");
  CUtensorMap map;
  const auto u64 = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t size[4] = {u64(c), u64(w.in_size), u64(h.in_size), u64(n)};
  const cuuint64_t row = u64(c) * sizeof(T), strides[3] = {row, row * size[1], row * size[1] * size[2]};
  const int lower[2] = {static_cast<int>(w.first), static_cast<int>(h.first)}, upper[2] = {w.last(), h.last()};
  const cuuint32_t steps[4] = {1, static_cast<cuuint32_t>(w.step), static_cast<cuuint32_t>(h.step), 1};
  const CUresult result = encode(&map, map_type<T>(), 4, const_cast<T*>(data), size, strides, lower, upper, kLine,
                                 places, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail(op, "cuTensorMapEncodeIm2col gave error " + std::to_string(result));
  return map;
}

// ---- on the device

// Between what a thread did to shared memory itself and what copies or tensor cores do to it next.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the barrier wait for so many bytes of copies as well.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done; wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra.uni end; "
      "bra.uni wait; end:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

#if COG_RWKV_WGMMA
// Whether this is the one thread of a warp that does what one does alone. The compiler knows what this instruction
// means: then what copies need lies in registers of the warp, without a loop over threads around each copy.
__device__ __forceinline__ bool elected() {
  uint32_t mine = 0;
  asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff; @one mov.u32 %0, 1;}" : "+r"(mine));
  return mine != 0;
}

// Fetches what a map says, so that the first copy by it need not wait for that.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}
__device__ __forceinline__ void load_matrix(uint32_t to, const CUtensorMap& map, uint32_t barrier, int a, int b,
                                            int c) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(a), "r"(b), "r"(c)
      : "memory");
}
__device__ __forceinline__ void load_image(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c, int x, int y,
                                           int n, int right, int down) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2], {%7, %8};" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(c), "r"(x), "r"(y), "r"(n),
      "h"(static_cast<uint16_t>(right)), "h"(static_cast<uint16_t>(down))
      : "memory");
}
#endif

}  // namespace cog_rwkv

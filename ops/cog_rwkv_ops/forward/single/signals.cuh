// What the warps of a block and the blocks of a grid tell each other, in a kernel whose blocks all run at once. Hopper.
//
// Every wait gives up after some seconds: a grid that hangs would hold the device for good.
#pragma once

#include "../../csrc/barriers.cuh"
#include "../../csrc/wgmma.cuh"

namespace cog_rwkv {

constexpr uint32_t kReaders = 256;  // threads that compute; a warp more copies

// Ends the kernel with an error when it has been asked for some seconds.
class Patience {
 public:
  __device__ __forceinline__ void lose() {
    const int64_t now = clock64();
    if (since_ == 0) since_ = now;
    if (now - since_ > int64_t{1} << 33) __trap();
  }

 private:
  int64_t since_ = 0;
};

// ---- in a block: barriers in shared memory

__device__ __forceinline__ void wait_at(uint64_t* barrier, uint32_t parity) {
  Patience patience;
  while (true) {
    uint32_t done = 0;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    if (done != 0) return;
    patience.lose();
  }
}

// Of the kReaders threads, without the warp that copies.
__device__ __forceinline__ void sync_readers() { asm volatile("bar.sync 1, %0;" ::"n"(kReaders) : "memory"); }

// ---- in the grid: a counter in global memory, to which each block adds one for each barrier

__device__ __forceinline__ uint64_t count_and_ask(uint64_t* counter) {
  uint64_t before;
  asm volatile("atom.add.release.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
  return before;
}

__device__ __forceinline__ void count(uint64_t* counter) {
  asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void wait_for_count(const uint64_t* counter, uint64_t least) {
  Patience patience;
  while (true) {
    uint64_t now;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(counter) : "memory");
    if (now >= least) return;
    patience.lose();
  }
}

// ---- memory

__device__ __forceinline__ void add_to(uint64_t* sum, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(sum), "l"(value) : "memory");
}

// Brings bytes, a multiple of 16, into L2.
__device__ __forceinline__ void fetch_to_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Weights, which nobody writes, past the cache of the multiprocessor.
__device__ __forceinline__ void read_once(uint32_t (&words)[2], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
}
__device__ __forceinline__ void read_once(uint32_t (&words)[4], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from));
}

}  // namespace cog_rwkv

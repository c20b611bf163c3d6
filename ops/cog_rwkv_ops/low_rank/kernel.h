// low_rank on the CPU: the matrix products of matmul_kernel.h, and what lies between the two. Read by each_cpu.h.
#include "../csrc/matmul_kernel.h"

inline void activate_tanh(float* values, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) store_upto(values + i, tanh(load_upto(values + i, size - i)), size - i);
}

inline void activate_sigmoid(float* values, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) store_upto(values + i, sigmoid(load_upto(values + i, size - i)), size - i);
}

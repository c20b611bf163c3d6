// The kernels of the operators that a decode step is made of. Read by each_cpu.h.
#include "../layer_norm/kernel.h"
#include "../squared_relu/kernel.h"
#include "../time_mix_output/kernel.h"
#include "../time_mix_prepare/kernel.h"
#include "../token_shift/kernel.h"
#include "../wkv7/kernel.h"

// x += delta where it is given, then normed = layer norm of x, for the rows begin to end.
inline void add_and_norm(float* x, const float* delta, const float* weight, const float* bias, float* normed,
                         int64_t begin, int64_t end, int64_t c_size, float eps) {
  for (int64_t i = begin * c_size; delta != nullptr && i < end * c_size; i += 16) {
    const int64_t left = end * c_size - i;
    store_upto(x + i, load_upto(x + i, left) + load_upto(delta + i, left), left);
  }
  layer_norm_rows(x, weight, bias, normed, begin, end, c_size, eps);
}

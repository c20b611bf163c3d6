// token_shift_: CUDA kernel and launch.
#include "../csrc/cuda.cuh"
#include "../csrc/packed.cuh"
#include "../csrc/tensor.h"
#include "token_shift.h"

namespace cog_rwkv {
namespace {

template <class T>
struct TokenShift {
  const T* x;                        // [n, c]
  const float* mix;                  // [mixes, c]
  float* shift;                      // [pool_rows, c], rows `stride` apart
  const int64_t *rows, *cu_seqlens;  // [batch], [batch + 1]
  T* out;                            // [mixes, n, c]
  int64_t n, c, mixes, stride, batch, pool_rows;
};

// A block a token, a thread a channel. Who reads a channel of the state, for the first token of a sequence, also
// writes it, from the last token: so no other block can be too early.
template <class T>
__global__ void __launch_bounds__(256) token_shift_kernel(const TokenShift<T> p) {
  for (int64_t t = blockIdx.x; t < p.n; t += gridDim.x) {
    const int64_t i = sequence_of(p.cu_seqlens, p.batch, t);
    Sequence s{0, 0, 0, false};
    if (i >= 0) s = sequence_at(p.rows, p.cu_seqlens, i, p.n, p.pool_rows);
    const bool ok = s.row_ok && s.begin <= t && t < s.end;
    for (int64_t c = threadIdx.x; c < p.c; c += blockDim.x) {
      const float now = static_cast<float>(p.x[t * p.c + c]);
      float before = nanf("");
      if (ok && t == s.begin) {
        float* state = p.shift + s.row * p.stride + c;
        before = *state;
        *state = static_cast<float>(p.x[(s.end - 1) * p.c + c]);
      } else if (ok) {
        before = static_cast<float>(p.x[(t - 1) * p.c + c]);
      }
      for (int64_t m = 0; m < p.mixes; ++m) {
        p.out[(m * p.n + t) * p.c + c] = static_cast<T>(now + (before - now) * p.mix[m * p.c + c]);
      }
    }
  }
}

Tensor token_shift_cuda(const Tensor& x, const Tensor& mix, const Tensor& shift, const Tensor& rows,
                        const Tensor& cu_seqlens) {
  const int64_t stride = check_token_shift(x, mix, shift, rows, cu_seqlens);
  const Launch launch("token_shift_", x);
  const Tensor tokens = as_contiguous(x), mixes = as_contiguous(mix);
  const Tensor row = as_contiguous(rows), start = as_contiguous(cu_seqlens);
  const int64_t n = x.size(0), c = x.size(1);
  Tensor out = empty_tensor(x, {mix.size(0), n, c});
  if (n * c == 0) return out;
  dispatch_float_or_half(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const TokenShift<T> work{data<T>(tokens),
                             data<float>(mixes),
                             mutable_data<float>(shift),
                             data<int64_t>(row),
                             data<int64_t>(start),
                             mutable_data<T>(out),
                             n,
                             c,
                             mix.size(0),
                             stride,
                             rows.size(0),
                             shift.size(0)};
    token_shift_kernel<<<blocks(n, 1), 256, 0, launch.stream>>>(work);
    launch.check();
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("token_shift_", TORCH_BOX(&token_shift_cuda)); }

}  // namespace cog_rwkv

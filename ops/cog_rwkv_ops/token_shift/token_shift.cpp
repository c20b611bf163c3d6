// token_shift_: schema and CPU kernel.
#include "token_shift.h"

#define COG_RWKV_KERNELS "../token_shift/kernel.h"
#include "../csrc/each_cpu.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

template <class T>
struct TokenShift {
  const T* x;        // [n, c]
  const float* mix;  // [mixes, c]
  float* shift;      // [pool, c], rows `stride` apart
  T* out;            // [mixes, n, c]
  int64_t n, c, mixes, stride;

  // Tokens begin to end, of the sequences that hold them.
  void run(int64_t begin, int64_t end, const int64_t* rows, const int64_t* cu_seqlens, int64_t batch) const {
    const auto first = COG_RWKV_KERNEL(token_shift_row<float, T>);
    const auto later = COG_RWKV_KERNEL(token_shift_row<T, T>);
    int64_t i = std::upper_bound(cu_seqlens, cu_seqlens + batch + 1, begin) - cu_seqlens - 1;
    for (int64_t t = begin; t < end; t++) {
      while (cu_seqlens[i + 1] <= t) i++;
      if (t == cu_seqlens[i]) {
        first(x + t * c, shift + rows[i] * stride, mix, mixes, c, out + t * c, n * c);
      } else {
        later(x + t * c, x + (t - 1) * c, mix, mixes, c, out + t * c, n * c);
      }
    }
  }
};

Tensor token_shift_cpu(const Tensor& x, const Tensor& mix, const Tensor& shift, const Tensor& rows,
                       const Tensor& cu_seqlens) {
  const int64_t stride = check_token_shift(x, mix, shift, rows, cu_seqlens);
  const Tensor tokens = as_contiguous(x), m = as_contiguous(mix), r = as_contiguous(rows),
               cu = as_contiguous(cu_seqlens);
  const int64_t n = x.size(0), c = x.size(1), mixes = mix.size(0), batch = rows.size(0);
  const int64_t *row = data<int64_t>(r), *start = data<int64_t>(cu);
  check_packed_values("token_shift_", row, start, batch, n, shift.size(0));
  Tensor out = empty_tensor(x, {mixes, n, c});
  if (n * c == 0) return out;
  dispatch_float_or_half(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const TokenShift<T> work{data<T>(tokens), data<float>(m), mutable_data<float>(shift), mutable_data<T>(out), n, c,
                             mixes,           stride};
    parallel_for(n, 1 + 32768 / (c * (mixes + 1)),
                 [&](int64_t begin, int64_t end) { work.run(begin, end, row, start, batch); });
    // Only now: the first token of a sequence has read what its last one replaces.
    for (int64_t i = 0; i < batch; i++) {
      if (start[i + 1] > start[i]) std::copy_n(work.x + (start[i + 1] - 1) * c, c, work.shift + row[i] * stride);
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("token_shift_(Tensor x, Tensor mix, Tensor(a!) shift, Tensor rows, Tensor cu_seqlens) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("token_shift_", TORCH_BOX(&token_shift_cpu)); }

}  // namespace cog_rwkv

// norm_shift_: schema and CPU kernel.
#include "norm_shift.h"

#define COG_RWKV_KERNELS "../norm_shift/kernel.h"
#include "../csrc/each_cpu.h"
#include "../csrc/floats.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

// Sequence i is the tokens start[i] to start[i + 1], and its last token before them is row[i] of `shift`.
struct Shift {
  const float* normed;  // [n, c]
  const float* mix;     // [mixes, c]
  float* shift;         // [pool, c], rows `stride` apart
  int64_t n, c, mixes, stride, batch;
  const int64_t *row, *start;

  // Tokens begin to end, of the sequences that hold them.
  template <class T>
  void run(T* out, int64_t begin, int64_t end) const {
    const auto kernel = COG_RWKV_KERNEL(shift_row<T>);
    int64_t i = std::upper_bound(start, start + batch + 1, begin) - start - 1;
    for (int64_t t = begin; t < end; t++) {
      while (start[i + 1] <= t) i++;
      const float* before = t == start[i] ? shift + row[i] * stride : normed + (t - 1) * c;
      kernel(normed + t * c, before, mix, mixes, c, out + t * c, n * c);
    }
  }

  void keep_last() const {
    for (int64_t i = 0; i < batch; i++) {
      if (start[i + 1] > start[i]) std::copy_n(normed + (start[i + 1] - 1) * c, c, shift + row[i] * stride);
    }
  }
};

std::tuple<Tensor, Tensor> norm_shift_cpu(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& weight,
                                          const Tensor& bias, const Tensor& mix, const Tensor& shift,
                                          const Tensor& rows, const Tensor& cu_seqlens, double eps) {
  const int64_t stride = check_norm_shift(x, delta, weight, bias, mix, shift, rows, cu_seqlens);
  const Tensor tokens = as_contiguous(x), added = as_contiguous(delta.value_or(x)), w = as_contiguous(weight),
               b = as_contiguous(bias), m = as_contiguous(mix), r = as_contiguous(rows), cu = as_contiguous(cu_seqlens);
  const int64_t n = x.size(0), c = x.size(1), mixes = mix.size(0), batch = rows.size(0);
  const int64_t *row = data<int64_t>(r), *start = data<int64_t>(cu);
  check_packed_values("norm_shift_", row, start, batch, n, shift.size(0));
  Tensor sum = empty_tensor(x, x.sizes()), out = empty_tensor(x, {mixes, n, c});
  if (n * c == 0) return {sum, out};
  const auto normed = scratch(n * c);
  const Shift work{normed.get(), data<float>(m), mutable_data<float>(shift), n, c, mixes, stride, batch, row, start};
  dispatch_float_or_half(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto norm = COG_RWKV_KERNEL(norm_rows<T>);
    parallel_for(n, 1 + 16384 / c, [&](int64_t begin, int64_t end) {
      norm(data<T>(tokens), delta ? data<T>(added) : nullptr, data<float>(w), data<float>(b), mutable_data<T>(sum),
           normed.get(), begin, end, c, static_cast<float>(eps));
    });
    parallel_for(n, 1 + 32768 / (c * (mixes + 1)),
                 [&](int64_t begin, int64_t end) { work.run(mutable_data<T>(out), begin, end); });
  });
  work.keep_last();  // only now: the first token of a sequence has read what its last one replaces
  return {sum, out};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def(
      "norm_shift_(Tensor x, Tensor? delta, Tensor weight, Tensor bias, Tensor mix, Tensor(a!) shift, Tensor rows, "
      "Tensor cu_seqlens, float eps=1e-5) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("norm_shift_", TORCH_BOX(&norm_shift_cpu)); }

}  // namespace cog_rwkv

// time_mix_prepare: schema and CPU kernel.
#include "time_mix_prepare.h"

#include <tuple>

#include "args.h"

#define COG_RWKV_KERNELS "../time_mix_prepare/kernel.h"
#include "../csrc/each_cpu.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> time_mix_prepare_cpu(const Tensor& k, const Tensor& v, const Tensor& a,
                                                                const Tensor& k_k, const Tensor& k_a,
                                                                const std::optional<Tensor>& v_first,
                                                                const std::optional<Tensor>& v_mix) {
  check_time_mix_prepare(k, v, a, k_k, k_a, v_first, v_mix);
  const Tensor key = as_contiguous(k), value = as_contiguous(v), rate = as_contiguous(a);
  const Tensor first = as_contiguous(v_first.value_or(v)), mix = as_contiguous(v_mix.value_or(v));
  const Tensor key_scale = as_contiguous(k_k), key_rate = as_contiguous(k_a);
  Tensor k_out = empty_tensor(k, k.sizes()), v_out = empty_tensor(k, k.sizes());
  Tensor minus_kk = empty_tensor(k, k.sizes()), kk_a = empty_tensor(k, k.sizes());
  const int64_t heads = k.size(1) / 64;
  dispatch_float_or_half(k.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const PrepareArgs<T> args{data<T>(key),
                              data<T>(value),
                              data<T>(rate),
                              v_first ? data<T>(first) : nullptr,
                              v_mix ? data<T>(mix) : nullptr,
                              data<float>(key_scale),
                              data<float>(key_rate),
                              mutable_data<T>(k_out),
                              mutable_data<T>(v_out),
                              mutable_data<T>(minus_kk),
                              mutable_data<T>(kk_a)};
    const auto kernel = COG_RWKV_KERNEL(time_mix_prepare_heads<T>);
    parallel_for(k.size(0) * heads, 64, [&](int64_t begin, int64_t end) { kernel(args, begin, end, heads); });
  });
  return {k_out, v_out, minus_kk, kk_a};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def(
      "time_mix_prepare(Tensor k, Tensor v, Tensor a, Tensor k_k, Tensor k_a, Tensor? v_first=None, "
      "Tensor? v_mix=None) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("time_mix_prepare", TORCH_BOX(&time_mix_prepare_cpu)); }

}  // namespace cog_rwkv

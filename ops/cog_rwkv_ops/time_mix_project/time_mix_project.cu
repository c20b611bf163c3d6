// time_mix_project: CUDA kernels and launches.
#include "time_mix_project.h"

#include "../csrc/matmul.cuh"

namespace cog_rwkv {
namespace {

constexpr const char* kOp = "time_mix_project";

Tensor matrix_of(const Tensor& weight) { return torch::stable::transpose(as_contiguous(weight), 0, 1); }

// rows times weight^T, and the bias, into `out`.
template <class F>
void project(const Launch& launch, const Rows& rows, const Tensor& weight, F f, const std::optional<Tensor>& bias,
             const Tensor& out) {
  finish_rows_into(launch, multiply(launch, kOp, rows, matrix_of(weight), f), as_contiguous(bias), out);
}

template <class F>
void project(const Launch& launch, const Tensor& x, const LowRank& low, F between, const Tensor& out) {
  const Rows hidden = multiply(launch, kOp, Rows{x, std::nullopt}, matrix_of(low.down), Identity{});
  project(launch, hidden, low.up, between, low.bias, out);
}

Tensor time_mix_project_cuda(const Tensor& x, const Tensor& receptance, const Tensor& key, const Tensor& value,
                             const Tensor& w1, const Tensor& w2, const Tensor& w0, const Tensor& a1, const Tensor& a2,
                             const Tensor& a0, const Tensor& g1, const Tensor& g2, const std::optional<Tensor>& v1,
                             const std::optional<Tensor>& v2, const std::optional<Tensor>& v0) {
  const Projections p = projections(receptance, key, value, w1, w2, w0, a1, a2, a0, g1, g2, v1, v2, v0);
  check_time_mix_project(x, p);
  const Launch launch(kOp, x);
  const Tensor tokens = as_contiguous(x);
  Tensor out = empty_tensor(x, {p.mix ? 7 : 6, x.size(1), x.size(2)});
  if (out.numel() == 0) return out;
  const auto mix = [&](int64_t i) { return torch::stable::select(tokens, 0, i); };  // in the order r, w, k, v, a, g
  const auto place = [&](int64_t i) { return torch::stable::select(out, 0, i); };
  const auto square = [&](int64_t from, const Tensor& weight, int64_t to) {
    project(launch, Rows{mix(from), std::nullopt}, weight, Identity{}, std::nullopt, place(to));
  };
  square(0, p.receptance, 0);
  square(2, p.key, 1);
  square(3, p.value, 2);
  project(launch, mix(1), p.decay, Tanh{}, place(3));
  project(launch, mix(4), p.rate, Identity{}, place(4));
  project(launch, mix(5), p.gate, Sigmoid{}, place(5));
  if (p.mix) project(launch, mix(3), *p.mix, Identity{}, place(6));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CUDA, m) { m.impl("time_mix_project", TORCH_BOX(&time_mix_project_cuda)); }

}  // namespace cog_rwkv

// time_mix_project: schema and CPU kernel.
#include "time_mix_project.h"

#include "../csrc/floats.h"
#include "../csrc/matmul.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

enum Mix { kR, kW, kK, kV, kA, kG };  // the order of the token shift's mixes

struct Work {
  const LowRank& projection;
  Mix from;
  int64_t to;  // place in the result
  Activation between;
};

// Two pieces of work: all that reads x, then the second halves of the low-rank projections.
void project(const Projections& p, const float* x, float* out, int64_t n, int64_t c) {
  const int64_t size = n * c;
  std::vector<Work> thin{
      {p.decay, kW, 3, Activation::tanh}, {p.rate, kA, 4, Activation::none}, {p.gate, kG, 5, Activation::sigmoid}};
  if (p.mix) thin.push_back({*p.mix, kV, 6, Activation::none});
  int64_t ranks = 0;
  for (const Work& one : thin) ranks += one.projection.down.size(0);
  const auto hidden = scratch(n * ranks);

  std::vector<MatmulJob> first, second;
  first.push_back({{x + kR * size, nullptr, out, n, c, c, Activation::none}, as_contiguous(p.receptance)});
  first.push_back({{x + kK * size, nullptr, out + size, n, c, c, Activation::none}, as_contiguous(p.key)});
  first.push_back({{x + kV * size, nullptr, out + 2 * size, n, c, c, Activation::none}, as_contiguous(p.value)});
  std::vector<Tensor> biases;
  float* middle = hidden.get();
  for (const Work& one : thin) {
    const LowRank& low = one.projection;
    const int64_t d = low.down.size(0);
    if (low.bias) biases.push_back(as_contiguous(*low.bias));
    const float* bias = low.bias ? data<float>(biases.back()) : nullptr;
    first.push_back({{x + one.from * size, nullptr, middle, n, d, c, one.between}, as_contiguous(low.down)});
    second.push_back({{middle, bias, out + one.to * size, n, c, d, Activation::none}, as_contiguous(low.up)});
    middle += n * d;
  }
  matmul(first);
  matmul(second);
}

Tensor time_mix_project_cpu(const Tensor& x, const Tensor& receptance, const Tensor& key, const Tensor& value,
                            const Tensor& w1, const Tensor& w2, const Tensor& w0, const Tensor& a1, const Tensor& a2,
                            const Tensor& a0, const Tensor& g1, const Tensor& g2, const std::optional<Tensor>& v1,
                            const std::optional<Tensor>& v2, const std::optional<Tensor>& v0) {
  const Projections p = projections(receptance, key, value, w1, w2, w0, a1, a2, a0, g1, g2, v1, v2, v0);
  check_time_mix_project(x, p);
  const Tensor tokens = as_contiguous(x);
  const int64_t n = x.size(1), c = x.size(2);
  Tensor out = empty_tensor(x, {p.mix ? 7 : 6, n, c});
  if (n * c == 0) return out;
  const Floats floats(tokens);
  FloatsOut result(out);
  project(p, floats.get(), result.get(), n, c);
  result.write();
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def(
      "time_mix_project(Tensor x, Tensor receptance, Tensor key, Tensor value, Tensor w1, Tensor w2, Tensor w0, "
      "Tensor a1, Tensor a2, Tensor a0, Tensor g1, Tensor g2, Tensor? v1=None, Tensor? v2=None, Tensor? v0=None) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) { m.impl("time_mix_project", TORCH_BOX(&time_mix_project_cpu)); }

}  // namespace cog_rwkv

// wkv7, wkv7_ and wkv7_backward: schemas and CPU kernels.
#include "wkv7.h"

#define COG_RWKV_KERNELS "../wkv7/kernel.h"
#include "../csrc/each_cpu.h"
#include "../csrc/floats.h"
#include "../csrc/tensor.h"

namespace cog_rwkv {
namespace {

// The inputs, contiguous, as [tokens, heads, 64].
struct Inputs {
  Tensor r, w, k, v, a, b;
};

// Sequence i is the tokens start[i] to start[i + 1], and its state is row[i] of `pool`.
template <class T, class S>
void wkv7_run_as(const Inputs& in, T* y, S* pool, int64_t pool_stride, const int64_t* row, const int64_t* start,
                 int64_t batch, int64_t heads) {
  const auto kernel = COG_RWKV_KERNEL(wkv7_head<T, S>);
  const T *r = data<T>(in.r), *w = data<T>(in.w), *k = data<T>(in.k), *v = data<T>(in.v), *a = data<T>(in.a),
          *b = data<T>(in.b);
  const int64_t tokens_each = 1 + start[batch] / batch;
  parallel_for(batch * heads, 1 + 4 / tokens_each, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t sequence = i / heads, head = i % heads, h = head * kHead;
      kernel(r + h, w + h, k + h, v + h, a + h, b + h, y + h, pool + row[sequence] * pool_stride + head * kHead * kHead,
             start[sequence], start[sequence + 1], heads * kHead);
    }
  });
}

void wkv7_run(const Inputs& in, const Tensor& y, const Tensor& pool, int64_t pool_stride, const int64_t* row,
              const int64_t* start, int64_t batch, int64_t heads) {
  if (batch * heads == 0) return;
  dispatch_float_or_half(y.scalar_type(), [&](auto type) {
    dispatch_float_or_half(pool.scalar_type(), [&](auto pool_type) {
      using T = typename decltype(type)::type;
      using S = typename decltype(pool_type)::type;
      wkv7_run_as(in, mutable_data<T>(y), mutable_data<S>(pool), pool_stride, row, start, batch, heads);
    });
  });
}

std::tuple<Tensor, Tensor> wkv7_cpu(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a,
                                    const Tensor& b, const Tensor& state) {
  check_wkv7(r, w, k, v, a, b, state);
  const Inputs in{as_contiguous(r), as_contiguous(w), as_contiguous(k),
                  as_contiguous(v), as_contiguous(a), as_contiguous(b)};
  const int64_t batch = r.size(0), tokens = r.size(1), heads = r.size(2);
  Tensor y = empty_tensor(r, r.sizes()), after = empty_tensor(state, state.sizes());
  torch::stable::copy_(after, state);
  std::vector<int64_t> row(batch), start(batch + 1);
  for (int64_t i = 0; i < batch; i++) row[i] = i, start[i + 1] = (i + 1) * tokens;
  wkv7_run(in, y, after, heads * kHead * kHead, row.data(), start.data(), batch, heads);
  return {y, after};
}

Tensor wkv7_packed_cpu(const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a,
                       const Tensor& b, const Tensor& pool, const Tensor& rows, const Tensor& cu_seqlens) {
  const int64_t stride = check_wkv7_packed(r, w, k, v, a, b, pool, rows, cu_seqlens);
  const Inputs in{as_contiguous(r), as_contiguous(w), as_contiguous(k),
                  as_contiguous(v), as_contiguous(a), as_contiguous(b)};
  const Tensor row = as_contiguous(rows), start = as_contiguous(cu_seqlens);
  check_packed_values("wkv7_", data<int64_t>(row), data<int64_t>(start), rows.size(0), r.size(0), pool.size(0));
  Tensor y = empty_tensor(r, r.sizes());
  wkv7_run(in, y, pool, stride, data<int64_t>(row), data<int64_t>(start), rows.size(0), pool.size(1));
  return y;
}

template <class T>
void wkv7_backward_as(const Tensor (&in)[6], const Tensor& d_y, const Tensor (&out)[6], const float* state,
                      float* d_state) {
  const auto kernel = COG_RWKV_KERNEL(wkv7_head_backward<T>);
  const int64_t batch = d_y.size(0), tokens = d_y.size(1), heads = d_y.size(2), size = kHead * kHead;
  constexpr int64_t kSpan = 16;  // as in kernel.h
  parallel_for(batch * heads, 1, [&](int64_t begin, int64_t end) {
    const auto kept = scratch((tokens / kSpan + 1) * size), states = scratch((kSpan + 1) * size);
    for (int64_t i = begin; i < end; i++) {
      const int64_t first = (i / heads * tokens * heads + i % heads) * kHead;
      const T* from[6];
      T* to[6];
      for (int j = 0; j < 6; j++) from[j] = data<T>(in[j]) + first, to[j] = mutable_data<T>(out[j]) + first;
      std::copy_n(state + i * size, size, kept.get());
      kernel(from, data<T>(d_y) + first, to, d_state + i * size, kept.get(), states.get(), tokens, heads * kHead);
    }
  });
}

Gradients wkv7_backward_cpu(const Tensor& d_y, const Tensor& d_end, const Tensor& r, const Tensor& w, const Tensor& k,
                            const Tensor& v, const Tensor& a, const Tensor& b, const Tensor& state) {
  check_wkv7_backward(d_y, d_end, r, w, k, v, a, b, state);
  const Tensor in[6] = {as_contiguous(r), as_contiguous(w), as_contiguous(k),
                        as_contiguous(v), as_contiguous(a), as_contiguous(b)};
  const Tensor before = as_contiguous(state), dy = as_contiguous(d_y);
  Tensor out[6], d_state = empty_tensor(state, state.sizes());
  for (Tensor& t : out) t = empty_tensor(r, r.sizes());
  torch::stable::copy_(d_state, d_end);
  dispatch_float_or_half(r.scalar_type(), [&](auto type) {
    wkv7_backward_as<typename decltype(type)::type>(in, dy, out, data<float>(before), mutable_data<float>(d_state));
  });
  return {out[0], out[1], out[2], out[3], out[4], out[5], d_state};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def("wkv7(Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b, Tensor state) -> (Tensor, Tensor)");
  m.def(
      "wkv7_(Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b, Tensor(a!) pool, Tensor rows, "
      "Tensor cu_seqlens) -> Tensor");
  m.def(
      "wkv7_backward(Tensor d_y, Tensor d_end, Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b, "
      "Tensor state) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(cog_rwkv, CPU, m) {
  m.impl("wkv7", TORCH_BOX(&wkv7_cpu));
  m.impl("wkv7_", TORCH_BOX(&wkv7_packed_cpu));
  m.impl("wkv7_backward", TORCH_BOX(&wkv7_backward_cpu));
}

}  // namespace cog_rwkv

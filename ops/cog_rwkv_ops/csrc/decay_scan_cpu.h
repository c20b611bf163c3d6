// wkv5 and wkv6 on the CPU, forward and backward: the scans of decay_scan.h, a head at a time.
#pragma once

#include "decay_scan.h"

#define COG_RWKV_KERNELS "../csrc/decay_scan_kernel.h"
#include "each_cpu.h"
#include "floats.h"

namespace cog_rwkv {
namespace {

inline void transpose(float* to, const float* from) {
  for (int64_t i = 0; i < kScanHead * kScanHead; i++) to[i % kScanHead * kScanHead + i / kScanHead] = from[i];
}

// What every scan of a head has in common, and where its first and last tokens are.
template <class T>
struct HeadPlace {
  int64_t index, first, last, stride, tokens;

  HeadPlace(const Tensor& r, int64_t i) : index(i) {
    const int64_t heads = r.size(2);
    tokens = r.size(1), stride = heads * kScanHead;
    first = (i / heads * tokens * heads + i % heads) * kScanHead;
    last = first + (tokens - 1) * stride;
  }
};

// Runs the kernel of this machine; `fill(scan)` sets the arguments, whose type depends on the instruction set.
template <class T, class Fill>
void run_scan(float* m, const Fill& fill) {
  const auto run = [&](auto kernel, auto scan) {
    fill(scan);
    kernel(scan, m);
  };
#if COG_RWKV_X86_KERNELS
  if (cpu() == Cpu::avx512) return run(&avx512::scan_head<T>, avx512::HeadScan<T>{});
  if (cpu() == Cpu::avx2) return run(&avx2::scan_head<T>, avx2::HeadScan<T>{});
#endif
  run(&baseline::scan_head<T>, baseline::HeadScan<T>{});
}

struct ScanInputs {
  Tensor r, w, k, v, u, state;
  ScanInputs(const Tensor& r_, const Tensor& w_, const Tensor& k_, const Tensor& v_, const Tensor& u_, const Tensor& s_)
      : r(as_contiguous(r_)),
        w(as_contiguous(w_)),
        k(as_contiguous(k_)),
        v(as_contiguous(v_)),
        u(as_contiguous(u_)),
        state(as_contiguous(s_)) {}
};

template <bool constant, class T, class Scan>
void fill_scan(Scan& s, const ScanInputs& in, const HeadPlace<T>& at, const T* p, const T* q, const T* x, T* out,
               bool reverse) {
  const int64_t heads = in.r.size(2), start = reverse ? at.last : at.first;
  s.p = p + start, s.q = q + start, s.x = x + start, s.out = out + start;
  s.tokens = at.tokens, s.stride = reverse ? -at.stride : at.stride, s.reverse = reverse;
  s.u = data<float>(in.u) + at.index % heads * kScanHead;
  if constexpr (constant) {
    s.w_constant = data<float>(in.w) + at.index % heads * kScanHead;
  } else {
    s.w = data<T>(in.w) + start;
  }
}

template <bool constant>
std::tuple<Tensor, Tensor> scan_forward_cpu(const char* op, const Tensor& r, const Tensor& w, const Tensor& k,
                                            const Tensor& v, const Tensor& u, const Tensor& state) {
  check_decay_scan(op, r, w, k, v, u, state, constant);
  const ScanInputs in(r, w, k, v, u, state);
  Tensor y = empty_tensor(r, r.sizes()), after = empty_tensor(state, state.sizes());
  torch::stable::copy_(after, state);
  dispatch_float_or_half(r.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(r.size(0) * r.size(2), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const HeadPlace<T> at(r, i);
        run_scan<T>(mutable_data<float>(after) + i * kScanHead * kScanHead, [&](auto& s) {
          fill_scan<constant>(s, in, at, data<T>(in.v), data<T>(in.k), data<T>(in.r), mutable_data<T>(y), false);
        });
      }
    });
  });
  return {y, after};
}

// The gradients of one head; `work` has room for two states, d_state begins as the gradient of the last one.
template <bool constant, class T>
void scan_backward_head(const ScanInputs& in, const Tensor& d_y, const Tensor (&out)[6], float* product, float* work,
                        int64_t i) {
  constexpr int64_t kSize = kScanHead * kScanHead;
  const HeadPlace<T> at(in.r, i);
  const T *r = data<T>(in.r), *k = data<T>(in.k), *v = data<T>(in.v), *dy = data<T>(d_y);
  float *last = work, *d_keys = work + kSize, *d_state = mutable_data<float>(out[5]) + i * kSize;
  float* part = mutable_data<float>(out[4]) + i * kScanHead;
  transpose(last, data<float>(in.state) + i * kSize);
  transpose(d_keys, d_state);
  run_scan<T>(last, [&](auto& s) {
    fill_scan<constant>(s, in, at, k, v, dy, mutable_data<T>(out[0]), false);
    s.rows = true, s.z = r + at.first, s.product = product + at.first, s.d_u = part;
  });
  run_scan<T>(d_keys, [&](auto& s) {
    fill_scan<constant>(s, in, at, r, dy, v, mutable_data<T>(out[2]), true);
    s.rows = true, s.z = k + at.last, s.product = product + at.last, s.last = last;
    if constexpr (constant) {
      s.d_w_sum = mutable_data<float>(out[1]) + i * kScanHead;
    } else {
      s.d_w = mutable_data<T>(out[1]) + at.last;
    }
  });
  run_scan<T>(d_state, [&](auto& s) { fill_scan<constant>(s, in, at, dy, r, k, mutable_data<T>(out[3]), true); });
}

template <bool constant>
ScanGradients scan_backward_cpu(const char* op, const Tensor& d_y, const Tensor& d_end, const Tensor& r,
                                const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& u,
                                const Tensor& state) {
  check_decay_scan_backward(op, d_y, d_end, r, w, k, v, u, state, constant);
  const ScanInputs in(r, w, k, v, u, state);
  const Tensor dy = as_contiguous(d_y);
  const int64_t batch = r.size(0), heads = r.size(2);
  const auto alike = [&] { return empty_tensor(r, r.sizes()); };
  const auto part = [&] { return empty_tensor(state, {batch, heads, kScanHead}); };
  // Of r, w, k, v, u, state.
  const Tensor out[6] = {alike(), constant ? part() : alike(),       alike(), alike(),
                         part(),  empty_tensor(state, state.sizes())};
  Tensor d_state = out[5];
  torch::stable::copy_(d_state, d_end);
  const auto product = scratch(r.numel());
  dispatch_float_or_half(r.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(batch * heads, 1, [&](int64_t begin, int64_t end) {
      const auto work = scratch(2 * kScanHead * kScanHead);
      for (int64_t i = begin; i < end; i++) scan_backward_head<constant, T>(in, dy, out, product.get(), work.get(), i);
    });
  });
  return {out[0], out[1], out[2], out[3], out[4], out[5]};
}

}  // namespace
}  // namespace cog_rwkv

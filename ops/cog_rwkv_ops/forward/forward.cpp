// forward_: schema. Its kernels are for CUDA; on a CPU decode_ does for a token each what this one does.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(cog_rwkv, m) {
  m.def(
      "forward_(Tensor ids, Tensor table, Tensor norm_weight, Tensor norm_bias, Tensor[] weights, Tensor(a!) shift, "
      "Tensor(b!) wkv, Tensor rows, Tensor? cu_seqlens=None, bool last_only=True) -> Tensor");
}

"""The definition of `time_mix_output`, in plain PyTorch."""

from torch import Tensor
from torch.nn.functional import layer_norm


def time_mix_output(
    y: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 64e-5,
) -> Tensor:
    """(group_norm(y) + (sum over head of r * k * r_k) * v) * g, all [N, C]."""
    heads = y.shape[1] // 64
    normal = layer_norm(y.unflatten(-1, (heads, 64)), (64,), eps=eps).reshape(y.shape) * weight + bias
    bonus = (r * k * r_k).unflatten(-1, (heads, 64)).sum(-1, keepdim=True) * v.unflatten(-1, (heads, 64))
    return (normal + bonus.reshape(y.shape)) * g

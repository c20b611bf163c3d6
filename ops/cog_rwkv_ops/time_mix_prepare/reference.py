"""The definition of `time_mix_prepare`, in plain PyTorch."""

from torch import Tensor
from torch.nn.functional import normalize


def time_mix_prepare(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    k_k: Tensor,
    k_a: Tensor,
    v_first: Tensor | None = None,
    v_mix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k, v, minus the normalised removal key, and that key times the learning rate: all [N, C]."""
    a = a.sigmoid()
    kk = normalize((k * k_k).unflatten(-1, (-1, 64)), dim=-1, eps=1e-12).reshape(k.shape)
    if v_first is not None and v_mix is not None:
        v = v + (v_first - v) * v_mix.sigmoid()
    return k * (1 + (a - 1) * k_a), v, -kk, kk * a

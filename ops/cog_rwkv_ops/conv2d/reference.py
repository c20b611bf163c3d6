"""The definition of `conv2d`, in plain PyTorch: a sum over the places of the kernel of shifted images times weights."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """The convolution of x [N, C, H, W] with weight [K, C / groups, R, S], as cog_rwkv_ops.conv2d defines it."""
    wide = x if x.dtype == torch.float64 else x.float()
    padded = pad(wide, (padding[1], padding[1], padding[0], padding[0])).unflatten(1, (groups, -1))
    w = weight.to(wide.dtype).unflatten(0, (groups, -1))
    rows = (padded.shape[-2] - dilation[0] * (weight.shape[2] - 1) - 1) // stride[0] + 1
    columns = (padded.shape[-1] - dilation[1] * (weight.shape[3] - 1) - 1) // stride[1] + 1
    out = wide.new_zeros(x.shape[0], groups, w.shape[1], rows, columns)
    for r in range(weight.shape[2]):
        for s in range(weight.shape[3]):
            seen = padded[..., r * dilation[0] :, s * dilation[1] :][..., :: stride[0], :: stride[1]]
            out = out + torch.einsum("ngchw,gkc->ngkhw", seen[..., :rows, :columns], w[..., r, s])
    out = out.flatten(1, 2)
    return (out if bias is None else out + bias.to(wide.dtype)[:, None, None]).to(x.dtype)

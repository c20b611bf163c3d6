"""conv2d beside cuDNN (channels_last, its fastest algorithm by measurement) at the shapes of ResNet-50, batch 32."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.op_cases import Call, Case, numbers, relative_error, sets_for
from cog_rwkv_ops._library import operator

OPERATORS = ("conv2d",)
BATCH = 32
DTYPES = (torch.float16, torch.bfloat16)
# Channels in and out, side of the image, kernel, stride.
SHAPES = [
    (64, 64, 56, 1, 1),
    (64, 64, 56, 3, 1),
    (64, 256, 56, 1, 1),
    (256, 64, 56, 1, 1),
    (256, 128, 56, 1, 1),
    (128, 128, 56, 3, 2),
    (128, 512, 28, 1, 1),
    (256, 512, 56, 1, 2),
    (512, 128, 28, 1, 1),
    (128, 128, 28, 3, 1),
    (512, 256, 28, 1, 1),
    (256, 256, 28, 3, 2),
    (256, 1024, 14, 1, 1),
    (512, 1024, 28, 1, 2),
    (1024, 256, 14, 1, 1),
    (256, 256, 14, 3, 1),
    (1024, 512, 14, 1, 1),
    (512, 512, 14, 3, 2),
    (512, 2048, 7, 1, 1),
    (1024, 2048, 14, 1, 2),
    (2048, 512, 7, 1, 1),
    (512, 512, 7, 3, 1),
]
forward = operator("conv2d")
to_input, to_weight = operator("conv2d_input_gradient"), operator("conv2d_weight_gradient")


def last(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers in channels_last."""
    return numbers(*shape, dtype=dtype, seed=seed).contiguous(memory_format=torch.channels_last)


def one_set(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> dict[str, tuple[Call, Call]]:
    """Our call and cuDNN's, for each pass, on tensors of their own."""
    c, k, side, kernel, stride = shape
    x, weight = (
        last(BATCH, c, side, side, dtype=dtype, seed=seed),
        last(k, c, kernel, kernel, dtype=dtype, seed=seed + 1),
    )
    padding, out = kernel // 2, (side + stride - 1) // stride
    gradient = last(BATCH, k, out, out, dtype=dtype, seed=seed + 2)
    options = (stride, stride, padding, padding, 1, 1, 1)
    backward = torch.ops.aten.convolution_backward
    given = (gradient, x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    return {
        "forward": (
            partial(forward, x, weight, None, *options),
            partial(torch.nn.functional.conv2d, x, weight, None, stride, padding),
        ),
        "input gradient": (
            partial(to_input, gradient, weight, side, side, *options, True),
            lambda: backward(*given, [True, False, False])[0],
        ),
        "weight gradient": (
            partial(to_weight, gradient, x, kernel, kernel, *options, kernel > 1),
            lambda: backward(*given, [False, True, False])[1],
        ),
    }


def cases(op: str) -> Iterator[Case]:
    """Every shape, forward and both gradients. The reference is cuDNN's own result, from the same numbers."""
    torch.backends.cudnn.benchmark = True
    for dtype in DTYPES:
        for shape in SHAPES:
            c, k, side, kernel, stride = shape
            out = (side + stride - 1) // stride
            moved = dtype.itemsize * (BATCH * (c * side * side + k * out * out) + k * c * kernel * kernel)
            sets = [one_set(shape, dtype, 3 * i) for i in range(sets_for(moved, 8))]
            for name in sets[0]:
                ours, peer = sets[0][name]
                yield Case(
                    op=op,
                    backward=name != "forward",
                    dtype=dtype,
                    shape=f"{name}, N={BATCH} C={c} K={k} {side}x{side} {kernel}x{kernel}/{stride}",
                    ours=[each[name][0] for each in sets],
                    peers={"cuDNN": [each[name][1] for each in sets]},
                    error=lambda ours=ours, peer=peer: relative_error(ours(), peer()),  # type: ignore[misc]
                    bound=1e-3 if dtype == torch.float16 else 6e-3,
                    bytes=moved,
                    flops=2.0 * BATCH * out * out * k * c * kernel * kernel,
                    rate=str(dtype).removeprefix("torch."),
                )

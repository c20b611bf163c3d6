"""layer_norm: rows of every width and place, against the definition in float64."""

import pytest
import torch

import cog_rwkv_ops
from cog_rwkv_ops.layer_norm import reference
from tests.ops.common import FLOAT_OR_HALF, numbers
from tests.ops.model_cases import BOUND, error

every_dtype = pytest.mark.parametrize("dtype", FLOAT_OR_HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))
WIDTHS = [1, 2, 4, 6, 124, 128, 130, 1000, 1024, 1028, 2560, 4096, 4100, 5120, 6002, 9000]


@every_dtype
def test_every_width_and_place(dtype: torch.dtype, device: str, guard) -> None:
    for c in WIDTHS:
        for shift in (0, 1):  # on the 16-byte boundary, and off it
            x = guard(numbers(3, c, dtype=dtype, device=device, scale=2.0), shift)
            weight, bias = (numbers(c, dtype=torch.float32, device=device, seed=i) for i in (1, 2))
            got = cog_rwkv_ops.layer_norm(x, weight, bias)
            want = reference.layer_norm(x.double(), weight.double(), bias.double()).cpu()
            assert got.dtype == dtype
            assert error(got, want) <= BOUND[dtype], (c, shift)

"""The smallest complete test of an operator: the one to copy together with the folder `add/`."""

import pytest
import torch

from cog_rwkv_ops import add
from cog_rwkv_ops.add.reference import add as reference
from tests.ops.common import FLOATING, ODD_SIZES, assert_close, numbers


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_equals_the_definition(dtype: torch.dtype, device: str, guard) -> None:
    for size in ODD_SIZES:
        a = guard(numbers(size, dtype=dtype, device=device, seed=1))
        b = guard(numbers(size, dtype=dtype, device=device, seed=2))
        assert_close(add(a, b), reference(a, b))


def test_takes_tensors_of_any_layout(device: str) -> None:
    a = numbers(4, 6, dtype=torch.float32, device=device, seed=1)
    b = numbers(6, 4, dtype=torch.float32, device=device, seed=2).t()
    assert_close(add(a, b), reference(a, b))


def test_names_the_argument_that_is_wrong(device: str) -> None:
    with pytest.raises(RuntimeError, match="cog_rwkv::add: b has shape"):
        add(torch.ones(2, device=device), torch.ones(3, device=device))


def test_registers_everything_that_pytorch_needs(device: str) -> None:
    a = numbers(3, 5, dtype=torch.float64, device=device, seed=1).requires_grad_()
    b = numbers(3, 5, dtype=torch.float64, device=device, seed=2).requires_grad_()
    torch.library.opcheck(torch.ops.cog_rwkv.add.default, (a, b))
    assert torch.autograd.gradcheck(add, (a, b))

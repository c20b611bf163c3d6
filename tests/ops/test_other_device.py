"""Operators on a GPU that is not the current one; those of the model and of elements have such a test of their own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops as ops
from tests.ops import model_cases
from tests.ops.common import numbers
from tests.ops.test_sample import step

F16, F32 = torch.float16, torch.float32


def with_gradients(call: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    """The result, and the gradient of each argument."""
    leaves = [t.requires_grad_() for t in given]
    out = call(*leaves)
    incoming = numbers(*out.shape, dtype=out.dtype, device=str(out.device), seed=9)
    return [out.detach(), *torch.autograd.grad(out, leaves, incoming)]


def conv2d(device: str) -> list[Tensor]:
    x, weight = (numbers(*s, dtype=F16, device=device, seed=sum(s)) for s in ((2, 64, 9, 8), (72, 64, 3, 3)))
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight * 0.1))
    return with_gradients(lambda x, w: ops.conv2d(x, w, padding=(1, 1)), x, weight)


def depthwise_conv1d(device: str) -> list[Tensor]:
    w, k = numbers(3, 1500, dtype=F32, device=device), numbers(2, 3, 1500, dtype=F32, device=device, seed=1)
    return with_gradients(lambda w, k: ops.depthwise_conv1d(w, k, 0.5), w, k)


def scattering2d(device: str) -> list[Tensor]:
    return with_gradients(lambda x: ops.scattering2d(x, 2, 3), numbers(2, 17, 30, dtype=F32, device=device))


def binary_linear(device: str) -> list[Tensor]:
    x, weight = (numbers(*s, dtype=F16, device=device, seed=sum(s)) for s in ((5, 1000), (70, 1000)))
    return with_gradients(ops.binary_linear, x, weight)


def products(device: str) -> list[Tensor]:
    sizes = [(160, 96), (96, 416)]
    x = [numbers(19, k, dtype=F16, device=device, seed=k) for _, k in sizes]
    weights = [numbers(m, k, dtype=F16, device=device, seed=m + k, scale=k**-0.5) for m, k in sizes]
    return [*ops.products(x, weights), ops.active_rows(x[0][:3].relu(), weights[0].T.contiguous())]


def host_rows(device: str) -> list[Tensor]:
    """Rows of a table, and the table when rows were written."""
    table = numbers(7, 65, dtype=F16, device="cpu")
    table = table if device == "cpu" else table.pin_memory()
    ids = torch.tensor([5, 0, 6, 2], device=device)
    out = ops.host_gather(table, ids)
    ops.host_scatter_(table, ids, out * 2)
    if device != "cpu":
        torch.cuda.synchronize(device)
    return [out, table.to(device)]


def sample(device: str) -> list[Tensor]:
    """Ids, draws and counts, of one block and of a cluster."""
    found = []
    for vocab in (1000, 65536):
        there = step(3, vocab).to(device)
        found += [there()[0], there.integers, there.counts]
    return found


CALLS = [conv2d, depthwise_conv1d, scattering2d, binary_linear, products, host_rows, sample]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.gpu
def test_runs_on_a_device_that_is_not_current(call: Callable[[str], list[Tensor]], cuda: str) -> None:
    """After the same on the current one: what is remembered about a kernel is remembered for one device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    right = call("cpu")
    with torch.cuda.device(0):
        for device in ("cuda:0", "cuda:1"):
            found = call(device)
            assert torch.cuda.current_device() == 0
            for actual, wanted in zip(found, right, strict=True):
                assert actual.device == torch.device(device)
                assert model_cases.error(actual, wanted.double()) <= 2e-3

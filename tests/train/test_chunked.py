"""The chunked time mix equals the token-by-token recurrence: values, state, gradients, document cuts."""

import pytest
import torch

from train.model import RWKV7, Shape, chunked, recurrent


def inputs(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    shape = (2, length, 2, 64)
    r, k, v = (torch.randn(shape, dtype=dtype) for _ in range(3))
    w = 6 * torch.randn(shape, dtype=dtype)  # from almost no decay to the strongest
    kk = torch.nn.functional.normalize(torch.randn(shape, dtype=dtype), dim=-1)
    state = torch.randn(2, 2, 64, 64, dtype=dtype)
    keep = torch.ones(2, length // 16, dtype=dtype)
    keep[0, 1], keep[1, 0] = 0, 0
    return [r, w, k, v, -kk, kk * torch.rand(shape, dtype=dtype), state, keep]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_values(dtype: torch.dtype, limit: float) -> None:
    given = inputs(64, dtype)
    expected = recurrent(*(x.double() for x in given))
    for found, wanted in zip(chunked(*given), expected, strict=True):
        assert (found - wanted).norm() / wanted.norm() < limit


def test_gradients() -> None:
    given = inputs(48, torch.float64)
    found, wanted = [], []
    for function, gradients in ((chunked, found), (recurrent, wanted)):
        leaves = [x.clone().requires_grad_() for x in given[:6]]
        y, state = function(*leaves, *given[6:])
        (y.square().sum() + state.square().sum()).backward()
        gradients.extend(x.grad for x in leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_document_does_not_see_the_one_before() -> None:
    torch.manual_seed(5)
    model = RWKV7(Shape(layers=2, width=64, vocab=32)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(0, 32, (1, 64))
    starts = torch.zeros(1, 64)
    starts[0, 32] = 1
    packed, _ = model(ids, model.zero_state(1), starts)
    alone, _ = model(ids[:, 32:], model.zero_state(1))
    torch.testing.assert_close(packed[:, 32:], alone)


def test_state_carries_over() -> None:
    torch.manual_seed(6)
    model = RWKV7(Shape(layers=2, width=64, vocab=32)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(0, 32, (3, 64))
    whole, _ = model(ids, model.zero_state(3))
    head, state = model(ids[:, :48], model.zero_state(3))
    tail, state = model(ids[:, 48:57], state)
    last, _ = model(ids[:, 57:], state)
    torch.testing.assert_close(torch.cat([head, tail, last], 1), whole)

"""pack_bfloat16: every bit comes back, products are the same bits, what cannot be packed is said."""

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from tests.ops.common import Guard, numbers

BF16 = torch.bfloat16


def matrix(m: int, k: int, scale: float = 0.03, seed: int = 0) -> Tensor:
    return numbers(m, k, dtype=BF16, device="cpu", scale=scale, seed=seed)


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int16)


@pytest.mark.parametrize(("m", "k"), [(0, 128), (1, 128), (7, 256), (33, 768), (5, 65536), (300, 2048)])
@pytest.mark.parametrize("scale", [1e-30, 0.03, 1.0, 1e30])
def test_every_bit_comes_back(m: int, k: int, scale: float) -> None:
    weight = matrix(m, k, scale)
    weight = weight.where(weight.abs() > scale / 100, torch.tensor(scale, dtype=BF16))  # a long row has many small ones
    packed = cog_rwkv_ops.pack_bfloat16(weight)
    assert packed is not None
    assert packed.shape == (m, k * 3 // 2 + 32)
    assert torch.equal(bits(cog_rwkv_ops.unpack_bfloat16(packed)), bits(weight))


def test_every_number_of_16_bits_comes_back() -> None:
    """Infinities, NaNs, zeros and subnormal numbers too: 16 exponents a row, with both signs."""
    every = torch.arange(65536).to(torch.int16).view(BF16)
    by_exponent = every.view(2, 16, 16 * 128).transpose(0, 1).reshape(16, 4096)
    packed = cog_rwkv_ops.pack_bfloat16(by_exponent)
    assert packed is not None
    assert torch.equal(bits(cog_rwkv_ops.unpack_bfloat16(packed)), bits(by_exponent))


def test_seven_weights_of_a_row_may_lie_elsewhere() -> None:
    weight = matrix(3, 512).abs() + 1
    weight[1, torch.arange(7) * 73] = torch.tensor([0.0, -0.0, 1e-30, -1e-20, 1e-38, 3e-6, -2e-9], dtype=BF16)
    packed = cog_rwkv_ops.pack_bfloat16(weight)
    assert packed is not None
    assert torch.equal(bits(cog_rwkv_ops.unpack_bfloat16(packed)), bits(weight))
    for n in (1, 2, 3, 4, 5, 20):
        rows = numbers(n, 512, dtype=torch.float32, device="cpu", seed=3)
        assert torch.equal(cog_rwkv_ops.linear(rows, packed), cog_rwkv_ops.linear(rows, weight))
    weight[1, 511] = 0.0
    assert cog_rwkv_ops.pack_bfloat16(weight) is None


@pytest.mark.parametrize("k", [128, 768, 2176])
@pytest.mark.acceptance(8)
def test_products_are_the_same_bits(k: int) -> None:
    """For any number of rows of x and of the weight, wherever the memory begins, and nothing around it is read."""
    for m in (1, 15, 16, 17, 40, 100):
        weight = matrix(m, k, seed=m)
        packed = cog_rwkv_ops.pack_bfloat16(weight)
        assert packed is not None
        for n in (0, 1, 2, 3, 4, 5, 7, 16, 33):
            x = Guard(numbers(n, k, dtype=torch.float32, device="cpu", seed=n), 1).tensor
            bias = numbers(m, dtype=torch.float32, device="cpu", seed=5)
            got = cog_rwkv_ops.linear(x, Guard(packed, m % 5).tensor, bias)
            assert torch.equal(got, cog_rwkv_ops.linear(x, weight, bias)), (m, n)


def test_the_gradient_of_x_goes_through_a_packed_weight() -> None:
    weight, x = matrix(40, 128), numbers(3, 128, dtype=torch.float32, device="cpu").requires_grad_()
    packed = cog_rwkv_ops.pack_bfloat16(weight)
    assert packed is not None
    cog_rwkv_ops.linear(x, packed).sum().backward()
    torch.testing.assert_close(x.grad, weight.float().sum(0).expand(3, -1))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(2, 128), r"pack_bfloat16: weight is float32; it must be bfloat16"),
        (torch.zeros(128, dtype=BF16), r"pack_bfloat16: weight has shape \[128\]; it must be \[M, K\]"),
        (torch.zeros(2, 100, dtype=BF16), r"pack_bfloat16: weight has shape \[2, 100\]; K must be a multiple of 128"),
        (torch.zeros(2, 0, dtype=BF16), r"pack_bfloat16: weight has shape \[2, 0\]; K must be a multiple of 128"),
    ],
)
def test_what_cannot_be_packed_is_named(weight: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"cog_rwkv::{message}"):
        cog_rwkv_ops.pack_bfloat16(weight)


@pytest.mark.parametrize("shape", [(2, 223), (2, 225), (2, 32), (2, 0), (224,)])
def test_what_was_not_packed_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"cog_rwkv::unpack_bfloat16: packed has shape"):
        cog_rwkv_ops.unpack_bfloat16(torch.zeros(shape, dtype=torch.uint8))


def test_opcheck() -> None:
    packed = cog_rwkv_ops.pack_bfloat16(matrix(20, 128))
    torch.library.opcheck(torch.ops.cog_rwkv.pack_bfloat16.default, (matrix(20, 128),))
    torch.library.opcheck(torch.ops.cog_rwkv.unpack_bfloat16.default, (packed,))
    torch.library.opcheck(torch.ops.cog_rwkv.linear.default, (torch.ones(2, 128), packed))


@pytest.mark.gpu
def test_cuda_tensors_are_refused(cuda: str) -> None:
    with pytest.raises(NotImplementedError, match="pack_bfloat16"):
        cog_rwkv_ops.pack_bfloat16(matrix(2, 128).to(cuda))
    packed = cog_rwkv_ops.pack_bfloat16(matrix(2, 128))
    assert packed is not None
    with pytest.raises(RuntimeError, match=r"cog_rwkv::linear: weight is uint8; it must be float32"):
        cog_rwkv_ops.linear(torch.ones(1, 128, device=cuda), packed.to(cuda))

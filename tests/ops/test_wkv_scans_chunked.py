"""wkv5 and wkv6 on CUDA where sequences are long: blocks of 16 tokens, tiles of 64, segments; results and gradients."""

import pytest
import torch
from torch import Tensor

from tests.ops.model_cases import BOUND, CHUNKED, Arguments, Case, Fill, copied, error
from tests.ops.test_wkv_scans import F32, every_dtype, every_matrix, gradients, limits, tokens

# Blocks, tiles and segments that are full, one token longer, one shorter; the shortest that chunks are used for.
LENGTHS = [64, 65, 79, 80, 81, 127, 128, 129, 192, 193, 255, 257, 500, 1025]
# Mean and spread of w: hardly any decay, those of a model, and mostly below 0.1.
DECAYS = {"weak": (-6.0, 1.0), "mixed": (-1.5, 2.0), "strong": (1.0, 1.0)}
every_decay = pytest.mark.parametrize("decay", list(DECAYS))


def make(case: Case, shape: tuple[int, int, int], dtype: torch.dtype, decay: str, device: str) -> Arguments:
    fill, (batch, length, heads), (mean, spread) = Fill(device, 11), shape, DECAYS[decay]
    given: Arguments = {name: fill(batch, length, heads, 64, dtype=dtype) for name in ("r", "w", "k", "v")}
    w = fill(heads, 64) if case.name == "wkv5" else given["w"]
    given["w"] = w * spread + mean
    return given | {"u": fill(heads, 64), "state": fill(batch, heads, 64, 64)}


def incoming(given: Arguments) -> list[Tensor]:
    fill = Fill(str(given["r"].device), 90)
    return [fill(*given["r"].shape, dtype=given["r"].dtype), fill(*given["state"].shape)]


def gradient_limit(name: str, found: Tensor) -> float:
    """That of w is a difference of sums over keys and tokens, small beside them where decays are strong."""
    return max(5e-4 if name == "w" else 2e-5, BOUND[found.dtype])


@every_matrix
@every_dtype
@every_decay
@pytest.mark.gpu
def test_results_at_every_border(case: Case, dtype: torch.dtype, decay: str, cuda: str) -> None:
    for length in LENGTHS:
        given = make(case, (1, length, 2), dtype, decay, cuda)
        y, end = case.call(**given)
        y_wanted, end_wanted = case.definition(**copied(given, lambda t: t.double()))
        y_limit, end_limit = limits(case, dtype, length, cuda)
        assert error(y, y_wanted.cpu()) <= y_limit, length
        assert error(end, end_wanted.cpu()) <= end_limit, length


@every_matrix
@every_dtype
@every_decay
@pytest.mark.gpu
def test_gradients_at_every_border(case: Case, dtype: torch.dtype, decay: str, cuda: str) -> None:
    for length in (64, 81, 128, 129, 257, 1025):
        given = make(case, (1, length, 2), dtype, decay, cuda)
        into = incoming(given)
        found = gradients(case.call, given, into)
        right = gradients(case.definition, copied(given, lambda t: t.double()), [t.double() for t in into])
        for name, a, b in zip(given, found, right, strict=True):
            assert error(a, b.cpu()) <= gradient_limit(name, a), (length, name)


@every_matrix
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1000, 1), (3, 300, 5), (2, 200, 70), (1, 130, 300)])
def test_any_number_of_segments(case: Case, shape: tuple[int, int, int], cuda: str) -> None:
    """One head has a segment for each tile, 300 heads have one for all."""
    for dtype in (F32, torch.bfloat16):
        given = make(case, shape, dtype, "mixed", cuda)
        into = incoming(given)
        wide = copied(given, lambda t: t.double())
        y, end = case.call(**given)
        y_wanted, end_wanted = case.definition(**wide)
        assert error(y, y_wanted.cpu()) <= CHUNKED[dtype]
        assert error(end, end_wanted.cpu()) <= CHUNKED[F32 if dtype == F32 else torch.float16]
        found = gradients(case.call, given, into)
        right = gradients(case.definition, wide, [t.double() for t in into])
        for name, a, b in zip(given, found, right, strict=True):
            assert error(a, b.cpu()) <= gradient_limit(name, a), name


@every_matrix
@pytest.mark.gpu
def test_the_same_bytes_every_time(case: Case, cuda: str) -> None:
    given = make(case, (2, 300, 3), torch.bfloat16, "mixed", cuda)
    into = incoming(given)
    first, again = ([*case.call(**given), *gradients(case.call, given, into)] for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


@every_matrix
@pytest.mark.gpu
def test_a_cut_gives_the_state_between(case: Case, cuda: str) -> None:
    given = make(case, (2, 330, 3), F32, "weak", cuda)
    y, end = case.call(**given)
    for cut in (64, 100, 265):
        first, between = case.call(**tokens(given, 0, cut, given["state"]))
        second, after = case.call(**tokens(given, cut, 330, between))
        assert error(torch.cat([first, second], 1), y.cpu().double()) <= 2 * CHUNKED[F32]
        assert error(after, end.cpu().double()) <= 2 * CHUNKED[F32]

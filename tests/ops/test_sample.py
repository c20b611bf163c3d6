"""sample_: against the definition, and the same bits whatever the batch, the row, the machine and the device."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.sample import reference
from tests.ops.common import FLOAT_OR_HALF, numbers

ROOT = Path(__file__).parents[2]
GREEDY, ALL = 1, 0
# temperature, presence, frequency, decay, top_p; greedy, top_k
KINDS: list[tuple[list[float], list[int]]] = [
    ([1.0, 0.0, 0.0, 1.0, 1.0], [GREEDY, ALL]),
    ([1.0, 0.0, 0.0, 1.0, 1.0], [0, ALL]),
    ([0.7, 0.0, 0.0, 1.0, 0.9], [0, ALL]),
    ([1.0, 0.0, 0.0, 1.0, 1.0], [0, 7]),
    ([1.5, 0.0, 0.0, 1.0, 0.5], [0, 40]),
    ([1.0, 0.6, 0.3, 0.9, 0.8], [0, ALL]),
    ([1.0, -0.4, 0.2, 0.996, 1.0], [GREEDY, ALL]),
    ([30.0, 0.0, 0.0, 1.0, 0.999], [0, ALL]),
    ([1e-3, 0.0, 0.0, 1.0, 0.5], [0, 3]),
    ([1.0, 0.0, 0.0, 1.0, 0.01], [0, 10**6]),
]
VOCABS = [1, 2, 31, 33, 257, 1000, 5001]


class Step(NamedTuple):
    """The arguments of a step of B sequences."""

    logits: Tensor
    rows: Tensor
    allowed: Tensor
    numbers: Tensor
    integers: Tensor
    counts: Tensor

    def to(self, device: str) -> "Step":
        return Step(*(one.to(device, copy=True) for one in self))

    def only(self, i: int) -> "Step":
        """Sequence i alone, on tables of its own."""
        tables = (table[self.rows[i : i + 1]] for table in self[3:])
        return Step(self.logits[i : i + 1], torch.tensor([0]), self.allowed, *tables)

    def __call__(self) -> tuple[Tensor, Tensor]:
        return cog_rwkv_ops.sample_(*self)


def step(batch: int, vocab: int, scale: float = 3.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> Step:
    """A step on the CPU: kinds in turn, some ids not allowed, counts as after some draws, rows in another order."""
    random = torch.Generator().manual_seed(seed + 1000 * vocab + batch)
    kinds = [KINDS[i % len(KINDS)] for i in range(batch + 3)]
    keys = torch.randint(-(2**63), 2**63 - 1, (batch + 3, 2), generator=random)
    keys[:, 1] = torch.arange(batch + 3) * 3
    counts = torch.randint(-20, 4, (batch + 3, vocab), generator=random).clamp(min=0) * 0.7
    allowed = torch.rand(vocab, generator=random) < 0.9
    allowed[vocab // 2] = True
    return Step(
        numbers(batch, vocab, dtype=dtype, device="cpu", seed=seed, scale=scale),
        torch.randperm(batch + 3, generator=random)[:batch],
        allowed,
        torch.tensor([floats for floats, _ in kinds]),
        torch.cat([torch.tensor([integers for _, integers in kinds]), keys], 1),
        counts,
    )


def assert_defined(before: Step, ids: Tensor) -> None:
    """Each id is one that the definition gives, to float32's precision of the sums."""
    for i, row in enumerate(before.rows.tolist()):
        tables = [before.numbers[row], before.integers[row], before.counts[row]]
        value, chance = reference.distribution(before.logits[i], before.allowed, *tables)
        id_, (greedy, _, key, draws) = int(ids[i]), before.integers[row].tolist()
        if greedy:
            assert value[id_] >= value.max() - 1e-5, i
            continue
        upto, u = float(chance[: id_ + 1].sum()), reference.uniform(key, draws)
        assert chance[id_] > 0 and upto - float(chance[id_]) - 3e-6 <= u <= upto + 3e-6, i


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("scale", [1e-6, 0.3, 3.0, 30.0])
def test_ids_are_those_of_the_definition(device: str, vocab: int, scale: float) -> None:
    cpu = step(20, vocab, scale)
    there = cpu.to(device)
    ids, finite = there()
    assert (ids.dtype, finite.dtype, finite.all()) == (torch.int64, torch.bool, True)
    assert_defined(cpu, ids.cpu())
    by_definition = cpu.to("cpu")
    defined_ids, _ = reference.sample_(*by_definition)
    assert (ids.cpu() == defined_ids).float().mean() > 0.9  # who differs was next to a boundary, or tied
    rows, same = cpu.rows, ids.cpu() == defined_ids
    assert torch.equal(there.integers.cpu(), by_definition.integers)
    torch.testing.assert_close(there.counts.cpu()[rows[same]], by_definition.counts[rows[same]])
    others = torch.ones(len(cpu.counts), dtype=torch.bool)
    others[rows] = False
    for now, then in zip(there[3:], cpu[3:], strict=True):
        assert torch.equal(now.cpu()[others], then[others]), "a row that was not named was written"
    assert torch.equal(there.logits.cpu(), cpu.logits)


@pytest.mark.parametrize("dtype", FLOAT_OR_HALF[1:])
def test_half_logits_are_widened(device: str, dtype: torch.dtype) -> None:
    narrow = step(20, 1000, dtype=dtype)
    wide = narrow._replace(logits=narrow.logits.float()).to("cpu")
    assert torch.equal(narrow.to(device)()[0].cpu(), wide()[0])


@pytest.mark.acceptance(8)
@pytest.mark.parametrize("vocab", [33, 5001, 70000])
def test_neighbours_never_show(device: str, vocab: int) -> None:
    many = step(20, vocab)
    ids, counts = [], []
    for i in range(20):
        alone = many.only(i).to(device)
        ids.append(int(alone()[0]))
        counts.append(alone.counts[0].cpu())
    together = many.to(device)
    assert together()[0].tolist() == ids
    assert torch.equal(together.counts.cpu()[many.rows], torch.stack(counts))


def chi_square(device: str, floats: list[float], integers: list[int], chances: Tensor) -> float:
    """The statistic of 20,000 first draws of as many seeds."""
    draws = 20000
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(draws, 3)
    keys = torch.stack([torch.arange(draws) * 7919 - 40000, torch.arange(draws) % 11], 1)
    tables = torch.tensor([floats] * draws), torch.cat([torch.tensor([integers] * draws), keys], 1)
    made = Step(logits, torch.arange(draws), torch.ones(3, dtype=torch.bool), *tables, torch.zeros(draws, 3))
    counts = torch.bincount(made.to(device)()[0].cpu(), minlength=3).double()
    there = chances > 0
    assert not counts[~there].any()
    return float(((counts - draws * chances)[there] ** 2 / (draws * chances)[there]).sum())


@pytest.mark.acceptance(13)
def test_draws_fit_the_distribution(device: str) -> None:
    three, two = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.625, 0.375, 0.0]).double()
    assert chi_square(device, [1.0, 0, 0, 1, 1.0], [0, ALL], three) < 13.82  # 99.9 % of those with 2 degrees
    assert chi_square(device, [0.5, 0, 0, 1, 1.0], [0, ALL], three**2 / (three**2).sum()) < 13.82
    assert chi_square(device, [1.0, 0, 0, 1, 0.79], [0, ALL], two) < 10.83  # 1 degree
    assert chi_square(device, [1.0, 0, 0, 1, 1.0], [0, 2], two) < 10.83


@pytest.mark.acceptance(13)
def test_ties(device: str) -> None:
    """The lowest of the largest is taken; who ties with the last that stays, stays; -0 is 0."""
    made = step(10, 40)._replace(logits=torch.zeros(10, 40), counts=torch.zeros(13, 40))
    made.logits[:, 3], made.allowed[:] = -0.0, True
    made.logits[:, 20:] = -1.0
    made.integers[:, :2], made.numbers[:] = torch.tensor([GREEDY, ALL]), torch.tensor(KINDS[0][0])
    assert made.to(device)()[0].tolist() == [0] * 10
    made.allowed[:3] = False
    assert made.to(device)()[0].tolist() == [3] * 10
    for column, value in ((made.integers[:, 1], 2), (made.numbers[:, 4], 0.01)):
        made.integers[:, 0], drawn = 0, set()
        column.copy_(torch.full_like(column, value))
        for _ in range(60):
            drawn |= set(made()[0].tolist())
        assert drawn == set(range(3, 20))


@pytest.mark.acceptance(7)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -math.nan])
@pytest.mark.parametrize("vocab", [300, 20000])
def test_rows_that_are_not_finite(device: str, value: float, vocab: int) -> None:
    good = step(10, vocab)
    good.allowed[:3] = False
    bad = good._replace(logits=good.logits.clone())
    bad.logits[0, 0] = bad.logits[4, vocab - 1] = bad.logits[5] = value
    there, fine = bad.to(device), torch.tensor([i not in (0, 4, 5) for i in range(10)])
    ids, finite = there()
    assert finite.tolist() == fine.tolist()
    assert torch.equal(ids.cpu()[fine], good.to(device)()[0].cpu()[fine])
    assert good.allowed[ids.cpu()].all()
    assert torch.equal(there.integers.cpu()[good.rows, 3], good.integers[good.rows, 3] + 1)


def test_nothing_is_allowed(device: str) -> None:
    made = step(4, 50)
    made.allowed[:] = False
    ids, finite = made.to(device)()
    assert ids.tolist() == [0] * 4 and not finite.any()


def test_extreme_parameters(device: str) -> None:
    """None makes a sum overflow or a search go on for ever; every id is one that is allowed."""
    extreme = [0.0, 1e-45, 1e-30, 3e38, math.inf, -1.0, math.nan]
    made = step(len(extreme), 300)
    made.integers[:, 0] = 0
    for top_p, top_k in itertools.product((0.0, 0.5, 1.0, math.nan), (5, ALL)):
        made.integers[:, 1] = top_k
        for row, temperature in zip(made.rows.tolist(), extreme, strict=True):
            made.numbers[row] = torch.tensor([temperature, 0.0, 0.0, 1.0, top_p])
        for scale in (1e-30, 1.0, 1e37):
            cpu = made._replace(logits=made.logits * scale).to("cpu")
            there = cpu.to(device)
            ids = there()[0].cpu()
            assert made.allowed[ids].all() and torch.equal(ids, cpu()[0])


def test_tensors_that_are_views(device: str, guard) -> None:
    made = step(6, 65).to(device)
    wanted, _ = made.to("cpu")()
    ids = torch.full((12,), -9, device=device)
    ids[::2] = made.rows
    counts, integers = guard(made.counts, shift=1), torch.full((9, 7), -9, device=device)
    integers[:, 1:5] = made.integers
    views = Step(
        guard(made.logits.t().contiguous(), shift=1).t(), ids[::2], guard(made.allowed.byte()).bool(),
        made.numbers.t().contiguous().t(), integers[:, 1:5], counts,
    )  # fmt: skip
    assert torch.equal(views()[0].cpu(), wanted)
    made()
    assert torch.equal(counts, made.counts) and torch.equal(integers[:, 1:5], made.integers)
    assert (integers[:, [0, 5, 6]] == -9).all()
    with pytest.raises(RuntimeError, match="sample_: counts must have contiguous rows"):
        views._replace(counts=made.counts.t().contiguous().t())()


def test_no_rows(device: str) -> None:
    ids, finite = step(0, 10).to(device)()
    assert ids.shape == finite.shape == (0,) and ids.device.type == device


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("logits", torch.zeros(4, 10, dtype=torch.float64), "logits is float64; it must be float32, float16, bfloat16"),
        ("logits", torch.zeros(4, 2**18 + 1), "B must be at most 16777216 and V from 1 to 262144"),
        ("rows", torch.zeros(3, dtype=torch.int64), r"rows has shape \[3\]; it must be \[B\]"),
        ("rows", torch.tensor([0, 1, 2, 7]), "rows has 7; the tables have rows 0 to 6"),
        ("rows", torch.tensor([0, 1, 1, 3]), "rows has 1 twice"),
        ("allowed", torch.ones(9, dtype=torch.bool), r"allowed has shape \[9\]; it must be \[V\]"),
        ("allowed", torch.ones(10), "allowed is float32; it must be bool"),
        ("numbers", torch.zeros(7, 4), r"numbers has shape \[7, 4\]; it must be \[R, 5\]"),
        ("integers", torch.zeros(7, 4), "integers is float32; it must be int64"),
        ("counts", torch.zeros(7, 9), r"counts has shape \[7, 9\]; it must be \[R, V\]"),
        ("counts", torch.zeros(7, 10).requires_grad_(), "cog_rwkv_ops.sample_ has no backward"),
    ],
)
def test_wrong_arguments_are_named(field: str, wrong: Tensor, message: str) -> None:
    made = step(4, 10)
    before = made.to("cpu")
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        made._replace(**{field: wrong})()
    assert torch.equal(made.integers, before.integers) and torch.equal(made.counts, before.counts)


def test_opcheck(device: str) -> None:
    torch.library.opcheck(torch.ops.cog_rwkv.sample_.default, tuple(step(12, 100).to(device)))


IDS = "import sys; sys.path[:0] = sys.argv[1:]; from tests.ops.test_sample import step\n"
IDS += "print([step(20, n, scale)()[0].tolist() for n in (33, 5001) for scale in (0.01, 3.0)])"


@pytest.mark.parametrize("variant", ["baseline", "avx2"])
def test_every_instruction_set_gives_the_same(variant: str) -> None:
    command = [sys.executable, "-c", IDS, str(ROOT), str(ROOT / "ops")]
    found = subprocess.run(command, env=os.environ | {"COG_RWKV_CPU": variant}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    wanted = [step(20, n, scale)()[0].tolist() for n in (33, 5001) for scale in (0.01, 3.0)]
    assert found.stdout.strip() == str(wanted)

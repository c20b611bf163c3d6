"""Ids are drawn from the right distribution, and nothing but a row's own logits, parameters and draws decides."""

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from model.errors import RequestError
from model.sampling import Sampler, SamplingParams, _key
from model.sampling_plain import SCALE, _at_least, _threshold, uniform

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
THREE = torch.tensor([0.5, 0.3, 0.2])
# The upper 99.9 % point of chi-square for 1 to 7 degrees of freedom; seeds are fixed, so a test fails always or never.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The batches here are small: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def sampler(
    params: Sequence[SamplingParams], vocab: int, device: str = "cpu", allowed: Tensor | None = None
) -> Sampler:
    made = Sampler(vocab, len(params), device, torch.ones(vocab, dtype=torch.bool) if allowed is None else allowed)
    for row, one in enumerate(params):
        made.set_row(row, one)
    return made


def draws(params: Sequence[SamplingParams], logits: Tensor, steps: int, device: str = "cpu") -> Tensor:
    """int64 [steps, rows] on the CPU: the ids of ``steps`` calls with the same logits [V] for every row."""
    made, rows = sampler(params, len(logits), device), torch.arange(len(params), device=device)
    batch = logits.to(device).expand(len(params), -1)
    return torch.stack([made.sample(batch, rows)[0].cpu() for _ in range(steps)])


def assert_fits(ids: Tensor, probabilities: Sequence[float]) -> None:
    """Chi-square of the draws against the exact distribution; an id of probability 0 never comes."""
    counts = torch.bincount(ids.flatten(), minlength=len(probabilities)).double()
    wanted = torch.tensor(probabilities, dtype=torch.float64) * counts.sum()
    assert not counts[wanted == 0].any()
    there = wanted > 0
    statistic = float(((counts - wanted)[there] ** 2 / wanted[there]).sum())
    assert statistic < CHI_SQUARE[int(there.sum()) - 1], (counts.tolist(), wanted.tolist())


@pytest.mark.acceptance(13)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}], ids=str)
def test_greedy_takes_the_lowest_of_the_largest(device: str, params: dict[str, float]) -> None:
    ties = torch.tensor([0.0, 2.0, 2.0, 1.0, 2.0])
    assert draws([SamplingParams(seed=1, **params)] * 3, ties, 2, device).unique().tolist() == [1]
    assert draws([SamplingParams(seed=1, **params)] * 3, THREE.log(), 2, device).unique().tolist() == [0]
    mixed = [SamplingParams(seed=1, **params), SamplingParams(seed=1)]  # not all greedy: another way through the code
    assert draws(mixed, ties, 20, device)[:, 0].unique().tolist() == [1]


@pytest.mark.acceptance(13)
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_p": 1.0}, 3),
        ({"top_p": 0.49}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.79}, 2),
        ({"top_p": 0.81}, 3),
        ({"top_k": 2}, 2),
        ({"top_k": 3}, 3),
        ({"top_k": 99}, 3),
        ({"top_k": 2, "top_p": 0.62}, 1),  # of .625 and .375, what top_k has left
        ({"top_k": 2, "top_p": 0.63}, 2),
        ({"temperature": 0.5, "top_p": 0.65}, 1),  # squared: .658, .237, .105
        ({"temperature": 0.5, "top_p": 0.67}, 2),
    ],
    ids=str,
)
def test_20000_draws_fit_the_distribution(device: str, params: dict[str, float], kept: int) -> None:
    rows = [SamplingParams(seed=seed, **params) for seed in range(200)]
    wanted = THREE.double() ** (1 / params.get("temperature", 1.0))
    wanted[kept:] = 0
    ids = draws(rows, THREE.log(), 100, device)
    assert ids.unique().tolist() == list(range(kept))
    if kept > 1:
        assert_fits(ids, (wanted / wanted.sum()).tolist())
        first = torch.cat(
            [draws([SamplingParams(seed=seed, **params) for seed in range(2000)], THREE.log(), 1, device)]
        )
        assert_fits(first, (wanted / wanted.sum()).tolist())


@pytest.mark.acceptance(13)
def test_one_long_stream_fits_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -math.inf, 0.5, -2.0, 1.5]).clamp(min=-50)
    for seed in (0, 1, 2**53 - 1):
        ids = draws([SamplingParams(seed=seed)], logits, 5000)
        wanted = logits.double().softmax(0)
        wanted[4] = 0
        assert_fits(ids, wanted.tolist())


@pytest.mark.acceptance(13)
@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 2, 5, 1000])
def test_the_nucleus_is_that_of_a_sort(top_p: float, top_k: int) -> None:
    """Which ids may come, at the size of the World vocabulary: by weights against a sort in float64."""
    vocab = 65536
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[0.1], [1.0], [3.0], [9.0]]
    )
    made = sampler([SamplingParams(top_p=top_p, top_k=top_k, seed=row) for row in range(4)], vocab)
    for row, ids in enumerate(sorted_nucleus(logits, top_p, top_k or vocab)):
        allowed = torch.zeros(vocab, dtype=torch.bool)
        allowed[ids] = True
        for step in range(8):
            made.set_row(row, SamplingParams(top_p=top_p, top_k=top_k, seed=step))
            assert allowed[made.sample(logits, torch.arange(4))[0][row]]
        # The last id of the nucleus can be drawn: where it alone is left, it is.
        only = torch.full((1, vocab), -40.0)
        only[0, ids[-1]] = logits[row, ids[-1]]
        assert (
            sampler([SamplingParams(top_p=top_p, top_k=top_k)], vocab).sample(only, torch.tensor([0]))[0].item()
            == ids[-1]
        )


def sorted_nucleus(logits: Tensor, top_p: float, top_k: int) -> list[list[int]]:
    out = []
    for row in logits.double():
        order = row.argsort(descending=True, stable=True)[:top_k]
        mass = row[order].softmax(0).cumsum(0)
        out.append(order[: int((mass < top_p).sum()) + 1].tolist())
    return out


@pytest.mark.acceptance(13)
@pytest.mark.parametrize(("scale", "top_p"), [(0.0, 0.5), (1e-6, 0.5), (1.0, 0.37), (3.0, 0.8), (30.0, 0.9)])
def test_how_many_ids_the_nucleus_holds(scale: float, top_p: float) -> None:
    """Counted through the threshold: enough to reach top_p, and not one more; all of those that tie."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2)) * scale
    below = logits - logits.amax(1, keepdim=True)
    keys = 0x7F800000 - below.abs().view(torch.int32)
    weights = (below.exp() * SCALE).to(torch.int64)
    wanted = (weights.sum(1).double() * top_p).ceil().long()
    threshold = _threshold(keys, weights, wanted)
    kept = _at_least(keys, threshold).bool()
    above = keys > threshold
    assert ((weights * kept).sum(1) >= wanted).all()
    assert ((weights * above).sum(1) < wanted).all()
    assert (keys == threshold).any(dim=1).all()
    if scale == 0:
        assert kept.all()


@pytest.mark.acceptance(13)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-1.0, math.nan, math.inf)],
        *[("top_p", value) for value in (1.5, -0.1, math.nan)],
        ("top_k", -1),
        *[("presence_penalty", value) for value in (math.nan, math.inf)],
        ("frequency_penalty", -math.inf),
        *[("penalty_decay", value) for value in (-0.1, 1.1, math.nan)],
    ],
)
def test_values_out_of_bounds_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"E200 {field}: found .*, wanted a finite number from"):
        SamplingParams(**{field: value})


MIX = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5),
    SamplingParams(temperature=0.7, top_p=0.9, seed=6),
    SamplingParams(top_k=40, seed=0),
    SamplingParams(temperature=1.5, top_k=100, top_p=0.8, seed=2**63),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.3, penalty_decay=0.9, seed=8),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, penalty_decay=0.996),
]


@pytest.mark.acceptance(8)
@pytest.mark.acceptance(13)
@pytest.mark.parametrize("vocab", [17, 1001, 65536])
def test_neighbours_row_and_batch_never_show(device: str, vocab: int) -> None:
    """Bit for bit: each sequence alone, and 17 of them, in another order at each step, some of them not in each step,
    on more threads."""
    steps, random = 4, torch.Generator().manual_seed(3)
    params = [MIX[index % len(MIX)] for index in range(17)]
    logits = torch.randn(steps, 17, vocab, generator=random).mul_(3).to(device)
    alone = []
    for index, one in enumerate(params):
        made, row = sampler([one], vocab, device), torch.tensor([0], device=device)
        alone.append([int(made.sample(logits[step, index : index + 1], row)[0]) for step in range(steps)])
    torch.set_num_threads(2)
    made = sampler(params, vocab, device)
    together: list[list[int]] = [[] for _ in params]
    while any(len(ids) < steps for ids in together):
        order = [row for row in torch.randperm(17, generator=random).tolist()[:13] if len(together[row]) < steps]
        if not order:
            continue
        batch = torch.stack([logits[len(together[row]), row] for row in order])
        ids, finite = made.sample(batch, torch.tensor(order, device=device))
        assert finite.all()
        for row, id_ in zip(order, ids.tolist(), strict=True):
            together[row].append(id_)
    assert together == alone


@pytest.mark.acceptance(13)
def test_a_greedy_row_disturbs_no_neighbour() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(4))
    rows = [SamplingParams(seed=1), SamplingParams(temperature=0.0), SamplingParams(seed=2)]
    together = sampler(rows, 100).sample(logits, torch.arange(3))[0].tolist()
    alone = [sampler([one], 100).sample(logits[i : i + 1], torch.tensor([0]))[0].item() for i, one in enumerate(rows)]
    assert together == alone


def test_a_row_that_is_used_again_starts_anew(device: str) -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, penalty_decay=0.9, seed=3)
    logits = torch.zeros(1, 50, device=device)
    made, row = sampler([params], 50, device), torch.tensor([0], device=device)
    first = [made.sample(logits, row)[0].item() for _ in range(10)]
    made.set_row(0, SamplingParams(seed=9))
    made.sample(logits, row)
    made.clear_row(0)
    made.set_row(0, params)
    assert [made.sample(logits, row)[0].item() for _ in range(10)] == first


@pytest.mark.parametrize("params", [MIX[2], MIX[5], MIX[6]])
def test_a_sequence_goes_on_where_it_was(device: str, params: SamplingParams) -> None:
    logits = torch.randn(20, 1, 50, generator=torch.Generator().manual_seed(5)).to(device)
    row = torch.tensor([1], device=device)
    whole = sampler([MIX[0], params], 50, device)
    ids = [whole.sample(one, row)[0].item() for one in logits]
    again = sampler([MIX[0], MIX[0]], 50, device)
    again.set_row(1, params, ids[:12])
    assert [again.sample(one, row)[0].item() for one in logits[12:]] == ids[12:]
    assert torch.equal(again._tables.counts[1], whole._tables.counts[1]) or not params.penalised


def test_seeds() -> None:
    logits = torch.zeros(1000)
    zero, one, zero_again = (draws([SamplingParams(seed=seed)], logits, 20).flatten().tolist() for seed in (0, 1, 0))
    assert zero == zero_again != one
    assert SamplingParams(seed=0).seed == 0
    assert SamplingParams().seed != SamplingParams().seed
    huge = draws([SamplingParams(seed=2**64 + 5)], logits, 5)
    assert torch.equal(huge, draws([SamplingParams(seed=5)], logits, 5))


def test_the_numbers_are_those_of_splitmix64() -> None:
    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        for count in (0, 1, 1000):
            wanted = mix((mix((seed + golden) % 2**64) + (count + 1) * golden) % 2**64) >> 11
            assert uniform(torch.tensor(_key(seed)), torch.tensor(count)).item() == wanted / 2**53
    assert mix(golden) == 0xE220A8397B1DCDAF  # the first number of the published generator at seed 0


def test_the_numbers_are_uniform_over_seeds_and_counts() -> None:
    numbers = torch.stack([uniform(torch.tensor(_key(seed)), torch.arange(200)) for seed in range(200)])
    assert_fits((numbers * 8).long(), [1 / 8] * 8)
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        pairs = torch.stack([one.flatten(), other.flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 0.02
    assert len(numbers.unique()) == numbers.numel()


@pytest.mark.acceptance(2)
@pytest.mark.parametrize("params", MIX)
def test_undefined_ids_are_never_drawn(device: str, params: SamplingParams) -> None:
    allowed = torch.ones(20, dtype=torch.bool)
    allowed[[0, 7, 19]] = False
    made = sampler([params] * 50, 20, device, allowed)
    logits = torch.zeros(50, 20, device=device)
    logits[:, [0, 7, 19]] = 80.0
    for _ in range(10):
        ids, finite = made.sample(logits, torch.arange(50, device=device))
        assert finite.all() and allowed[ids.cpu()].all()


@pytest.mark.acceptance(7)
@pytest.mark.parametrize("params", MIX)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_told_and_harms_no_other(device: str, params: SamplingParams, value: float) -> None:
    allowed = torch.ones(300, dtype=torch.bool)
    allowed[:3] = False
    rows, random = torch.arange(4, device=device), torch.Generator().manual_seed(6)
    logits = torch.randn(4, 300, generator=random).to(device)
    good, bad = (sampler([params, *MIX[1:4]], 300, device, allowed) for _ in range(2))
    broken = logits.clone()
    broken[0, 5] = value
    broken[2] = value
    for _ in range(5):
        wanted, finite = good.sample(logits, rows)
        assert finite.all()
        ids, finite = bad.sample(broken, rows)
        assert finite.tolist() == [False, True, False, True]
        assert allowed[ids.cpu()].all()
        assert ids[[1, 3]].tolist() == wanted[[1, 3]].tolist()
    bad.set_row(0, params)
    good.set_row(0, params)
    assert bad.sample(logits, rows)[0][0] == good.sample(logits, rows)[0][0]


def test_penalties_are_those_of_the_definition(device: str) -> None:
    """Greedy, against the definition in float64, token by token."""
    params = SamplingParams(temperature=0.0, presence_penalty=0.4, frequency_penalty=0.3, penalty_decay=0.8)
    logits = torch.tensor([1.0, 0.9, 0.8, 0.3, -0.5])
    counts, wanted = torch.zeros(5, dtype=torch.float64), []
    for _ in range(60):
        id_ = int((logits.double() - 0.4 * (counts > 0) - 0.3 * counts).argmax())
        counts *= 0.8
        counts[id_] += 1
        wanted.append(id_)
    assert draws([params], logits, 60, device).flatten().tolist() == wanted
    assert len(set(wanted)) > 2


def test_a_penalty_without_memory_forgets(device: str) -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, penalty_decay=0.0)
    assert draws([params], torch.tensor([1.0, 0.5, 0.0]), 4, device).flatten().tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_a_very_low_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, 5.0])
    assert draws([SamplingParams(temperature=temperature, seed=1)], logits, 40).unique().tolist() == [1, 3]


def test_extreme_logits() -> None:
    logits = torch.tensor([3e38, -3e38, 3e38, 0.0])
    for params in (
        SamplingParams(seed=1),
        SamplingParams(top_p=0.9, top_k=3, seed=1),
        SamplingParams(temperature=2.0, seed=1),
    ):
        assert draws([params], logits, 40).unique().tolist() == [0, 2]


def test_logits_stay_as_they_are(device: str) -> None:
    logits = torch.randn(7, 100, device=device)
    before = logits.clone()
    sampler(MIX, 100, device).sample(logits, torch.arange(7, device=device))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_other_dtypes(dtype: torch.dtype) -> None:
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(7)).to(dtype)
    rows = torch.arange(7)
    assert sampler(MIX, 100).sample(logits, rows)[0].equal(sampler(MIX, 100).sample(logits.float(), rows)[0])


def test_more_rows_than_are_drawn_at_once() -> None:
    logits = torch.randn(300, 40, generator=torch.Generator().manual_seed(8))
    params = [SamplingParams(top_p=0.9, seed=row) for row in range(300)]
    alone = [
        sampler([params[row]], 40).sample(logits[row : row + 1], torch.tensor([0]))[0].item()
        for row in (0, 127, 128, 299)
    ]
    ids, finite = sampler(params, 40).sample(logits, torch.arange(300))
    assert ids[[0, 127, 128, 299]].tolist() == alone and finite.shape == (300,)


@pytest.mark.parametrize(
    "allowed", [torch.ones(9, dtype=torch.bool), torch.ones(10), torch.zeros(10, dtype=torch.bool)]
)
def test_a_mask_that_is_none(allowed: Tensor) -> None:
    with pytest.raises(ValueError, match=r"allowed: wanted bool \[10\] with a true value"):
        Sampler(10, 2, "cpu", allowed)

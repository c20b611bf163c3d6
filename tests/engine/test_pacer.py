"""A long prompt leaves running replies their pace, on devices of any speed, by their own clock."""

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.handle import Handle
from model.pacer import Pacer
from model.sampling import SamplingParams
from model.scheduler import Part, Scheduler, Sequence

PARAMS = SamplingParams(temperature=0.0)


class Device:
    """How long a step takes: reading the weights and so much a token, or so much arithmetic if that is more."""

    def __init__(self, weights: float, reply: float, prompt: float, noise: float = 0.0) -> None:
        self.weights, self.reply, self.prompt, self.noise = weights, reply, prompt, noise
        self.random = random.Random(1)

    def seconds(self, parts: list[Part]) -> float:
        """Of one step."""
        tokens = sum(part.size for part in parts)
        longest = max(self.weights + self.reply * len(parts), self.prompt * tokens)
        return longest * (1 + self.noise * self.random.random())


GPU = Device(5e-3, 1e-5, 3e-5, noise=0.1)
CPU = Device(2e-3, 1e-4, 1e-3, noise=0.1)
SLOW_READER = Device(4e-3, 0.0, 2e-3)


class Simulation:
    """A scheduler and a device, without an engine."""

    def __init__(self, device: Device, rows: int, chunk: int, grid: int) -> None:
        self.device, self.scheduler = device, Scheduler(rows, chunk, grid)

    def add(self, prompt: int, max_tokens: int = 10**9) -> Sequence:
        """A request."""
        self.scheduler.add(sequence := Sequence([1] * prompt, PARAMS, max_tokens, Handle()))
        self.scheduler.admit()
        return sequence

    def step(self) -> tuple[float, list[Part]]:
        """One step, and how long it took."""
        parts = self.scheduler.plan()
        seconds = self.device.seconds(parts)
        self.scheduler.launched(parts)
        writing = [part for part in parts if part.size == 1 and part.draws]
        self.scheduler.pacer.measured(len(writing), sum(part.size for part in parts) - len(writing), seconds)
        for part in parts:
            part.sequence.ids += [1] * part.draws
        self.scheduler.settled(parts)
        return seconds, parts


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


@pytest.mark.parametrize(
    ("device", "chunk", "grid", "running"),
    [
        (GPU, 512, 16, 1),
        (GPU, 512, 16, 8),
        (GPU, 512, 16, 200),
        (CPU, 64, 1, 1),
        (CPU, 64, 1, 8),
        (SLOW_READER, 64, 1, 1),
    ],
)
def test_a_prompt_of_50000_tokens_at_most_doubles_the_time_between_tokens(
    device: Device, chunk: int, grid: int, running: int
) -> None:
    simulation = Simulation(device, running + 1, chunk, grid)
    for _ in range(running):
        simulation.add(1)
    idle = [simulation.step()[0] for _ in range(300)]
    entering = simulation.add(50000)
    times = []
    while entering.drawn == 0:
        seconds, parts = simulation.step()
        assert sum(part.draws and part.sequence is not entering for part in parts) == running
        times.append(seconds)
    assert _p99(times) <= 2 * _p99(idle)
    assert median(times) >= 1.3 * median(idle), "what is allowed is made use of"


def test_nothing_is_held_back_where_nobody_writes() -> None:
    simulation = Simulation(GPU, 2, 512, 16)
    simulation.add(5000, 1)
    sizes = []
    while len(sizes) < 10:
        sizes.append(simulation.step()[1][0].size)
    assert sizes == [512] * 9 + [5000 - 9 * 512]


@pytest.mark.parametrize("rows", [256, 400, 512])
def test_a_crowd_of_prompts_gets_more_of_the_time(rows: int) -> None:
    """Or it would wait for ever: as many tokens are read a step as prompts of 512 and replies of 256 tokens need."""
    simulation = Simulation(Device(7e-3, 1e-5, 2.4e-5 * 256 / rows), rows, 512, 16)
    waiting = [simulation.add(512, 256) for _ in range(rows)]
    written = steps = 0
    clock, began, first = 0.0, {}, []
    while steps < 1600:
        seconds, parts = simulation.step()
        clock, steps = clock + seconds, steps + 1
        for part in parts:
            sequence = part.sequence
            if part.draws and sequence.drawn == 1 and sequence in began:
                first.append(clock - began[sequence])
            if sequence.left == 0:
                simulation.scheduler.release(sequence)
                began[simulation.add(512, 256)] = clock
        written += sum(part.draws for part in parts)
    assert len(waiting) == rows
    assert median(first[len(first) // 2 :]) < 1.0
    assert written / steps > 0.7 * rows, "most rows are writing"


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    chunk=st.sampled_from([1, 16, 512]),
    grid=st.sampled_from([1, 16]),
    told=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2000), st.floats(0, 1e3)), max_size=60),
)
def test_budgets_stay_in_bounds_whatever_the_clock_says(
    chunk: int, grid: int, told: list[tuple[int, int, float]]
) -> None:
    grid = min(grid, chunk)
    pacer = Pacer(chunk, grid, 4 * chunk)
    without = 0
    for writing, tokens, seconds in told:
        pacer.measured(writing, tokens, seconds)
        budget = pacer.budget(writing, 1 + tokens % 40)
        assert budget == 0 or (grid <= budget <= 4 * chunk and budget % grid == 0)
        assert writing or budget == chunk
        assert budget or writing
        without += budget == 0
    assert without <= 10 + len(told) / 64

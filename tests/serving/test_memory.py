"""Nothing of a request stays behind."""

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from model.engine import EngineError
from model.request import Request
from model.rwkv7 import RWKV7
from model.service import Service
from model.settings import Settings
from tests.serving.orders import order
from tests.serving.server import Server

POISON = 8  # the id of U+0007, as of every single byte: one more than it


def _one(server: Server, n: int) -> None:
    """Every tenth is cancelled, every tenth fails."""
    if n % 10 == 3:
        with server.open_stream(order(words=5000), max_tokens=60000) as events:
            next(event for event in events if event.name == "output")
    elif n % 10 == 7:
        prompt = order(words=9, fail=("error", "oom", "nan")[n % 3], at=3)
        assert server.predict(prompt)["status"] == "failed"
    else:
        temperature = 1.0 if n % 10 == 5 else 0.0
        assert server.predict(order(words=2 + n % 3), seed=n, temperature=temperature)["status"] == "succeeded"


def _run(server: Server, numbers: range) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: _one(server, n), numbers))


def _check(server: Server, count: int) -> None:
    """A buffer of 6 MB comes and goes, so this compares the most of three samples with the least of three."""
    warm = count // 5  # by then every thread of the server has come into being
    before = max(_memory_after(server, range(n, n + warm // 3)) for n in range(0, warm, warm // 3))
    step = count // 4
    after = [_memory_after(server, range(warm + n, warm + n + step)) for n in range(0, count, step)]
    assert min(after[-3:]) <= before * 1.01
    assert server.health()["status"] == "READY"


def _memory_after(server: Server, numbers: range) -> int:
    _run(server, numbers)
    return server.memory()


@pytest.mark.acceptance(12)
def test_a_thousand_requests_leave_no_trace_in_memory(launch: Callable[..., Server]) -> None:
    server = launch()
    server.defaults = {"temperature": 0.0}
    _check(server, 1000)


@pytest.mark.slow
@pytest.mark.acceptance(12)
def test_ten_thousand_requests_leave_no_trace_in_memory(launch: Callable[..., Server]) -> None:
    server = launch()
    server.defaults = {"temperature": 0.0}
    _check(server, 10000)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Service]]:
    """``build(device)``: the embedded model in this process, whose steps fail late where they read POISON."""
    forward, services = RWKV7.forward, []

    def fail_if_poisoned(model: RWKV7, ids: Tensor, *rest: Any) -> Tensor:
        logits = forward(model, ids, *rest)
        if bool((ids == POISON).any()):
            raise torch.OutOfMemoryError("injected")
        return logits

    def build(device: str) -> Service:
        services.append(Service.build(Settings(device=device, max_batch=8)))
        return services[-1]

    monkeypatch.setattr(RWKV7, "forward", fail_if_poisoned)
    yield build
    for service in services:
        service.engine.close()


def _reply(service: Service, n: int) -> str:
    """How one short reply ended: every tenth is cancelled, every tenth fails."""
    prompt = f"def function_{n}(path):\n" + ("\a" if n % 10 == 7 else "")
    limit = 5000 if n % 10 == 3 else 4
    reply = service.reply(Request.of(prompt=prompt, max_tokens=limit, seed=n, temperature=0.5 if n % 2 else 0.0))
    try:
        for _ in reply:
            if n % 10 == 3:
                reply.cancel()
    except EngineError:
        assert reply.finish_reason == "error"
    return str(reply.finish_reason)


def _replies(service: Service, numbers: range) -> None:
    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(lambda n: _reply(service, n), numbers))
    assert {end for n, end in zip(numbers, ends, strict=True) if n % 10 == 3} == {"cancelled"}
    assert {end for n, end in zip(numbers, ends, strict=True) if n % 10 == 7} == {"error"}
    assert {end for n, end in zip(numbers, ends, strict=True) if n % 10 not in (3, 7)} <= {"length", "stop"}
    while service.engine.last_step_age():
        time.sleep(0.01)
    time.sleep(0.2)  # the thread lets go of its last step
    gc.collect()


@pytest.mark.acceptance(12)
def test_hundreds_of_replies_of_the_real_model_leave_no_trace(build: Callable[[str], Service]) -> None:
    def own() -> int:
        return psutil.Process().memory_full_info().uss

    def tensors() -> int:
        return sum(type(one) is Tensor for one in gc.get_objects())

    service = build("cpu")
    samples = []
    for begin in range(0, 240, 30):
        _replies(service, range(begin, begin + 30))
        samples.append((own(), tensors()))
    memory, count = zip(*samples, strict=True)
    assert min(memory[-3:]) <= max(memory[1:4]) * 1.01
    assert count[-1] <= count[1]
    assert len(service.engine._scheduler) == 0


@pytest.mark.gpu
@pytest.mark.acceptance(12)
def test_hundreds_of_replies_leave_no_memory_taken_on_a_gpu(build: Callable[[str], Service]) -> None:
    service = build("cuda")
    _replies(service, range(50))
    before = torch.cuda.memory_allocated()
    _replies(service, range(50, 450))
    assert torch.cuda.memory_allocated() == before

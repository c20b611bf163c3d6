"""The product as users get it: predict.py, the embedded weights, Cog's server."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model.request import Request
from model.service import Service
from model.settings import Settings
from tests import tiny
from tests.serving.server import PRODUCT, Server

PROMPT = "def fibonacci(n):\n"


def test_it_continues_a_program(product: Server) -> None:
    prediction = product.predict(PROMPT, max_tokens=100, temperature=0.0)
    text = "".join(prediction["output"])
    assert prediction["status"] == "succeeded" and len(text) > 100
    assert text.isascii() and "    " in text
    assert prediction["metrics"]["finish_reason"] in ("stop", "length")


@pytest.mark.acceptance(11)
def test_the_same_request_gives_the_same_bytes_whatever_ran_between(product: Server) -> None:
    first = product.text(PROMPT, max_tokens=60, temperature=0.0)
    seeded = product.text(PROMPT, max_tokens=60, temperature=1.0, top_p=0.9, seed=0)
    assert seeded != first
    product.text("class Node:\n", max_tokens=60, temperature=0.0)
    assert product.text(PROMPT, max_tokens=60, temperature=0.0) == first
    with product.open_stream(PROMPT, max_tokens=65536) as events:
        next(event for event in events if event.name == "output")
    assert product.predict("x", system_prompt="y")["status"] == "failed"
    assert product.text(PROMPT, max_tokens=60, temperature=0.0) == first
    assert product.text(PROMPT, max_tokens=60, temperature=1.0, top_p=0.9, seed=0) == seeded


@pytest.mark.acceptance(16)
@pytest.mark.acceptance(17)
def test_overlapping_streams_of_any_length_equal_their_single_runs(product: Server) -> None:
    prompts = [f"import os\n\n\ndef function_{n}(path):\n" * (1 + n % 4) for n in range(1, 21)]
    options = [{"max_tokens": n, "seed": n, "temperature": 0.0 if n % 2 else 1.0} for n in range(1, 21)]
    alone = [product.text(prompt, **option) for prompt, option in zip(prompts, options, strict=True)]

    def run(n: int) -> str:
        time.sleep(0.05 * n)
        return product.stream(prompts[n], **options[n]).text

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(run, range(20))) == alone


@pytest.mark.acceptance(3)
def test_a_stop_string_ends_a_reply_of_the_real_model(product: Server) -> None:
    whole = product.text(PROMPT, max_tokens=80, temperature=0.0)
    for stop in (whole[10:13], whole[30:50], whole[-8:]):
        streamed = product.stream(PROMPT, max_tokens=80, temperature=0.0, stop=[stop])
        assert streamed.text == whole[: whole.find(stop)]
        assert streamed.final["metrics"]["finish_reason"] == "stop"


@pytest.mark.acceptance(16)
def test_health_answers_under_load(product: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(product.text, PROMPT, max_tokens=150, seed=n) for n in range(8)]
        slowest = 0.0
        while not all(reply.done() for reply in replies):
            asked = time.monotonic()
            assert product.health()["status"] == "READY"
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.05)
        assert all(reply.result() for reply in replies)
    assert slowest < 1


def test_setup_says_in_one_line_what_runs_where(product: Server) -> None:
    line = _ready_line(product)
    for part in ("device=cpu", "dtype=torch.", "checkpoint=", "rwkv7", "layers=", "vocab=", "rows=64"):
        assert part in line


def test_weights_of_cog_are_what_it_serves(launch: Callable[..., Server], tmp_path: Path) -> None:
    """COG_WEIGHTS, with the vocabulary beside the checkpoint, goes before our own setting."""
    tiny.write_byte_vocabulary(tmp_path / "vocab.txt")
    weights = tiny.write(tiny.Shape(vocab=257), tmp_path / "small.safetensors")
    server = launch(
        runner=PRODUCT, COG_WEIGHTS=str(weights), COG_RWKV_WEIGHTS=str(tmp_path / "no.pth"), COG_RWKV_DEVICE="cpu"
    )
    line = _ready_line(server)
    assert f"checkpoint={weights}" in line and "vocab=257" in line
    service = Service.build(Settings(weights=str(weights), device="cpu"))
    expected = list(service.reply(Request.of(prompt="abc", max_tokens=20, temperature=0.0)))
    service.engine.close()
    assert server.text("abc", max_tokens=20, temperature=0.0) == "".join(expected) != ""


@pytest.mark.acceptance(14)
def test_what_cannot_be_loaded_fails_at_setup_with_one_line(launch: Callable[..., Server], tmp_path: Path) -> None:
    pointer = tmp_path / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 191084544\n")
    server = launch(runner=PRODUCT, expect="SETUP_FAILED", COG_RWKV_WEIGHTS=str(pointer), COG_RWKV_DEVICE="cpu")
    assert any("E100" in line and "LFS" in line for line in _said(server))


def test_a_bad_setting_fails_at_setup_by_its_name(launch: Callable[..., Server]) -> None:
    server = launch(runner=PRODUCT, expect="SETUP_FAILED", COG_RWKV_DEVICE="gpu")
    assert any("E130 COG_RWKV_DEVICE: " in line and "'gpu'" in line for line in _said(server))


def _said(server: Server) -> list[str]:
    return (server.health()["setup"]["logs"] + server.log()).splitlines()


def _ready_line(server: Server) -> str:
    """The line in the server's log, which the worker's reaches a moment after the server is ready."""
    until = time.monotonic() + 10
    while not (found := _whole_lines(server.log(), "event=ready")) and time.monotonic() < until:
        time.sleep(0.1)
    (line,) = found
    return line


def _whole_lines(log: str, part: str) -> list[str]:
    return [line for line in log.splitlines(True) if part in line and line.endswith("\n")]


@pytest.mark.gpu
def test_it_serves_on_a_gpu(launch: Callable[..., Server]) -> None:
    server = launch(runner=PRODUCT, COG_RWKV_DEVICE="cuda")
    assert "device=cuda:0 dtype=torch.float16" in _ready_line(server)
    server.defaults = {"temperature": 0.0, "max_tokens": 100}
    first = server.text(PROMPT)
    assert len(first) > 100
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(server.text, [f"{PROMPT}    # {n}\n" for n in range(32)]))
    assert all(texts)
    assert server.text(PROMPT) == first, "the same bytes on an idle server"
    assert server.health()["status"] == "READY"


@pytest.mark.slow
@pytest.mark.acceptance(17)
def test_eight_streams_are_three_times_as_fast_as_one(launch: Callable[..., Server], tmp_path: Path) -> None:
    shape = tiny.Shape(layers=12, width=768, ranks=(64, 64, 32, 128))
    weights = tiny.write(shape, tmp_path / "rwkv7-0.1b.safetensors")
    server = launch(runner=PRODUCT, COG_RWKV_WEIGHTS=str(weights), COG_RWKV_DEVICE="cpu")
    server.defaults = {"temperature": 0.0, "max_tokens": 128}

    def speed(clients: int) -> float:
        began = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            streams = list(pool.map(lambda n: server.stream(f"{n} {PROMPT}"), range(clients)))
        took = time.monotonic() - began
        assert all(stream.named("output")[0].time - began < 0.3 * took for stream in streams)
        return sum(stream.final["metrics"]["completion_tokens"] for stream in streams) / took

    one = eight = 0.0
    for turn in range(6):  # the best of each of two turns or more, for the machine may have other guests
        one, eight = max(one, speed(1)), max(eight, speed(8))
        print(f"0.1b, tokens/s: {one:.1f} at 1 stream, {eight:.1f} at 8 ({eight / one:.1f}x)")
        if turn and eight >= 3 * one:
            break
    assert eight >= 3 * one

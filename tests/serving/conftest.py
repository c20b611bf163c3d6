"""Servers that several tests share. Each is started once; the tests leave it as they found it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import server


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    """The product over a stub model (stub_runner.py), with 32 slots and 32 rows."""
    started = server.start(tmp_path_factory.mktemp("stub"), COG_RWKV_MAX_BATCH="32", COG_RWKV_PREFILL_CHUNK="1024")
    started.defaults = {"temperature": 0.0}  # sampling among 65,536 ids is most of a stub's time
    yield started
    started.stop()


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    """The product as it is, with the weights that come with it, on the CPU."""
    started = server.start(tmp_path_factory.mktemp("product"), server.PRODUCT, COG_RWKV_DEVICE="cpu")
    yield started
    started.stop()


@pytest.fixture
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """``launch(**settings)`` starts a server as server.start() does, for one test."""
    started: list[server.Server] = []

    def launch(**settings: Any) -> server.Server:
        started.append(server.start(tmp_path_factory.mktemp("server"), **settings))
        return started[-1]

    yield launch
    for one in started:
        one.stop()

"""The clients of the load test against a server, so that its counts can be believed."""

from itertools import pairwise

import pytest

from benchmarks import load_client
from benchmarks.load_work import Work
from tests.serving.server import Server


def test_the_load_test_sees_whether_a_text_is_right(stub: Server) -> None:
    work = Work(5, (10, 30), (5, 40), 0.0, None, distinct=6)
    expected = load_client.single_runs(stub.url, work)
    assert len(set(expected.values())) == 6
    expected["2"] += "?"
    records, window = load_client.run(stub.url, work, expected, streams=8, rate=None, seconds=1, processes=1)
    assert window.end - window.begin == pytest.approx(1)
    assert {one.key for one in records} == set(work.all_keys())
    assert all((one.error is not None) == (one.key == "2") for one in records), [one.error for one in records]
    assert all(one.tokens == work.inputs(one.key)["max_tokens"] for one in records)
    assert all(one.sent < one.first <= one.last for one in records)


def test_the_open_loop_sends_whatever_has_become_of_the_others(stub: Server) -> None:
    work = Work(6, (10, 10), (40, 40), 0.0, None)
    records, window = load_client.run(stub.url, work, {}, streams=0, rate=25, seconds=2, processes=1)
    assert all(one.error is None and one.tokens == 40 for one in records)
    assert 10 < len(window.within(records)) < 90  # 50 on average
    in_turn = sorted(records, key=lambda one: one.sent)
    assert any(later.sent < one.last for one, later in pairwise(in_turn))

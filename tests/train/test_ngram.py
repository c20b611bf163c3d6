"""The n-gram model's probabilities are probabilities, and its two ways to them agree."""

from pathlib import Path

import numpy as np
import pytest

from train.ngram import ByteNgram

TEXT = b"def f(x):\n    return x\n\0def g(y):\n    return y + 1\n\0"


@pytest.fixture
def ngram(tmp_path: Path) -> ByteNgram:
    (tmp_path / "train.bin").write_bytes(TEXT * 3)
    return ByteNgram(tmp_path / "train.bin")


@pytest.mark.parametrize("context", [b"", b"def f", b"    r", b"\xff\xff\xff\xff\xff\xff"])
def test_sums_to_one(ngram: ByteNgram, context: bytes) -> None:
    p = ngram.next(context)
    assert p.min() > 0
    assert p.sum() == pytest.approx(1, abs=1e-5)


def test_score_is_the_sum_over_bytes(ngram: ByteNgram) -> None:
    document = b"def h(x):\n"
    nats = -sum(np.log(ngram.next(document[:i])[byte]) for i, byte in enumerate(document + b"\0"))
    assert ngram.score(document + b"\0") == pytest.approx(nats, rel=1e-5)


def test_seen_text_costs_less(ngram: ByteNgram) -> None:
    assert ngram.score(TEXT) < 0.5 * ngram.score(TEXT[::-1].lstrip(b"\0") + b"\0")

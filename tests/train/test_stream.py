"""Packing loses no token, predicts each once, and keeps documents on chunk boundaries."""

import numpy as np
import pytest
import torch

from train.model import CHUNK
from train.stream import Stream, pack, pack_rows

LENGTHS = np.array([5, 15, 16, 40, 1], dtype=np.int32)
TOKENS = np.concatenate([100 * (i + 1) + np.arange(n) for i, n in enumerate(LENGTHS)]).astype(np.uint16)


def predictions(stream: Stream) -> tuple[list[int], int, list[int]]:
    """(text tokens predicted, ends predicted, positions of document starts in their rows)."""
    wanted, ends, begun = [], 0, []
    for number in range(stream.windows):
        _, targets, starts = stream.next()
        ends += int((targets == 0).sum())
        wanted += targets[targets > 0].tolist()
        begun += (starts.nonzero()[:, 1] + number * stream.length).tolist()
    return wanted, ends, begun


@pytest.mark.parametrize("data", [pack(TOKENS, LENGTHS, np.array([3, 0, 4, 1, 2])), pack_rows(TOKENS, LENGTHS, 1, 32)])
def test_every_token_is_predicted_once(data: np.ndarray) -> None:
    wanted, ends, begun = predictions(Stream(data, 1, CHUNK, torch.device("cpu")))
    assert sorted(wanted) == sorted(TOKENS.tolist())
    assert ends == len(LENGTHS)
    assert len(begun) == len(LENGTHS)
    assert all(position % CHUNK == 0 for position in begun)


def test_rows_hold_whole_documents() -> None:
    data = pack_rows(TOKENS, LENGTHS, 3, 32).reshape(3, -1)
    assert data.shape[1] % 32 == 0
    found = sorted(t for row in data for t in row.tolist() if 0 < t < 65535)
    assert found == sorted(TOKENS.tolist())
    assert (data[:, 0] == 0).all()

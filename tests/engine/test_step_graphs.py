"""Which graph a step runs in."""

import pytest

from model.step_graphs import MIXED_ROWS, MIXED_TOKENS, Sizes


@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 40, 300])
@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_a_graph_holds_what_it_is_for_and_little_more(rows: int, chunk: int) -> None:
    sizes = Sizes(rows, chunk)
    for count in range(1, rows + 1):
        found = sizes.holding(count, count)
        assert found is not None and count <= found.rows == found.tokens <= max(count * 1.5, count + 3)
    for count in range(2, min(rows, MIXED_ROWS[-1] - 1) + 1):
        for tokens in (*range(2, chunk, 5), chunk):
            found = sizes.holding(count, count - 1 + tokens)
            assert found is not None and found in sizes.mixed
            assert count < found.rows <= 4 * count and count - 1 + tokens <= found.tokens
            assert found.tokens - found.rows <= max(16, 1.5 * (tokens + count))


def test_other_steps_have_none() -> None:
    sizes = Sizes(300, 512)
    assert sizes.holding(1, 16) is None, "a prompt alone"
    assert sizes.holding(256, 300) is None, "too many rows"
    assert sizes.holding(3, 600) is None, "too many tokens"
    assert Sizes(300, 100).holding(3, 5 + 128) is None, "more than a chunk"
    assert len(sizes.mixed) == len(MIXED_ROWS) * len(MIXED_TOKENS)

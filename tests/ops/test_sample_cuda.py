"""sample_ on CUDA: bit for bit what the CPU gives, at every size, in graphs, on side streams, in one launch."""

import pytest
import torch

from tests.ops.test_sample import Step, step

pytestmark = pytest.mark.gpu
# One block a row; the clusters of 2, 4 and 8 and their bounds; more than shared memory holds without clusters.
VOCABS = [1, 31, 33, 256, 4096, 8191, 8192, 8193, 16385, 32769, 50001, 65529, 65535, 65536, 70001, 2**18]


def assert_same(cpu: Step, there: Step, steps: int = 2) -> None:
    """Ids, draws and counts, after each step."""
    for _ in range(steps):
        (ids, finite), (cuda_ids, cuda_finite) = cpu(), there()
        assert cuda_ids.tolist() == ids.tolist()
        assert cuda_finite.tolist() == finite.tolist()
        assert torch.equal(there.integers.cpu(), cpu.integers)
        assert torch.equal(there.counts.cpu(), cpu.counts)


@pytest.mark.parametrize("gpu", ["", "plain"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_every_vocabulary(cuda: str, vocab: int, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COG_RWKV_GPU", gpu)
    for scale in (0.0, 1e-6, 1.0, 4.0):
        cpu = step(20, vocab, scale)
        assert_same(cpu, cpu.to(cuda))


@pytest.mark.parametrize("batch", [1, 2, 3, 31, 32, 133, 257, 960])
def test_every_batch(cuda: str, batch: int) -> None:
    for vocab in (1000, 9001) if batch > 200 else (1000, 65536):
        cpu = step(batch, vocab, 2.0)
        assert_same(cpu, cpu.to(cuda))


@pytest.mark.parametrize("vocab", [1000, 65536])
def test_in_a_graph_and_on_a_side_stream(cuda: str, vocab: int) -> None:
    cpu = step(20, vocab)
    there, stream, graph = cpu.to(cuda), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        ids = there()[0]
    stream.synchronize()
    assert torch.equal(ids.cpu(), cpu()[0])
    with torch.cuda.graph(graph):
        ids, finite = there()
    for seed in range(3):
        logits = step(20, vocab, seed=seed).logits
        there.logits.copy_(logits)
        cpu.logits.copy_(logits)
        ids.fill_(-1)
        graph.replay()
        assert ids.tolist() == cpu()[0].tolist() and finite.all()
        assert torch.equal(there.counts.cpu(), cpu.counts)


def test_a_row_that_is_not_there_changes_nothing(cuda: str) -> None:
    for vocab in (100, 20000):
        cpu = step(6, vocab)
        there = cpu.to(cuda)
        there.rows[[1, 4]] = torch.tensor([99, -1], device=cuda)
        ids, finite = there()
        kept = [0, 2, 3, 5]
        wanted, _ = cpu._replace(logits=cpu.logits[kept], rows=cpu.rows[kept])()
        assert ids[kept].tolist() == wanted.tolist() and ids[[1, 4]].tolist() == [0, 0]
        assert finite.tolist() == [True, False, True, True, False, True]
        assert torch.equal(there.integers.cpu(), cpu.integers) and torch.equal(there.counts.cpu(), cpu.counts)


def test_again_and_again_the_same_bytes(cuda: str) -> None:
    first = step(133, 65536, 1.0).to(cuda)
    wanted, _ = first.to(cuda)()
    for _ in range(20):
        assert torch.equal(first.to(cuda)()[0], wanted)

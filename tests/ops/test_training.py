"""Networks made of the operators learn scikit-learn's handwritten digits: 8 x 8 pixels, 1797 of them."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from cog_rwkv_ops import add, binary_activation, conv2d, scattering2d, swish

Data = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def digits() -> Data:
    """Images [N, 1, 8, 8] and labels to learn from, then those to test on: every fourth, none seen before."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)
    test = torch.arange(len(labels)) % 4 == 0
    return images[~test], labels[~test], images[test], labels[test]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Such small layers gain nothing from more, and beside other work they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Network(nn.Module):
    """Two convolutions, the second one binary; one more around which its input is added; one that sees all."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(16, 1, 3, 3), (32, 16, 3, 3), (32, 32, 3, 3), (10, 32, 4, 4)]
        self.weights = nn.ParameterList(nn.init.kaiming_normal_(torch.empty(shape)) for shape in shapes)
        self.biases = nn.ParameterList(torch.zeros(shape[0]) for shape in shapes)

    def layer(self, i: int, x: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
        return conv2d(x, self.weights[i], self.biases[i], stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        x = swish(self.layer(0, x))
        x = binary_activation(self.layer(1, x, stride=2))
        x = add(swish(self.layer(2, x)), x)
        return self.layer(3, x, padding=0).flatten(1)


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return (scores.argmax(1) == labels).float().mean().item()


def test_a_small_network_learns(digits: Data) -> None:
    images, labels, test_images, test_labels = digits
    torch.manual_seed(0)
    network, start = Network(), time.monotonic()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    steps = 15 * (len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for step in range(steps):
        chosen = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        right = accuracy(network(test_images), test_labels)
    print(f"test accuracy {right:.4f} after {time.monotonic() - start:.1f} s")
    assert right > 0.95
    assert time.monotonic() - start < 60


def linear_classifier(features: Callable[[Tensor], Tensor], data: Data) -> float:
    """Its accuracy on the test images: ridge regression of the labels, one against all, on the features."""
    images, labels, test_images, test_labels = data
    seen, unseen = (features(x[:, 0]).flatten(1).double() for x in (images, test_images))
    mean, spread = seen.mean(0), seen.std(0) + 1e-6
    seen, unseen = (torch.cat([(f - mean) / spread, torch.ones(len(f), 1)], 1) for f in (seen, unseen))
    wanted = nn.functional.one_hot(labels).double()
    ridge = seen.T @ seen + 10.0 * torch.eye(seen.shape[1])
    return accuracy(unseen @ torch.linalg.solve(ridge, seen.T @ wanted), test_labels)


def test_scattering_and_a_linear_classifier(digits: Data) -> None:
    ours = linear_classifier(lambda x: scattering2d(x, 2), digits)
    pixels = linear_classifier(lambda x: x, digits)
    print(f"test accuracy {ours:.4f}; from the pixels {pixels:.4f}")
    assert ours > 0.97
    assert ours > pixels


def test_scattering_classifies_as_well_as_kymatio(digits: Data) -> None:
    """The same features, so the same digits are told apart: but for rounding, which may move one."""
    kymatio = pytest.importorskip("kymatio.torch", reason="kymatio is not installed", exc_type=ImportError)
    ours = linear_classifier(lambda x: scattering2d(x, 2), digits)
    theirs = linear_classifier(kymatio.Scattering2D(2, (8, 8)), digits)
    print(f"test accuracy {ours:.4f}; kymatio {theirs:.4f}")
    assert abs(ours - theirs) <= 1 / len(digits[3]) + 1e-6

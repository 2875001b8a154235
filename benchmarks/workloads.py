"""The workloads: synthetic data of the right shapes, in memory, and the models of the experiments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # the peers read this module in environments of their own, where this library is not installed
    import gradalign as ga


def emnist_cnn() -> nn.Module:
    """Return the EMNIST network of the paper: 100,271 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 47),
    )  # fmt: skip


def lenet() -> nn.Module:
    """Return the CIFAR-10 network of the paper: 62,006 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """Return a small network: 4,810 parameters."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class CharacterLSTM(nn.Module):
    """The Shakespeare network of the paper: two LSTM layers of 100, embedding 8, 80 letters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 8)
        self.lstm = nn.LSTM(8, 100, num_layers=2, batch_first=True)
        self.head = nn.Linear(100, 80)

    def forward(self, letters: Tensor) -> Tensor:
        """Return the scores of the next letter."""
        states, _ = self.lstm(self.embedding(letters))
        return self.head(states[:, -1])


def large_cnn() -> nn.Module:
    """Return a convolutional network of 1.6 million parameters, most of them in one linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1152, 1376), nn.ReLU(), nn.Linear(1376, 10),
    )  # fmt: skip


def conv_heavy_cnn() -> nn.Module:
    """Return the CIFAR network of pfl's benchmarks without dropout: 1,626,442 parameters, the time in convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One thing to be timed: a round of FedAvg on clients of equal size."""

    name: str
    what: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    clients: int
    size: int
    sampled: int
    batch: int
    steps: int | None = None
    epochs: int | None = None
    letters: bool = False
    lr: float = 0.05

    def local_steps(self) -> int:
        """Return K."""
        return self.steps or (self.epochs or 1) * self.batches()

    def batches(self) -> int:
        """Return how many batches a client's examples make, the last one perhaps smaller."""
        return -(-self.size // self.batch)

    def samples(self) -> int:
        """Return the examples trained on in a round."""
        return self.sampled * self.local_steps() * self.batch

    def data(self) -> tuple[Tensor, Tensor]:
        """Return all clients' examples, client after client."""
        generator = torch.Generator().manual_seed(0)
        total = self.clients * self.size
        targets = torch.randint(self.classes, (total,), generator=generator)
        if self.letters:
            return torch.randint(80, (total, *self.shape), generator=generator), targets
        return torch.randn(total, *self.shape, generator=generator), targets

    def task(self, data: tuple[Tensor, Tensor]) -> ga.Task:
        """Return the workload as a task."""
        import gradalign as ga

        parts = torch.arange(self.clients * self.size).view(self.clients, self.size)
        return ga.Task(name=self.name, model=self.model, clients=ga.PartitionedClients(data, parts))

    def local(self) -> ga.LocalTraining:
        """Return how a client trains."""
        import gradalign as ga

        return ga.LocalTraining(lr=self.lr, steps=self.steps, epochs=self.epochs, batch_size=self.batch)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="W1", what="EMNIST-like, CNN 100 k", model=emnist_cnn, shape=(1, 28, 28), classes=47,
            clients=47, size=780, sampled=10, batch=78, steps=10,
        ),
        Workload(
            name="W2", what="CIFAR-like, LeNet 62 k", model=lenet, shape=(3, 32, 32), classes=10,
            clients=10, size=1600, sampled=10, batch=125, steps=20,
        ),
        Workload(
            name="W3", what="tiny clients, MLP 5 k", model=mlp, shape=(64,), classes=10,
            clients=1000, size=100, sampled=100, batch=20, epochs=5,
        ),
        Workload(
            name="W4", what="letters, LSTM 134 k", model=CharacterLSTM, shape=(80,), classes=80,
            clients=20, size=500, sampled=4, batch=50, steps=10, letters=True,
        ),
        Workload(
            name="W5", what="many clients, CNN 1.6 M", model=large_cnn, shape=(3, 32, 32), classes=10,
            clients=1000, size=50, sampled=50, batch=10, epochs=1,
        ),
        Workload(
            name="W6", what="W5 with heavy convolutions", model=conv_heavy_cnn, shape=(3, 32, 32), classes=10,
            clients=1000, size=50, sampled=50, batch=10, epochs=1,
        ),
    )
}  # fmt: skip
USUAL = [name for name in WORKLOADS if name != "W6"]  # on request: W5's clients where there is little to gain

CHECK = Workload(
    name="check", what="one batch a client, every client: nothing is random", model=mlp, shape=(64,), classes=10,
    clients=6, size=20, sampled=6, batch=20, epochs=3,
)  # fmt: skip


def find_workload(name: str) -> Workload:
    """Return a workload by its name."""
    return CHECK if name == CHECK.name else WORKLOADS[name]

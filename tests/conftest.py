"""Small problems with known answers, shared by the tests."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

import gradalign as ga

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers is not to look for anything on the network
settings.register_profile("unhurried", deadline=None)  # a slow machine is not a failure
settings.load_profile("unhurried")

DIMENSION = 3


class PointModel(nn.Module):
    """A model that is only a point w."""

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))


def quadratic_value(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
    """Return ½ (w − b)ᵀ A (w − b) for every (A, b) of the batch."""
    matrices, centres = batch
    distance = model.w - centres
    return 0.5 * torch.einsum("ni,nij,nj->n", distance, matrices, distance), None


@dataclass(frozen=True)
class Quadratics:
    """Clients f_i(w) = mean over examples of ½ (w − b)ᵀ A (w − b), with all arithmetic in NumPy beside the product."""

    matrices: list[np.ndarray]
    centres: list[np.ndarray]
    start: np.ndarray

    @classmethod
    def make(cls, clients: int, seed: int = 0, examples: tuple[int, ...] | None = None) -> Quadratics:
        rng = np.random.default_rng(seed)
        counts = examples or (1,) * clients
        matrices, centres = [], []
        for count in counts:
            roots = rng.normal(size=(count, DIMENSION, DIMENSION))
            matrices.append(np.einsum("nij,nkj->nik", roots, roots) / DIMENSION + 0.1 * np.eye(DIMENSION))
            centres.append(rng.normal(size=(count, DIMENSION)))
        return cls(matrices, centres, rng.normal(size=DIMENSION))

    def gradient(self, client: int, w: np.ndarray) -> np.ndarray:
        matrices, centres = self.matrices[client], self.centres[client]
        return np.einsum("nij,nj->ni", matrices, w - centres).mean(axis=0)

    def task(self) -> ga.Task:
        clients = [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(self.matrices, self.centres, strict=True)]
        return ga.Task(
            name="quadratics",
            model=lambda: PointModel(self.start),
            clients=clients,
            test=clients[0],
            predict=quadratic_value,
            loss=lambda values, _: values.mean(),
        )


@pytest.fixture
def quadratics() -> Quadratics:
    return Quadratics.make(4)


def hear_ctrl_c() -> None:
    """In a child about to start: take SIGINT as a terminal program does, also when the tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def final_point(result: ga.Result) -> np.ndarray:
    """Return the trained point as NumPy."""
    return next(result.model.parameters()).detach().numpy()


def vector(result: ga.Result) -> Tensor:
    """Return all parameters and buffers of the final model as one vector."""
    return torch.cat([value.double().reshape(-1) for value in result.model.state_dict().values()])


def blobs(clients: int = 6, size: int = 20, seed: int = 0) -> ga.Task:
    """Return a small float32 classification task with batch norm and dropout: everything that can go out of step."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 8, generator=generator) * 2
    labels = torch.randint(4, (clients * size + 50,), generator=generator)
    inputs = centres[labels] + torch.randn(len(labels), 8, generator=generator)
    cut = clients * size
    return ga.Task(
        name="blobs",
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)),
        clients=[(inputs[i : i + size], labels[i : i + size]) for i in range(0, cut, size)],
        test=(inputs[cut:], labels[cut:]),
    )


@pytest.fixture(scope="session")
def _small_data(tmp_path_factory):
    from small_files import write_all

    folder = tmp_path_factory.mktemp("data")
    write_all(folder)
    return folder


@pytest.fixture
def small_data(_small_data, tmp_path, monkeypatch):
    """The folder with small data sets in their original formats, in use; the cache is the test's own."""
    monkeypatch.setenv("GRADALIGN_DATA", str(_small_data))
    monkeypatch.setenv("GRADALIGN_CACHE", str(tmp_path / "cache"))
    return _small_data

"""The Flower engine evaluates on the server as the clients train: plainly when it is asked to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradalign as ga
from conftest import vector

pytest.importorskip("flwr")


def test_the_plain_way_is_plain_in_evaluation_too():
    """A large window over small images: the fast way takes spectra, which round differently."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 8, 12, 12, generator=generator), torch.arange(6) % 3) for _ in range(2)]
    test = torch.randn(40, 8, 12, 12, generator=generator), torch.arange(40) % 3
    model = lambda: nn.Sequential(nn.Conv2d(8, 32, 5), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 3))  # noqa: E731
    task = ga.Task(model=model, clients=data, test=test)
    quiet = {"rounds": 1, "local": ga.LocalTraining(lr=0.01, steps=1), "measure": ga.Measure(train_every=0)}
    local, flower = (
        ga.run(task, ga.FedAvg(), fast=False, engine=engine, workers=0 if engine == "local" else None, **quiet)
        for engine in ("local", "flower")
    )
    assert torch.equal(vector(local), vector(flower))
    assert local.history["test_loss"] == flower.history["test_loss"]

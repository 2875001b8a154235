"""The example that follows the paper's Algorithm 2 line by line gives the library's numbers."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import gradalign as ga
from gradalign.client.trainer import shuffled_batches
from gradalign.seeding import Purpose, torch_stream

_spec = importlib.util.spec_from_file_location(
    "fedga_by_hand", Path(__file__).parent.parent / "examples" / "fedga_by_hand.py"
)
by_hand = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(by_hand)

ROUNDS, STEPS, SIZE, LR, SEED = 3, 4, 7, 0.2, 5


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = (20, 11, 31)  # the last batch of a pass is smaller
    return [
        (torch.randn(n, 6, generator=generator).double() + i, torch.randint(3, (n,), generator=generator))
        for i, n in enumerate(sizes)
    ]


def batches_of(client: int, round_index: int):
    """Yield the mini-batches that the library's client sees in this round."""
    inputs, targets = clients()[client]
    stream = torch_stream(SEED, Purpose.SHUFFLE, round_index, client)
    for rows in itertools.islice(shuffled_batches(len(targets), SIZE, stream), STEPS):
        yield inputs[rows], targets[rows]


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_the_plain_loop_gives_the_librarys_model(beta):
    task = ga.Task(model=network, clients=clients())
    local = ga.LocalTraining(lr=LR, steps=STEPS, batch_size=SIZE)
    result = ga.run(task, ga.FedGA(beta=beta), rounds=ROUNDS, local=local, seed=SEED, workers=0)
    model = task.make_model(SEED)
    for round_index in range(ROUNDS):
        batches = [batches_of(client, round_index) for client in range(len(clients()))]
        by_hand.fedga_round(model, clients(), batches, lr=LR, beta=beta, steps=STEPS)
    for (name, expected), found in zip(model.named_parameters(), result.model.parameters(), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_it_is_short_enough_to_be_read_first():
    assert len(Path(by_hand.__file__).read_text().splitlines()) <= 80
    assert "gradalign" not in Path(by_hand.__file__).read_text()

"""The embedded task: 1,797 handwritten digits, 8×8 pixels, shipped with scikit-learn. Nothing to download."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.data import PartitionedClients
from gradalign.tasks.partition import by_classes, iid
from gradalign.tasks.task import Task


def digits_model() -> nn.Module:
    """Return the model: 64 pixels, one hidden layer of 64, ten classes; 4,810 parameters."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits(
    *,
    seed: int = 0,
    clients: int = 20,
    partition: str = "classes",
    classes_per_client: int = 2,
    test_share: float = 0.25,
) -> Task:
    """Make the digits task.

    Args:
        seed: The seed of the split and the partition.
        clients: The number of clients.
        partition: "classes" (each client holds a few classes) or "iid".
        classes_per_client: How many classes a client holds, for "classes".
        test_share: The share of the digits kept for testing.
    """
    from sklearn.datasets import load_digits

    if not 0.0 < test_share < 1.0:
        raise GradalignError(f"task.test_share must be between 0 and 1, got {test_share:g}")
    bunch = load_digits()
    # Pixels are 0..16; centred and scaled to about unit variance.
    images = torch.as_tensor((bunch.data / 16.0 - 0.3) / 0.4, dtype=torch.float32)
    labels = bunch.target.astype(np.int64)
    order = numpy_stream(seed, Purpose.SPLIT).permutation(len(labels))
    held_out = round(test_share * len(labels))
    test, train = np.sort(order[:held_out]), np.sort(order[held_out:])
    if partition == "classes":
        parts = by_classes(labels[train], clients, classes_per_client, seed)
    elif partition == "iid":
        parts = iid(labels[train], clients, seed)
    else:
        raise GradalignError(f'task.partition must be "classes" or "iid", got "{partition}"')
    targets = torch.as_tensor(labels)
    return Task(
        name="digits",
        model=digits_model,
        clients=PartitionedClients((images[train], targets[train]), parts),
        test=(images[test], targets[test]),
        facts={"partition": partition if partition == "iid" else f"{classes_per_client} classes per client"},
    )

"""The embedded task: 1,797 handwritten digits, 8×8 pixels. Nothing to download.

The digits are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine
Learning Repository, 1998, doi:10.24432/C50P49, licence CC BY 4.0), in the order and scale in which scikit-learn has
them; ``digits.npz`` holds the pixels and labels as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.data import PartitionedClients
from gradalign.tasks.divide import Division
from gradalign.tasks.task import Task


def digits_model() -> nn.Module:
    """Return the model: 64 pixels, one hidden layer of 64, ten classes; 4,810 parameters."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def images_and_labels() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the digits' pixels, 0 to 16, a row of 64 for each digit, and their labels."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return file["images"], file["labels"].astype(np.int64)


def digits(
    *,
    seed: int = 0,
    clients: int = 20,
    partition: str = "classes",
    classes_per_client: int = 2,
    iid_share: float = 0.0,
    alpha: float = 0.5,
    parts: Sequence[Sequence[int]] | str | None = None,
    test_share: float = 0.25,
    client_share: float = 1.0,
    data_share: float = 1.0,
) -> Task:
    """1,797 handwritten digits, 8×8 pixels (Alpaydin & Kaynak 1998), part of the package: nothing to download.

    Args:
        seed: The seed of the split and the partition.
        clients: The number of clients.
        partition: How digits are divided among clients; see ``divide.PARTITIONS``.
        classes_per_client: How many classes a client holds, for "classes" and "separate".
        iid_share: For the partition "sorted".
        alpha: For the partition "dirichlet".
        parts: For the partition "custom": rows of the training digits.
        test_share: The share of the digits kept for testing.
        client_share: The share of the clients that is kept.
        data_share: The share of its digits that each kept client has.
    """
    if not 0.0 < test_share < 1.0:
        raise GradalignError(f"task.test_share must be between 0 and 1, got {test_share:g}")
    division = Division(
        partition=partition,
        clients=clients,
        classes_per_client=classes_per_client,
        iid_share=iid_share,
        alpha=alpha,
        parts=parts,
        client_share=client_share,
        data_share=data_share,
    )
    pixels, labels = images_and_labels()
    # Pixels are 0..16; centred and scaled to about unit variance.
    images = torch.as_tensor((pixels / 16.0 - 0.3) / 0.4, dtype=torch.float32)
    order = numpy_stream(seed, Purpose.SPLIT).permutation(len(labels))
    held_out = round(test_share * len(labels))
    test, train = np.sort(order[:held_out]), np.sort(order[held_out:])
    whole = division.divide(labels[train], seed)
    kept = division.keep(whole, labels[train], seed)
    targets = torch.as_tensor(labels)
    return Task(
        name="digits",
        model=digits_model,
        clients=PartitionedClients((images[train], targets[train]), kept),
        test=(images[test], targets[test]),
        facts=division.describe(len(whole), len(kept)),
    )

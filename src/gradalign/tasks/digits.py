"""The embedded task: 1,797 handwritten digits, 8×8 pixels. Nothing to download.

The digits are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine
Learning Repository, 1998, doi:10.24432/C50P49, licence CC BY 4.0), in the order and scale in which scikit-learn has
them; ``digits.npz`` holds the pixels and labels as bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.divide import Division, divided
from gradalign.tasks.task import PartitionedClients, Task


def digits_model() -> nn.Module:
    """Return the model: 64 pixels, one hidden layer of 64, ten classes; 4,810 parameters."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def images_and_labels() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the digits' pixels, 0 to 16, a row of 64 for each digit, and their labels."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return file["images"], file["labels"].astype(np.int64)


@divided(partition="classes", clients=20, classes_per_client=2)
def digits(division: Division, *, seed: int = 0, test_share: float = 0.25) -> Task:
    """1,797 handwritten digits, 8×8 pixels (Alpaydin & Kaynak 1998), part of the package: nothing to download.

    Args:
        division: How the digits are divided among clients; its fields are given as keywords.
        seed: The seed of the split and the partition.
        test_share: The share of the digits that are for testing.
    """
    if not 0.0 < test_share < 1.0:
        raise GradalignError(f"task.test_share must be between 0 and 1, got {test_share:g}")
    pixels, labels = images_and_labels()
    # Pixels are 0..16; centred and scaled to about unit variance.
    images = torch.as_tensor((pixels / 16.0 - 0.3) / 0.4, dtype=torch.float32)
    order = numpy_stream(seed, Purpose.SPLIT).permutation(len(labels))
    tested = round(test_share * len(labels))
    test, train = np.sort(order[:tested]), np.sort(order[tested:])
    whole = division.divide(labels[train], seed)
    used = division.subset(whole, labels[train], seed)
    targets = torch.as_tensor(labels)
    # A client's own tests are the test digits of its classes: what it will be shown, if it goes on as it began.
    own = [np.flatnonzero(np.isin(labels[test], labels[train][rows])) for rows in used]
    return Task(
        name="digits",
        model=digits_model,
        clients=PartitionedClients((images[train], targets[train]), used),
        test=(images[test], targets[test]),
        client_tests=PartitionedClients((images[test], targets[test]), own),
        facts=division.describe(len(whole), len(used)),
    )

"""EMNIST Balanced: handwritten digits and letters of 47 classes, with the paper's two-layer CNN."""

from __future__ import annotations

from collections.abc import Sequence

from gradalign.tasks.datasets import emnist_data
from gradalign.tasks.divide import Division
from gradalign.tasks.federate import federate
from gradalign.tasks.images import Normalise
from gradalign.tasks.models import emnist_cnn
from gradalign.tasks.task import Task

# The paper scales pixels to mean 0.5 and standard deviation 0.5, that is, to the range from −1 to 1.
NORMALISE = Normalise((0.5,), (0.5,))


def emnist(
    *,
    seed: int = 0,
    partition: str = "one-class",
    clients: int = 47,
    classes_per_client: int = 1,
    iid_share: float = 0.0,
    alpha: float = 0.5,
    parts: Sequence[Sequence[int]] | str | None = None,
    extra: bool = False,
    train_limit: int | None = None,
    test_limit: int | None = None,
    client_share: float = 1.0,
    data_share: float = 1.0,
    data_dir: str | None = None,
) -> Task:
    """EMNIST Balanced, handwritten digits and letters of 47 classes; the paper's CNN.

    Args:
        seed: The seed of the partition.
        partition: How images are divided among clients; see ``divide.PARTITIONS``.
        clients: The number of clients.
        classes_per_client: For the partitions "separate" and "classes".
        iid_share: For the partition "sorted".
        alpha: For the partition "dirichlet".
        parts: For the partition "custom".
        extra: Use the ``emnist-balancedextra`` files too.
        train_limit: At most this many training images, evenly from all classes.
        test_limit: At most this many test images, evenly from all classes.
        client_share: The share of the clients that is kept.
        data_share: The share of its images that each kept client has; the same of the test images.
        data_dir: The data folder, when it is not the usual one.
    """
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
    return federate(
        emnist_data(data_dir, extra=extra),
        division,
        model=emnist_cnn,
        transform=NORMALISE,
        seed=seed,
        train_limit=train_limit,
        test_limit=test_limit,
    )

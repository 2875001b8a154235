"""CIFAR-10 and CIFAR-100: small colour photographs, with the paper's LeNet, cropped and flipped in local steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gradalign.tasks.datasets import cifar_data
from gradalign.tasks.divide import Division
from gradalign.tasks.federate import federate
from gradalign.tasks.images import CropAndFlip, Normalise
from gradalign.tasks.models import lenet
from gradalign.tasks.task import Task

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# Mean and standard deviation of the training pixels, channel by channel.
NORMALISE = {
    10: Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def cifar10(
    *,
    seed: int = 0,
    partition: str = "iid",
    clients: int = 10,
    classes_per_client: int = 2,
    iid_share: float = 0.0,
    alpha: float = 0.5,
    parts: Sequence[Sequence[int]] | str | None = None,
    augment: bool = True,
    train_limit: int | None = None,
    test_limit: int | None = None,
    client_share: float = 1.0,
    data_share: float = 1.0,
    data_dir: str | None = None,
) -> Task:
    """CIFAR-10, colour photographs of ten classes; the paper's LeNet.

    ``augment`` crops and flips the images in local steps; the other settings are those of ``emnist``.
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
    return _cifar(10, division, seed, augment, train_limit, test_limit, data_dir)


def cifar100(
    *,
    seed: int = 0,
    partition: str = "separate",
    clients: int = 50,
    classes_per_client: int = 2,
    iid_share: float = 0.0,
    alpha: float = 0.5,
    parts: Sequence[Sequence[int]] | str | None = None,
    augment: bool = True,
    train_limit: int | None = None,
    test_limit: int | None = None,
    client_share: float = 1.0,
    data_share: float = 1.0,
    data_dir: str | None = None,
) -> Task:
    """CIFAR-100, colour photographs of a hundred classes; the paper's LeNet with 100 outputs.

    ``augment`` crops and flips the images in local steps; the other settings are those of ``emnist``.
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
    return _cifar(100, division, seed, augment, train_limit, test_limit, data_dir)


def _cifar(
    classes: int,
    division: Division,
    seed: int,
    augment: bool,
    train_limit: int | None,
    test_limit: int | None,
    data_dir: str | None,
) -> Task:
    return federate(
        cifar_data(classes, data_dir),
        division,
        model=partial(lenet, classes),
        transform=NORMALISE[classes],
        augment=CropAndFlip(NORMALISE[classes].black()) if augment else None,
        seed=seed,
        train_limit=train_limit,
        test_limit=test_limit,
    )

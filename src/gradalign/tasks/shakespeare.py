"""Shakespeare's plays, letter by letter: a client is a speaking role, the model the paper's two-layer LSTM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradalign.errors import GradalignError
from gradalign.tasks.datasets import shakespeare_data
from gradalign.tasks.divide import Division
from gradalign.tasks.federate import federate
from gradalign.tasks.models import CharLSTM
from gradalign.tasks.task import Task


def as_codes(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Turn bytes into the whole numbers that embeddings and losses take."""
    return tuple(part.to(torch.int64) for part in batch)


def shakespeare(
    *,
    seed: int = 0,
    partition: str = "natural",
    clients: int | None = None,
    iid_share: float = 0.0,
    alpha: float = 0.5,
    parts: Sequence[Sequence[int]] | str | None = None,
    train_limit: int | None = None,
    test_limit: int | None = None,
    client_share: float = 1.0,
    data_share: float = 1.0,
    data_dir: str | None = None,
) -> Task:
    """Shakespeare's plays, the next letter after 80; a client is a speaking role; the paper's LSTM.

    With the natural partition, ``clients`` takes that many of the roles, all when it is not given, and the test set is
    that of the same roles. The other settings are those of ``emnist``.
    """
    if partition in ("one-class", "separate", "classes"):
        raise GradalignError('task.partition: a class here is a letter; use "natural", "iid", "sorted" or "dirichlet"')
    division = Division(
        partition=partition,
        clients=clients,
        iid_share=iid_share,
        alpha=alpha,
        parts=parts,
        client_share=client_share,
        data_share=data_share,
    )
    return federate(
        shakespeare_data(data_dir),
        division,
        model=CharLSTM,
        transform=as_codes,
        seed=seed,
        train_limit=train_limit,
        test_limit=test_limit,
    )

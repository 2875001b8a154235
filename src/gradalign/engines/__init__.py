"""Engines: the machines that do what the server asks of its clients.

An engine hands on a ``Broadcast`` and the ``Participant``s, and brings back replies. Plans are made where the clients'
work is done, by ``gradalign.fast.Group``: in this process, in a worker, on a rank of a job, at a Flower node.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from gradalign.client.exchange import Broadcast, ClientScore, Gradient, Participant, Score, Update
    from gradalign.client.flat import Point

_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Engine(ABC):
    """What every engine offers. Replies come in the participants' order; one that does not answer is left out.

    A reply's tensors are valid until the next reply is asked for: copy what you hold on to.
    """

    attempts: int = 1
    """How often a round is played before too few answers end the run; 1 where clients cannot fail to answer."""
    failures: Mapping[int, str] = {}
    """Why clients were left out of the last phase."""

    @abstractmethod
    def gradients(self, told: Broadcast, who: Sequence[Participant]) -> Iterator[Gradient]:
        """Yield ∇f_i(x), of every client or summed over neighbours; each g_i is remembered where it was taken."""

    @abstractmethod
    def train(self, told: Broadcast, who: Iterable[Participant]) -> Iterator[Update]:
        """Yield Δ_i, of every client or summed over neighbours; participants are asked for as they are needed."""

    @abstractmethod
    def evaluate(self, point: Point) -> Score | None:
        """Return the score on the test examples, None when the task has none."""

    def evaluate_clients(
        self, told: Broadcast, who: Sequence[Participant], *, tuned: bool = False
    ) -> Iterator[ClientScore]:
        """Yield how the point does on each client's own test examples; a client that has none is left out.

        With ``tuned`` every client first trains from x as in a round of plain averaging (the broadcast's lr, the
        client's own stream), is scored where that leads, and throws it away. An engine without this yields nothing.
        """
        yield from ()

    def close(self) -> None:  # noqa: B027 - many have nothing to release
        """Release everything; no process outlives this call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def under_torchrun() -> bool:
    """Return whether a launcher has made this process one rank of a job."""
    return all(name in os.environ for name in _SET_BY_TORCHRUN)


def rank() -> int:
    """Return this process's rank; 0 when it is alone."""
    return int(os.environ["RANK"]) if under_torchrun() else 0

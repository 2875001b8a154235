"""Engines: the machines that carry out what an algorithm plans.

An engine gathers the clients' gradients, lets them train under plans, and evaluates; it knows nothing of algorithms.
Replies come in the order in which the clients were asked for, whatever order the work was done in. A client that does
not answer is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, Self

from gradalign.flat import Point
from gradalign.local import ClientGradient, ClientUpdate, Score
from gradalign.plan import Plan


class Engine(Protocol):
    """What every engine offers. A reply's vectors are valid until the next reply is asked for: copy what you keep."""

    def gradients(
        self, point: Point, clients: Sequence[int], *, round_index: int, limit: int | None = None
    ) -> Iterator[tuple[int, ClientGradient]]:
        """Yield (client, ∇f_i(x)) for every client."""

    def train(
        self, point: Point, plans: Iterable[tuple[int, Plan]], *, round_index: int, lr: float
    ) -> Iterator[tuple[int, ClientUpdate]]:
        """Yield (client, Δ_i) for every planned client; plans are asked for as they are needed."""

    def evaluate(self, point: Point) -> Score | None:
        """Return the score on the test examples, None when the task has none."""

    def close(self) -> None:
        """Release everything; no process outlives this call."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

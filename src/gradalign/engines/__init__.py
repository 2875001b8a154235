"""Engines: the machines that carry out what an algorithm plans.

An engine gathers the clients' gradients, lets them train under plans, and evaluates; it knows nothing of algorithms.
Replies come in the order in which the clients were asked for, whatever order the work was done in. A client that does
not answer is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, Self, runtime_checkable

from gradalign.algorithms.plan import ClientView, Combination, Plan, Shift
from gradalign.client.exchange import ClientGradient, ClientUpdate, GroupGradient, GroupUpdate, Score
from gradalign.client.flat import Point


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


@runtime_checkable
class SummingEngine(Protocol):
    """An engine that can add up what neighbouring clients report where it is made.

    Enough for an algorithm that keeps nothing of single clients, and less to carry: one vector instead of many.
    """

    def sums(self, shifted: bool) -> bool:
        """Return whether that gains anything for this task, for plans that are shifts or for any plans."""

    def keeps_gradients(self, clients: Sequence[int]) -> bool:
        """Return whether ``gradient_sums`` and ``train_sums`` with a shift can be had for these clients."""

    def gradient_sums(
        self, point: Point, clients: Sequence[tuple[int, float]], *, round_index: int, limit: int | None = None
    ) -> Iterator[tuple[list[int], GroupGradient]]:
        """Yield (clients, Σ w_i ∇f_i(x)) for groups of clients, given every client's weight.

        Every client's own gradient is kept for a ``train_sums`` with a shift in the same round.
        """

    def train_sums(
        self,
        point: Point,
        plans: Iterable[tuple[int, Plan, float]],
        *,
        round_index: int,
        lr: float,
        shift: Shift | None = None,
    ) -> Iterator[tuple[list[int], GroupUpdate]]:
        """Yield (clients, Σ w_i Δ_i) for groups of clients, given every client's plan and weight.

        With a shift, the plans are empty and every client is displaced by the shift's common part and its own gradient.
        """


@runtime_checkable
class RemoteEngine(Protocol):
    """An engine whose clients are elsewhere: they keep what is theirs, make their own plans, and may fail.

    It is an ``Engine`` that is given what plans are made from instead of plans, so that it sends a client only what the
    client does not hold itself (ḡ and s, but neither g_i nor k_i).
    """

    attempts: int
    """How often a round is played before too few answers end the run."""
    failures: Mapping[int, str]
    """Why the clients left out of the last phase were left out."""

    def train_views(
        self,
        point: Point,
        algorithm: Combination,
        views: Iterable[tuple[int, Mapping[str, ClientView]]],
        *,
        round_index: int,
        lr: float,
    ) -> Iterator[tuple[int, ClientUpdate]]:
        """Yield (client, Δ_i) for every client that answers; views hold each part's view under its label."""

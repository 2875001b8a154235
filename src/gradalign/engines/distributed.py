"""The distributed engine: the ranks of a ``torchrun`` job do the clients' work, and rank 0 leads.

Rank 0 plays the server's part and asks; the other ranks follow, each with the whole task at hand and one client's work
at a time. What all clients are told is broadcast once. A client trains on the rank that took its gradient. Every rank
drives the same single-threaded trainer as the local engine, and replies are handed on in client order: the bits are the
same for any number of ranks, and the local engine's wherever that one trains clients one by one.
"""

from __future__ import annotations

import itertools
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from gradalign.algorithms.plan import FedAvg, combine
from gradalign.client.exchange import Broadcast, ClientScore, Gradient, Participant, Reply, Score, Update
from gradalign.client.flat import Point
from gradalign.client.trainer import Setup, one_thread
from gradalign.engines import Engine
from gradalign.engines.shared import changed_settings
from gradalign.engines.wire import Wire
from gradalign.engines.worker import Failure
from gradalign.errors import GradalignError, LostRankError
from gradalign.fast import Group, evaluation_spans

_AHEAD = 2  # replies for each rank that may wait for their turn
_NUMBERS = ("round", "lr", "gradient_examples", "participants", "weight_decay", "one_by_one")  # of a broadcast


class DistributedEngine(Engine):
    """Rank 0's side of the job, behind the Engine interface; ``follow`` is the other ranks' side."""

    def __init__(self, setup: Setup) -> None:
        self.wire = Wire()
        self.rank = self.wire.rank
        self._algorithm = combine(FedAvg()) if setup.algorithm is None else setup.algorithm
        with one_thread():
            self._group = Group(replace(setup, clients_per_round=0))  # one by one: the bits of any number of ranks
        self._point = self._group.one.flat.read()
        self._told = Broadcast(point=self._point, round=0, algorithm=self._algorithm)
        self._rank_of: dict[int, int] = {}  # who has taken a client's gradient at the present point
        self._in_step = True  # whether every other rank waits to be asked; if not, nothing more can be said to them

    def _do(self, command: str, order: Participant | tuple[int, int]) -> Reply | Score | ClientScore | None:
        """Do one client's work, or evaluate some of the test examples."""
        with one_thread():
            if isinstance(order, tuple):
                return self._group.evaluate(self._point, *order)
            if command in ("score", "tune"):
                return self._group.score_client(self._told, order, tuned=command == "tune")
            work = self._group.train if command == "train" else self._group.gradients
            return work(self._told, [order])[0]

    # The leader's side

    def _say(self, *words: Any) -> None:
        for peer in self.wire.others:
            self.wire.say(words, peer)

    def _move(self, point: Point) -> None:
        """Let all ranks have this point."""
        if all(new is old for new, old in zip(point, self._point, strict=True)):
            return
        self._in_step = False
        self._say("move")
        for vector in point:
            self.wire.broadcast(vector)
        self._point, self._rank_of, self._in_step = point, {}, True

    def _tell(self, told: Broadcast) -> None:
        """Let all ranks have what all clients are told."""
        self._move(told.point)
        settings = changed_settings(told.algorithm, self._algorithm)
        if settings is None:
            raise GradalignError("the ranks of a job were started for another algorithm")
        numbers, mean = {name: getattr(told, name) for name in _NUMBERS}, [] if told.mean is None else [told.mean]
        self._in_step = False
        self._say("told", numbers, settings, bool(mean), list(told.shared))
        for vector in (*mean, *told.shared.values()):
            self.wire.broadcast(vector.to(told.point.x.dtype))
        self._told, self._in_step = told, True

    def _ask(self, command: str, order: Participant | tuple[int, int], peer: int) -> None:
        kept = {} if isinstance(order, tuple) else order.kept
        words = order if isinstance(order, tuple) else (order.client, order.weight, order.share, list(kept))
        self.wire.say((command, *words), peer)
        for vector in kept.values():
            self.wire.send(vector.to(self._point.x.dtype), peer)

    def _hear(self, command: str, peer: int) -> Reply | Score | ClientScore | GradalignError | None:
        """Return what a rank answers; an error of its own is raised when its turn comes."""
        done, numbers = self.wire.hear(peer)
        if not done:
            return Failure(**numbers).as_error()
        if command == "evaluate":
            parts = range(numbers.pop("predictions"))
            return Score(**numbers, predictions=tuple((self.wire.take(peer), self.wire.take(peer)) for _ in parts))
        if command in ("score", "tune"):
            return ClientScore(**numbers) if numbers else None
        numbers = {name: tuple(value) if isinstance(value, list) else value for name, value in numbers.items()}
        vector = self.wire.receive(self._point.x, peer)
        if command == "gradient":
            return Gradient(vector=vector, **numbers)
        floats, ints = self.wire.receive(self._point.floats, peer), self.wire.receive(self._point.ints, peer)
        return Update(vector=vector, floats=floats, ints=ints, **numbers)

    def _stream(self, command: str, orders: Sequence[Any], ranks: Sequence[int]) -> Iterator[Any]:
        """Have the ranks do orders, one each at a time; yield the answers in the orders' order."""
        # Only this rank waits, and it asks a rank again when that one has answered: a failed phase leaves all in step.
        waiting = [deque(place for place, owner in enumerate(ranks) if owner == rank) for rank in range(self.wire.size)]
        answers, turn = dict[int, Any](), 0
        while turn < len(orders):
            soon = turn + _AHEAD * self.wire.size
            wave = {rank: queue.popleft() for rank, queue in enumerate(waiting) if queue and queue[0] < soon}
            own = wave.pop(0, None)
            self._in_step = False
            for peer, place in wave.items():
                self._ask(command, orders[place], peer)
            if own is not None:
                try:
                    answers[own] = self._do(command, orders[own])
                except GradalignError as error:
                    answers[own] = error
            for peer, place in wave.items():
                answers[place] = self._hear(command, peer)
            self._in_step = True
            while turn in answers:
                answer = answers.pop(turn)
                if isinstance(answer, GradalignError):
                    raise answer
                yield answer
                turn += 1

    def gradients(self, told: Broadcast, who: Sequence[Participant]) -> Iterator[Gradient]:
        self._tell(told)
        for place, one in enumerate(who):
            self._rank_of.setdefault(one.client, place % self.wire.size)
        return self._stream("gradient", who, [self._rank_of[one.client] for one in who])

    def train(self, told: Broadcast, who: Iterable[Participant]) -> Iterator[Update]:
        self._tell(told)
        orders = list(who)
        ranks = [self._rank_of.get(one.client, place % self.wire.size) for place, one in enumerate(orders)]
        return self._stream("train", orders, ranks)

    def evaluate(self, point: Point) -> Score | None:
        examples = self._group.setup.task.test_examples
        if examples is None:
            return None
        self._move(point)
        spans = evaluation_spans(len(examples))
        return sum(self._stream("evaluate", spans, [place % self.wire.size for place in range(len(spans))]), Score())

    def evaluate_clients(
        self, told: Broadcast, who: Sequence[Participant], *, tuned: bool = False
    ) -> Iterator[ClientScore]:
        self._tell(told)
        ranks = [place % self.wire.size for place in range(len(who))]
        return (score for score in self._stream("tune" if tuned else "score", who, ranks) if score is not None)

    def finish(self, result: Any, point: Point) -> None:
        """Tell the other ranks that the run is over, its result (anything JSON can say) and its final point."""
        self._move(point)
        self._in_step = False
        self._say("stop", result)

    def close(self) -> None:
        """Let the other ranks go, if they still listen."""
        if self.rank == 0 and self._in_step:
            self._in_step = False
            for peer in self.wire.others:
                with suppress(LostRankError):
                    self.wire.say(("stop",), peer)
        self.wire.close()

    # The other ranks' side

    def follow(self) -> tuple[Any, Point]:
        """Do what rank 0 asks until it ends the run; return the result and the final point."""
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no Python code runs while this rank waits to be asked
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        while True:
            command, *words = self.wire.hear(0)
            if command == "stop":
                if not words:
                    raise GradalignError("rank 0 ended the run without a result")
                return words[0], self._point
            if command == "move":
                self._point = Point(*(self.wire.broadcast(torch.empty_like(vector)) for vector in self._point))
            elif command == "told":
                self._told = self._hear_told(*words)
            else:
                self._answer(command, words)

    def _hear_told(self, numbers: dict[str, Any], settings: Any, mean: bool, shared: list[str]) -> Broadcast:
        x = self._point.x
        return Broadcast(
            point=self._point,
            algorithm=self._algorithm.with_values(settings),
            mean=self.wire.broadcast(torch.empty_like(x)) if mean else None,
            shared={label: self.wire.broadcast(torch.empty_like(x)) for label in shared},
            **numbers,
        )

    def _answer(self, command: str, words: list[Any]) -> None:
        order: Participant | tuple[int, int] = tuple(words)
        if command != "evaluate":
            client, weight, share, labels = words
            kept = {label: self.wire.receive(self._point.x, 0) for label in labels}
            order = Participant(client=client, weight=weight, share=share, kept=kept)
        try:
            reply = self._do(command, order)
        except GradalignError as error:
            self.wire.say((False, asdict(Failure.of(error))), 0)
            return
        numbers = {} if reply is None else dict(vars(reply))
        vectors = [numbers.pop(name) for name in ("vector", "floats", "ints") if name in numbers]
        if isinstance(reply, Score):
            numbers["predictions"] = len(reply.predictions)
        self.wire.say((True, numbers), 0)
        for vector in vectors:
            self.wire.send(vector, 0)
        for tensor in itertools.chain(*reply.predictions) if isinstance(reply, Score) else ():
            self.wire.give(tensor, 0)

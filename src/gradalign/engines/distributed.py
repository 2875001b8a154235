"""The distributed engine: the ranks of a ``torchrun`` job do the clients' work, and rank 0 leads.

Rank 0 plays the server's part and asks; the other ranks follow, each with the whole task at hand and one client's work
at a time. What all clients are told is broadcast once. A client trains on the rank that took its gradient. Every rank
drives the same single-threaded trainer as the local engine, and replies are handed on in client order: the bits are the
same for any number of ranks, and the local engine's wherever that one trains clients one by one.
"""

from __future__ import annotations

import json
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradalign.algorithms.plan import FedAvg, combine
from gradalign.client.exchange import Broadcast, Gradient, Participant, Reply, Score, Update
from gradalign.client.flat import Point
from gradalign.client.trainer import Setup, one_thread
from gradalign.engines import Engine, under_torchrun
from gradalign.engines.shared import changed_settings
from gradalign.engines.worker import Failure
from gradalign.errors import GradalignError, LostRankError
from gradalign.fast import Group, evaluation_spans
from gradalign.stopping import left_to_the_kernel

_AHEAD = 2  # replies for each rank that may wait for their turn
_NUMBERS = ("round", "lr", "gradient_examples", "participants", "weight_decay", "one_by_one")  # of a broadcast


class Wire:
    """Messages between rank 0 and the others over gloo; a rank that has ended is named in a LostRankError."""

    def __init__(self) -> None:
        if not dist.is_available():
            raise GradalignError("this torch was built without torch.distributed; use the local engine")
        self._owned = not dist.is_initialized()
        if self._owned:
            if not under_torchrun():
                raise GradalignError(
                    "the distributed engine needs ranks; start it with "
                    "torchrun --nproc-per-node N -m gradalign run RECIPE"
                )
            with left_to_the_kernel():
                dist.init_process_group("gloo")
        # Vectors are handed over on the CPU: a group of the user's that speaks only nccl gets one beside it.
        gloo = self._owned or dist.get_backend() == "gloo"
        self._group = None if gloo else dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.others = range(1, self.size) if self.rank == 0 else range(1)  # with whom this rank speaks

    @contextmanager
    def _with(self, peer: int | None) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            late = "timed out" in str(error).lower()
            what = "did not answer in time" if late else "ended before its work was done"
            raise LostRankError(f"{'a rank' if peer is None else f'rank {peer}'} of the job {what}") from error

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor whose shape and kind the receiver knows."""
        if tensor.numel():
            with self._with(peer):
                dist.send(tensor.detach().cpu().contiguous(), peer, group=self._group)

    def receive(self, like: Tensor, peer: int) -> Tensor:
        """Receive a tensor with the shape and kind of ``like``."""
        tensor = torch.empty(like.shape, dtype=like.dtype)
        if tensor.numel():
            with self._with(peer):
                dist.recv(tensor, peer, group=self._group)
        return tensor

    def say(self, value: Any, peer: int) -> None:
        """Send anything that JSON can say."""
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        self.send(torch.tensor([len(data)]), peer)
        self.send(data, peer)

    def hear(self, peer: int) -> Any:
        """Receive what ``say`` sent."""
        length = int(self.receive(torch.empty(1, dtype=torch.int64), peer))
        return json.loads(bytes(self.receive(torch.empty(length, dtype=torch.uint8), peer).tolist()))

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Give rank 0's tensor to every rank; all call this with the same shape and kind."""
        tensor = tensor.detach().cpu().contiguous()
        if tensor.numel():
            try:
                with self._with(1 - self.rank if self.size == 2 else None):
                    dist.broadcast(tensor, 0, group=self._group)
            except LostRankError:
                for peer in self.others:  # a broadcast does not say who is gone, sending something may
                    self.send(torch.zeros(1), peer)
                raise
        return tensor

    def close(self) -> None:
        """Leave the group that was joined here."""
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()


def _vectors(point: Point) -> tuple[Tensor, Tensor, Tensor]:
    return point.x, point.floats, point.ints


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

    def _do(self, command: str, order: Participant | tuple[int, int]) -> Reply | Score:
        """Do one client's work, or evaluate some of the test examples."""
        with one_thread():
            if isinstance(order, tuple):
                return self._group.evaluate(self._point, *order)
            work = self._group.train if command == "train" else self._group.gradients
            return work(self._told, [order])[0]

    # The leader's side

    def _say(self, *words: Any) -> None:
        for peer in self.wire.others:
            self.wire.say(words, peer)

    def _move(self, point: Point) -> None:
        """Let all ranks have this point."""
        if all(new is old for new, old in zip(_vectors(point), _vectors(self._point), strict=True)):
            return
        self._in_step = False
        self._say("move")
        for vector in _vectors(point):
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

    def _hear(self, command: str, peer: int) -> Reply | Score | GradalignError:
        """Return what a rank answers; an error of its own is raised when its turn comes."""
        done, numbers = self.wire.hear(peer)
        if not done:
            return Failure(**numbers).as_error()
        if command == "evaluate":
            return Score(**numbers)
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
                like = _vectors(self._point)
                self._point = Point(*(self.wire.broadcast(torch.empty_like(vector)) for vector in like))
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
        numbers = {one.name: getattr(reply, one.name) for one in fields(reply)}
        vectors = [numbers.pop(name) for name in ("vector", "floats", "ints") if name in numbers]
        self.wire.say((True, numbers), 0)
        for vector in vectors:
            self.wire.send(vector, 0)

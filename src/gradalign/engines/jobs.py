"""What the server asks of a worker process, and the buffers of shared memory on which vectors change hands."""

from __future__ import annotations

import math
import mmap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradalign.algorithms.plan import Plan
from gradalign.client.exchange import ClientGradient, ClientUpdate, GroupGradient, GroupUpdate, Score
from gradalign.client.flat import Point
from gradalign.errors import ClientError, GradalignError
from gradalign.fast.group import GroupTrainer

_NOTHING = torch.empty(0)
_LINE = 16  # numbers that fill whole lines of the cache, in any precision


class Slot:
    """Room for one group's work: the plans' vectors going in, the replies' coming out, a row for each client."""

    __slots__ = ("correction", "displacement", "floats", "ints", "out")

    def __init__(self, vectors: Tensor, floats: Tensor, ints: Tensor) -> None:
        # Inputs and output apart: when a worker dies half-way, its successor finds the inputs unharmed.
        self.displacement, self.correction, self.out = vectors
        self.floats, self.ints = floats, ints


def _shared(*shape: int, dtype: torch.dtype, forked: bool) -> Tensor:
    """Return zeros that worker processes see; most systems give them memory only where they are touched."""
    size = math.prod(shape) * dtype.itemsize
    if forked and size:
        return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
    zeros = torch.empty(0, dtype=dtype)
    zeros.set_(torch.UntypedStorage._new_shared(size))  # the kernel's fresh pages are zeros
    return zeros.view(shape)


class SharedBuffers:
    """All shared memory of a pool: the server's point, slots for groups of up to ``width`` clients, and shelves."""

    def __init__(self, point: Point, slots: int, width: int, *, forked: bool = False) -> None:
        d, f, i = point.x.numel(), point.floats.numel(), point.ints.numel()
        self._forked = forked

        def room(*shape: int, like: Tensor) -> Tensor:
            return _shared(*shape, dtype=like.dtype, forked=forked)

        self.point = Point(room(d, like=point.x), room(f, like=point.floats), room(i, like=point.ints))
        # Every vector begins a line of the cache: products written to other places may round differently.
        self._vectors = room(slots, 3, width, -(-d // _LINE) * _LINE, like=point.x)[..., :d]
        self._floats = room(slots, width, f, like=point.floats)
        self._ints = room(slots, width, i, like=point.ints)
        self.shelves = room(0, 0, like=point.x)
        """A row for each client of a round, where its gradient waits for the round's second phase."""

    def has_shelves(self, clients: int, length: int) -> bool:
        """Return whether there is a shelf of this length for every client."""
        there, long = self.shelves.shape
        return there >= clients and long >= length

    def set_up_shelves(self, clients: int, length: int) -> None:
        """Make shelves, which only workers started after this see."""
        try:
            self.shelves = _shared(clients, length, dtype=self.shelves.dtype, forked=self._forked)
        except OSError as error:
            raise GradalignError(f"no memory for the gradients of {clients} clients: {error}") from error

    def slot(self, number: int) -> Slot:
        """Return one slot's vectors."""
        return Slot(self._vectors[number], self._floats[number], self._ints[number])


@dataclass(frozen=True, kw_only=True)
class GradientJob:
    """Write ∇f_i(x) of a group to the slot."""

    slot: int
    clients: list[int]
    round_index: int
    limit: int | None

    def run(self, trainer: GroupTrainer, buffers: SharedBuffers) -> list[ClientGradient]:
        """Do the work in a worker; the replies' vectors stay in the slot."""
        out = buffers.slot(self.slot).out
        replies = trainer.gradients(
            buffers.point, self.clients, round_index=self.round_index, limit=self.limit, out=out
        )
        return [replace(reply, gradient=_NOTHING) for reply in replies]

    def collect(self, replies: list[ClientGradient], buffers: SharedBuffers) -> list[ClientGradient]:
        """Give the replies their vectors back, in the server."""
        out = buffers.slot(self.slot).out
        return [replace(reply, gradient=out[row]) for row, reply in enumerate(replies)]


@dataclass(frozen=True, kw_only=True)
class GradientSumJob:
    """Write Σ w_i ∇f_i(x) of a group to the slot's first row, and each gradient to its shelf."""

    slot: int
    clients: list[int]
    weights: list[float]
    shelves: list[int]
    round_index: int
    limit: int | None

    def run(self, trainer: GroupTrainer, buffers: SharedBuffers) -> GroupGradient:
        """Do the work in a worker; the reply's vector stays in the slot."""
        reply = trainer.gradient_sum(
            buffers.point,
            self.clients,
            self.weights,
            round_index=self.round_index,
            limit=self.limit,
            out=buffers.slot(self.slot).out[0],
            shelves=[buffers.shelves[row] for row in self.shelves],
        )
        return replace(reply, gradient=_NOTHING)

    def collect(self, reply: GroupGradient, buffers: SharedBuffers) -> GroupGradient:
        """Give the reply its vector back, in the server."""
        return replace(reply, gradient=buffers.slot(self.slot).out[0])


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Execute the plans whose vectors lie in the slot; write Δ_i and the buffers there."""

    slot: int
    clients: list[int]
    round_index: int
    lr: float
    plans: list[tuple[bool, bool, float, bool]]
    """Of each client: whether a displacement and a correction lie in the slot, the pull, and the form."""

    @classmethod
    def put(
        cls,
        plans: Sequence[Plan],
        buffers: SharedBuffers,
        *,
        slot: int,
        clients: list[int],
        round_index: int,
        lr: float,
    ) -> TrainJob:
        """Write the plans' vectors to the buffers."""
        room, described = buffers.slot(slot), []
        for row, plan in enumerate(plans):
            if plan.displacement is not None:
                room.displacement[row].copy_(plan.displacement)
            if plan.correction is not None:
                room.correction[row].copy_(plan.correction)
            given = plan.displacement is not None, plan.correction is not None
            described.append((*given, plan.pull, plan.every_step))
        return cls(slot=slot, clients=clients, round_index=round_index, lr=lr, plans=described)

    def run(self, trainer: GroupTrainer, buffers: SharedBuffers) -> list[ClientUpdate]:
        """Do the work in a worker; the replies' vectors stay in the slot."""
        room = buffers.slot(self.slot)
        replies = trainer.train(
            buffers.point, self.clients, self.read(room), round_index=self.round_index, lr=self.lr, out=room.out
        )
        for row, reply in enumerate(replies):
            room.floats[row].copy_(reply.floats)
            room.ints[row].copy_(reply.ints)
        return [replace(reply, update=_NOTHING, floats=_NOTHING, ints=_NOTHING) for reply in replies]

    def read(self, room: Slot) -> list[Plan]:
        """Return the plans that lie in the slot."""
        return [
            Plan(
                displacement=room.displacement[row] if displaced else None,
                correction=room.correction[row] if corrected else None,
                pull=pull,
                every_step=every_step,
            )
            for row, (displaced, corrected, pull, every_step) in enumerate(self.plans)
        ]

    def collect(self, replies: list[ClientUpdate], buffers: SharedBuffers) -> list[ClientUpdate]:
        """Give the replies their vectors back, in the server."""
        room = buffers.slot(self.slot)
        return [
            replace(reply, update=room.out[row], floats=room.floats[row], ints=room.ints[row])
            for row, reply in enumerate(replies)
        ]


@dataclass(frozen=True, kw_only=True)
class SumJob:
    """Execute the plans whose vectors lie in the slot; write Σ w_i Δ_i and the sum of the buffers to its first row."""

    each: TrainJob
    weights: list[float]
    along: float = 0.0
    shelves: list[int]
    """Where the clients' gradients are, when they start from x + along·g_i; else empty."""

    @property
    def slot(self) -> int:
        """The slot's number."""
        return self.each.slot

    @property
    def clients(self) -> list[int]:
        """Whose work this is."""
        return self.each.clients

    def run(self, trainer: GroupTrainer, buffers: SharedBuffers) -> GroupUpdate:
        """Do the work in a worker; the reply's vectors stay in the slot."""
        room, each = buffers.slot(self.slot), self.each
        reply = trainer.train_sum(
            buffers.point,
            each.clients,
            each.read(room),
            self.weights,
            round_index=each.round_index,
            lr=each.lr,
            out=room.out[0],
            along=self.along,
            shelves=[buffers.shelves[row] for row in self.shelves],
        )
        room.floats[0].copy_(reply.floats)
        room.ints[0].copy_(reply.ints)
        return replace(reply, update=_NOTHING, floats=_NOTHING, ints=_NOTHING)

    def collect(self, reply: GroupUpdate, buffers: SharedBuffers) -> GroupUpdate:
        """Give the reply its vectors back, in the server."""
        room = buffers.slot(self.slot)
        return replace(reply, update=room.out[0], floats=room.floats[0], ints=room.ints[0])


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """Evaluate one chunk of the test examples."""

    slot: int
    start: int
    stop: int

    def run(self, trainer: GroupTrainer, buffers: SharedBuffers) -> Score:
        """Do the work in a worker."""
        return trainer.evaluate(buffers.point, self.start, self.stop)

    def collect(self, reply: Score, buffers: SharedBuffers) -> Score:
        """Nothing lies in the slot."""
        return reply


Job = GradientJob | GradientSumJob | TrainJob | SumJob | EvaluationJob


def for_whom(job: Job) -> str:
    """Say whose work a job is."""
    if isinstance(job, EvaluationJob):
        return "the evaluation"
    first, last = job.clients[0], job.clients[-1]
    return f"client {first}" if first == last else f"one of the clients {first} to {last}"


@dataclass(frozen=True)
class Failure:
    """A worker's answer when the work raised."""

    message: str
    details: str
    by_user_code: bool

    @classmethod
    def of(cls, error: GradalignError) -> Failure:
        """Describe an error in a form that crosses the process boundary."""
        details = "".join(traceback.format_exception(error))
        return cls(str(error), details, isinstance(error, ClientError))

    def as_error(self) -> GradalignError:
        """Return the error to raise in the server, with the worker's traceback as a note."""
        error = ClientError(self.message) if self.by_user_code else GradalignError(self.message)
        error.add_note("in a worker process:\n" + self.details)
        return error

"""What the server asks of a worker process, and the desk of shared memory on which vectors change hands."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradalign.errors import ClientError, GradalignError
from gradalign.flat import Point
from gradalign.local import ClientGradient, ClientUpdate, LocalTrainer, Score
from gradalign.plan import Plan

EVALUATION_CHUNK = 1000


def evaluation_rows(examples: int) -> list[Tensor]:
    """Return the fixed chunks in which test examples are evaluated, whoever does it."""
    return list(torch.arange(examples).split(EVALUATION_CHUNK))


@contextmanager
def run_for_client(client: int | None) -> Iterator[None]:
    """Turn what user code raises into a ClientError that names the client."""
    try:
        yield
    except GradalignError:
        raise
    except Exception as error:
        where = "the evaluation" if client is None else f"client {client}"
        message = f"{where} failed: {type(error).__name__}: {error}"
        raise ClientError(message) from error


class Slot:
    """Room for one client's work: the plan's vectors going in, the reply's coming out."""

    __slots__ = ("correction", "displacement", "floats", "ints", "out")

    def __init__(self, vectors: Tensor, floats: Tensor, ints: Tensor) -> None:
        # Inputs and output apart: when a worker dies half-way, its successor finds the inputs unharmed.
        self.displacement, self.correction, self.out = vectors
        self.floats, self.ints = floats, ints


class Desk:
    """All shared memory of a pool: the server's point, and some slots."""

    def __init__(self, point: Point, slots: int) -> None:
        d, f, i = point.x.numel(), point.floats.numel(), point.ints.numel()
        self.point = Point(
            torch.zeros_like(point.x).share_memory_(),
            torch.zeros_like(point.floats).share_memory_(),
            torch.zeros_like(point.ints).share_memory_(),
        )
        self._vectors = torch.zeros(slots, 3, d, dtype=point.x.dtype).share_memory_()
        self._floats = torch.zeros(slots, f, dtype=point.floats.dtype).share_memory_()
        self._ints = torch.zeros(slots, i, dtype=torch.int64).share_memory_()

    def slot(self, number: int) -> Slot:
        """Return one slot's vectors."""
        return Slot(self._vectors[number], self._floats[number], self._ints[number])


@dataclass(frozen=True, kw_only=True)
class GradientJob:
    """Write ∇f_i(x) to the slot."""

    slot: int
    client: int
    round_index: int
    limit: int | None

    def run(self, trainer: LocalTrainer, desk: Desk) -> ClientGradient:
        """Do the work in a worker; the reply's vector stays in the slot."""
        examples = trainer.task.client(self.client)
        reply = trainer.gradient(
            desk.point, examples, client=self.client, round_index=self.round_index, limit=self.limit
        )
        desk.slot(self.slot).out.copy_(reply.gradient)
        return ClientGradient(
            gradient=torch.empty(0), loss=reply.loss, accuracy=reply.accuracy, examples=reply.examples
        )

    def collect(self, reply: ClientGradient, desk: Desk) -> ClientGradient:
        """Give the reply its vector back, in the server."""
        return ClientGradient(
            gradient=desk.slot(self.slot).out, loss=reply.loss, accuracy=reply.accuracy, examples=reply.examples
        )


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Execute the plan whose vectors lie in the slot; write Δ_i and the buffers there."""

    slot: int
    client: int
    round_index: int
    lr: float
    pull: float
    every_step: bool
    displaced: bool
    corrected: bool

    @classmethod
    def put(cls, plan: Plan, desk: Desk, *, slot: int, client: int, round_index: int, lr: float) -> TrainJob:
        """Lay the plan's vectors on the desk."""
        room = desk.slot(slot)
        if plan.displacement is not None:
            room.displacement.copy_(plan.displacement)
        if plan.correction is not None:
            room.correction.copy_(plan.correction)
        return cls(
            slot=slot,
            client=client,
            round_index=round_index,
            lr=lr,
            pull=plan.pull,
            every_step=plan.every_step,
            displaced=plan.displacement is not None,
            corrected=plan.correction is not None,
        )

    def run(self, trainer: LocalTrainer, desk: Desk) -> tuple[float, int, int, float]:
        """Do the work in a worker; the reply's vectors stay in the slot."""
        room = desk.slot(self.slot)
        plan = Plan(
            displacement=room.displacement if self.displaced else None,
            correction=room.correction if self.corrected else None,
            pull=self.pull,
            every_step=self.every_step,
        )
        examples = trainer.task.client(self.client)
        reply = trainer.train(desk.point, plan, examples, client=self.client, round_index=self.round_index, lr=self.lr)
        room.out.copy_(reply.update)
        room.floats.copy_(reply.floats)
        room.ints.copy_(reply.ints)
        return reply.loss, reply.steps, reply.examples, reply.travel

    def collect(self, reply: tuple[float, int, int, float], desk: Desk) -> ClientUpdate:
        """Give the reply its vectors back, in the server."""
        room, (loss, steps, examples, travel) = desk.slot(self.slot), reply
        return ClientUpdate(
            update=room.out,
            floats=room.floats,
            ints=room.ints,
            loss=loss,
            steps=steps,
            examples=examples,
            travel=travel,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """Evaluate one chunk of the test examples."""

    slot: int
    start: int
    stop: int

    client: None = None

    def run(self, trainer: LocalTrainer, desk: Desk) -> Score:
        """Do the work in a worker."""
        examples = trainer.task.test_examples
        if examples is None:
            raise GradalignError("the task has no test examples")
        return trainer.evaluate(desk.point, examples, torch.arange(self.start, self.stop))

    def collect(self, reply: Score, desk: Desk) -> Score:
        """Nothing lies in the slot."""
        return reply


Job = GradientJob | TrainJob | EvaluationJob


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

"""The inner loop: executes one plan on one client's data. The hot path.

A ``LocalTrainer`` holds one model as flat vectors and does three things for a client: its gradient at x, its K local
steps under a plan, and the evaluation of some examples. Every engine drives the same trainer, which is why they agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradalign.errors import GradalignError
from gradalign.flat import FlatModel, Point
from gradalign.plan import Plan
from gradalign.schedule import Schedule, require
from gradalign.seeding import Purpose, global_stream, torch_stream
from gradalign.tasks.data import Examples
from gradalign.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a client trains in one round.

    Attributes:
        lr: The learning rate α, a number or a schedule over rounds.
        steps: K, the number of local steps. Give this or ``epochs``.
        epochs: E, the number of passes over the client's data (1 when neither is given).
        batch_size: Examples per step; None takes the whole client.
        weight_decay: wd, added to every step's gradient as wd·y.
        momentum: Heavy-ball momentum of the local steps, from zero in every round.
        clip_norm: Scale the loss gradient down to this norm when it is longer, before decay, correction and pull.
        gradient_examples: How many of the client's examples the gradient phase uses; None takes all. They are the
            first ones that the local steps of the same round will see, so K = 1 with as many as ``batch_size``
            is GradAlign on mini-batches.
    """

    lr: float | Schedule = 0.1
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    clip_norm: float | None = None
    gradient_examples: int | None = None

    def __post_init__(self) -> None:
        require("local.lr", self.lr, above=0.0)
        require("local.weight_decay", self.weight_decay, least=0.0)
        if not 0.0 <= self.momentum < 1.0:
            raise GradalignError(f"local.momentum must be in [0, 1), got {self.momentum:g}")
        if self.clip_norm is not None:
            require("local.clip_norm", self.clip_norm, above=0.0)
        if self.steps is not None and self.epochs is not None:
            raise GradalignError("local.steps and local.epochs were both given; choose one")
        for name in ("steps", "epochs", "batch_size", "gradient_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise GradalignError(f"local.{name} must be at least 1, got {value}")

    def steps_for(self, examples: int) -> int:
        """Return K for a client with this many examples."""
        if self.steps is not None:
            return self.steps
        return (self.epochs or 1) * math.ceil(examples / self.batch_for(examples))

    def batch_for(self, examples: int) -> int:
        """Return the batch size for a client with this many examples."""
        return min(examples, self.batch_size or examples)

    def travel(self, lr: float, steps: int) -> float:
        """Return the sum of the step sizes given to all gradients of a round: αK, more with momentum.

        With momentum m the k-th of K gradients acts with α(1 + m + … + m^{K−k}).
        """
        m = self.momentum
        return lr * math.fsum((1.0 - m ** (k + 1)) / (1.0 - m) for k in range(steps))


@dataclass(frozen=True, kw_only=True)
class ClientGradient:
    """∇f_i(x) and what was seen on the way."""

    gradient: Tensor
    loss: float
    accuracy: float | None
    examples: int


@dataclass(frozen=True, kw_only=True)
class ClientUpdate:
    """Δ_i = y_K − y_0, the client's buffers after training, and what was seen on the way."""

    update: Tensor
    floats: Tensor
    ints: Tensor
    loss: float
    steps: int
    examples: int
    travel: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """Sums over evaluated examples, so that parts can be added."""

    loss: float = 0.0
    correct: float | None = 0.0
    examples: int = 0

    def __add__(self, other: Score) -> Score:
        known = self.correct is not None and other.correct is not None
        return Score(
            loss=self.loss + other.loss,
            correct=(self.correct or 0.0) + (other.correct or 0.0) if known else None,
            examples=self.examples + other.examples,
        )


def _shuffled_batches(examples: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield index batches for ever: without replacement within a pass, each pass in a new order."""
    while True:
        yield from torch.randperm(examples, generator=generator).split(size)


class LocalTrainer:
    """Does a client's work on one model; not thread-safe."""

    def __init__(self, task: Task, local: LocalTraining, seed: int, device: torch.device | str = "cpu") -> None:
        self.task, self.local, self.seed = task, local, seed
        self.device = torch.device(device)
        self.flat = FlatModel(task.make_model(seed, self.device))
        self.dtype = self.flat.vector.dtype

    def _place(self, batch: Any) -> Any:
        """Move a batch to the model's device, floats in the model's precision."""
        if isinstance(batch, Tensor):
            return batch.to(self.device, self.dtype if batch.is_floating_point() else None)
        if isinstance(batch, dict):
            return {key: self._place(value) for key, value in batch.items()}
        if isinstance(batch, tuple | list):
            placed = [self._place(value) for value in batch]
            return type(batch)(*placed) if hasattr(batch, "_fields") else type(batch)(placed)
        return batch

    def _loss(self, batch: Any) -> tuple[Tensor, Any, Any]:
        outputs, targets = self.task.predict(self.flat.module, self._place(batch))
        loss = self.task.loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise GradalignError(f"the loss must be a scalar tensor, the mean over the batch; got {kind}")
        return loss, outputs, targets

    def _vector(self, vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.to(self.device, self.dtype)

    def gradient(
        self, point: Point, examples: Examples, *, client: int, round_index: int, limit: int | None = None
    ) -> ClientGradient:
        """Return ∇f_i(x) over the whole client or its first ``limit`` shuffled examples; buffers stay as they are."""
        count = len(examples)
        index = torch.arange(count)
        if limit is not None and limit < count:
            index = torch.randperm(count, generator=torch_stream(self.seed, Purpose.SHUFFLE, round_index, client))
            index = index[:limit]
        chunk = max(2 * self.local.batch_for(count), 600)
        flat = self.flat
        flat.load(point)
        flat.module.train()
        flat.attach_gradients()
        flat.gradient.zero_()
        loss_sum, correct, known = 0.0, 0.0, True
        with global_stream(self.seed, Purpose.GRADIENT, round_index, client):
            for rows in index.split(chunk):
                share = len(rows) / len(index)
                loss, outputs, targets = self._loss(examples.batch(rows))
                (loss * share).backward()
                loss_sum += float(loss.detach()) * share
                accuracy = self.task.accuracy(outputs, targets)
                known = known and accuracy is not None
                correct += float(accuracy or 0.0) * share
        return ClientGradient(
            gradient=flat.gradient, loss=loss_sum, accuracy=correct if known else None, examples=len(index)
        )

    def train(
        self, point: Point, plan: Plan, examples: Examples, *, client: int, round_index: int, lr: float
    ) -> ClientUpdate:
        """Execute a plan from the server's point and report Δ_i."""
        count = len(examples)
        steps = self.local.steps_for(count)
        batches = _shuffled_batches(
            count, self.local.batch_for(count), torch_stream(self.seed, Purpose.SHUFFLE, round_index, client)
        )
        flat = self.flat
        flat.load(point)
        flat.module.train()
        flat.attach_gradients()
        with global_stream(self.seed, Purpose.TRAIN, round_index, client):
            update, loss, seen = self._walk(plan, itertools.islice(batches, steps), examples, lr)
        floats, ints = flat.read_buffers()
        return ClientUpdate(
            update=update,
            floats=floats,
            ints=ints,
            loss=loss / steps,
            steps=steps,
            examples=seen,
            travel=self.local.travel(lr, steps),
        )

    def _walk(self, plan: Plan, batches: Iterator[Tensor], examples: Examples, lr: float) -> tuple[Tensor, float, int]:
        """Take the local steps from ``flat.vector`` = x; return Δ, the sum of the losses and the examples seen.

        y, where gradients are taken, is ``flat.vector``. With the displacement inside every step the client's own
        point is z = y − v; with the displacement at the start it is y itself.
        """
        y, direction = self.flat.vector, self.flat.gradient
        shift = self._vector(plan.displacement)
        # The step's affine part: wd·y + c + μ(y − x) = decay·y + constant.
        decay = self.local.weight_decay + plan.pull
        constant = self._vector(plan.correction)
        if plan.pull:
            constant = -plan.pull * y if constant is None else constant - plan.pull * y
        inside = plan.every_step and shift is not None
        z = y.clone() if inside else y
        if shift is not None and not inside:
            y.add_(shift)
        start = z.clone()
        velocity: Tensor | None = None
        total, seen, augment = torch.zeros((), dtype=torch.float64), 0, self.task.augment
        for rows in batches:
            if inside and shift is not None:
                torch.add(z, shift, out=y)
            batch = examples.batch(rows)
            total += self._direction(batch if augment is None else augment(batch), decay, constant)
            seen += len(rows)
            if self.local.momentum:
                velocity = direction.clone() if velocity is None else velocity.mul_(self.local.momentum).add_(direction)
            z.add_(direction if velocity is None else velocity, alpha=-lr)
        return z - start, float(total), seen

    def _direction(self, batch: Any, decay: float, constant: Tensor | None) -> Tensor:
        """Fill ``flat.gradient`` with ∇f(y; batch) + decay·y + constant and return the loss."""
        y, direction, clip = self.flat.vector, self.flat.gradient, self.local.clip_norm
        loss = self._loss(batch)[0]
        if clip is None:
            # Backward accumulates, so the affine part goes in first: one pass over the vector less.
            torch.mul(y, decay, out=direction)
            if constant is not None:
                direction.add_(constant)
            loss.backward()
        else:
            direction.zero_()
            loss.backward()
            norm = float(torch.linalg.vector_norm(direction))
            if norm > clip:
                direction.mul_(clip / norm)
            direction.add_(y, alpha=decay)
            if constant is not None:
                direction.add_(constant)
        return loss.detach().to("cpu", torch.float64)

    @torch.no_grad()
    def evaluate(self, point: Point, examples: Examples, rows: Tensor) -> Score:
        """Return the summed loss and number right over these examples, in evaluation mode."""
        self.flat.load(point)
        self.flat.module.eval()
        loss, outputs, targets = self._loss(examples.batch(rows))
        accuracy = self.task.accuracy(outputs, targets)
        return Score(
            loss=float(loss) * len(rows),
            correct=None if accuracy is None else float(accuracy) * len(rows),
            examples=len(rows),
        )

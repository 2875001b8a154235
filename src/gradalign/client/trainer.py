"""The inner loop: executes one plan on one client's data. The hot path.

A ``LocalTrainer`` holds one model as flat vectors and does three things for a client: its gradient at x, its K local
steps under a plan, and the evaluation of some examples. Every engine drives the same trainer, which is why they agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradalign.algorithms.plan import Plan
from gradalign.client import LocalTraining
from gradalign.client.exchange import ClientGradient, ClientUpdate, Score
from gradalign.client.flat import FlatModel, Point
from gradalign.client.step import LocalStep, hand_over_gradients
from gradalign.errors import GradalignError
from gradalign.fast.linear import Products, keep_products
from gradalign.fast.stacks import run_stacks_faster
from gradalign.seeding import Purpose, global_stream, torch_stream
from gradalign.tasks.batches import map_tensors
from gradalign.tasks.data import Examples
from gradalign.tasks.task import Task, predict

CHUNK = 300  # examples that the gradient phase takes at once: what an LSTM leaves behind for more outgrows the caches


def shuffled_passes(examples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the examples' indices for ever, each time in a new order."""
    while True:
        yield torch.randperm(examples, generator=generator)


def shuffled_batches(examples: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield index batches for ever: without replacement within a pass, each pass in a new order."""
    for order in shuffled_passes(examples, generator):
        yield from order.split(size)


def gradient_rows(examples: int, limit: int | None, seed: int, round_index: int, client: int) -> Tensor:
    """Return the rows of a client's gradient phase: all, or the first ones that its local steps will see."""
    if limit is None or limit >= examples:
        return torch.arange(examples)
    return torch.randperm(examples, generator=torch_stream(seed, Purpose.SHUFFLE, round_index, client))[:limit]


class LocalTrainer:
    """Does a client's work on one model; not thread-safe."""

    def __init__(
        self,
        task: Task,
        local: LocalTraining,
        seed: int,
        device: torch.device | str = "cpu",
        *,
        fast: bool = True,
    ) -> None:
        self.task, self.local, self.seed, self.fast = task, local, seed, fast
        self.device = torch.device(device)
        model = task.make_model(seed, self.device)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        if fast and self.device.type == "cpu":
            if task.predict is predict and local.precision is None:
                keep_products(model)
            run_stacks_faster(model)
        self.flat = FlatModel(model)
        self.products = Products(model)
        self.dtype = self.flat.vector.dtype

    def _place(self, batch: Any) -> Any:
        """Move a batch to the model's device, floats in the model's precision."""
        return map_tensors(lambda t: t.to(self.device, self.dtype if t.is_floating_point() else None), batch)

    def loss(self, batch: Any) -> tuple[Tensor, Any, Any]:
        """Return the loss of a batch at the model's present point, with its outputs and targets."""
        halved = self.local.precision == "bf16" and torch.is_grad_enabled()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=halved):
            outputs, targets = self.task.predict(self.flat.module, self._place(batch))
        if halved and isinstance(outputs, Tensor):
            outputs = outputs.to(self.dtype)
        loss = self.task.loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise GradalignError(f"the loss must be a scalar tensor, the mean over the batch; got {kind}")
        return loss, outputs, targets

    def gradient_parts(self, index: Tensor, examples: int) -> tuple[Tensor, ...]:
        """Return the parts in which these rows of a client, with so many examples, are differentiated.

        They are even: a last part of one example would be too small for batch norm. With batch norm or dropout they
        belong to the function, so every derivative of it is taken over the same ones.
        """
        most = max(2 * self.local.batch_for(examples), CHUNK)
        return index.tensor_split(math.ceil(len(index) / most))

    def gradient(
        self,
        point: Point,
        examples: Examples,
        *,
        client: int,
        round_index: int,
        limit: int | None = None,
        out: Tensor | None = None,
    ) -> ClientGradient:
        """Return ∇f_i(x) over the whole client or its first ``limit`` shuffled examples, in ``out`` when given.

        Buffers stay as they are.
        """
        count = len(examples)
        index = gradient_rows(count, limit, self.seed, round_index, client)
        flat = self.flat
        flat.load(point)
        flat.module.train()
        flat.drop_gradients()
        gradient = torch.empty_like(flat.vector) if out is None else out
        views = flat.views(gradient)
        loss_sum, correct, known = 0.0, 0.0, True
        with (
            self.products.kept(),
            torch.enable_grad(),
            global_stream(self.seed, Purpose.GRADIENT, round_index, client),
        ):
            for part, rows in enumerate(self.gradient_parts(index, count)):
                share = len(rows) / len(index)
                loss, outputs, targets = self.loss(examples.batch(rows))
                (loss * share).backward()
                hand_over_gradients(flat, self.products, views, add=part > 0)
                loss_sum += float(loss.detach()) * share
                accuracy = self.task.accuracy(outputs, targets)
                known = known and accuracy is not None
                correct += float(accuracy or 0.0) * share
        return ClientGradient(
            gradient=gradient,
            loss=loss_sum,
            accuracy=correct if known else None,
            examples=len(index),
        )

    def train(
        self,
        point: Point,
        plan: Plan,
        examples: Examples,
        *,
        client: int,
        round_index: int,
        lr: float,
        out: Tensor | None = None,
    ) -> ClientUpdate:
        """Execute a plan from the server's point and report Δ_i, in ``out`` when that is given."""
        count = len(examples)
        steps = self.local.steps_for(count)
        batches = shuffled_batches(
            count, self.local.batch_for(count), torch_stream(self.seed, Purpose.SHUFFLE, round_index, client)
        )
        flat = self.flat
        flat.load(point)
        flat.module.train()
        flat.drop_gradients()
        with (
            self.products.kept(),
            torch.enable_grad(),
            global_stream(self.seed, Purpose.TRAIN, round_index, client),
        ):
            update, loss, seen = self._walk(point, plan, itertools.islice(batches, steps), examples, lr, out)
        floats, ints = flat.read_buffers()
        return ClientUpdate(
            update=update,
            floats=floats,
            ints=ints,
            loss=loss / steps,
            steps=steps,
            examples=seen,
            total_step_size=self.local.total_step_size(lr, steps),
        )

    def _walk(
        self, point: Point, plan: Plan, batches: Iterator[Tensor], examples: Examples, lr: float, out: Tensor | None
    ) -> tuple[Tensor, float, int]:
        """Take the local steps from ``flat.vector`` = x; return Δ, the sum of the losses and the examples seen.

        y, where gradients are taken, is ``flat.vector``. With the displacement inside every step the client's own
        point is z = y − v; with the displacement at the start it is y itself.
        """
        y = self.flat.vector
        shift = None if plan.displacement is None else self.flat.inward(plan.displacement)
        constant = None if plan.correction is None else self.flat.inward(plan.correction)
        if plan.pull:
            constant = -plan.pull * y if constant is None else constant - plan.pull * y
        inside = plan.every_step and shift is not None
        z = y.clone() if inside else y
        if shift is not None and not inside:
            y.add_(shift)
        displaced = shift is not None and not inside
        start = z.clone() if displaced or self.device.type != "cpu" else point.x  # without displacement, z starts at x
        step = LocalStep(
            self.flat,
            self.products,
            z,
            lr=lr,
            decay=self.local.weight_decay + plan.pull,
            constant=constant,
            momentum=self.local.momentum,
            clip_norm=self.local.clip_norm,
        )
        total, seen, augment = torch.zeros((), dtype=torch.float64), 0, self.task.augment
        for rows in batches:
            if inside and shift is not None:
                torch.add(z, shift, out=y)
            batch = examples.batch(rows)
            loss = self.loss(batch if augment is None else augment(batch))[0]
            loss.backward()
            step.take()
            total += loss.detach().to("cpu", torch.float64)
            seen += len(rows)
        update = torch.sub(z, start, out=torch.empty_like(z) if out is None else out)
        return update, float(total), seen

    @torch.no_grad()
    def evaluate(self, point: Point, examples: Examples, rows: Tensor) -> Score:
        """Return the summed loss and number right over these examples, in evaluation mode."""
        self.flat.load(point)
        self.flat.module.eval()
        with global_stream(self.seed, Purpose.EVALUATE, int(rows[0])):
            loss, outputs, targets = self.loss(examples.batch(rows))
        accuracy = self.task.accuracy(outputs, targets)
        return Score(
            loss=float(loss) * len(rows),
            correct=None if accuracy is None else float(accuracy) * len(rows),
            examples=len(rows),
        )

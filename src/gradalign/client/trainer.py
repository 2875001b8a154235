"""The inner loop: executes one plan on one client's data. The hot path.

A ``ClientTrainer`` holds one model as flat vectors and does three things for a client: its gradient at x, its K local
steps under a plan, and the evaluation of some examples. Every engine drives the same trainer, which is why they agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradalign.algorithms.plan import Combination
from gradalign.algorithms.view import Plan
from gradalign.client import LocalTraining
from gradalign.client.exchange import Broadcast, Gradient, Participant, Score, Update
from gradalign.client.flat import FlatModel, Point
from gradalign.client.step import FactoredGradients, LocalStep, hand_over_gradients, set_out
from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, global_stream, torch_stream
from gradalign.tasks.batches import Examples, map_tensors
from gradalign.tasks.metrics import kept_prediction
from gradalign.tasks.task import Task

CHUNK = 300  # examples that the gradient phase takes at once: what an LSTM leaves behind for more outgrows the caches


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that the clients' work depends on, besides what a round's server says."""

    task: Task
    local: LocalTraining
    seed: int = 0
    device: torch.device | str = "cpu"
    fast: bool = True
    """Use faster ways of computing that give the same result up to rounding."""
    clients_per_round: int = 0
    """Many may train together."""
    algorithm: Combination | None = None
    """What will be trained by, where it is known: worker processes then start with its classes."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside the block.

    Workers have one thread each, and sums over several threads round differently: this is what makes the
    in-process engine give the workers' bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_device(device: torch.device | str) -> torch.device:
    """Return a device that torch knows and this machine has, or say in one sentence why nothing can run there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise GradalignError(f'"{device}" is not a device; give for example "cpu" or "cuda:0"') from None
    if found.type == "meta":
        raise GradalignError('the device "meta" holds no numbers; give for example "cpu" or "cuda:0"')
    try:
        torch.zeros(1, device=found).add_(1)
    except Exception as error:  # every backend has errors of its own for not being here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GradalignError(f'the device "{device}" cannot be used here: {reason}; give for example "cpu"') from None
    return found


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


class ClientTrainer:
    """Does a client's work on one model; not thread-safe.

    ``prepare`` makes a new model faster, in place; ``gradalign.fast.client_trainer`` gives it.
    """

    def __init__(self, setup: Setup, prepare: Callable[[nn.Module, Setup], FactoredGradients] | None = None) -> None:
        self.task, self.local, self.seed = setup.task, setup.local, setup.seed
        self.device = torch.device(setup.device)
        model = setup.task.make_model(setup.seed, self.device)
        self.factored = FactoredGradients() if prepare is None else prepare(model, setup)
        self.flat = FlatModel(model)
        # Of what is given to the model: its first layer's, which may be a frozen one of another precision.
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def loss(self, batch: Any) -> tuple[Tensor, Any, Any]:
        """Return the loss of a batch at the model's present point, with its outputs and targets."""
        batch = map_tensors(lambda t: t.to(self.device, self.dtype if t.is_floating_point() else None), batch)
        halved = self.local.precision == "bf16" and torch.is_grad_enabled()
        # Off, too, where the caller's is on; but not all devices know of it.
        known = halved or torch.is_autocast_enabled(self.device.type)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=halved) if known else nullcontext():
            outputs, targets = self.task.predict(self.flat.module, batch)
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

    @contextmanager
    def _at(self, point: Point, purpose: Purpose, *keys: int) -> Iterator[None]:
        """Differentiate from the server's point inside the block, with the random numbers of this purpose."""
        self.flat.load(point)
        self.flat.module.train()
        for parameter in self.flat.parameters:  # backward is to hand over fresh ones
            parameter.grad = None
        with self.factored.recording(), torch.enable_grad(), global_stream(self.seed, purpose, *keys):
            yield

    def gradient(self, told: Broadcast, who: Participant, examples: Examples, out: Tensor | None = None) -> Gradient:
        """Return ∇f_i(x) over the whole client, or its first ``gradient_examples``, in ``out`` when given.

        Buffers stay as they are.
        """
        index = gradient_rows(len(examples), told.gradient_examples, self.seed, told.round, who.client)
        gradient = torch.empty_like(self.flat.vector) if out is None else out
        views = self.flat.views(gradient)
        loss_sum, correct, known = 0.0, 0.0, True
        with self._at(told.point, Purpose.GRADIENT, told.round, who.client):
            for part, rows in enumerate(self.gradient_parts(index, len(examples))):
                share = len(rows) / len(index)
                loss, outputs, targets = self.loss(examples.batch(rows))
                (loss * share).backward()
                hand_over_gradients(self.flat, self.factored, views, add=part > 0)
                loss_sum += float(loss.detach()) * share
                accuracy = self.task.accuracy(outputs, targets)
                known = known and accuracy is not None
                correct += float(accuracy or 0.0) * share
        return Gradient(
            clients=(who.client,),
            weights=(who.weight,),
            vector=gradient,
            factor=who.weight,
            losses=(loss_sum,),
            accuracies=(correct if known else None,),
            examples=len(index),
        )

    def train(
        self, told: Broadcast, who: Participant, plan: Plan, examples: Examples, out: Tensor | None = None
    ) -> Update:
        """Execute a plan from the server's point and report Δ_i, in ``out`` when that is given."""
        count = len(examples)
        steps = self.local.steps_for(count)
        stream = torch_stream(self.seed, Purpose.SHUFFLE, told.round, who.client)
        batches = itertools.islice(shuffled_batches(count, self.local.batch_for(count), stream), steps)
        with self._at(told.point, Purpose.TRAIN, told.round, who.client):
            update, loss, seen = self._walk(told, plan, batches, examples, out)
        floats, ints = self.flat.read_buffers()
        return Update(
            clients=(who.client,),
            weights=(who.weight,),
            vector=update,
            factor=who.weight,
            losses=(loss / steps,),
            examples=seen,
            floats=floats,
            ints=ints,
            steps=(steps,),
            total_step_sizes=(self.local.total_step_size(told.lr, steps),),
        )

    def _walk(
        self, told: Broadcast, plan: Plan, batches: Iterator[Tensor], examples: Examples, out: Tensor | None
    ) -> tuple[Tensor, float, int]:
        """Take the local steps from ``flat.vector`` = x; return Δ, the sum of the losses and the examples seen."""
        y, local = self.flat.vector, self.local
        if local.optimizer:  # what it does with y is its own affair: there is no shift to undo inside its step
            plan = replace(plan, every_step=False)
        given, correction = (None if v is None else v.to(y) for v in (plan.displaced(None), plan.correction))
        z, constant, shift = set_out(y, plan, given, correction)
        displaced = given is not None and shift is None
        start = z.clone() if displaced or self.device.type != "cpu" else told.point.x  # else z starts at x
        decay = plan.pull + (0.0 if local.optimizer else local.weight_decay)
        step = LocalStep(self.flat, self.factored, z, constant, lr=told.lr, decay=decay, local=local)
        total, seen, augment = torch.zeros((), dtype=torch.float64), 0, self.task.augment
        for rows in batches:
            if shift is not None:
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
            predictions=(kept_prediction(outputs, targets),) if self.task.metrics else (),
        )

"""Both phases of a round for a training loop of the client's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache

import torch
from flwr.app import Context, Message
from torch import Tensor, nn

from gradalign.algorithms.plan import Algorithm
from gradalign.client import LocalTraining
from gradalign.client.flat import FlatModel
from gradalign.client.step import set_out
from gradalign.errors import GradalignError
from gradalign.flower import messages
from gradalign.flower.client_round import ClientRound
from gradalign.flower.exchange import logger
from gradalign.flower.messages import EXAMPLES, SEEN, TOTAL_STEP_SIZE


@cache
def _warn_of_large_batches(limit: int, seen: int) -> None:
    logger.warning(
        "gradient_examples asks for a gradient of %d examples, and the first batches have %d; a beta that sets itself "
        "tells chance from disagreement by halving them: give batches of at most half of gradient_examples",
        limit,
        seen,
    )


def add_up(losses: Iterable[tuple[Tensor, int]], limit: int | None) -> tuple[float, int]:
    """Add up the gradients of losses, each times its number of examples; return the mean loss and all examples."""
    total, seen = 0.0, 0
    for loss, count in losses:
        if limit is not None and seen >= limit:
            break
        (loss * count).backward()
        total += float(loss.detach()) * count
        seen += count
    if not seen:
        raise GradalignError("the client has no examples to take a gradient of")
    if limit is not None and seen > limit:
        _warn_of_large_batches(limit, seen)
    return total / seen, seen


def settings_unread(wanted: LocalTraining, steps: int, followed: set[str]) -> str:
    """Name the server's settings that a loop cannot have followed; another number of steps than asked is an error."""
    if wanted.steps is not None and steps not in (0, wanted.steps):
        raise GradalignError(f"the server asks for local.steps = {wanted.steps}, and this loop took {steps}")
    followed = followed | ({"steps"} if steps == wanted.steps else set())
    given = {field.name: getattr(wanted, field.name) for field in fields(wanted) if field.name not in followed}
    usual = LocalTraining(epochs=1)
    return ", ".join(name for name, value in given.items() if value is not None and value != getattr(usual, name))


def _gradient_at(flat: FlatModel, work: ClientRound, losses: Iterable[tuple[Tensor, int]]) -> tuple[Tensor, float, int]:
    """Return g_i at the server's point, the mean loss there, and how many examples were seen."""
    flat.load(work.told.point)
    flat.module.train()
    flat.attach_gradients()
    flat.gradient.zero_()
    loss, seen = add_up(losses, work.told.gradient_examples)
    # Batch norm's running means moved while the data was seen; no gradient phase reports buffers.
    return flat.gradient.div_(seen).cpu(), loss, seen


def gradient_reply(
    message: Message,
    context: Context,
    model: nn.Module,
    losses: Iterable[tuple[Tensor, int]],
    *,
    examples: int | None = None,
) -> Message:
    """Answer ``train.gradient``: g_i at the server's point, also remembered for this round's training.

    Args:
        message: The server's message.
        context: Flower's context.
        model: The model, of the server's kind; it is loaded with the server's point.
        losses: Yields, for every batch of the client's data, the mean loss and the number of examples. Give a
            generator: it is asked for a batch only when the model is loaded, and for no more once
            ``LocalTraining.gradient_examples`` have been seen.
        examples: How many examples the client has, for ``weights="examples"``; as many as were seen when not given
            and ``gradient_examples`` is not set.
    """
    flat = FlatModel(model)
    work = ClientRound(message, context, flat.read())
    limit = work.told.gradient_examples
    own, loss, seen = _gradient_at(flat, work, losses)
    work.remember_gradient(own)
    size = seen if examples is None and limit is None else examples
    return messages.reply(message, {"gradient": own}, {"loss": loss, EXAMPLES: size, SEEN: seen})


class LocalRound:
    """One round's training in your own loop: loads the model, displaces it, corrects gradients, reports Δ_i.

    Make it before the optimizer. The displacement is always applied once, at the start. ``lr`` is the server's for this
    ``round``, counted from 0. Of the strategy's ``LocalTraining`` your loop follows what it reads from ``local``; the
    server warns of settings that nobody read. Algorithms that use the client's gradient without a gradient phase
    (``FedGA(mean="running")``) need ``losses``, as ``gradient_reply`` does.
    """

    def __init__(
        self,
        message: Message,
        context: Context,
        model: nn.Module,
        *,
        losses: Iterable[tuple[Tensor, int]] | None = None,
        algorithms: Iterable[type[Algorithm] | str] = (),
    ) -> None:
        self._message, self._flat, self._steps = message, FlatModel(model), 0
        self._work = ClientRound(message, context, self._flat.read(), messages.own_classes(algorithms))
        self.lr, self.round = self._work.told.lr, self._work.told.round
        self._local, self._looked = replace(self._work.order.local), False
        object.__setattr__(self._local, "lr", self.lr)  # unchecked: a schedule may pass through 0
        self._more = 0
        if self._work.gradient is None and self._work.told.algorithm.uses_own_gradient:
            if losses is None:
                raise GradalignError("this algorithm uses the client's gradient at x; give LocalRound(losses=...)")
            self._work.gradient, _, self._more = _gradient_at(self._flat, self._work, losses)
            model.zero_grad()
        plan = replace(self._work.plan(), every_step=False)
        self._flat.load(self._work.told.point)
        model.train()
        y = self._flat.vector
        given, correction = (None if v is None else v.to(y) for v in (plan.displaced(None), plan.correction))
        self._pull, (_, self._constant, _) = plan.pull, set_out(y, plan, given, correction)
        self._start = y.clone()

    @property
    def local(self) -> LocalTraining:
        """How the server asks clients to train, with this round's lr: steps, epochs, batch_size, momentum."""
        self._looked = True
        return self._local

    @torch.no_grad()
    def correct(self) -> None:
        """Add c_i + μ (y − x) to the gradients; call it between ``backward`` and the optimizer's step."""
        self._steps += 1
        if self._constant is None:
            return
        direction = self._constant + self._pull * self._flat.vector if self._pull else self._constant
        for p, part in zip(self._flat.parameters, self._flat.views(direction), strict=True):
            p.grad = part.clone() if p.grad is None else p.grad.add_(part)

    def reply(
        self,
        *,
        loss: float,
        examples: int,
        seen: int | None = None,
        total_step_size: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Message:
        """Return the reply with Δ_i = y_K − y_0.

        Args:
            loss: The loss to report.
            examples: How many examples the client has; its weight with ``weights="examples"``, unless ``aligned_app``
                was told a number or this round's gradient phase had one.
            seen: How many examples the steps went through, for the totals; ``examples`` when not given.
            total_step_size: The sum of the step sizes that gradients were given, for algorithms that keep a vector; the
                server's lr times the calls of ``correct`` when not given.
            metrics: Numbers of your own, for the result's metrics.
        """
        update = self._flat.vector - self._start
        floats, ints = self._flat.read_buffers()
        if total_step_size is None:
            if not self._steps and (self._work.order.step_sizes or self._work.told.algorithm.reports):
                raise GradalignError("call correct() before every optimizer step, or give reply(total_step_size=...)")
            total_step_size = self.lr * self._steps
        self._work.remember_update(update.cpu(), total_step_size)
        facts = self._work.facts((self._more, examples))
        numbers = {**(metrics or {}), **facts, "loss": loss, "steps": self._steps, EXAMPLES: examples}
        numbers |= {SEEN: (examples if seen is None else seen) + self._more, TOTAL_STEP_SIZE: total_step_size}
        unread = settings_unread(self._local, self._steps, {"lr", "gradient_examples"})
        vectors = {"update": update, "floats": floats, "ints": ints}
        return messages.reply(self._message, vectors, numbers, unread="" if self._looked else unread)

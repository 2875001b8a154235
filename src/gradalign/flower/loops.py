"""For a ClientApp with a training loop of its own: the two phases of a round in a few lines each.

@app.train("gradient")
def gradient(message, context):
    model, batches = Net(), load_data(context)
    return gradient_reply(message, context, model, ((loss(model(x), y), len(y)) for x, y in batches))

@app.train()
def train(message, context):
    model, batches = Net(), load_data(context)
    work = LocalRound(message, context, model)       # the model is now at y_0 = x + v_i
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    for x, y in batches:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        work.correct()                               # adds c_i + μ (y − x); nothing for FedGA alone
        optimizer.step()
    return work.reply(loss=float(value), examples=len(batches.dataset))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

import torch
from flwr.app import ConfigRecord, Context, Message
from torch import Tensor, nn

from gradalign.algorithms.plan import Algorithm
from gradalign.client import LocalTraining
from gradalign.client.flat import FlatModel
from gradalign.errors import GradalignError
from gradalign.flower.client import ClientRound, remember_as_sent
from gradalign.flower.memory import ClientMemory
from gradalign.flower.messages import CONFIG, EXAMPLES, SEEN, UNREAD, Order, known_algorithms, reply


def gradient_reply(
    message: Message,
    context: Context,
    model: nn.Module,
    losses: Iterable[tuple[Tensor, int]],
    *,
    examples: int | None = None,
) -> Message:
    """Answer ``train.gradient``: g_i at the server's point, also kept for this round's training.

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
    order, memory = Order.of(message), ClientMemory(context)
    flat = FlatModel(model)
    point = memory.point(message, order.round, flat.read())
    flat.load(point)
    model.train()
    flat.attach_gradients()
    flat.gradient.zero_()
    total, seen = 0.0, 0
    for loss, count in losses:
        if order.limit is not None and seen >= order.limit:
            break
        (loss * count).backward()
        total += float(loss.detach()) * count
        seen += count
    if not seen:
        raise GradalignError("the client has no examples to take a gradient of")
    flat.gradient.div_(seen)
    # Batch norm's running means moved while the data was seen; the gradient phase reports and keeps no buffers.
    memory.put_point(message, order.round)
    own = flat.gradient.cpu()
    remember_as_sent("gradient", own, lambda sent: memory.put_gradient(sent, order.round, order.limit))
    size = seen if examples is None and order.limit is None else examples
    return reply(message, {"gradient": own}, {"loss": total / seen, EXAMPLES: size, SEEN: seen})


class LocalRound:
    """One round's training in your own loop: loads the model, displaces it, corrects gradients, reports Δ_i.

    Make it before the optimizer. The displacement is always applied once, at the start. Of the strategy's
    ``LocalTraining`` your loop follows what it reads from ``local``; the server warns of settings that nobody read.

    Attributes:
        lr: The server's learning rate for this round.
        round: The round, from 0.
    """

    def __init__(
        self, message: Message, context: Context, model: nn.Module, *, algorithms: Iterable[type[Algorithm]] = ()
    ) -> None:
        order, memory = Order.of(message), ClientMemory(context)
        known = known_algorithms(algorithms)
        self.lr, self.round = order.lr, order.round
        self._local, self._looked = replace(order.local), False
        object.__setattr__(self._local, "lr", order.lr)  # unchecked: a schedule may pass through 0
        self._message, self._flat, self._steps = message, FlatModel(model), 0
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        point = memory.point(message, order.round, self._flat.read())
        self._brief = ClientRound.of(message, order, memory, point, known)
        plan = self._brief.algorithm.plan(dict(self._brief.views))
        self._flat.load(point)
        model.train()
        self._pull, self._constant = plan.pull, self._on_device(plan.correction)
        if plan.pull:
            pulled = -plan.pull * self._flat.vector
            self._constant = pulled if self._constant is None else self._constant + pulled
        shift = self._on_device(plan.displacement)
        if shift is not None:
            self._flat.vector.add_(shift)
        self._start = self._flat.vector.clone()

    @property
    def local(self) -> LocalTraining:
        """How the server asks clients to train, with this round's lr: steps, epochs, batch_size, momentum."""
        self._looked = True
        return self._local

    def _unread(self) -> str:
        """Name the settings that the server gave and this loop cannot have followed; too many steps are an error."""
        wanted, usual = self._local, LocalTraining(epochs=1)
        if wanted.steps is not None and self._steps not in (0, wanted.steps):
            raise GradalignError(f"the server asks for local.steps = {wanted.steps}, and this loop took {self._steps}")
        followed = {"lr", "gradient_examples"} | ({"steps"} if self._steps == wanted.steps else set())
        given = {
            name: getattr(wanted, name) for name in (field.name for field in fields(wanted)) if name not in followed
        }
        strange = [name for name, value in given.items() if value is not None and value != getattr(usual, name)]
        return "" if self._looked else ", ".join(strange)

    def _on_device(self, vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.to(self._flat.vector)

    @torch.no_grad()
    def correct(self) -> None:
        """Add c_i + μ (y − x) to the gradients; call it between ``backward`` and the optimizer's step."""
        self._steps += 1
        if self._constant is None:
            return
        direction = self._constant + self._pull * self._flat.vector if self._pull else self._constant
        parts = direction.split([p.numel() for p in self._parameters])
        for p, part in zip(self._parameters, parts, strict=True):
            p.grad = part.view_as(p).clone() if p.grad is None else p.grad.add_(part.view_as(p))

    def reply(
        self, *, loss: float, examples: int, seen: int | None = None, total_step_size: float | None = None
    ) -> Message:
        """Return the reply with Δ_i = y_K − y_0.

        Args:
            loss: The loss to report.
            examples: How many examples the client has; its weight with ``weights="examples"``, unless ``aligned_app``
                was told a number or this round's gradient phase had one.
            seen: How many examples the steps went through, for the totals; ``examples`` when not given.
            total_step_size: The sum of the step sizes that gradients were given, for algorithms that keep a vector; the
                server's lr times the calls of ``correct`` when not given.
        """
        update = self._flat.vector - self._start
        floats, ints = self._flat.read_buffers()
        if total_step_size is None:
            if not self._steps and self._brief.algorithm.keepers:
                raise GradalignError("call correct() before every optimizer step, or give reply(total_step_size=...)")
            total_step_size = self.lr * self._steps
        self._brief.remember(update.cpu(), total_step_size)
        numbers = {"loss": loss, "steps": self._steps, EXAMPLES: examples, SEEN: seen, "travel": total_step_size}
        answer = reply(self._message, {"update": update, "floats": floats, "ints": ints}, numbers)
        unread = self._unread()
        if unread:
            answer.content[CONFIG] = ConfigRecord({UNREAD: unread})
        return answer

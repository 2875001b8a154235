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

import torch
from flwr.app import Context, Message
from torch import Tensor, nn

from gradalign.errors import GradalignError
from gradalign.flat import FlatModel
from gradalign.flower.client import Keepsakes
from gradalign.flower.memory import ClientMemory
from gradalign.flower.messages import Order, known_algorithms, reply
from gradalign.plan import Algorithm


def gradient_reply(
    message: Message, context: Context, model: nn.Module, losses: Iterable[tuple[Tensor, int]]
) -> Message:
    """Answer ``train.gradient``: g_i at the server's point, also kept for this round's training.

    Args:
        message: The server's message.
        context: Flower's context.
        model: The model, of the server's kind; it is loaded with the server's point.
        losses: Yields, for every batch of the client's data, the mean loss and the number of examples. Give a
            generator: it is asked for a batch only when the model is loaded.
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
        (loss * count).backward()
        total += float(loss.detach()) * count
        seen += count
    if not seen:
        raise GradalignError("the client has no examples to take a gradient of")
    flat.gradient.div_(seen)
    # Batch norm's running means moved while the data was seen; the gradient phase reports and keeps no buffers.
    memory.put_point(message, order.round)
    memory.put_gradient(flat.gradient, order.round, order.limit)
    return reply(message, {"gradient": flat.gradient}, {"loss": total / seen, "num-examples": seen})


class LocalRound:
    """One round's training in your own loop: loads the model, displaces it, corrects gradients, reports Δ_i.

    Make it before the optimizer. The displacement is always applied once, at the start.

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
        self._message, self._flat, self._steps = message, FlatModel(model), 0
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        point = memory.point(message, order.round, self._flat.read())
        self._brief = Keepsakes.of(message, order, memory, point, known)
        if self._brief.algorithm.needs_gradients:
            own = memory.gradient(order.round, order.limit, point.x)
            if own is None:
                raise GradalignError(f"this client has no gradient of round {order.round + 1}: its state was lost")
            self._brief = self._brief.with_gradient(own)
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

    def reply(self, *, loss: float, examples: int, travel: float | None = None) -> Message:
        """Return the reply with Δ_i = y_K − y_0.

        Args:
            loss: The loss to report.
            examples: How many examples were seen.
            travel: The sum of the step sizes that gradients were given, for algorithms that keep a vector; the
                server's lr times the calls of ``correct`` when not given.
        """
        update = self._flat.vector - self._start
        floats, ints = self._flat.read_buffers()
        travel = self.lr * self._steps if travel is None else travel
        if not travel and self._brief.algorithm.keepers:
            raise GradalignError("call correct() before every optimizer step, or give reply(travel=...)")
        self._brief.remember(update.cpu(), travel)
        numbers = {"loss": loss, "steps": self._steps, "num-examples": examples, "travel": travel}
        return reply(self._message, {"update": update, "floats": floats, "ints": ints}, numbers)

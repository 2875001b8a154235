"""One round at a client: what it holds between messages, its plan, and both phases for a loop of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import fields, replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from torch import Tensor, nn

from gradalign.algorithms.plan import Algorithm
from gradalign.algorithms.view import Plan
from gradalign.client import LocalTraining
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import FlatModel, Point
from gradalign.errors import GradalignError
from gradalign.flower import messages
from gradalign.flower.messages import ARRAYS, EXAMPLES, SEEN, MemoryLostError, received_point, to_array, to_tensor

_GRADIENT, _POINT, _KEPT = "gradalign.gradient", "gradalign.point", "gradalign.kept"
leaving: ContextVar[list[Callable[[Message], None]] | None] = ContextVar("leaving", default=None)
"""What is to look at the reply when it has passed all mods; see ``client.at_the_door``."""


def _remember_as_sent(name: str, made: Tensor, remember: Callable[[Tensor], None]) -> None:
    """Remember what comes of a vector: as it was made, and once more as it leaves if a mod changed it on its way."""
    remember(made)

    def look(answer: Message) -> None:
        arrays = answer.content.array_records.get(ARRAYS) if answer.has_content() else None
        sent = to_tensor(arrays[name], made.dtype) if arrays is not None and name in arrays else made
        if sent.shape == made.shape and not torch.equal(sent, made):
            remember(sent)

    waiting = leaving.get()
    if waiting is not None:
        waiting.append(look)


class ClientRound:
    """One order, with what the client holds for it in Flower's ``context.state``: x and its own gradient, and its k_i.

    A k_i is stored in two versions: the one the server knows of, and the one after the present round. When the reply
    is lost on its way, the server names the older round again and the client goes back to it. The server is the
    authority: an order has the digests of g_i and k_i as the server has them, and a client that holds others (its Δ_i
    was clipped or noised on the way) asks for them.
    """

    def __init__(
        self, message: Message, context: Context, like: Point, algorithms: Iterable[type[Algorithm]] = ()
    ) -> None:
        self.order = order = messages.Order.of(message)
        self._context, self._arrays = context, message.content.array_records[ARRAYS]
        point = self._point(like)
        algorithm = messages.algorithm_of(order, algorithms)
        sent = {part.label: self._sent(f"shared.{part.label}", point.x) for part in algorithm.parts}
        shared = {part.label: torch.zeros_like(point.x) for part in algorithm.keepers}
        shared |= {label: vector for label, vector in sent.items() if vector is not None}
        self.told = Broadcast(
            point=point,
            round=order.round,
            algorithm=algorithm,
            lr=order.lr,
            gradient_examples=order.limit,
            participants=order.participants,
            mean=self._sent("mean_gradient", point.x),
            shared=shared,
            weight_decay=order.local.weight_decay,
        )
        self.who = Participant(client=order.client, share=order.weight, kept=self._kept())
        self.gradient: Tensor | None = None  # g_i as the server has it, for training after a gradient phase
        if algorithm.needs_gradients:
            self.gradient = self._held("gradient", _GRADIENT, f"{self._tag(order.round)}:{order.limit}", point.x)

    def _tag(self, round_index: int) -> str:
        # A state can outlive a run (Flower's run series); another run's vectors must not be taken for this one's.
        return f"{self._context.run_id}:{round_index}"

    def _record(self, name: str) -> ArrayRecord:
        return self._context.state.array_records.get(name, ArrayRecord())

    def _sent(self, name: str, like: Tensor) -> Tensor | None:
        return to_tensor(self._arrays[name], like.dtype) if name in self._arrays else None

    def _held(self, sent_as: str, record: str, name: str, like: Tensor) -> Tensor:
        """Return a vector of this client's as the server has it: sent along, or held here with the same bits."""
        sent = self._sent(sent_as, like)
        if sent is not None:
            return sent
        if name not in self._record(record):
            raise MemoryLostError(f"this client has lost the vector {sent_as} that round {self.order.round + 1} needs")
        vector, wanted = to_tensor(self._record(record)[name], like.dtype), self.order.digests.get(sent_as)
        if wanted is not None and messages.digest(vector) != wanted:
            raise MemoryLostError(f"this client's vector {sent_as} is not the server's", differs=True)
        return vector

    def _kept(self) -> dict[str, Tensor]:
        """Return the k_i that the server knows of; none for a client that it has never heard of."""
        kept = {}
        for part in self.told.algorithm.keepers:
            name, last = f"kept.{part.label}", self.order.memory.get(part.label, -1)
            if last >= 0 or name in self._arrays:
                kept[part.label] = self._held(name, _KEPT, f"{part.label}@{self._tag(last)}", self.told.point.x)
        return kept

    def _point(self, like: Point) -> Point:
        """Return x and the buffers that the message carries, or those of this round that were remembered."""
        if "x" in self._arrays:
            return received_point(self._arrays, like)
        prefix, held = f"{self._tag(self.order.round)}/", self._record(_POINT)
        found = {name.removeprefix(prefix): array for name, array in held.items() if name.startswith(prefix)}
        if not found:
            raise MemoryLostError(f"this client has no model of round {self.order.round + 1}")
        return received_point(ArrayRecord(found), like)

    def plan(self) -> Plan:
        return self.told.plan(self.who, self.gradient).written_out(self.gradient)

    def facts(self) -> dict[str, float]:
        """Return what the algorithm has clients report, by the names it is sent under."""
        return {f"{messages.FACT}{name}": value for name, value in self.told.facts(self.who, self.gradient).items()}

    def remember_gradient(self, gradient: Tensor) -> None:
        """Remember g_i, and x so that it is sent once, until this round's training."""
        tag, state = self._tag(self.order.round), self._context.state
        state[_POINT] = ArrayRecord({f"{tag}/{name}": array for name, array in self._arrays.items()})

        def put(sent: Tensor) -> None:
            state[_GRADIENT] = ArrayRecord({f"{tag}:{self.order.limit}": to_array(sent)})

        _remember_as_sent("gradient", gradient, put)

    def remember_update(self, update: Tensor, total_step_size: float) -> None:
        """Remember k_i⁺ beside the k_i that the server knows of."""

        def put(sent: Tensor) -> None:
            for part in self.told.algorithm.keepers:
                view, last = self.told.view(part.label, self.who, self.gradient), self.order.memory.get(part.label, -1)
                versions = {self.order.round: part.keep(view, sent, total_step_size)}
                if last >= 0:
                    versions[last] = view.memory()[0]
                others = {key: array for key, array in self._record(_KEPT).items() if key.split("@")[0] != part.label}
                fresh = {f"{part.label}@{self._tag(index)}": to_array(vector) for index, vector in versions.items()}
                self._context.state[_KEPT] = ArrayRecord(others | fresh)

        if self.told.algorithm.keepers:
            _remember_as_sent("update", update, put)


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
    flat.load(work.told.point)
    model.train()
    flat.attach_gradients()
    flat.gradient.zero_()
    total, seen = 0.0, 0
    for loss, count in losses:
        if limit is not None and seen >= limit:
            break
        (loss * count).backward()
        total += float(loss.detach()) * count
        seen += count
    if not seen:
        raise GradalignError("the client has no examples to take a gradient of")
    flat.gradient.div_(seen)
    # Batch norm's running means moved while the data was seen; the gradient phase reports no buffers.
    own = flat.gradient.cpu()
    work.remember_gradient(own)
    size = seen if examples is None and limit is None else examples
    return messages.reply(message, {"gradient": own}, {"loss": total / seen, EXAMPLES: size, SEEN: seen})


class LocalRound:
    """One round's training in your own loop: loads the model, displaces it, corrects gradients, reports Δ_i.

    Make it before the optimizer. The displacement is always applied once, at the start. ``lr`` is the server's for this
    ``round``, counted from 0. Of the strategy's ``LocalTraining`` your loop follows what it reads from ``local``; the
    server warns of settings that nobody read.
    """

    def __init__(
        self, message: Message, context: Context, model: nn.Module, *, algorithms: Iterable[type[Algorithm]] = ()
    ) -> None:
        self._message, self._flat, self._steps = message, FlatModel(model), 0
        self._work = ClientRound(message, context, self._flat.read(), algorithms)
        self.lr, self.round = self._work.told.lr, self._work.told.round
        self._local, self._looked = replace(self._work.order.local), False
        object.__setattr__(self._local, "lr", self.lr)  # unchecked: a schedule may pass through 0
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        plan = self._work.plan()
        self._flat.load(self._work.told.point)
        model.train()
        x = self._flat.vector
        self._pull, self._constant = plan.pull, None if plan.correction is None else plan.correction.to(x)
        if plan.pull:
            pulled = -plan.pull * x
            self._constant = pulled if self._constant is None else self._constant + pulled
        if isinstance(plan.displacement, Tensor):
            x.add_(plan.displacement.to(x))
        self._start = x.clone()

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
        given = {field.name: getattr(wanted, field.name) for field in fields(wanted) if field.name not in followed}
        strange = [name for name, value in given.items() if value is not None and value != getattr(usual, name)]
        return "" if self._looked else ", ".join(strange)

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
        self,
        *,
        loss: float,
        examples: int,
        seen: int | None = None,
        total_step_size: float | None = None,
        travel: float | None = None,
    ) -> Message:
        """Return the reply with Δ_i = y_K − y_0.

        Args:
            loss: The loss to report.
            examples: How many examples the client has; its weight with ``weights="examples"``, unless ``aligned_app``
                was told a number or this round's gradient phase had one.
            seen: How many examples the steps went through, for the totals; ``examples`` when not given.
            total_step_size: The sum of the step sizes that gradients were given, for algorithms that keep a vector; the
                server's lr times the calls of ``correct`` when not given.
            travel: The old name of ``total_step_size``.
        """
        if travel is not None:
            warnings.warn("reply(travel=...) is called total_step_size now", DeprecationWarning, stacklevel=2)
            total_step_size = travel
        update = self._flat.vector - self._start
        floats, ints = self._flat.read_buffers()
        if total_step_size is None:
            if not self._steps and self._work.told.algorithm.keepers:
                raise GradalignError("call correct() before every optimizer step, or give reply(total_step_size=...)")
            total_step_size = self.lr * self._steps
        self._work.remember_update(update.cpu(), total_step_size)
        numbers = {"loss": loss, "steps": self._steps, EXAMPLES: examples, SEEN: seen}
        numbers[messages.TOTAL_STEP_SIZE] = total_step_size
        numbers |= self._work.facts()
        answer = messages.reply(self._message, {"update": update, "floats": floats, "ints": ints}, numbers)
        unread = self._unread()
        if unread:
            answer.content[messages.CONFIG] = ConfigRecord({messages.UNREAD: unread})
        return answer

"""One round at a client: what it holds between messages, and its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar

import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor

from gradalign.algorithms.plan import Algorithm
from gradalign.algorithms.view import Plan
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import Point
from gradalign.flower import messages
from gradalign.flower.messages import ARRAYS, MemoryLostError, received_point, to_array, to_tensor

_GRADIENT, _POINT, _KEPT = "gradalign.gradient", "gradalign.point", "gradalign.kept"
leaving: ContextVar[list[Callable[[Message], None]] | None] = ContextVar("leaving", default=None)
"""What is to look at the reply when it has passed all mods; see ``client.Door``."""


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


def facts_sent(told: Broadcast, who: Participant, own: Tensor | None, sample: tuple[int, int]) -> dict[str, float]:
    """Return what ``ClientRound.facts`` does, without the sample where that is nothing or more than all examples."""
    facts = told.facts(who, own, sample if 0 < sample[0] <= sample[1] else None)
    return {f"{messages.FACT}{name}": value for name, value in facts.items()}


class ClientRound:
    """One order, with what the client holds for it in Flower's ``context.state``: x and its own gradient, and its k_i.

    A k_i is stored in two versions: the one the server knows of, and the one after the present round. When the reply
    is lost on its way, the server names the older round again and the client goes back to it. The server is the
    authority: an order has the digests of g_i and k_i as the server has them, and a client that holds others (its Δ_i
    was clipped or noised on the way) asks for them.
    """

    def __init__(
        self, message: Message, context: Context, like: Point | None, algorithms: Iterable[type[Algorithm]] = ()
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

    def _point(self, like: Point | None) -> Point:
        """Return x and the buffers that the message carries, or those of this round that were remembered."""
        found = self._arrays
        if "x" not in found:
            prefix, held = f"{self._tag(self.order.round)}/", self._record(_POINT)
            found = ArrayRecord({name.removeprefix(prefix): held[name] for name in held if name.startswith(prefix)})
        if not found:
            raise MemoryLostError(f"this client has no model of round {self.order.round + 1}")
        self.rest = {name: to_tensor(array) for name, array in found.items() if name.startswith("rest.")}
        return received_point(found, like)

    def plan(self) -> Plan:
        return self.told.plan(self.who, self.gradient).written_out(self.gradient)

    def facts(self, sample: tuple[int, int]) -> dict[str, float]:
        """Return what the algorithm has clients report, by the names it is sent under; ``sample`` as in a view."""
        return facts_sent(self.told, self.who, self.gradient, sample)

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

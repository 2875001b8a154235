"""Flower apps as they stand: every algorithm with an app's own train function, which knows of none.

The train function loads arrays, trains them with a torch optimizer and returns them. It is given y_0 = x + v_i instead
of x, and what it returns is y_K. ``Steps`` adds c_i and the pull to its gradients and counts its steps. The gradient at
x is taken by letting the same function run once with every step held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp as FlowerClientApp
from flwr.clientapp.client_app import DEFAULT_ACTION
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from gradalign.algorithms.alignment import FedLESAM
from gradalign.algorithms.plan import Algorithm
from gradalign.client import LocalTraining
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import Point
from gradalign.client.step import set_out
from gradalign.errors import GradalignError
from gradalign.flower import messages
from gradalign.flower.client import Door, tell_partition
from gradalign.flower.client_round import ClientRound, facts_sent
from gradalign.flower.layout import Layout, Named
from gradalign.flower.messages import CONFIG, EXAMPLES, LAYOUT, NAMES, ORDER, SEEN, SHARED, TOTAL_STEP_SIZE
from gradalign.flower.own_loop import add_up, settings_unread
from gradalign.flower.steps import Steps

Losses = Callable[[Message, Context], tuple[nn.Module, Iterable[tuple[Tensor, int]]]]


@dataclass
class _Round:
    """One order, seen from an app that loads named arrays."""

    layout: Layout
    vectors: dict[str, Tensor]
    """x, floats, ints and the rest, as they came."""
    told: Broadcast
    who: Participant
    show: Callable[[Named], Message]
    """Returns the message that the app is shown, with these arrays in it."""
    gradient: Tensor | None = None
    trained: set[str] | None = None
    """The arrays that have a gradient, and what the app said when it was taken."""
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def x(self) -> Tensor:
        return self.vectors["x"]

    def of_trained(self, vector: Tensor) -> Tensor:
        """Return a vector like x with zeros where nothing is trained, as far as that is known."""
        if self.trained is None:
            return vector
        return self.layout.flat(self.layout.named({**self.vectors, "x": vector}), {"x": self.x}, self.trained)["x"]


class _Adapter:
    """The innermost mod: between our messages and the app's own train function."""

    def __init__(self, losses: Losses | None, algorithms: list[type[Algorithm]]) -> None:
        self._losses, self._algorithms = losses, algorithms
        self.own_train: ClientAppCallable | None = None  # the app's train function without any mods of its own

    def __call__(self, message: Message, context: Context, train: ClientAppCallable) -> Message:
        ordered = any(ORDER in config for config in message.content.config_records.values())
        if not ordered or message.metadata.message_type != messages.TRAIN:
            return train(message, context)
        if any(LAYOUT in config for config in message.content.config_records.values()):
            return self._flat(message, context, train)
        return self._named(message, context, train)

    def gradient_phase(self, message: Message, context: Context, train: ClientAppCallable) -> Message:
        """Answer ``train.gradient``."""
        work, one = self._received(message, context)
        gradient = self._take_gradient(one, context, train)
        work.remember_gradient(gradient)
        return messages.reply(message, {"gradient": gradient}, _with_loss(one.numbers))

    def _received(self, message: Message, context: Context) -> tuple[ClientRound, _Round]:
        """Read a message of ``AlignedStrategy``, which has flat vectors."""
        config, work = message.content.config_records[CONFIG], ClientRound(message, context, None, self._algorithms)
        layout, keys = Layout.decode(str(config[LAYOUT])), str(config[messages.KEYS]).split()

        def show(arrays: Named) -> Message:
            return messages.in_place_of(message, RecordDict({keys[0]: ArrayRecord(arrays), keys[1]: _users(config)}))

        vectors = work.told.point._asdict() | work.rest
        return work, _Round(layout, vectors, work.told, work.who, show, work.gradient)

    def _flat(self, message: Message, context: Context, train: ClientAppCallable) -> Message:
        """Train for ``AlignedStrategy``: Δ_i goes back flat, with the app's own numbers and ours."""
        work, one = self._received(message, context)
        start, reply, steps = self._train(one, context, train)
        if reply.has_error():
            return reply
        work.told, work.gradient = one.told, one.gradient
        after = one.layout.flat(_arrays(reply), work.told.point._asdict())
        after["update"] = after.pop("x") - start
        local = work.order.local
        unseen = work.told.algorithm.reports and not steps.count  # then β would stay 0 without a word
        exact = work.order.step_sizes or unseen
        total = steps.total_step_size(local.weight_decay) if exact else steps.total
        work.remember_update(after["update"], total)
        numbers = _with_loss(_numbers(reply)) | {"steps": steps.count, TOTAL_STEP_SIZE: total}
        numbers |= work.facts((one.numbers.get(SEEN, 0), numbers.get(EXAMPLES, 0)))
        if one.numbers and EXAMPLES in numbers:  # once more, or as many as were looked at, for the gradient
            numbers[SEEN] = numbers[EXAMPLES] + one.numbers.get(SEEN, numbers[EXAMPLES])
        followed = {"weight_decay"} if work.order.step_sizes else set()
        followed |= {"lr"} if work.order.lr in (LocalTraining.lr, steps.lr) else set()  # the default asks for nothing
        followed |= set() if self._losses is None else {"gradient_examples"}
        unread = settings_unread(local, steps.count, followed)
        return messages.reply(message, after, numbers, unread=unread)

    def _named(self, message: Message, context: Context, train: ClientAppCallable) -> Message:
        """Train for ``OneTrip``: x comes, and x + Δ_i goes back, by name as the app has it."""
        order, content = messages.Order.of(message), message.content
        key, record = next(iter(content.array_records.items()))
        place, config = next((name, one) for name, one in content.config_records.items() if ORDER in one)
        sent = record.to_torch_state_dict()
        names = str(config[NAMES]).split("\n")
        layout, x = Layout.of_arrays(sent, names), torch.cat([sent[name].reshape(-1) for name in names])
        algorithm = messages.algorithm_of(order, self._algorithms)
        if order.limit is not None and self._losses is None:
            raise GradalignError("steps held back see all examples; for gradient_examples give ClientApp(gradient=...)")
        shared = {
            name.removeprefix(SHARED): torch.frombuffer(bytearray(value), dtype=x.dtype)
            for name, value in config.items()
            if name.startswith(SHARED) and isinstance(value, bytes)
        }
        told = Broadcast(
            point=Point(x, x[:0], x[:0]),
            round=order.round,
            algorithm=algorithm,
            gradient_examples=order.limit,
            shared=shared,
            weight_decay=order.local.weight_decay,
        )

        def show(arrays: Named) -> Message:
            typed = ArrayRecord({name: arrays[name].to(value.dtype) for name, value in sent.items()})
            return messages.in_place_of(message, RecordDict({**content, key: typed, place: _users(config)}))

        vectors = {"x": x} | {f"rest.{name}": value for name, value in sent.items()}
        one = _Round(layout, vectors, told, Participant(client=order.client), show)
        start, reply, steps = self._train(one, context, train)
        if reply.has_error():
            return reply
        after, (back, _) = _arrays(reply), next(iter(reply.content.array_records.items()))
        moved = layout.flat(after, {"x": x})["x"]
        # Where nothing was displaced, the app's own bits.
        vectors["x"] = torch.where(start == x, moved, x + (moved - start))
        named = layout.named(vectors)
        returned = {name: named[name].to(a) if name in names else a for name, a in after.items()}
        reply.content[back] = ArrayRecord(returned)
        numbers: Any = reply.content.config_records.get("fitres.metrics")  # of Flower's older kind
        numbers = next(iter(reply.content.metric_records.values()), {}) if numbers is None else numbers
        numbers[TOTAL_STEP_SIZE] = steps.total_step_size(order.local.weight_decay) if order.step_sizes else 0.0
        if algorithm.reports:
            facts = facts_sent(one.told, one.who, one.gradient, (one.numbers.get(SEEN, 0), numbers.get(EXAMPLES, 0)))
            numbers.update(facts | {messages.STEP_SIZE: numbers[TOTAL_STEP_SIZE] / steps.count})
        return reply

    def _take_gradient(self, one: _Round, context: Context, train: ClientAppCallable) -> Tensor:
        """Return g_i, and note what is trained and what the app said."""
        arrays, limit = one.layout.named(one.vectors), one.told.gradient_examples
        if self._losses is not None:
            model, losses = self._losses(one.show(arrays), context)
            model.train().zero_grad()
            loss, seen = add_up(losses, limit)
            grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
            found = {name: g.detach().cpu() / seen for name, g in grads.items() if g is not None}
            one.numbers = {"loss": loss, EXAMPLES: seen if limit is None else None, SEEN: seen}
        else:
            with torch.random.fork_rng(), Steps(one.layout.named({"x": one.x}), still=True) as steps:
                reply = (self.own_train or train)(one.show(arrays), _aside(context))
            if reply.has_error():
                raise GradalignError(f"the app's train function failed: {reply.error.reason}")
            found, one.numbers = steps.gradient(), _numbers(reply)
        if not found.keys() & arrays.keys():
            raise GradalignError(
                "the app's train function took no step with a torch optimizer on the server's arrays, so its gradient "
                "cannot be seen; give ClientApp(gradient=...)"
            )
        one.trained = set(found)
        return one.layout.flat(found, {"x": one.x}, one.trained)["x"]

    def _train(self, one: _Round, context: Context, train: ClientAppCallable) -> tuple[Tensor, Message, Steps]:
        """Let the app train from y_0; return y_0, its reply, and what was seen of its steps."""
        if not one.layout.exact and any(isinstance(part, FedLESAM) for part in one.told.algorithm.parts):
            raise GradalignError("fedlesam needs to know which arrays are trained; give AlignedStrategy the model")
        if one.gradient is None and one.told.algorithm.uses_own_gradient:
            one.gradient = self._take_gradient(one, context, train)
            # s has numbers for running means and the like, too, where the server does not know them.
            shared = {label: one.of_trained(vector) for label, vector in one.told.shared.items()}
            one.told = replace(one.told, shared=shared)
        plan = replace(one.told.plan(one.who, one.gradient), every_step=False)
        moved = plan.displaced(one.gradient)
        if moved is not None:
            if one.told.mean is None and one.trained is None and not one.layout.exact:
                self._take_gradient(one, context, train)  # for what is trained
            moved = one.of_trained(moved)
        start, constant, _ = set_out(one.x.clone(), plan, moved, plan.correction)
        arrays = one.layout.named({**one.vectors, "x": start})
        added = None if constant is None else one.layout.named({"x": constant})
        with Steps(one.layout.named({"x": start}), constant=added, pull=plan.pull) as steps:
            reply = train(one.show(arrays), context)
        if added is not None and steps.count and not steps.known:
            raise GradalignError("the app's optimizer trains none of the server's arrays as they were sent")
        return start, reply, steps


def _arrays(reply: Message) -> Named:
    if not reply.content.array_records:
        raise GradalignError("the app's reply to train has no arrays")
    return next(iter(reply.content.array_records.values())).to_torch_state_dict()


def _numbers(reply: Message) -> dict[str, Any]:
    return dict(next(iter(reply.content.metric_records.values()), {}))


def _with_loss(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return an app's numbers with one called loss: its own, or the first that is named like one."""
    return {"loss": next((value for name, value in numbers.items() if "loss" in name.lower()), 0.0)} | numbers


def _users(config: ConfigRecord) -> ConfigRecord:
    return ConfigRecord({name: value for name, value in config.items() if not name.startswith(ORDER)})


def _aside(context: Context) -> Context:
    """Return a context whose state may be written to without a trace."""
    own = {name: deepcopy(record) for name, record in context.state.items() if not name.startswith(ORDER)}
    return replace(context, state=RecordDict(own))


class ClientApp(FlowerClientApp):
    """Flower's ClientApp, whose train function may stay as it is with every algorithm here.

    Import it instead of Flower's. It answers ``AlignedStrategy`` (in one trip or two) and ``OneTrip``, and anyone else
    as before. The train function must load the message's arrays, train with a torch optimizer and return the arrays.

    Args:
        client_fn: As in Flower, for apps of its older kind.
        mods: Flower mods for all messages. With ``AlignedStrategy``, those that work on arrays go in as
            ``on_update(mod)``.
        gradient: How a client's gradient is taken: a function of message and context that returns the model, loaded
            with the message's arrays, and its losses, ``(mean loss, number of examples)`` for each batch. When not
            given, the train function runs once more with its steps held back, and their gradients' mean is taken.
        examples: Gives the number of the client's examples; when not given, the server goes by the first reply.
        algorithms: Algorithms of your own that the server may name, as for ``client_app``.
    """

    def __init__(
        self,
        client_fn: Any = None,
        mods: list[Mod] | None = None,
        *,
        gradient: Losses | None = None,
        examples: Callable[[Context], int] | None = None,
        algorithms: Iterable[type[Algorithm] | str] = (),
    ) -> None:
        self._adapter = _Adapter(gradient, messages.own_classes(algorithms))
        self._door = Door(mods or ())
        super().__init__(client_fn, [self._door, *(mods or ()), self._adapter])
        if client_fn is None:
            self.query("partition")(tell_partition(self, examples, stock=True))
            super().train("gradient")(self._gradient_phase)

    def train(
        self, action: str = DEFAULT_ACTION, *, mods: list[Mod] | None = None
    ) -> Callable[[ClientAppCallable], ClientAppCallable]:
        """Register a train function, as in Flower; mods that are given here see the app's own arrays both ways."""
        self._door.notice(mods or ())
        register = super().train(action, mods=mods)

        def decorate(function: ClientAppCallable) -> ClientAppCallable:
            if action == DEFAULT_ACTION:
                self._adapter.own_train = function
            return register(function)

        return decorate

    def _gradient_phase(self, message: Message, context: Context) -> Message:
        if self._adapter.own_train is None:
            raise GradalignError("this app has no train function")
        return self._adapter.gradient_phase(message, context, self._adapter.own_train)

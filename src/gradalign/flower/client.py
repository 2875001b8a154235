"""The client's side: a ClientApp that answers the server's two phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.constant import ErrorCode
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from gradalign.algorithms.plan import Algorithm, FedAvg, combine
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import ClientTrainer, Setup, one_thread
from gradalign.errors import GradalignError
from gradalign.fast import Group
from gradalign.flower import messages
from gradalign.flower.client_round import ClientRound, leaving
from gradalign.flower.messages import ARRAYS, CONFIG, METRICS, ORDER, PARTITION, PARTITIONS
from gradalign.tasks.batches import Examples
from gradalign.tasks.task import Task


def partition_of(context: Context) -> int:
    """Return the client's number, which Flower's simulation or ``--node-config`` gives to the node."""
    value = context.node_config.get(PARTITION)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise GradalignError(
            f"this node has no {PARTITION}; start it with flower-supernode --node-config '{PARTITION}=0 {PARTITIONS}=3'"
        )
    return value


class Door:
    """The outermost Flower mod.

    It sees replies as the server will, asks it for a vector that is lost or differs, and says so when the other mods
    are not those that the server counts on: what was to be clipped or masked must not leave as it is.
    """

    # A class, since Flower's simulation pickles apps, and functions inside functions take their globals along.

    def __init__(self, mods: Sequence[Mod], *, all_known: bool = True) -> None:
        self._mods, self._masks = not all_known, False  # a function of the app's own may have further mods
        self.notice(mods)

    def notice(self, mods: Sequence[Mod]) -> None:
        """Take note of the app's mods."""
        self._mods = self._mods or bool(mods)
        self._masks |= any(getattr(mod, "__name__", "") in ("secaggplus_mod", "secagg_mod") for mod in mods)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        token = leaving.set([])
        try:
            self._check(message)
            answer = call_next(message, context)
            for look in leaving.get() or ():
                look(answer)
            return _addressed(answer, message)
        except messages.MemoryLostError as lost:
            numbers = MetricRecord({messages.LOST: 1, messages.DIFFERS: int(lost.differs)})
            return Message(RecordDict({METRICS: numbers}), reply_to=message)
        finally:
            leaving.reset(token)

    def _check(self, message: Message) -> None:
        configs = message.content.config_records
        if not message.metadata.message_type.startswith(messages.TRAIN):
            return
        if RECORD_KEY_CONFIGS in configs and not self._mods:
            raise GradalignError("the server aggregates securely; give this app mods=[secaggplus_mod]")
        if self._masks and RECORD_KEY_CONFIGS not in configs:
            raise GradalignError("this app masks its updates, and the server does not run Flower's SecAggPlusWorkflow")
        if not self._mods and any(KEY_CLIPPING_NORM in config for config in configs.values()):
            raise GradalignError(f"the server sends a {KEY_CLIPPING_NORM}, and this app has no mod that clips updates")


def _addressed(answer: Message, message: Message) -> Message:
    """Return an error as a reply to the server's message: Flower's mods make some in reply to the app's reply."""
    if not answer.has_error():
        return answer
    code, reason = answer.error.code, answer.error.reason
    asked = message.metadata.message_type == messages.QUERY or ORDER in message.content.config_records.get(CONFIG, {})
    if code == ErrorCode.MOD_FAILED_PRECONDITION and asked:
        reason = f"{reason} With AlignedStrategy, a mod that works on arrays goes in as on_update(mod)."
    return Message(Error(code=code, reason=reason), reply_to=message)


def tell_partition(
    app: ClientApp,
    examples: Callable[[Context], int] | None,
    *,
    stock: bool = False,
    evaluates: Callable[[Context], int] | None = None,
) -> ClientAppCallable:
    """Return the function that tells the server whose data is here, and what the app can do."""

    def partition(message: Message, context: Context) -> Message:
        known = {PARTITION: partition_of(context), messages.STOCK: int(stock)}
        registered = int("evaluate.default" in app._registered_funcs)
        known[messages.EVALUATES] = registered if evaluates is None else evaluates(context)
        if examples is not None:
            known[messages.EXAMPLES] = examples(context)
        total = context.node_config.get(PARTITIONS)
        if isinstance(total, int):
            known[PARTITIONS] = total
        return Message(RecordDict({METRICS: MetricRecord(dict(known))}), reply_to=message)

    return partition


def aligned_app(*, examples: Callable[[Context], int] | None = None, mods: Iterable[Mod] = ()) -> ClientApp:
    """Return a ClientApp for your own training functions; it already tells the server whose data is here.

    Register ``train("gradient")`` and ``train()`` on it, with ``gradient_reply`` and ``LocalRound`` inside.

    Args:
        examples: Gives the number of the client's examples, for ``weights="examples"``; when not given, the server
            goes by the client's first reply in each round.
        mods: Flower mods for all messages; those that work on arrays go in as ``on_update(mod)``.
    """
    mods = list(mods)
    app = ClientApp(mods=[Door(mods, all_known=False), *mods])
    app.query("partition")(tell_partition(app, examples))
    return app


def on_update(mod: Mod, *, gradients: bool = True) -> Mod:
    """Return a Flower mod that applies ``mod`` to Δ_i, and to g_i in the gradient phase; buffers pass untouched.

    Flower's privacy mods expect one ArrayRecord each way with the same names, and take the difference of the two for
    the update. Ours go down with x and ḡ and come up with the update itself. So the mod is shown what it expects:
    zeros going down, the update coming up. The difference is then the update, to the bit.

    Args:
        mod: For example ``fixedclipping_mod``, ``adaptiveclipping_mod`` or ``LocalDpMod(...)``.
        gradients: Whether g_i goes through the mod, too. A g_i sent as it is says as much about the data as Δ_i.
    """

    def adapted(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind, reply = message.metadata.message_type, call_next(message, context)
        concerned = kind == messages.TRAIN or (gradients and kind.startswith(f"{messages.TRAIN}."))
        if not concerned or reply.has_error() or ARRAYS not in reply.content.array_records:
            return reply
        rest = dict(reply.content.array_records[ARRAYS])
        carried: dict[str, Array] = {name: rest.pop(name) for name in ("update", "gradient") if name in rest}
        zeros = {name: Array(np.zeros_like(array.numpy())) for name, array in carried.items()}
        reply.content[ARRAYS] = ArrayRecord(carried)
        content = RecordDict({ARRAYS: ArrayRecord(zeros), CONFIG: message.content.config_records[CONFIG]})
        answer = mod(messages.in_place_of(message, content), context, lambda *_: reply)
        if not answer.has_error():
            answer.content[ARRAYS] = ArrayRecord({**answer.content.array_records[ARRAYS], **rest})
        return answer

    return adapted


class _TaskClient:
    """Answers for the clients of one task. The model is made once and used for every message of the process."""

    def __init__(
        self, task: Task | Callable[[Context], Task], algorithms: list[type[Algorithm]], device: torch.device | str
    ) -> None:
        self._source, self._algorithms, self._device = task, algorithms, device
        self._made: tuple[str, Task] | None = None
        self._group: Group | None = None
        self._trained_with: tuple[object, ...] = ()

    def task(self, context: Context) -> Task:
        if isinstance(self._source, Task):
            return self._source
        # A task with all clients serves every node of a process (Flower's simulation); one with a single client, one.
        for_all, for_one = repr(context.run_config), repr((context.run_config, context.node_config))
        if self._made is None or self._made[0] not in (for_all, for_one):
            task = self._source(context)
            self._made = (for_all if len(task.clients) > 1 else for_one, task)
        return self._made[1]

    def examples(self, context: Context, seed: int = 0) -> Examples:
        """Return the node's examples: its partition's, or the only ones there are."""
        task, client = self.task(context), partition_of(context)
        total = len(task.clients)
        if 1 < total <= client:
            raise GradalignError(f"{PARTITION} is {client}, but the task {task.name} has {total} clients")
        return task.client(client if total > 1 else 0, seed)

    def _group_for(self, order: messages.Order, task: Task) -> Group:
        wanted = (order.local, order.seed, order.fast)
        if self._group is None or self._group.setup.task is not task or self._trained_with != wanted:
            setup = Setup(task=task, local=order.local, seed=order.seed, device=self._device, fast=order.fast)
            self._group, self._trained_with = Group(setup), wanted
            self._like = self._group.one.flat.read()
        return self._group

    def _begin(self, message: Message, context: Context) -> tuple[ClientTrainer, ClientRound, Examples]:
        order = messages.Order.of(message)
        group = self._group_for(order, self.task(context))
        work = ClientRound(message, context, self._like, self._algorithms)
        return group.one, work, self.examples(context, order.seed)

    def gradient(self, message: Message, context: Context) -> Message:
        with one_thread():
            trainer, work, examples = self._begin(message, context)
            found = trainer.gradient(work.told, work.who, examples)
        work.remember_gradient(found.vector.cpu())
        numbers = {"loss": found.losses[0], "accuracy": found.accuracies[0]}
        numbers |= {messages.EXAMPLES: len(examples), messages.SEEN: found.examples}
        return messages.reply(message, {"gradient": found.vector}, numbers)

    def train(self, message: Message, context: Context) -> Message:
        with one_thread():
            trainer, work, examples = self._begin(message, context)
            taken = 0
            if work.gradient is None and work.told.algorithm.uses_own_gradient:  # without a trip to the server
                own = trainer.gradient(work.told, work.who, examples)
                work.gradient, taken = own.vector.cpu(), own.examples
            done = trainer.train(work.told, work.who, work.plan(), examples)
        work.remember_update(done.vector.cpu(), done.total_step_sizes[0])
        numbers = {"loss": done.losses[0], "steps": done.steps[0], messages.TOTAL_STEP_SIZE: done.total_step_sizes[0]}
        numbers |= {
            messages.EXAMPLES: len(examples),
            messages.SEEN: done.examples + taken,
            **work.facts(work.told.sample(len(examples))),
        }
        return messages.reply(message, {"update": done.vector, "floats": done.floats, "ints": done.ints}, numbers)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Score the server's point on the client's own test examples, after some training where that is asked."""
        order, task = messages.Order.of(message), self.task(context)
        arrays = next(iter(message.content.array_records.values())).to_torch_state_dict()
        with one_thread():
            group, model = self._group_for(order, task), task.make_model(order.seed)
            model.load_state_dict(arrays)
            told = Broadcast(point=FlatModel(model).read(), round=order.round, algorithm=combine(FedAvg()), lr=order.lr)
            client = order.client if len(task.clients) > 1 else 0
            score = group.score_client(told, Participant(client=client), tuned=order.tuned)
        if score is None:
            raise GradalignError("this client has no test examples of its own")
        numbers = {**score.metrics, "loss": score.loss, "accuracy": score.accuracy, messages.EXAMPLES: score.examples}
        return messages.reply(message, {}, numbers)

    def evaluates(self, context: Context) -> int:
        return 2 if self.task(context).client_tests is not None else 0


def client_app(
    task: Task | Callable[[Context], Task],
    *,
    algorithms: Iterable[type[Algorithm] | str] = (),
    mods: Iterable[Mod] = (),
    device: torch.device | str = "cpu",
) -> ClientApp:
    """Return the ClientApp that trains a task under any algorithm the server names.

    Args:
        task: The task, or a function that makes it from Flower's context. The node works on the client that its
            ``partition-id`` names, or on the only client of a task that has one.
        algorithms: Algorithms of your own that the server may name beside the built-in ones: classes, or their names,
            ``"package.module:Class"``. No others are ever imported, whatever a message says.
        mods: Flower mods for all messages; those that work on arrays go in as ``on_update(mod)``.
        device: Where the model runs.
    """
    client = _TaskClient(task, messages.own_classes(algorithms), device)
    mods = list(mods)
    app = ClientApp(mods=[Door(mods), *mods])
    sizes = lambda context: len(client.examples(context))  # noqa: E731
    app.query("partition")(tell_partition(app, sizes, evaluates=client.evaluates))
    app.train("gradient")(client.gradient)
    app.train()(client.train)
    app.evaluate()(client.evaluate)
    return app

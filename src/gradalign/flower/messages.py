"""What the server and the clients say to each other, as Flower records.

Down, in one message: an ArrayRecord with x and the buffers, and for training ḡ and each keeper's s; a ConfigRecord
with the order as JSON under one key, beside whatever the user adds for mods. Up: an ArrayRecord with g_i, or with Δ_i
and the buffers; a MetricRecord with the numbers. Vectors are flat, in the model's own precision: nothing is rounded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from gradalign.algorithms import known_algorithms
from gradalign.algorithms.plan import Algorithm, Combination
from gradalign.client import LocalTraining
from gradalign.client.exchange import ClientScore, Gradient, Update
from gradalign.client.flat import Point, all_finite
from gradalign.errors import GradalignError
from gradalign.recipes.names import parts_of

ARRAYS, CONFIG, METRICS, ORDER = "arrays", "config", "metrics", "gradalign"
QUERY, GRADIENT, TRAIN, EVALUATE = "query.partition", "train.gradient", "train", "evaluate"
LOST, DIFFERS = "memory-lost", "memory-differs"  # a client lacks a vector that the server speaks of, or has another
EXAMPLES, SEEN = "num-examples", "examples-seen"
UNREAD = "settings-unread"  # those that a training loop of the client's own did not look at
STOCK = "stock"  # of a node's app: it loads named arrays
EVALUATES = "evaluates"  # 1: it has an evaluate function; 2: it is a Task's, and can train before it evaluates
# For apps that load named arrays:
LAYOUT, KEYS, NAMES, SHARED = "gradalign.layout", "gradalign.keys", "gradalign.names", "gradalign.shared."
ROUND = "server-round"  # counted from 1, as in Flower
TOTAL_STEP_SIZE = "total-step-size"
FACT = "fact."  # begins the names of what an algorithm has clients report
STEP_SIZE = f"{FACT}step-size"  # the mean over a client's steps
OURS = ("steps", SEEN, TOTAL_STEP_SIZE, FACT)  # begin those of a reply that are not its app's
PARTITION, PARTITIONS = "partition-id", "num-partitions"


class BadReplyError(GradalignError):
    """A client's reply that cannot be used; the message is the reason."""


class MemoryLostError(GradalignError):
    """The server counts on a vector that this client does not have, or not with the same bits.

    It is missing when a SuperNode was restarted; it ``differs`` when Δ_i or g_i was changed on its way to the server.
    """

    def __init__(self, text: str, *, differs: bool = False) -> None:
        super().__init__(text)
        self.differs = differs


def to_array(tensor: Tensor) -> Array:
    """Return a tensor as Flower sends it; bfloat16, which NumPy lacks, goes as its bits."""
    plain = tensor.detach().cpu().contiguous()
    return Array((plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy())


def to_tensor(array: Array, dtype: torch.dtype | None = None) -> Tensor:
    tensor = torch.from_numpy(array.numpy())
    if dtype == torch.bfloat16 and tensor.dtype == torch.int16:
        return tensor.view(torch.bfloat16)
    return tensor if dtype is None else tensor.to(dtype)


def digest(vector: Tensor) -> str:
    """Return a hash of a vector's bytes: equal where server and client hold the same numbers, to the bit."""
    plain = vector.detach().cpu().contiguous()
    return hashlib.blake2b(plain.view(torch.uint8).numpy().data, digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a client is asked to do, vectors apart."""

    client: int
    round: int
    seed: int
    local: LocalTraining
    fast: bool = True
    lr: float = 0.0
    limit: int | None = None
    """How many examples the gradient phase uses."""
    parts: tuple[Mapping[str, Any], ...] = ()
    """The algorithm's parts by name, with this round's values, for training."""
    weight: float = 1.0
    participants: int = 1
    memory: Mapping[str, int] = field(default_factory=dict)
    """For each keeper: the round after which the server last heard of this client's k_i, −1 for never."""
    tuned: bool = False
    """Whether the client trains before it evaluates."""
    step_sizes: bool = False
    """Whether anyone reckons with what the round's step sizes add up to."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of the client's vectors as the server has them; what a client holds counts only where it is the same."""

    def encode(self) -> str:
        """Return the order as JSON; Python writes floats so that they are read back to the bit."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, message: Message) -> Order:
        configs = message.content.config_records.values()
        try:
            plain = json.loads(str(next((one for one in configs if ORDER in one), ConfigRecord())[ORDER]))
            return cls(**plain | {"local": LocalTraining(**plain["local"])})
        except (KeyError, TypeError, ValueError) as error:
            raise GradalignError(f"this message is not from a gradalign server: {error}") from None


def encoded_parts(algorithm: Combination) -> tuple[dict[str, Any], ...]:
    """Return the parts of an algorithm as ``Order.parts`` has them; the server's rule stays on the server."""
    return tuple({"name": label} | values for label, values in algorithm.values().items())


def needs_step_sizes(algorithm: Combination) -> bool:
    """Return whether anyone reckons with what a round's step sizes add up to."""
    return any(part.keeps or part.extra_down for part in algorithm.parts)


def own_classes(algorithms: Iterable[type[Algorithm] | str]) -> list[type[Algorithm]]:
    """Return the classes that a client allows beside the built-in ones, imported where they are given by name.

    A server can name only these: nothing is imported because a message says so.
    """
    found: list[type[Algorithm]] = []
    for one in algorithms:
        found += parts_of(one).values() if isinstance(one, str) else [one]
    return found


def algorithm_of(order: Order, more: Iterable[type[Algorithm]]) -> Combination:
    """Return the algorithm that an order names, of built-in classes and these; the server's rule stays there."""
    known = {label: kind for label, kind in known_algorithms().items() if kind.__module__.startswith("gradalign.")}
    known |= {kind.label: kind for kind in more}
    values = {str(part["name"]): {key: part[key] for key in part if key != "name"} for part in order.parts}
    for name in values:
        if name not in known:
            raise GradalignError(
                f'this client does not know the algorithm "{name}" (it knows {", ".join(known)}); install the '
                "server's version of gradalign here, or give client_app(algorithms=...) your own algorithm"
            )
    return Combination.from_values(values, known)


def point_arrays(point: Point) -> dict[str, Array]:
    """Return x and the buffers as arrays; made once for all clients of a phase."""
    return {name: to_array(vector) for name, vector in point._asdict().items() if vector.numel()}


def instruction(
    kind: str, node: int, arrays: Mapping[str, Array], order: Order, extra: Mapping[str, Any], ttl: float
) -> Message:
    config = ConfigRecord({**extra, ROUND: order.round + 1, ORDER: order.encode()})
    content = RecordDict({ARRAYS: ArrayRecord(dict(arrays)), CONFIG: config})
    return Message(content, dst_node_id=node, message_type=kind, ttl=ttl, group_id=str(order.round + 1))


def in_place_of(message: Message, content: RecordDict) -> Message:
    """Return a message with other content, to which replies are replies to the first one."""
    shown = Message(content, reply_to=message)
    shown.metadata.__dict__.update(message.metadata.__dict__)
    return shown


def received_point(arrays: ArrayRecord, like: Point | None) -> Point:
    """Return the point that arrays hold, in the shape of the client's own model where that is known."""
    if like is None:
        empty = {"x": torch.empty(0), "floats": torch.empty(0), "ints": torch.empty(0, dtype=torch.int64)}
        return Point(**{name: to_tensor(arrays[name]) if name in arrays else none for name, none in empty.items()})

    def vector(name: str, own: Tensor) -> Tensor:
        found = to_tensor(arrays[name], own.dtype) if name in arrays else own.new_empty(0)
        if found.shape != own.shape:
            raise GradalignError(
                f"the server's model has {found.numel()} values in {name} and this client's has {own.numel()}; "
                "both sides must make the same model"
            )
        return found

    return Point(*(vector(name, own) for name, own in like._asdict().items()))


def reply(message: Message, vectors: Mapping[str, Tensor], metrics: Mapping[str, Any], *, unread: str = "") -> Message:
    """Return a reply; empty vectors and unknown numbers are left out. ``unread`` names the settings not followed."""
    arrays = {name: to_array(vector) for name, vector in vectors.items() if vector.numel()}
    numbers: dict[str, Any] = {name: value for name, value in metrics.items() if value is not None}
    content = RecordDict({ARRAYS: ArrayRecord(arrays), METRICS: MetricRecord(numbers)})
    if unread:
        content[CONFIG] = ConfigRecord({UNREAD: unread})
    return Message(content, reply_to=message)


def metrics_of(message: Message) -> MetricRecord:
    """Return a message's numbers; an error has none."""
    return message.content.metric_records.get(METRICS, MetricRecord()) if message.has_content() else MetricRecord()


def _number(record: MetricRecord, name: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadReplyError(f"its reply has no number called {name}")
    if not abs(float(value)) < float("inf"):
        raise BadReplyError(f"its {name} is NaN or infinite")
    return float(value)


def _replied_vector(arrays: ArrayRecord, name: str, like: Tensor) -> Tensor:
    if name not in arrays:
        if not like.numel():
            return like
        raise BadReplyError(f"its reply has no array called {name}")
    try:
        found = to_tensor(arrays[name], like.dtype)
    except (TypeError, ValueError) as error:
        raise BadReplyError(f"its {name} cannot be read: {error}") from None
    if found.shape != like.shape:
        raise BadReplyError(f"its {name} has shape {tuple(found.shape)} instead of {tuple(like.shape)}")
    if found.is_floating_point() and not all_finite(found):
        raise BadReplyError(f"its {name} has values that are NaN or infinite")
    return found


def _records(message: Message) -> tuple[ArrayRecord, MetricRecord]:
    content = message.content
    if ARRAYS not in content.array_records or METRICS not in content.metric_records:
        raise BadReplyError(f'its reply lacks the records "{ARRAYS}" and "{METRICS}"')
    return content.array_records[ARRAYS], content.metric_records[METRICS]


def _of_one(client: int, weight: float, metrics: MetricRecord) -> dict[str, Any]:
    """Return what a Gradient and an Update have in common; without a number of examples seen, they are the client's."""
    loss, seen = _number(metrics, "loss"), _number(metrics, SEEN if SEEN in metrics else EXAMPLES)
    return {"clients": (client,), "weights": (weight,), "factor": weight, "losses": (loss,), "examples": int(seen)}


def read_gradient(message: Message, point: Point, client: int, weight: float) -> Gradient:
    """Return g_i from a reply, or say why it cannot be used."""
    arrays, metrics = _records(message)
    vector = _replied_vector(arrays, "gradient", point.x)
    accuracy = _number(metrics, "accuracy") if "accuracy" in metrics else None
    return Gradient(vector=vector, accuracies=(accuracy,), **_of_one(client, weight, metrics))


def read_size(message: Message, key: str = EXAMPLES) -> float:
    """Return what a client weighs by its reply: how many examples it says that it has, or another number."""
    metrics = _records(message)[1]
    if key not in metrics:
        hint = "; give aligned_app(examples=…)" if key == EXAMPLES else ""
        raise BadReplyError(f'its reply has no number called {key}, and weights="examples" needs one{hint}')
    size, least = _number(metrics, key), "at least 1" if key == EXAMPLES else "more than 0"
    if size < 1 if key == EXAMPLES else size <= 0:
        raise BadReplyError(f'its {key} is {size:g}, and weights="examples" needs {least}')
    return size


def read_score(message: Message, client: int, key: str = EXAMPLES) -> ClientScore | None:
    """Return what a client's evaluation says, by the names of its numbers; None where none of them is a loss."""
    numbers = {name: float(v) for name, v in metrics_of(message).items() if isinstance(v, int | float)}

    def named(word: str) -> str:
        return next((name for name in (word, *numbers) if name in numbers and word[:4] in name.lower()), "")

    loss, accuracy = named("loss"), named("accuracy")
    if not loss:
        return None
    others = {name: value for name, value in numbers.items() if name not in (loss, accuracy, key)}
    examples = int(numbers.get(key, numbers.get(EXAMPLES, 0)))
    return ClientScore(
        client=client, examples=examples, loss=numbers[loss], accuracy=numbers.get(accuracy), metrics=others
    )


def read_update(message: Message, point: Point, client: int, weight: float) -> Update:
    """Return Δ_i from a reply, or say why it cannot be used."""
    arrays, metrics = _records(message)
    facts = {name.removeprefix(FACT): (_number(metrics, name),) for name in metrics if name.startswith(FACT)}
    return Update(
        vector=_replied_vector(arrays, "update", point.x),
        floats=_replied_vector(arrays, "floats", point.floats),
        ints=_replied_vector(arrays, "ints", point.ints),
        **_of_one(client, weight, metrics),
        facts=facts,
        steps=(int(_number(metrics, "steps")),),
        total_step_sizes=(_number(metrics, TOTAL_STEP_SIZE),),
    )

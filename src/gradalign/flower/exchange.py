"""Messages and replies with an end to every wait, and who is on which node."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from gradalign.errors import GradalignError, whole
from gradalign.flower.messages import EVALUATES, EXAMPLES, PARTITION, PARTITIONS, QUERY, STOCK, metrics_of

# A child of Flower's own logger: what is said here stands beside what Flower says, in the same form.
logger = logging.getLogger("flwr.gradalign")

ASK_AGAIN_SECONDS = 10.0
# What the SuperLink itself answers for a node that is gone.
_UNAVAILABLE = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the server waits, and how often it tries again.

    Attributes:
        connect_seconds: For enough nodes to be connected. The first phase of a run waits as long as this for all of its
            clients; later ones only while fewer than ``min_fraction`` of them are there.
        gradient_seconds: For the replies of the gradient phase.
        train_seconds: For the replies of the training phase.
        retries: How often a round that too few clients answered is played again before the run stops.
        poll_seconds: How often the server looks for replies. SuperNodes themselves look for messages every 3 seconds.
    """

    connect_seconds: float = 120.0
    gradient_seconds: float = 600.0
    train_seconds: float = 1800.0
    retries: int = 2
    poll_seconds: float = 0.5

    def __post_init__(self) -> None:
        for name in ("connect_seconds", "gradient_seconds", "train_seconds", "poll_seconds"):
            if not getattr(self, name) > 0:  # infinite is as long as it takes
                raise GradalignError(f"patience.{name} must be above 0, got {getattr(self, name)!r}")
        whole("patience.retries", self.retries, 0)


class Answers(NamedTuple):
    """What came of a phase: the replies, why other clients have none, and which of these did not say a word."""

    replies: dict[int, Message]
    failures: dict[int, str]
    silent: set[int]


class Exchange:
    """Pushes messages and pulls replies through a grid. Flower's own ``send_and_receive`` looks every 3 seconds."""

    def __init__(self, grid: Grid, poll_seconds: float) -> None:
        self.grid, self._poll = grid, poll_seconds

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Send messages; an empty id stands for one that Flower refused."""
        if not messages:
            return []
        ids = [message_id or "" for message_id in self.grid.push_messages(messages)]
        return ids if len(ids) == len(messages) else [""] * len(messages)

    def pull(self, ids: Iterable[str]) -> Iterator[tuple[str, Message]]:
        for message in self.grid.pull_messages(list(ids)):
            yield message.metadata.reply_to_message_id, message

    def ask(self, messages: Mapping[int, Message], seconds: float) -> Answers:
        waiting: dict[str, int] = {}
        replies, failures, silent = answers = Answers({}, {}, set())
        for client, message_id in zip(messages, self.push(list(messages.values())), strict=True):
            if message_id:
                waiting[message_id] = client
            else:
                failures[client] = "Flower could not take the message"
        for _ in until(time.monotonic() + seconds, self._poll):
            for message_id, message in self.pull(waiting):
                if message_id not in waiting:
                    continue
                client = waiting.pop(message_id)
                if not message.has_error():
                    replies[client] = message
                    continue
                failures[client] = f"it failed: {message.error.reason or f'error code {message.error.code}'}"
                if message.error.code in _UNAVAILABLE:
                    silent.add(client)
            if not waiting:
                break
        failures.update(dict.fromkeys(waiting.values(), f"no answer within {seconds:g} s"))
        silent.update(waiting.values())
        return answers


def until(deadline: float, poll_seconds: float) -> Iterator[None]:
    """Yield at once, then every ``poll_seconds``, and once more at the deadline."""
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(poll_seconds, left))


class Roster:
    """Who is where: clients are known by their partition-id, Flower's nodes by random numbers.

    A node is asked once who it is. A SuperNode that was restarted may come back under another number; the one that
    spoke last counts.
    """

    def __init__(self, grid: Grid, patience: Patience) -> None:
        self.exchange, self.patience = Exchange(grid, patience.poll_seconds), patience
        self._asked: dict[str, tuple[int, float]] = {}  # by message: the node, and until when it may answer
        self._not_before: dict[int, float] = {}
        self._client_of: dict[int, int] = {}
        self._node_of: dict[int, int] = {}
        self.sizes: dict[int, float] = {}
        self.told: set[int] = set()  # those that said their size when asked; the others say it in their replies
        self.stock: set[int] = set()  # whose app loads named arrays
        self.evaluating: set[int] = set()  # whose app has an evaluate function,
        self.tuning: set[int] = set()  # and can train before it evaluates
        self.partitions: int | None = None
        self._complaints: dict[int, str] = {}

    def refresh(self) -> None:
        """Forget the nodes that left, ask the new ones, and read the answers that have come."""
        present, now = set(self.exchange.grid.get_node_ids()), time.monotonic()
        self._client_of = {node: client for node, client in self._client_of.items() if node in present}
        self._node_of = {client: node for client, node in self._node_of.items() if node in present}
        self._asked = {key: (node, end) for key, (node, end) in self._asked.items() if node in present and end > now}
        pending = {node for node, _ in self._asked.values()} | set(self._client_of)
        new = [node for node in sorted(present - pending) if self._not_before.get(node, 0.0) <= now]
        ttl = self.patience.connect_seconds
        messages = [Message(RecordDict(), dst_node_id=node, message_type=QUERY, ttl=ttl) for node in new]
        for node, message_id in zip(new, self.exchange.push(messages), strict=True):
            self._not_before[node] = now + ASK_AGAIN_SECONDS
            if message_id:
                self._asked[message_id] = (node, now + ttl)
        if self._asked:
            for message_id, message in list(self.exchange.pull(self._asked)):
                self._note(self._asked.pop(message_id)[0], message)

    def doubt(self, clients: Iterable[int]) -> None:
        """Take nodes that did not answer for gone until they say who they are again.

        Flower lists a dead node for up to a minute. Doubting it makes its death cost one timeout instead of many.
        """
        for client in clients:
            node = self._node_of.pop(client, None)
            if node is not None:
                self._client_of.pop(node, None)
                self._not_before.pop(node, None)

    def _note(self, node: int, message: Message) -> None:
        metrics = metrics_of(message)
        client, examples, total = metrics.get(PARTITION), metrics.get(EXAMPLES), metrics.get(PARTITIONS)
        wrong = examples is not None and (not isinstance(examples, int) or examples < 1)
        if not isinstance(client, int) or wrong:
            reason = message.error.reason if message.has_error() else "its app does not answer query.partition"
            reason = f"it says that it has {examples} examples, and must have at least 1" if wrong else reason
            if self._complaints.get(node) != reason:
                logger.warning("node %s cannot take part: %s", node, reason)
            self._complaints[node] = str(reason)
            return
        other = self._node_of.get(client)
        if other is not None and other != node:
            logger.warning("nodes %s and %s both hold partition %s; the second is used", other, node, client)
        self._client_of[node], self._node_of[client] = client, node
        if isinstance(examples, int):
            self.sizes[client] = examples
            self.told.add(client)
        self.partitions = total if isinstance(total, int) else self.partitions
        can = ((STOCK, 1, self.stock), (EVALUATES, 1, self.evaluating), (EVALUATES, 2, self.tuning))
        for name, least, group in can:
            (group.add if metrics.get(name, 0) >= least else group.discard)(client)  # type: ignore[operator]

    @property
    def connected(self) -> int:
        return len(self._node_of)

    @property
    def complaint(self) -> str:
        """Why some node cannot take part, as the end of a sentence; empty when all can."""
        return next((f": {reason}" for reason in self._complaints.values()), "")

    def wait(self, enough: Callable[[], bool]) -> bool:
        """Refresh until there is enough or the patience ends; return whether there is."""
        for _ in until(time.monotonic() + self.patience.connect_seconds, self.patience.poll_seconds):
            self.refresh()
            if enough():
                return True
        return False

    def locate(self, clients: Sequence[int], needed: int) -> dict[int, int]:
        """Return the nodes of these clients, waiting while fewer than ``needed`` are connected."""

        def here() -> dict[int, int]:
            return {client: self._node_of[client] for client in clients if client in self._node_of}

        if not self.wait(lambda: len(here()) >= needed):
            waited = self.patience.connect_seconds
            logger.warning("after %g s, %d of %d clients are connected", waited, len(here()), len(clients))
        return here()

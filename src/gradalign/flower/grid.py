"""A grid of nodes in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import count

from flwr.app import Context, Error, Message, RecordDict, UserConfig, UserConfigValue
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from gradalign.errors import told
from gradalign.flower.messages import PARTITION, PARTITIONS, in_place_of


class InProcessGrid(Grid):
    """Runs a ClientApp for many clients without Ray, SuperLink or waiting.

    What a real grid gives is given here, too: random-looking node ids, a context with a state for each node, and an
    error reply in place of an exception. A message is answered when it is pushed, so a timeout cannot cut it short.
    """

    def __init__(
        self, app: ClientApp, clients: int, *, run_id: int = 1, run_config: Mapping[str, UserConfigValue] | None = None
    ) -> None:
        self._app, self._clients, self._run_id, self._run_config = app, clients, run_id, dict(run_config or {})
        self._contexts: dict[int, Context] = {}
        self._replies: dict[str, Message] = {}
        self._numbers = count(1)
        # Flower writes the running task into every message, and has one only in processes that it started itself.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, SUPERLINK_NODE_ID

    def set_run(self, run: Run) -> None:
        self._run_id = run.run_id

    @property
    def run(self) -> Run:
        return Run.create_empty(self._run_id)

    def node_id(self, client: int) -> int:
        """Return the node of a client: an odd multiplier modulo 2⁶² shuffles the numbers and loses none."""
        return (client + 1) * 0x9E3779B97F4A7C15 % 2**62

    @cached_property
    def _client_of(self) -> dict[int, int]:
        return {self.node_id(client): client for client in range(self._clients)}

    def get_node_ids(self) -> list[int]:
        return list(self._client_of)

    def context(self, client: int) -> Context:
        """Return a client's context, made when it is first needed."""
        if client not in self._contexts:
            config: UserConfig = {PARTITION: client, PARTITIONS: self._clients}
            state, settings = RecordDict(), dict(self._run_config)
            self._contexts[client] = Context(self._run_id, self.node_id(client), config, state, run_config=settings)
        return self._contexts[client]

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)  # only Flower's interface asks

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message_id = f"message-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = message_id  # as Flower's own grids do
            # Records of its own for each client, as after a journey: Flower sends one to many, and mods write in it.
            content = RecordDict({name: type(one)(dict(one)) for name, one in message.content.items()})  # type: ignore[arg-type]
            arrived, client = in_place_of(message, content), self._client_of[message.metadata.dst_node_id]
            self._replies[message_id] = self.answer(arrived, client)
            ids.append(message_id)
        return ids

    def answer(self, message: Message, client: int) -> Message:
        """Return the client's reply, or the error that Flower makes of what it raised."""
        try:
            return self._app(message, self.context(client))
        except Exception as error:
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=told(error)), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

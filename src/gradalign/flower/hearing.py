"""What the clients' apps say beside what the rounds need: their own metrics, and their evaluations, as in Flower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import validate_message_reply_consistency

from gradalign.client.exchange import ClientScore
from gradalign.client.flat import Point
from gradalign.flower.exchange import logger
from gradalign.flower.layout import as_arrays
from gradalign.flower.messages import EVALUATE, METRICS, ORDER, OURS, ROUND, Order, metrics_of, read_score
from gradalign.seeding import Purpose, numpy_stream

if TYPE_CHECKING:
    from gradalign.flower.engine import FlowerEngine

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


def evaluations(
    engine: FlowerEngine,
    server_round: int,
    point: Point,
    clients: Sequence[int],
    *,
    lr: float = 0.0,
    tuned: bool = False,
) -> dict[int, Message]:
    """Return the answers of those clients that can evaluate to Flower's own message, which has a state_dict.

    An app of somebody's own cannot be asked to train before (``tuned``): only the clients of a Task can.
    """
    known, roster, seconds = engine.federation, engine.roster, engine.patience.train_seconds
    able = roster.tuning if tuned else roster.evaluating
    nodes = {one: node for one, node in roster.locate(clients, min(1, len(clients))).items() if one in able}
    engine.phase, engine.failures = f"round {server_round}, evaluation", {}
    asked, arrays = {}, as_arrays(known.task.make_model(known.seed), point) if nodes else ArrayRecord()
    order = Order(client=0, round=server_round, seed=known.seed, local=replace(known.local, lr=1.0), fast=known.fast)
    for client, node in nodes.items():
        own = replace(order, client=client, lr=lr, tuned=tuned)
        config = ConfigRecord({**engine.evaluate_config, ROUND: server_round, ORDER: own.encode()})
        content = RecordDict({engine.keys[0]: arrays, engine.keys[1]: config})
        asked[client] = Message(content, node, EVALUATE, ttl=seconds, group_id=str(server_round))
    return engine.ask(asked, seconds) if asked else {}


class Hearing:
    """Gathers a result's records while the rounds are played; Flower's own functions add clients' metrics up."""

    def __init__(self, engine: FlowerEngine, flower: FedAvg, evaluating: int, evaluate_fn: EvaluateFn | None) -> None:
        self._engine, self._federation, self._flower = engine, engine.federation, flower
        self._evaluating, self._evaluate_fn = evaluating, evaluate_fn
        self._train: dict[int, MetricRecord] = {}
        self._evaluate: dict[int, MetricRecord] = {}
        self._server: dict[int, MetricRecord] = {}
        self._scores: dict[int, list[ClientScore]] = {}
        self._warned: set[str] = set()

    def records(self) -> dict[str, Any]:
        """Return what was heard, by the names of a result."""
        return {
            "train_metrics_clientapp": self._train,
            "evaluate_metrics_clientapp": self._evaluate,
            "evaluate_metrics_serverapp": self._server,
            "client_scores": self._scores,
        }

    def trained(self, server_round: int, replies: Mapping[int, Message]) -> None:
        """Add up the metrics of a round's training; a round played again replaces the first attempt."""
        own = [{k: v for k, v in metrics_of(one).items() if not k.startswith(OURS)} for one in replies.values()]
        contents = [RecordDict({METRICS: MetricRecord(numbers)}) for numbers in own]
        self._add_up(self._train, server_round, contents, self._flower.train_metrics_aggr_fn, "train")

    def reached(self, server_round: int, point: Point) -> None:
        """Have a point evaluated: by the user's function, and after every round by clients."""
        if self._evaluate_fn is not None:
            model = self._federation.task.make_model(self._federation.seed)
            found = self._evaluate_fn(server_round, as_arrays(model, point))
            if found is not None:
                self._server[server_round] = found
        if server_round == 0 or not self._evaluating:
            return
        total = len(self._federation.task.clients)
        stream = numpy_stream(self._federation.seed, Purpose.EVALUATE, server_round)
        asked = sorted(int(i) for i in stream.choice(total, self._evaluating, replace=False, shuffle=False))
        replies = evaluations(self._engine, server_round, point, asked)
        contents = [RecordDict({METRICS: metrics_of(reply)}) for reply in replies.values()]
        self._add_up(self._evaluate, server_round, contents, self._flower.evaluate_metrics_aggr_fn, "evaluate")
        scores = (read_score(reply, client, self._flower.weighted_by_key) for client, reply in replies.items())
        self._scores[server_round] = [score for score in scores if score is not None]

    def scores(self, server_round: int) -> list[ClientScore]:
        """Return how the clients fare that evaluated after a round."""
        return self._scores.get(server_round, [])

    def _add_up(
        self,
        found: dict[int, MetricRecord],
        server_round: int,
        contents: list[RecordDict],
        aggregate: Callable[[list[RecordDict], str], MetricRecord],
        what: str,
    ) -> None:
        if not contents:
            return
        key = self._flower.weighted_by_key
        try:
            validate_message_reply_consistency(contents, key, check_arrayrecord=False)
        except InconsistentMessageReplies as reason:
            if str(reason) not in self._warned:
                self._warned.add(str(reason))
                logger.warning("round %d has no %s metrics: %s", server_round, what, reason)
            return
        found[server_round] = aggregate(contents, key)

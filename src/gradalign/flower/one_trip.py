"""Algorithms of one trip on top of Flower's own strategies, which go on sampling, averaging and evaluating.

The server's s rides with x, and the client takes its own gradient: ``gradalign.flower.ClientApp`` does, with the app's
own train function. What goes back is x + Δ_i in the arrays that came. So whatever Flower does with FedAvg's messages
it does with these: weighting, clipping, noise, masks. s is worked out from the points that the strategy gives out,
after all noise and never from a single client: it tells nobody anything that the points do not. A β that sets itself
needs more, a few numbers of each client beside its metrics, and is refused where those would leave it unprotected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import FitIns, FitRes, Parameters, parameters_to_ndarrays
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg as FitFedAvg
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvgM, Result, Strategy
from flwr.serverapp.strategy.fedopt import FedOpt
from torch import Tensor

from gradalign.algorithms.plan import Algorithm, Combination, combine
from gradalign.algorithms.rules import ServerRule
from gradalign.algorithms.view import SharedSums
from gradalign.client import LocalTraining
from gradalign.errors import GradalignError, real
from gradalign.flower import messages
from gradalign.flower.exchange import logger
from gradalign.flower.messages import EXAMPLES, FACT, NAMES, ORDER, SHARED, STEP_SIZE, TOTAL_STEP_SIZE, Order


class _Teller:
    """What the server tells clients beside x: the algorithm with this round's values, and s."""

    def __init__(
        self,
        algorithm: Algorithm | Combination,
        total_step_size: float | None,
        weight_decay: float,
        gradient_examples: int | None,
        protected: bool,
    ) -> None:
        self._given = self.algorithm = combine(algorithm)
        for part in self.algorithm.parts:
            changed = type(part).multiple is not Algorithm.multiple or type(part).offset is not Algorithm.offset
            if part.needs_gradients or part.keeps or part.one_step or changed:
                raise GradalignError(
                    f"{part.label} needs more of clients than one trip with their update; run it with AlignedStrategy. "
                    'FedGA() needs no more, nor does FedGA(beta=0.1, mean="running")'
                )
            if part.reports and (protected or total_step_size is not None):
                raise GradalignError(
                    f"{part.label} has every client tell numbers of its gradient (its beta sets itself by them), which "
                    "neither masks nor noise would protect; with SecureOneTrip, differential privacy or a "
                    'total_step_size give a beta: FedGA(beta=0.1, mean="running")'
                )
        if type(self.algorithm.server) is not ServerRule:
            raise GradalignError("the server's rule is the strategy's here; leave it out of the algorithm")
        self._fixed = None if total_step_size is None else real("total_step_size", total_step_size, 0.0)
        self._local = LocalTraining(weight_decay=weight_decay, gradient_examples=gradient_examples)
        reporting = [part.label for part in self.algorithm.parts if part.reports]
        self._begun = False
        self._facts = tuple([STEP_SIZE, *(f"{FACT}{label}." for label in reporting)] if reporting else [])
        self._forget()

    def _forget(self) -> None:
        self._heard, self._reported, self._names = dict[str, float](), 0, list[str]()
        self._before: tuple[Combination, Tensor, int | None] | None = None
        self._shared, self._numbers = dict[str, Tensor](), dict[str, Mapping[str, float]]()

    def over(self, rounds: int) -> None:
        """Learn how many rounds there will be, for schedules in shares of the run."""
        self.algorithm, self._begun = self._given.over(rounds), True

    def tell(self, round_index: int, arrays: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the further values of a round's config, given the point that the strategy gives out."""
        if self._facts and not self._begun:
            raise GradalignError("OneTrip must be the outermost strategy: what is around it cannot protect clients")
        if not round_index:  # another run of the same strategy begins anew
            self._forget()
        # As they are at first: Flower's average makes floats of a counter.
        self._names = self._names or [name for name, value in arrays.items() if value.is_floating_point()]
        sent_as = torch.cat([arrays[name].reshape(-1) for name in self._names])
        x = sent_as.double()
        self._learn(x)
        algorithm = self.algorithm.at(round_index).informed(self._numbers, 0.0)  # α is the clients' affair
        limit = algorithm.gradient_limit(self._local.gradient_examples, self._numbers)
        self._before = algorithm, x, limit
        if self.algorithm.reports:
            logger.info("round %d: beta = %.4g", round_index + 1, algorithm.beta)
        order = Order(
            client=0,
            round=round_index,
            seed=0,
            local=self._local,
            limit=limit,
            parts=messages.encoded_parts(algorithm),
            step_sizes=self._fixed is None and (self.algorithm.reports or messages.needs_step_sizes(self.algorithm)),
        )
        sent = {part.label for part in algorithm.parts if part.extra_down}
        vectors = {label: s.to(sent_as.dtype) for label, s in self._shared.items() if label in sent}
        shared = {SHARED + label: s.numpy().tobytes() for label, s in vectors.items()}
        return {ORDER: order.encode(), NAMES: "\n".join(self._names), **shared}

    def _learn(self, x: Tensor) -> None:
        """Work out the next s from two points and what was heard; where the round gave no new one, nothing."""
        total_step_size = self._fixed or self._heard.get(TOTAL_STEP_SIZE)
        if self._before is None or not total_step_size or torch.equal(x, self._before[1]):
            return
        algorithm, before, limit = self._before
        for part in algorithm.parts:
            own = f"{FACT}{part.label}."
            sums = SharedSums(
                update=x - before,
                kept_change=None,
                total_step_size=total_step_size,
                step_size=self._heard.get(STEP_SIZE, 0.0),
                reported=self._reported,
                clients=1,
                x=before,
                weight_decay=self._local.weight_decay,
                gradient_share=(limit or 1) / (self._local.gradient_examples or 1),
                numbers=self._numbers.get(part.label, {}),
                facts={name.removeprefix(own): v for name, v in self._heard.items() if name.startswith(own)},
            )
            new = part.next_shared(self._shared.get(part.label), sums)
            if new is not None:
                self._shared[part.label] = new
            self._numbers[part.label] = part.next_numbers(sums)

    def hear(self, said: Iterable[tuple[dict[str, Any], Any]]) -> None:
        """Take what clients tell the algorithm out of their metrics: the means, each with its client's weight.

        A client whose app does not know of the algorithm says none: it has trained as in FedAvg, and that is an error.
        """
        sums, self._reported = dict[str, tuple[float, float]](), 0
        for metrics, weight in said:
            self._reported += 1
            if TOTAL_STEP_SIZE not in metrics:
                raise GradalignError("a client's app is not a gradalign.flower.ClientApp, and does not align")
            for name in [name for name in metrics if name == TOTAL_STEP_SIZE or name.startswith(self._facts)]:
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = total + float(metrics.pop(name)) * float(weight), weights + float(weight)
        self._heard = {name: total / weights for name, (total, weights) in sums.items() if weights}


class OneTrip(Strategy):
    """Wraps a strategy of Flower's that averages (FedAvg, its robust kin, or one with differential privacy around it).

    Args:
        strategy: The strategy; it does everything else.
        algorithm: One that needs one trip: ``FedGA()``, ``FedProx(mu=0.01)``. For a β that sets itself, clients tell a
            few numbers of their gradients beside their metrics; β is in the log.
        total_step_size: What a client's step sizes add up to in a round, αK; when not given, the clients tell it beside
            their metrics. Give it where nothing may leave a client unprotected, and a β of your own: it depends on a
            client's data where its number of steps does.
        weight_decay: That of the clients' optimizers.
        gradient_examples: Of how many examples a ``ClientApp(gradient=...)`` takes its gradient; None is all.
    """

    def __init__(
        self,
        strategy: Strategy,
        algorithm: Algorithm | Combination,
        *,
        total_step_size: float | None = None,
        weight_decay: float = 0.0,
        gradient_examples: int | None = None,
    ) -> None:
        inner: Any = strategy
        while hasattr(inner, "strategy"):  # those that add privacy
            inner = inner.strategy
        if isinstance(inner, FedOpt | FedAvgM):
            raise GradalignError(f"{type(inner).__name__} does not average; run AlignedStrategy with its rule of ours")
        self.strategy, self._weight = strategy, str(getattr(inner, "weighted_by_key", EXAMPLES))
        self._teller = _Teller(algorithm, total_step_size, weight_decay, gradient_examples, inner is not strategy)

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *more: Any, **named: Any) -> Result:
        """As Flower's; schedules in shares of the run learn its length here."""
        self._teller.over(num_rounds)
        return super().start(grid, initial_arrays, num_rounds, *more, **named)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send s and the algorithm along."""
        more = self._teller.tell(server_round - 1, arrays.to_torch_state_dict())
        return self.strategy.configure_train(server_round, arrays, ConfigRecord({**config, **more}), grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the strategy average; what clients tell the algorithm is taken out of their metrics before."""
        replies = list(replies)
        contents = [reply.content for reply in replies if reply.has_content()]
        said: list[Any] = [next(iter(one.metric_records.values()), {}) for one in contents]
        self._teller.hear((metrics, metrics.get(self._weight, 1.0)) for metrics in said)
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy does."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy does."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """As the strategy does."""
        self.strategy.summary()


class SecureOneTrip(FitFedAvg):
    """The same on Flower's older FedAvg, the one that ``SecAggPlusWorkflow`` works with; its arguments are FedAvg's."""

    def __init__(
        self,
        algorithm: Algorithm | Combination,
        *,
        total_step_size: float | None = None,
        weight_decay: float = 0.0,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        self._teller = _Teller(algorithm, total_step_size, weight_decay, None, protected=True)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Send s and the algorithm along."""
        arrays = enumerate(parameters_to_ndarrays(parameters))
        more = self._teller.tell(server_round - 1, {str(place): torch.as_tensor(array) for place, array in arrays})
        asked = super().configure_fit(server_round, parameters, client_manager)
        return [(proxy, FitIns(ins.parameters, {**ins.config, **more})) for proxy, ins in asked]

    def aggregate_fit(self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: Any) -> Any:
        """Average; the clients' step sizes are taken out of their metrics before."""
        self._teller.hear((answer.metrics, answer.num_examples) for _, answer in results)
        return super().aggregate_fit(server_round, results, failures)

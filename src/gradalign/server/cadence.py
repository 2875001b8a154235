"""How often a run is measured when nobody said how often: so that measuring stays a small part of the run.

Costs are counted in examples whose gradient is taken; an example that is only evaluated counts a third. Counting
instead of timing keeps the spacing, and with it the rows of a run, the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gradalign.server.federation import Federation
from gradalign.server.measure import Measure
from gradalign.server.rounds import probe_clients

TEST_POINTS, TRAIN_POINTS = 50, 20
SHARE = 0.04  # of the run's own cost, which keeps measuring below 5 % of its time
FREE = 5000.0  # examples: a moment, so that small runs have whole curves
_FORWARD_ONLY = 1 / 3
_LOOKED_AT = 50  # clients whose sizes stand for all


def spacing(rounds: int, points: int, cost: float, budget: float) -> int:
    """Return every how many rounds to measure: about ``points`` times at most, and within the budget.

    The start and the end are always measured, whatever they cost.
    """
    closest = max(1, rounds // points)
    if cost <= 0.0:
        return closest
    affordable = math.floor(budget / cost)  # the start included
    return rounds if affordable <= 2 else max(closest, math.ceil(rounds / (affordable - 1)))


def settle(measure: Measure, federation: Federation, rounds: int) -> Measure:
    """Return the measure with the spacings that were left open decided.

    Half of the budget is for the test set, half for the clients' gradients. Where the clients' data is elsewhere its
    size is not known, and only the number of points counts.
    """
    if measure.test_every is not None and measure.train_every is not None:
        return measure
    test, probed, budget = (0.0, 0.0, 0.0) if federation.elsewhere else _costs(measure, federation, rounds)
    test_every, train_every = measure.test_every, measure.train_every
    if test_every is None:
        test_every = spacing(rounds, TEST_POINTS, test, budget / 2)
    if train_every is None:
        train_every = spacing(rounds, TRAIN_POINTS, probed, budget / 2)
    return replace(measure, test_every=test_every, train_every=train_every)


def _costs(measure: Measure, federation: Federation, rounds: int) -> tuple[float, float, float]:
    """Return what one evaluation and one pass over the probed clients cost, and what a whole run may spend on them."""
    task, local = federation.task, federation.local
    total, phases = len(task.clients), federation.algorithm.needs_gradients
    looked_at = probe_clients(total, min(_LOOKED_AT, total), federation.seed)
    sizes = [len(task.client(client, federation.seed)) for client in looked_at]
    whole = sum(sizes) / len(sizes)
    trained = sum(local.steps_for(size) * local.batch_for(size) for size in sizes) / len(sizes)
    if phases:
        trained += min(whole, local.gradient_examples or whole)
    test = 0.0 if task.test_examples is None else _FORWARD_ONLY * len(task.test_examples)
    # Gradients of whole clients that the round after needs anyway are taken over from the measurement.
    taken_over = federation.per_round / total if phases and local.gradient_examples is None else 0.0
    probed = min(measure.train_clients, total) * whole * (1.0 - taken_over)
    return test, probed, SHARE * rounds * federation.per_round * trained + FREE

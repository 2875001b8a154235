"""beta = "auto": a β that sets itself.

    β = min(ρ/d, α(K−1)/2)        d² a running mean of Σ p_i ‖g_i − s‖²;  α/2 for K = 1

A displacement's length is what a client feels: the best β of a task with equal clients may be fifty times that of a
task with one class each, the best β·d differs far less (docs/beta.md). β = α(K−1)/2 takes back what FedAvg's local
steps do to r, and α/2 is what SGD on the same mini-batches does; more than that may keep a run from getting started.
Equal clients, whose d is rounding, leave the run FedAvg's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gradalign.algorithms.view import SharedSums

AUTO = "auto"
LENGTH = 0.5
"""ρ where none is given."""


def newest_share(decay: float, rounds: float) -> float:
    """Return the weight of the newest of so many values in a running mean that is corrected for its start."""
    return (1.0 - decay) / (1.0 - float(decay**rounds))


def beta_of(length: float, numbers: Mapping[str, float], lr: float) -> float:
    """Return β for a round with this α, given what ``measured`` left; 0 before anything was measured."""
    apart, before = math.sqrt(numbers.get("square", 0.0)), numbers.get("lr", 0.0)
    most = numbers.get("most", 0.0) * (lr / before if before else 1.0)
    return most if length >= most * apart else length / apart


def measured(numbers: Mapping[str, float], square: float, sums: SharedSums, decay: float) -> dict[str, float]:
    """Return the numbers after a round, given d² of its clients; one that is not finite, or α = 0, teaches nothing."""
    if not math.isfinite(square) or not sums.total_step_size:
        return dict(numbers)
    # αK by the clients' own account, which may have lr of their own; α is only for what changes from round to round.
    most = sums.total_step_size * (1.0 - 1.0 / sums.steps if sums.steps > 1.0 else 1.0) / 2
    rounds, before = numbers.get("measured", 0.0) + 1.0, numbers.get("square", 0.0)
    square = before + newest_share(decay, rounds) * (square - before)
    return {**numbers, "measured": rounds, "square": square, "most": most, "lr": sums.lr}

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

AUTO = "auto"
LENGTH = 0.5
"""ρ where none is given."""


def beta_of(length: float, numbers: Mapping[str, float]) -> float:
    """Return β for a round, given what ``measured`` left; 0 before anything was measured."""
    apart, most = math.sqrt(numbers.get("square", 0.0)), numbers.get("most", 0.0)
    return most if length >= most * apart else length / apart


def measured(
    numbers: Mapping[str, float], square: float, lr: float, step_size: float, decay: float
) -> dict[str, float]:
    """Return the numbers after a round, given d² of its clients, α and αK; a d² that is not finite teaches nothing."""
    if not math.isfinite(square):
        return dict(numbers)
    rounds, before = numbers.get("measured", 0.0) + 1.0, numbers.get("square", 0.0)
    share = (1.0 - decay) / (1.0 - decay**rounds)  # a running mean, corrected for its start
    return {
        **numbers,
        "measured": rounds,
        "square": before + share * (square - before),
        "most": max(step_size - lr, lr) / 2,
    }

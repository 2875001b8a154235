"""beta = "auto": a β that sets itself.

    β = q·min(ρ/d, α/2)        d² a running mean of Σ p_i ‖g_i − s‖²;  q the share of d² that is the clients' own

α/2 is what SGD on the clients' mini-batches one after the other does by itself (Theorem 1). It does not grow with K:
clients that differ strongly have gone their way after a step or two. A displacement's length βd is what a client feels,
so ρ bounds it. With ``gradient_examples`` n, d² is disagreement and sampling noise, h² + σ²/n, and a displacement along
noise is only noise: every other measuring round takes n/2 examples, and d²(n/2) − d²(n) = σ²/n tells the two apart.
Equal clients, whose h is nothing, leave the run FedAvg's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gradalign.algorithms.schedule import OffUntil
from gradalign.algorithms.view import SharedSums

AUTO = "auto"
LENGTH = OffUntil(value=0.5, share=0.1)
"""ρ where none is given: the first tenth of a run is FedAvg's, which any displacement disturbs."""


def newest_share(decay: float, rounds: float) -> float:
    """Return the weight of the newest of so many values in a running mean that is corrected for its start."""
    return (1.0 - decay) / (1.0 - float(decay**rounds))


def halves(limit: int | None, numbers: Mapping[str, float]) -> bool:
    """Return whether the next measuring round takes half of its gradient examples: the first, and every other one."""
    return limit is not None and limit > 1 and numbers.get("halved", 0.0) <= numbers.get("measured", 0.0)


def own_share(numbers: Mapping[str, float]) -> float:
    """Return q = 1 − (σ²/n)/d², within 0 and 1; 1 where no round has taken fewer examples."""
    share, square = numbers.get("share", 1.0), numbers.get("square", 0.0)
    if share == 1.0 or not square:
        return 1.0
    noise = (numbers["noisy"] - square) * share / (1.0 - share)  # d² of a share c is h² + σ²/(cn)
    return min(1.0, max(0.0, 1.0 - noise / square))


def beta_of(length: float, numbers: Mapping[str, float], lr: float) -> float:
    """Return β for a round with this α, given what ``measured`` left; 0 before anything was measured."""
    apart, before = math.sqrt(numbers.get("square", 0.0)), numbers.get("lr", 0.0)
    most = numbers.get("most", 0.0) * (lr / before if before else 1.0)
    return own_share(numbers) * (most if length >= most * apart else length / apart)


def measured(numbers: Mapping[str, float], square: float, sums: SharedSums, decay: float) -> dict[str, float]:
    """Return the numbers after a round, given d² of its clients; one that is not finite, or α = 0, teaches nothing."""
    if not math.isfinite(square) or not sums.total_step_size:
        return dict(numbers)
    halved = sums.gradient_share < 1.0
    mean, count = ("noisy", "halved") if halved else ("square", "measured")
    rounds, before = numbers.get(count, 0.0) + 1.0, numbers.get(mean, 0.0)
    new = {count: rounds, mean: before + newest_share(decay, rounds) * (square - before)}
    if halved:
        return {**numbers, **new, "share": sums.gradient_share}
    # α by the clients' own account, which may have lr of their own; the server's is only for what changes by the round.
    return {**numbers, **new, "most": sums.total_step_size / max(sums.steps, 1.0) / 2, "lr": sums.lr}

"""beta = "auto": a β that sets itself.

    β = q·min(ρ/d, α/2, α(K−1)/2)     d² a running mean of Σ p_i ‖g_i − s‖²;  q the share of d² that is the clients' own

α(K−1)/2 takes back what K local steps do to r (Lemma 1): nothing with one step, where any β is only harm to clients
that differ strongly; K is a running mean over the clients. It is no bound for GradAlign, whose one step is to do what
small batches do, nor where an app does not tell its steps. α/2 is what SGD on the clients' mini-batches one after the
other does by itself (Theorem 1). It does not grow with K: clients that differ strongly have gone their way after a step
or two. A displacement's length βd is what a client feels, so ρ bounds it. With gradients of n of a client's N examples
d² is disagreement and sampling noise, h² + σ²(1/n − 1/N), and a displacement along noise is only noise: half of the
measuring rounds take n/2 examples, and what d² grows by, σ²(2/n − 1/n), tells the two apart.

Clients with one and the same gradient leave the run FedAvg's. With a running mean they are not at s, which comes after
the gradients, so d² does not tell: each reports the product of g_i with a fixed vector, and where all are alike, β = 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from gradalign.algorithms.schedule import OffUntil
from gradalign.algorithms.view import SharedSums

AUTO = "auto"
LENGTH = OffUntil(value=0.5, share=0.1)
"""ρ where none is given: the first tenth of a run is FedAvg's, which any displacement disturbs."""
_WIDTH = 1024
_ALIKE = 1e-10
"""The variance of equal clients' products beside the square of their gradients: rounding, squared, with room."""


@cache
def _uneven(length: int) -> Tensor:
    """Return numbers from −½ to ½ without a pattern that a model's layers could have."""
    return torch.frac(0.6180339887498949 * torch.arange(1, length + 1, dtype=torch.float64)).sub_(0.5).float()


def mark(gradient: Tensor) -> float:
    """Return the product of a gradient with a fixed vector, of which only a row and a column are ever written out."""
    flat = gradient.reshape(-1).to(torch.promote_types(gradient.dtype, torch.float32))
    rows = flat.numel() // _WIDTH
    body, rest = flat[: rows * _WIDTH].view(rows, _WIDTH), flat[rows * _WIDTH :]
    row, column = _uneven(_WIDTH).to(flat), _uneven(rows + 1).to(flat)
    return float(column[:rows] @ (body @ row)) + float(column[rows] * (rest @ row[: rest.numel()]))


def marks(gradient: Tensor) -> dict[str, float]:
    """Return what a client reports so that its like are known."""
    product = mark(gradient)
    return {"mark": product, "mark square": product * product, "length": float(gradient.double().square().sum())}


def alike(facts: Mapping[str, float]) -> bool:
    """Return whether all clients of a round have the same gradient, as far as their marks tell."""
    variance = facts.get("mark square", math.inf) - facts.get("mark", 0.0) ** 2
    return variance <= _ALIKE * facts.get("length", 0.0) < math.inf


def newest_share(decay: float, rounds: float) -> float:
    """Return the weight of the newest of so many values in a running mean that is corrected for its start."""
    return (1.0 - decay) / (1.0 - float(decay**rounds))


def halves(limit: int | None, numbers: Mapping[str, float]) -> bool:
    """Return whether the next measuring round takes half of its gradient examples.

    Half, whole, whole, half, and so on: neither kind is the older one, so that a d² that falls is not taken for noise.
    """
    rounds = numbers.get("halved", 0.0) + numbers.get("measured", 0.0)
    return limit is not None and limit > 1 and rounds % 4 in (0, 3)


def own_share(numbers: Mapping[str, float]) -> float:
    """Return q = h²/d², within 0 and 1; 1 where it is not known that some rounds took fewer examples."""
    square, known = numbers.get("square", 0.0), {"inverse", "inverse halved"} <= numbers.keys()
    more = numbers["inverse halved"] - numbers["inverse"] if known else 0.0
    if not square or more <= 0.0:
        return 1.0
    noise = (numbers["noisy"] - square) * (numbers["inverse"] - numbers["inverse all"]) / more
    return min(1.0, max(0.0, 1.0 - noise / square))


def beta_of(length: float, numbers: Mapping[str, float], lr: float) -> float:
    """Return β for a round with this α, given what ``measured`` left; 0 before that, and where all were alike."""
    if numbers.get("alike"):
        return 0.0
    apart, before = math.sqrt(numbers.get("square", 0.0)), numbers.get("lr", 0.0)
    most = numbers.get("most", 0.0) * (lr / before if before else 1.0)
    return own_share(numbers) * (most if length >= most * apart else length / apart)


def later_steps(sums: SharedSums) -> float:
    """Return K − 1, the steps after the first, at most 1: more bound nothing; 1 where the steps are not known."""
    later = sums.total_step_size / sums.step_size - 1.0 if sums.step_size else 1.0
    return 1.0 if later < -1e-9 else min(1.0, max(0.0, later))  # of fewer than one step nobody has told


def measured(
    numbers: Mapping[str, float], sums: SharedSums, decay: float, *, one_step: bool = False
) -> dict[str, float]:
    """Return the numbers after a round whose clients reported d²; one that is not finite, or α = 0, teaches nothing."""
    facts = sums.facts
    if not math.isfinite(facts["square"]) or not sums.total_step_size:
        return dict(numbers)
    halved = sums.gradient_share < 1.0
    seen = {"noisy" if halved else "square": facts["square"]}
    seen |= {} if halved else {"later": 1.0 if one_step else later_steps(sums)}
    if "inverse" in facts:
        seen |= {"inverse halved": facts["inverse"]} if halved else {k: facts[k] for k in ("inverse", "inverse all")}
    count = "halved" if halved else "measured"
    rounds = numbers.get(count, 0.0) + 1.0
    newest = newest_share(decay, rounds)
    means = {name: (1.0 - newest) * numbers.get(name, 0.0) + newest * value for name, value in seen.items()}
    if not halved:  # α by the clients' own account; the server's is for what changes from round to round
        means |= {"most": sums.step_size / 2 * min(1.0, round(means["later"], 9)), "lr": sums.lr}
    if sums.reported > 1:  # one alone cannot tell
        means["alike"] = float(alike(facts))
    return {**numbers, **means, count: rounds}

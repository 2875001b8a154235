"""How far the clients' gradients disagree.

With g_i = ∇f_i(x), weights p_i that sum to one and ḡ = Σ p_i g_i:

r(x) = ½ Σ p_i ‖g_i − ḡ‖²          half the variance of the gradients, the paper's regulariser
drift = ‖ḡ − g_1‖                  the paper's drift curve: the first client against the mean
cosine = Σ p_i cos(g_i, ḡ)         1 when all gradients point the same way
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How well the clients' gradients agree at one point."""

    r: float
    drift: float
    drift_ratio: float | None
    """drift / ‖ḡ‖; None where ḡ = 0."""
    cosine: float | None
    """None where a gradient is 0."""
    mean_norm: float
    """‖ḡ‖."""


def alignment_of(gradients: Sequence[Tensor], weights: Sequence[float] | None = None) -> Alignment:
    """Measure the alignment of gradients taken at one point; the first one is client 1 of the drift."""
    weights = [1.0] * len(gradients) if weights is None else weights
    total, mean = float(sum(weights)), torch.zeros(gradients[0].shape, dtype=torch.float64)
    for gradient, weight in zip(gradients, weights, strict=True):
        mean.add_(gradient, alpha=float(weight))
    mean /= total
    mean_norm = float(mean.norm())
    spread, cosine, cosine_known = 0.0, 0.0, mean_norm > 0.0
    for gradient, weight in zip(gradients, weights, strict=True):
        g = gradient.double()
        share, norm = float(weight) / total, float(g.norm())
        spread += share * float((g - mean).square().sum())
        cosine_known = cosine_known and norm > 0.0
        if cosine_known:
            cosine += share * float(g @ mean) / (norm * mean_norm)
    drift = float((mean - gradients[0].double()).norm())
    return Alignment(
        r=0.5 * spread,
        drift=drift,
        drift_ratio=drift / mean_norm if mean_norm > 0.0 else None,
        cosine=cosine if cosine_known else None,
        mean_norm=mean_norm,
    )

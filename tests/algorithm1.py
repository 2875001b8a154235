"""Algorithm 1 of the paper in NumPy, for least squares, and the small data that the trainers' tests share.

A part of n examples has the loss f(W) = Σ ‖W x − y‖² / 2n. Ranks and micro-batches are of unequal sizes on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LR, GAMMA, MOMENTUM, BETA, LIMIT = 0.1, 0.5, 0.9, 0.7, 0.8
SIZES = ((5, 8, 3, 6, 4), (9, 2, 7, 4, 5))
"""The examples of each rank's five micro-batches."""
WINDOWS = ((0, 1), (2, 3), (4,))
"""The micro-batches of each step when two are accumulated: an epoch's last step has one."""
START = np.array([[0.5, -1.0, 2.0], [1.5, 0.0, -0.5], [-2.0, 1.0, 0.25]])
Part = tuple[np.ndarray, np.ndarray]


def micro_batch(rank: int, index: int) -> Part:
    random = np.random.default_rng([rank, index])
    size = SIZES[rank][index]
    return random.normal(size=(size, 3)) + rank, random.normal(size=(size, 3))


def halves(part: Part) -> list[Part]:
    return list(zip(np.array_split(part[0], 2), np.array_split(part[1], 2), strict=True))


def gradient(part: Part, w: np.ndarray) -> np.ndarray:
    x, y = part
    return (x @ w.T - y).T @ x / len(x)


def loss(part: Part, w: np.ndarray) -> float:
    x, y = part
    return float(0.5 * ((x @ w.T - y) ** 2).sum() / len(x))


def by_examples(parts: Sequence[Part]) -> list[float]:
    count = sum(len(x) for x, _ in parts)
    return [len(x) / count for x, _ in parts]


def algorithm1(
    steps: Sequence[tuple[Sequence[Part], Sequence[float]]],
    *,
    betas: Sequence[float] = (BETA,) * 3,
    limit: float | None = LIMIT,
    steps_of_schedule: int = 1,
    start: np.ndarray = START,
) -> np.ndarray:
    """Take the steps, each given as parts and their shares; momentum, exponential decay and clipping as in torch.

    Shares need not sum to one: the mean gradient is taken by them, and the step's gradient is the sum.
    """
    w, velocity = start, np.zeros_like(start)
    for number, ((parts, shares), beta) in enumerate(zip(steps, betas, strict=True)):
        own = [gradient(part, w) for part in parts]
        mean = sum(s * g for s, g in zip(shares, own, strict=True)) / sum(shares)
        moved = [gradient(part, w - beta * (mean - g)) for part, g in zip(parts, own, strict=True)]
        update = sum(s * g for s, g in zip(shares, moved, strict=True))
        if limit is not None:
            update = update * min(1.0, limit / (np.linalg.norm(update) + 1e-6))  # torch's formula
        velocity = MOMENTUM * velocity + update
        w = w - LR * GAMMA ** (steps_of_schedule * number) * velocity
    return w


def cut_batches(ranks: int) -> list[tuple[list[Part], list[float]]]:
    """Three steps: in each every rank cuts one micro-batch in two parts, which count by their examples."""
    steps = [[half for rank in range(ranks) for half in halves(micro_batch(rank, index))] for index in range(3)]
    return [(parts, by_examples(parts)) for parts in steps]


def accumulated(ranks: int) -> list[tuple[list[Part], list[float]]]:
    """Three steps: in each every rank accumulates up to two micro-batches, each divided by two."""
    steps = [[micro_batch(rank, index) for rank in range(ranks) for index in window] for window in WINDOWS]
    return [(parts, [0.5 / ranks] * len(parts)) for parts in steps]

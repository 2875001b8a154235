"""Claims about SGD: what a sequence of mini-batch steps does beside descending (Lemma 1, Theorem 1, linear scaling)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from gradalign.algorithms import GradAlign, LargeBatchSGD, LinearScaling
from gradalign.seeding import Purpose, numpy_stream, torch_stream
from gradalign.server.alignment import regulariser_gradient
from gradalign.theory.check import Check, limit, order, order_claim
from gradalign.theory.problems import Problem

Sequences = Sequence[tuple[int, ...]]


def every_order(members: Sequence[int]) -> Sequences:
    """Return all re-orderings of the mini-batches: sampling without replacement, exactly."""
    return list(itertools.permutations(members))


def every_draw(members: Sequence[int], length: int) -> Sequences:
    """Return all sequences of this length: sampling with replacement, exactly."""
    return list(itertools.product(members, repeat=length))


def mirrored_draws(members: Sequence[int], length: int, pairs: int, seed: int) -> Sequences:
    """Return random sequences, each with its reverse.

    A pair is symmetric in time by itself, and that is all Theorem 1 asks for; so a few pairs show the order exactly,
    without the sampling error that independent sequences would leave.
    """
    random = numpy_stream(seed, Purpose.PROBE, length)
    once = length <= len(members)
    drawn = [tuple(int(c) for c in random.choice(members, size=length, replace=not once)) for _ in range(pairs)]
    return [sequence for draw in drawn for sequence in (draw, draw[::-1])]


def lemma_1(arena: Problem) -> list[Check]:
    """Check Lemma 1 on a few clients at once, along a random direction."""
    members = arena.clients[:4]
    random = torch_stream(arena.seed, Purpose.PROBE, 1)
    direction = torch.randn(arena.x.numel(), generator=random, dtype=torch.float64)
    direction /= direction.norm()
    probe, calculus, x = arena.probe(members), arena.calculus, arena.x
    before = [probe.gradient(arena.at(x), client) for client in members]
    bend = [calculus.hessian_product(x, client, direction) for client in members]

    def remainder(length: float) -> Tensor:
        moved = arena.at(x + length * direction)
        after = [probe.gradient(moved, client) for client in members]
        return torch.cat([a - b - length * h for a, b, h in zip(after, before, bend, strict=True)])

    claim = "∇f_i(x+v) − ∇f_i(x) − ∇²f_i(x)v"
    if arena.quadratic:
        relative = float(remainder(1.0).norm() / torch.cat(before).norm())
        return [limit("1", arena.name, claim, "relative size", relative, 1e-13, "zero: these gradients are linear")]
    start = 0.05 * max(1.0, arena.scale)
    return [order(order_claim("1", arena.name, claim, "‖v‖", 2), start, remainder, scale=float(before[0].norm()))]


def _theorem_1(arena: Problem, number: str, how: str, sequences: Sequences) -> Check:
    """Check E[x_SGD,A − x_GD,A] + (Kα²/2)∇r_A, each sequence against gradient descent on its own multiset."""
    length = len(sequences[0])
    multisets = Counter(tuple(sorted(sequence)) for sequence in sequences)
    slopes = {members: arena.calculus.r_gradient(arena.x, members) for members in multisets}

    def remainder(lr: float) -> Tensor:
        total = torch.stack([arena.sgd(sequence, lr=lr) for sequence in sequences]).mean(dim=0)
        for members, times in multisets.items():
            descent = arena.rounds(LargeBatchSGD(), members, lr=lr, count=length)
            total = total - times / len(sequences) * (descent - 0.5 * length * lr**2 * slopes[members])
        return total

    claim = order_claim(number, arena.name, f"E[x_SGD − x_GD] + (Kα²/2)∇r_A, {how}", "α", 3)
    return order(claim, 0.1 * arena.unit / length, remainder, scale=arena.scale)


def theorem_1(arena: Problem) -> list[Check]:
    """Check SGD against gradient descent: all orders, all draws, and mirrored samples of long sequences."""
    few, draws = arena.clients[:4], arena.clients[:3]
    mirrored = mirrored_draws(arena.clients, 8, 2, arena.seed)
    return [
        _theorem_1(arena, "2a", f"K={len(few)}, all orders", every_order(few)),
        _theorem_1(arena, "2b", "K=3, all draws with replacement", every_draw(draws, 3)),
        _theorem_1(arena, "2c", "K=8, mirrored orders", mirrored),
    ]


def surrogate(arena: Problem) -> list[Check]:
    """Check K SGD steps against K steps on f + (α/2)r: with the exact ∇r, and by GradAlign."""
    members = arena.clients[:4]
    steps, orders, probe = len(members), every_order(members), arena.probe(members)

    def sgd(lr: float) -> Tensor:
        return torch.stack([arena.sgd(sequence, lr=lr) for sequence in orders]).mean(dim=0)

    def exact(lr: float) -> Tensor:
        x = arena.x
        for _ in range(steps):
            slope = regulariser_gradient(probe, arena.at(x))
            x = x - lr * (arena.calculus.mean_gradient(x, members) + 0.5 * lr * slope)
        return sgd(lr) - x

    def displaced(lr: float) -> Tensor:
        return sgd(lr) - arena.rounds(GradAlign(beta=0.5 * lr), members, lr=lr, count=steps)

    start = 0.1 * arena.unit / steps
    first = order_claim("3a", arena.name, "E[x_SGD] − K steps on f + (α/2)r_A", "α", 3)
    second = order_claim("3b", arena.name, "E[x_SGD] − K steps of GradAlign, β = α/2", "α", 3)
    return [order(first, start, exact, scale=arena.scale), order(second, start, displaced, scale=arena.scale)]


def linear_scaling(arena: Problem) -> list[Check]:
    """Check one scaled step against K SGD steps, plain and with alignment."""
    members = arena.clients[:4]
    orders = every_order(members)

    def gap(lr: float, aligned: bool) -> Tensor:
        sgd = torch.stack([arena.sgd(sequence, lr=lr) for sequence in orders]).mean(dim=0)
        return arena.round(LinearScaling(aligned=aligned), arena.x, members, lr=lr) - sgd

    start = 0.1 * arena.unit / len(members)
    plain = order_claim("7a", arena.name, "x − αΣ∇f_i(x) − E[x_SGD]: linear scaling", "α", 2)
    aligned = order_claim("7b", arena.name, "x − αΣ∇f_i(x + E[v_i]) − E[x_SGD]: aligned", "α", 3)
    return [
        order(plain, start, lambda lr: gap(lr, False), scale=arena.scale),
        order(aligned, start, lambda lr: gap(lr, True), scale=arena.scale),
    ]

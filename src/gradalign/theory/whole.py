"""Whole rounds to the last digit: what no order can show, such as unequal weights, memory, clients trained together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradalign.algorithms import FedGA, Scaffold
from gradalign.algorithms.plan import Algorithm
from gradalign.client import LocalTraining
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.tasks.task import Task
from gradalign.theory.check import Check, limit
from gradalign.theory.problems import Calculus, Problem

STEPS = 3
COPIES = 7
"""Of four clients: enough for a round in which clients train together."""
_ROUNDING = 1e-11


def _uneven(problem: Problem) -> Task | None:
    """Return a task of four clients with unequally many examples, None where batches are not tensors side by side."""
    clients = []
    for place, client in enumerate(problem.clients[:4]):
        examples = problem.task.client(client)
        batch = examples.batch(torch.arange(max(1, len(examples) * (place + 1) // 4)))
        if not isinstance(batch, tuple | list) or not all(isinstance(part, Tensor) for part in batch):
            return None
        clients.append(tuple(batch))
    return replace(problem.task, clients=clients)


def _by_library(problem: Problem, task: Task, algorithm: Algorithm, lr: float, rounds: int) -> Tensor:
    """Return the server's point after some rounds with all clients, weighted by their examples."""
    local = LocalTraining(lr=lr, steps=STEPS)
    setup = Setup(task=task, local=local, seed=problem.seed, clients_per_round=len(task.clients))
    with InProcessEngine(setup) as engine:
        return problem.play(task, engine, algorithm, problem.x, rounds=rounds, local=local, by_examples=True)


def _walk(calculus: Calculus, start: Tensor, client: int, correction: Tensor, lr: float) -> Tensor:
    y = start
    for _ in range(STEPS):
        y = y - lr * (calculus.gradient(y, client) + correction)
    return y - start


def _fedga(calculus: Calculus, x: Tensor, shares: Sequence[float], lr: float, beta: float) -> Tensor:
    """Return x + Σ p_i Δ_i, client i starting from x − β(ḡ − g_i) with ḡ = Σ p_i g_i."""
    own = [calculus.gradient(x, client) for client in range(len(shares))]
    mean, moved = torch.stack([p * g for p, g in zip(shares, own, strict=True)]).sum(dim=0), x
    for client, share in enumerate(shares):
        start = x - beta * (mean - own[client])
        moved = moved + share * _walk(calculus, start, client, torch.zeros_like(x), lr)
    return moved


def _scaffold(calculus: Calculus, x: Tensor, shares: Sequence[float], lr: float, rounds: int) -> Tensor:
    """Return x after rounds of option II: c_i = s − k_i, k_i ← k_i − s − Δ_i/(αK), s ← s + Σ p_i (k_i⁺ − k_i)."""
    kept, shared = [torch.zeros_like(x) for _ in shares], torch.zeros_like(x)
    for _ in range(rounds):
        moves = [_walk(calculus, x, i, shared - kept[i], lr) for i in range(len(shares))]
        new = [k - shared - move / (lr * STEPS) for k, move in zip(kept, moves, strict=True)]
        changes = zip(shares, new, kept, strict=True)
        shared = shared + torch.stack([p * (after - before) for p, after, before in changes]).sum(dim=0)
        x, kept = x + torch.stack([p * move for p, move in zip(shares, moves, strict=True)]).sum(dim=0), new
    return x


def whole_rounds(problem: Problem) -> list[Check]:
    """Check rounds with unequal weights, with memory and in cohorts against the same arithmetic by plain autograd."""
    task = None if problem.quadratic else _uneven(problem)
    if task is None:
        return []
    lr = 0.2 * problem.unit
    beta = 2.0 * lr
    calculus, sizes = Calculus(task, problem.seed), [len(task.client(i)) for i in range(len(task.clients))]
    shares = [size / sum(sizes) for size in sizes]
    aligned, kept = _fedga(calculus, problem.x, shares, lr, beta), _scaffold(calculus, problem.x, shares, lr, 3)
    copied = replace(task, clients=list(task.clients) * COPIES)

    def apart(found: Tensor, expected: Tensor) -> float:
        return float((found - expected).norm() / (expected - problem.x).norm())

    once = apart(_by_library(problem, task, FedGA(beta=beta), lr, 1), aligned)
    memory = apart(_by_library(problem, task, Scaffold(control="kept"), lr, 3), kept)
    together = apart(_by_library(problem, copied, FedGA(beta=beta), lr, 1), aligned)
    number = f"{len(copied.clients)} clients train together where the model allows it"
    return [
        limit("12a", problem.name, "a round of FedGA weighted by examples", "relative gap", once, _ROUNDING),
        limit("12b", problem.name, "three rounds of SCAFFOLD with memory", "relative gap", memory, _ROUNDING),
        limit("12c", problem.name, "12a with every client seven times", "relative gap", together, _ROUNDING, number),
    ]

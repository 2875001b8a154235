"""Rounds beside others: what FedAvg and the alignment family regularise, and whole rounds to the last digit.

Of the family each round's leading term beside FedAvg's, as slope and sign; of whole rounds what no order can show, such
as unequal weights, memory, clients trained together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradalign.algorithms import FedAvg, FedCM, FedGA, FedInit, FedLESAM, FedSAM, LargeBatchSGD, Scaffold
from gradalign.algorithms.plan import Algorithm
from gradalign.client import LocalTraining
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.tasks.task import Task
from gradalign.theory.check import Check, limit
from gradalign.theory.claims import STEPS, measured_order
from gradalign.theory.problems import Calculus, Problem

_INIT, _MOMENTUM = 0.5, 0.4  # FedInit's β and FedCM's a, held while α shrinks
WHOLE_STEPS = 3
"""K of the whole rounds."""
COPIES = 7
"""Of four clients: enough for a round in which clients train together."""
_ROUNDING = 1e-11


def against_descent(problem: Problem) -> list[Check]:
    """Check that FedAvg goes up r against gradient descent, and that β = α(K−1)/2 only takes that back."""
    members, x = problem.clients[:4], problem.x
    slope = problem.calculus.r_gradient(x, members)

    def beyond(algorithm: Algorithm, lr: float) -> Tensor:
        descent = problem.round(LargeBatchSGD(), x, members, lr=lr, rounds=STEPS)
        return problem.round(algorithm, x, members, lr=lr, steps=STEPS) - descent

    def raised(lr: float) -> Tensor:
        return beyond(FedAvg(), lr) - 0.5 * lr**2 * STEPS * (STEPS - 1) * slope

    def cancelled(lr: float) -> Tensor:
        return beyond(FedGA(beta=0.5 * lr * (STEPS - 1)), lr)

    start, rise = 0.1 * problem.unit / STEPS, beyond(FedAvg(), 1e-3 * problem.unit / STEPS)
    turned = 1.0 - float(rise @ slope / (rise.norm() * slope.norm()))
    return [
        measured_order(problem, "13a", "x_FedAvg − x_GD − (α²K(K−1)/2)∇r", "α", 3, start, raised),
        limit("13b", problem.name, "x_FedAvg − x_GD points along +∇r", "1 − cosine", turned, 0.01),
        measured_order(problem, "13c", "x_FedGA − x_GD, β = α(K−1)/2", "α", 3, start, cancelled),
    ]


def family(problem: Problem) -> list[Check]:
    """Check what each form of FedGA, and each neighbour, adds to a round of FedAvg."""
    members, calculus = problem.clients[:4], problem.calculus

    def added(algorithm: Algorithm, lr: float, effect: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the second round less FedAvg's from the same point, less the effect; the first round is FedAvg's."""
        first = problem.round(FedAvg(), problem.x, members, lr=lr, steps=STEPS)
        second = problem.round(algorithm, problem.x, members, lr=lr, steps=STEPS, rounds=2)
        return second - problem.round(FedAvg(), first, members, lr=lr, steps=STEPS) - effect(first)

    def r_term(x: Tensor) -> Tensor:
        return calculus.r_gradient(x, members)

    def bent(x: Tensor, vector: Tensor) -> Tensor:
        return torch.stack([calculus.hessian_product(x, client, vector) for client in members]).mean(dim=0)

    def length(x: Tensor) -> Tensor:
        mean = calculus.mean_gradient(x, members)
        return bent(x, mean / mean.norm())

    def lengths(x: Tensor) -> Tensor:
        own = [(client, calculus.gradient(x, client)) for client in members]
        return torch.stack([calculus.hessian_product(x, i, g / g.norm()) for i, g in own]).mean(dim=0)

    def sharpness(lr: float) -> Tensor:  # FedSAM acts in the first round already
        plain, ascended = (
            problem.round(algorithm, problem.x, members, lr=lr, steps=STEPS) for algorithm in (FedAvg(), FedSAM(rho=lr))
        )
        return ascended - plain + lr**2 * STEPS * lengths(problem.x)

    def momentum(lr: float, x: Tensor) -> Tensor:
        # c is the same for all: it moves them, and bends by the mean Hessian. There is no ∇r in it.
        direction = (1.0 - _MOMENTUM) / (lr * STEPS) * (problem.x - x)
        return -lr * STEPS * direction + 0.5 * lr**2 * STEPS * (STEPS - 1) * bent(x, direction)

    start = 0.05 * problem.unit / STEPS
    one, kept, initial, last, cm = (
        lambda a: added(FedGA(beta=a, mean="running"), a, lambda x: -(a**2) * STEPS * r_term(x)),
        lambda a: added(FedGA(beta=a, mean="kept"), a, lambda x: -(a**2) * STEPS * r_term(x)),
        lambda a: added(FedInit(beta=_INIT), a, lambda x: -_INIT * (a * STEPS) ** 2 * r_term(x)),
        lambda a: added(FedLESAM(rho=a), a, lambda x: -(a**2) * STEPS * length(x)),
        lambda a: added(FedCM(alpha=_MOMENTUM), a, lambda x: momentum(a, x)),
    )
    named: list[tuple[str, str, str, Callable[[float], Tensor]]] = [
        ("14a", "FedGA running − FedAvg + αβK∇r", "α = β", one),
        ("14b", "FedGA kept − FedAvg + αβK∇r", "α = β", kept),
        ("14c", "FedInit − FedAvg + β(αK)²∇r, everyone in every round", "α", initial),
        ("14d", "FedSAM − FedAvg + αKρ∇(Σ p_i‖g_i‖)", "α = ρ", sharpness),
        ("14e", "FedLESAM − FedAvg + αKρ∇‖ḡ‖", "α = ρ", last),
        ("14f", "FedCM − FedAvg + αKc − (α²K(K−1)/2)∇²f·c: no ∇r", "α", cm),
    ]
    return [measured_order(problem, number, claim, symbol, 3, start, rest) for number, claim, symbol, rest in named]


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
    local = LocalTraining(lr=lr, steps=WHOLE_STEPS)
    setup = Setup(task=task, local=local, seed=problem.seed, clients_per_round=len(task.clients))
    with InProcessEngine(setup) as engine:
        return problem.play(task, engine, algorithm, problem.x, rounds=rounds, local=local, by_examples=True)


def _walk(calculus: Calculus, start: Tensor, client: int, correction: Tensor, lr: float) -> Tensor:
    y = start
    for _ in range(WHOLE_STEPS):
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
        new = [k - shared - move / (lr * WHOLE_STEPS) for k, move in zip(kept, moves, strict=True)]
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

"""What FedAvg and the alignment family regularise: each round's leading term beside FedAvg's, as slope and sign."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradalign.algorithms import FedAvg, FedCM, FedGA, FedInit, FedLESAM, FedSAM, LargeBatchSGD
from gradalign.algorithms.plan import Algorithm
from gradalign.theory.check import Check, limit
from gradalign.theory.claims import STEPS, measured_order
from gradalign.theory.problems import Problem

_INIT, _MOMENTUM = 0.5, 0.4  # FedInit's β and FedCM's a, held while α shrinks


def against_descent(problem: Problem) -> list[Check]:
    """Check that FedAvg goes up r against gradient descent, and that β = α(K−1)/2 only takes that back."""
    members, x = problem.clients[:4], problem.x
    slope = problem.calculus.r_gradient(x, members)

    def beyond(algorithm: Algorithm, lr: float) -> Tensor:
        descent = problem.rounds(LargeBatchSGD(), members, lr=lr, count=STEPS)
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

"""Claims about GradAlign, FedGA and SCAFFOLD: one round of each against the same round without alignment."""

from __future__ import annotations

from torch import Tensor

from gradalign.algorithms import FedAvg, FedGA, GradAlign, LargeBatchSGD, Scaffold
from gradalign.server.alignment import regulariser_gradient
from gradalign.theory.check import Check, limit, order, order_claim
from gradalign.theory.problems import Problem

STEPS = 5
"""K, the local steps of the federated checks."""
_ROUNDING = 1e-13


def gradalign(arena: Problem) -> list[Check]:
    """Check Theorem 2: GradAlign against gradient descent at a fixed step size."""
    members, lr = arena.clients[:4], 0.5 * arena.unit
    descent = arena.round(LargeBatchSGD(), arena.x, members, lr=lr)
    slope = arena.calculus.r_gradient(arena.x, members)

    def remainder(beta: float) -> Tensor:
        return arena.round(GradAlign(beta=beta), arena.x, members, lr=lr) - descent + lr * beta * slope

    claim = "x_GradAlign − x_GD + αβ∇r, α fixed"
    if arena.quadratic:
        beta = arena.unit
        relative = float(remainder(beta).norm() / (lr * beta * slope).norm())
        return [limit("4", arena.name, claim, "relative size", relative, 1e-12, "zero: these gradients are linear")]
    return [order(order_claim("4", arena.name, claim, "β", 2), 0.05 * arena.unit, remainder, scale=arena.scale)]


def fedga(arena: Problem) -> list[Check]:
    """Check Theorem 4, and the α²β term that its O(αβ²) leaves out."""
    members, x = arena.clients[:4], arena.x
    slope, bend = arena.calculus.r_gradient(x, members), arena.calculus.bent_spread(x, members)
    unit = arena.unit / STEPS

    def remainder(lr: float, beta: float) -> Tensor:
        aligned = arena.round(FedGA(beta=beta), x, members, lr=lr, steps=STEPS)
        plain = arena.round(FedAvg(), x, members, lr=lr, steps=STEPS)
        return aligned - plain + lr * beta * STEPS * slope

    fixed, claim = 0.5 * unit, "x_FedGA − x_FedAvg + αβK∇r"
    hidden = (
        "The paper writes O(αβ²), which would be order 2 in β. Its proof drops the O(αβ) part of the local steps' "
        "displacement, which returns as (α²βK(K−1)/2)·mean ∇²(½‖∇f_i‖²)(g_i − ḡ): with α held fixed the remainder "
        "falls only with order 1. For K = 1 (GradAlign, check 4) the term is zero and order 2 holds."
    )
    together = order_claim("5a", arena.name, f"{claim}, α = β", "α = β", 3)
    alone = order_claim("5b", arena.name, f"{claim}, α fixed", "β", 1, note=hidden, finding=True)
    squared = order_claim("5c", arena.name, f"{claim}, β = α²", "α", 4)
    # β much smaller than α, and both small: the α²β term is all that is left of the remainder.
    lr, beta = 0.01 * unit, 1e-5 * unit
    rest, term = remainder(lr, beta), 0.5 * lr**2 * beta * STEPS * (STEPS - 1) * bend
    return [
        order(together, 0.1 * unit, lambda a: remainder(a, a), scale=arena.scale),
        order(alone, fixed / 64, lambda b: remainder(fixed, b), scale=arena.scale),
        # α² is counted in units of length, so that β = α² is a length too.
        order(squared, 0.1 * unit, lambda a: remainder(a, a * a / unit), scale=arena.scale),
        limit(
            "5d",
            arena.name,
            "5b is (α²βK(K−1)/2)·mean ∇²(½‖∇f_i‖²)(g_i − ḡ)",
            "relative gap",
            float((rest - term).norm() / rest.norm()),
            0.05,
        ),
    ]


def scaffold(arena: Problem) -> list[Check]:
    """Check Theorem 5, and the β at which FedGA aligns as much as SCAFFOLD."""
    members, x = arena.clients[:4], arena.x
    slope = arena.calculus.r_gradient(x, members)

    def against_fedavg(lr: float) -> Tensor:
        corrected = arena.round(Scaffold(), x, members, lr=lr, steps=STEPS)
        plain = arena.round(FedAvg(), x, members, lr=lr, steps=STEPS)
        return corrected - plain + 0.5 * lr**2 * STEPS * (STEPS - 1) * slope

    def against_fedga(lr: float) -> Tensor:
        corrected = arena.round(Scaffold(), x, members, lr=lr, steps=STEPS)
        return corrected - arena.round(FedGA(beta=0.5 * lr * (STEPS - 1)), x, members, lr=lr, steps=STEPS)

    start = 0.1 * arena.unit / STEPS
    theorem = order_claim("6", arena.name, "x_SCAFFOLD − x_FedAvg + (α²K(K−1)/2)∇r", "α", 3)
    equal = order_claim("10", arena.name, "x_SCAFFOLD − x_FedGA, β = α(K−1)/2", "α", 3)
    return [
        order(theorem, start, against_fedavg, scale=arena.scale),
        order(equal, start, against_fedga, scale=arena.scale),
    ]


def forms(arena: Problem) -> list[Check]:
    """Check that FedGA's two forms agree, and that its displacements need no undoing."""
    members, x, lr = arena.clients[:4], arena.x, 0.2 * arena.unit
    beta = 2.0 * lr
    once = arena.round(FedGA(beta=beta), x, members, lr=lr, steps=STEPS)
    inside = arena.round(FedGA(beta=beta, form="step"), x, members, lr=lr, steps=STEPS)
    moves = arena.displacements(FedGA(beta=beta), members, lr=lr)
    apart = float((once - inside).norm() / (once - x).norm())
    left = float(moves.mean(dim=0).norm() / moves.norm(dim=1).max())
    return [
        limit("8a", arena.name, "FedGA at the start = FedGA inside every step", "relative gap", apart, _ROUNDING),
        limit("8b", arena.name, "Σ p_i v_i = 0: displacements cancel", "relative sum", left, _ROUNDING),
    ]


def measuring_tools(arena: Problem) -> list[Check]:
    """Check ∇r as the library measures it against autograd of r."""
    members, x = arena.clients[:4], arena.x
    probe, true = arena.probe(members), arena.calculus.r_gradient(x, members)

    def error(exact: bool) -> float:
        return float((regulariser_gradient(probe, arena.at(x), exact=exact) - true).norm() / true.norm())

    checks = [
        limit("11a", arena.name, "∇r = Σ p_i ∇²f_i(g_i − ḡ), exact", "relative error", error(True), 1e-12),
        limit("11b", arena.name, "∇r by displacement to both sides", "relative error", error(False), 1e-7),
    ]
    if not arena.quadratic:
        claim = order_claim("11c", arena.name, "∇r by displacement to one side, as FedGA does", "β", 1)
        checks.append(
            order(
                claim,
                0.05 * arena.unit,
                lambda step: regulariser_gradient(probe, arena.at(x), exact=False, step=step) - true,
                scale=float(true.norm()),
            )
        )
    return checks

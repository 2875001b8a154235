"""The descent condition (Theorem 3) on a problem whose L1, L2 and ρ are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradalign.algorithms import LargeBatchGradAlign
from gradalign.seeding import Purpose, torch_stream
from gradalign.tasks.task import Task
from gradalign.theory.check import Check, limit
from gradalign.theory.problems import Energy, Problem, normal

BOWL = 1.0
WAVE = 2.0
"""Larger than BOWL, so that the f_i are not convex."""
_CLIENTS, _SIZE = 4, 5
_DOUBLINGS = 12


class WavyBowl(Energy):
    """f_i(x) = (h/2)‖x − c_i‖² + A Σ_j cos(x_j + φ_ij) with h = BOWL and A = WAVE; (c_i, φ_i) is the one example."""

    def forward(self, centres: Tensor, phases: Tensor) -> Tensor:
        return 0.5 * BOWL * (self.x - centres).square().sum(dim=1) + WAVE * torch.cos(self.x + phases).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Smoothness of f (L1) and of r (L2), and the Lipschitz constant ρ of the Hessians."""

    l1: float
    l2: float
    rho: float


def constants_of(centres: Tensor) -> Constants:
    """Return L1, L2 and ρ of the wavy bowl.

    The problem is separable, so every Hessian is diagonal and its norm is its largest entry.

    - ∇²f_i has the entries h − A cos(x_j + φ_ij), so L1 = h + A.
    - These change with x_j at a rate of at most A, so ‖∇²f_i(x) − ∇²f_i(y)‖ ≤ A max_j |x_j − y_j| ≤ A‖x − y‖: ρ = A.
    - g_i − ḡ has the entries u_ij = −h(c_ij − c̄_j) − A s_ij, s_ij being sin(x_j + φ_ij) less its mean over i. r is
      ½ mean_i Σ_j u_ij², so ∇²r has the entries mean_i (u'_ij² + u_ij u''_ij). Here mean_i u'² is A² times the variance
      of the cosines, at most A². By Cauchy-Schwarz |mean_i u u''| ≤ rms(u) rms(u''), with
      rms(u) ≤ h·std_i(c_ij) + A and rms(u'') ≤ A. So L2 = A² + A(h·max_j std_i(c_ij) + A).
    """
    deviation = float(centres.std(dim=0, correction=0).max())
    return Constants(l1=BOWL + WAVE, l2=WAVE**2 + WAVE * (BOWL * deviation + WAVE), rho=WAVE)


def wavy_bowl(seed: int) -> tuple[Task, Constants]:
    """Return the problem and its constants."""
    random = torch_stream(seed, Purpose.SYNTHETIC, 3)
    centres = 2.0 * normal(random, _CLIENTS, _SIZE)
    phases = 2.0 * math.pi * torch.rand(_CLIENTS, _SIZE, generator=random, dtype=torch.float64)
    return WavyBowl(normal(random, _SIZE)).task("wavy bowl", centres, phases), constants_of(centres)


def beta_bound(problem: Problem, x: Tensor, known: Constants, lr: float) -> float:
    """Return a β for which the proof of Theorem 3 promises a decrease at x.

    The proof asks for β < L1/L2 and ρβ²r < L1‖x⁺ − x‖, and shows ‖x⁺ − x‖ ≥ α‖∇f + β∇r‖ − αρβ²r. So
    ρβ²r(1 + αL1) < αL1‖∇f + β∇r‖ suffices, which needs no step to be taken. β is halved until it holds.
    """
    members = problem.clients
    r, slope = problem.calculus.r(x, members), problem.calculus.r_gradient(x, members)
    descent = problem.calculus.mean_gradient(x, members)
    beta = 0.99 * known.l1 / known.l2
    while known.rho * beta**2 * r * (1.0 + lr * known.l1) >= lr * known.l1 * float((descent + beta * slope).norm()):
        beta *= 0.5
    return beta


def _change(problem: Problem, x: Tensor, lr: float, beta: float) -> float:
    """Return f̂(x⁺) − f̂(x) for one GradAlign step, f̂ = f + βr."""
    everyone, objective = problem.clients, problem.calculus.objective
    after = problem.round(LargeBatchGradAlign(beta=beta), x, everyone, lr=lr)
    return objective(after, everyone, beta) - objective(x, everyone, beta)


def _points(problem: Problem, seed: int, count: int, known: Constants) -> list[Tensor]:
    """Return random points, and near-critical points of f reached from some of them."""
    random = torch_stream(seed, Purpose.PROBE, 3)
    points = [3.0 * normal(random, problem.x.numel()) for _ in range(count)]
    settled = []
    for x in points[: max(1, count // 20)]:
        for _ in range(200):
            x = x - problem.calculus.mean_gradient(x, problem.clients) / known.l1
        settled.append(x)
    return points + settled


def _first_rise(problem: Problem, x: Tensor, lr: float, bound: float) -> float | None:
    """Return a β above the bound at which f + βr rises, looking in factors of 2; None when there is none."""
    tried = (bound * 2.0**power for power in range(1, _DOUBLINGS + 1))
    return next((beta for beta in tried if _change(problem, x, lr, beta) > 0.0), None)


def descent(*, seed: int = 0, points: int = 100, searched: int = 10) -> list[Check]:
    """Check that f + βr falls below the paper's bound on β, and find where above it it does not.

    To the random points a twentieth as many near-critical points of f are added; a β that fails is ``searched`` from
    that many of them.
    """
    task, known = wavy_bowl(seed)
    problem = Problem(task, seed=seed)
    lr = 0.99 / (2.0 * known.l1)
    places = _points(problem, seed, points, known)
    bounds = [beta_bound(problem, x, known, lr) for x in places]
    rises = sum(_change(problem, x, lr, beta) >= 0.0 for x, beta in zip(places, bounds, strict=True))
    firsts = [(_first_rise(problem, x, lr, beta), beta) for x, beta in zip(places[:searched], bounds, strict=False)]
    failed = [(beta, beta / bound) for beta, bound in firsts if beta is not None]
    beta, ratio = min(failed, default=(math.inf, math.inf))
    facts = f"{len(places)} points; L1 = {known.l1:.3g}, L2 = {known.l2:.3g}, ρ = {known.rho:.3g}, α = {lr:.3g}"
    largest = known.l1 / known.l2 * 2.0**_DOUBLINGS
    found = f"{ratio:.3g} times the bound at that point; {len(failed)} of {searched} points searched have one"
    claim = "f + βr falls for α < 1/(2L1) and β below the bound"
    return [
        limit("9a", task.name, claim, "points where not", float(rises), 0.0, facts),
        limit("9b", task.name, "f + βr rises for a β above the bound", "β", beta, largest, found),
    ]

"""Numerical checks of the paper's lemma and theorems, run on the library's own algorithms.

Every check runs the algorithm through the same plan, trainer and engine that training uses, in float64 on whole
clients, and compares it with calculus done independently. So a fault in the arithmetic of a round shows up as a failed
check; what the checks do not see is mini-batches, clients that fall silent, and layers that the problems do not have.
"""

from __future__ import annotations

from collections.abc import Callable

from gradalign.client.trainer import one_thread
from gradalign.tasks.task import Task
from gradalign.theory import claims
from gradalign.theory.check import Check
from gradalign.theory.descent import descent
from gradalign.theory.problems import Problem, mlp_task, quadratic_task, users_task
from gradalign.theory.rounds import against_descent, family, whole_rounds

__all__ = ["Check", "verify"]

_CLAIMS: tuple[Callable[[Problem], list[Check]], ...] = (
    claims.lemma_1,
    claims.theorem_1,
    claims.surrogate,
    claims.gradalign,
    claims.fedga,
    claims.scaffold,
    claims.linear_scaling,
    claims.forms,
    claims.measuring_tools,
    against_descent,
    family,
    whole_rounds,
)


def verify(*, task: Task | None = None, seed: int = 0) -> list[Check]:
    """Run all checks and return them in the order of their numbers.

    Args:
        task: Check on this task's model and first clients instead of the built-in problems. The descent condition is
            left out: it needs a problem whose constants are known.
        seed: The seed of the random problems and of the task's first point.
    """
    with one_thread():
        tasks = [mlp_task(seed=seed), quadratic_task(seed=seed)] if task is None else [users_task(task, seed=seed)]
        problems = [Problem(made, seed=seed) for made in tasks]
        checks = [check for problem in problems for claim in _CLAIMS for check in claim(problem)]
        if task is None:
            checks += descent(seed=seed)
    return sorted(checks, key=lambda check: (int(check.number.rstrip("abcdefgh")), check.number))

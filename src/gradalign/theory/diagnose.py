"""Before training: do these clients' gradients disagree more than chance explains, and what would aligning them cost?

All numbers are measured at the model's first point. With d = √(Σ p_i ‖ḡ − g_i‖²) = √(2r), three of them decide:

- d/‖ḡ‖, the disagreement relative to the mean. FedGA displaces a client by β‖ḡ − g_i‖; when all gradients are nearly
  ḡ already, as between the roles of Shakespeare's plays, there is nothing to align.
- r against r of random splits of the same examples into clients of the same sizes. This is a permutation test: if the
  clients were random, r would be larger than all of m random splits with probability 1/(m + 1), 5 % for m = 19. Only
  then, and only when it is also 1.5 times their mean, are the clients called misaligned.
- αK‖ḡ‖/d, which sets the scale of β. A round moves the server by about αK‖ḡ‖. The displacement βd should be a
  good part of that path, or it does nothing; and not longer, or the gradients are taken where the round never goes
  and Lemma 1 no longer describes them. So

      ¼ αK‖ḡ‖/d  ≤  β  ≤  αK‖ḡ‖/d.

  It is a range for who searches β, not a law: the factors ¼ and 1 fit what the paper found on EMNIST.

"Misaligned" says that alignment has something to act on. It does not say that acting on it helps: docs/theory.md has a
table of both, made by ``benchmarks/diagnose_check.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from gradalign.algorithms.schedule import require
from gradalign.client import LocalTraining
from gradalign.client.trainer import one_thread
from gradalign.errors import GradalignError, named_failure, whole
from gradalign.server.measure import probe_clients
from gradalign.tasks.task import Task
from gradalign.theory.probe import HalfSplit, Probe, Spread, spread, within_client
from gradalign.theory.random_splits import LEVEL, SPLITS, Null, mean_of_known, null_of

Range = tuple[float, float]
Spent = tuple[float, float, float]
ALIGNED = math.sqrt(0.1)
"""Below this d/‖ḡ‖ the variance is less than a tenth of ‖ḡ‖²: the gradients agree."""
IID_LIKE = 1.5
"""Below this r / r(random splits) the clients are called IID-like, however sure the difference is."""
_SHORTEST, _LONGEST = 0.25, 1.0
# Outside of this d/‖ḡ‖ no β makes sense: there is next to nothing to align, or the mean is 0 up to rounding.
_LEAST, _MOST = 0.01, 1e4


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was measured, and what it suggests. Lengths are relative to ‖ḡ‖ where they say so."""

    task: str
    clients: int
    examples: int
    """Examples used, over all measured clients."""
    lr: float
    steps: int
    mean_norm: float
    """‖ḡ‖."""
    relative_min: float
    """The smallest ‖ḡ − g_i‖/‖ḡ‖."""
    relative_median: float
    relative_max: float
    relative: float
    """d/‖ḡ‖, the root mean square over clients."""
    r: float
    r_random: float | None
    """The mean r of random splits of the same examples; None when they cannot be mixed."""
    r_random_low: float | None
    """The smallest r of the random splits."""
    r_random_high: float | None
    """The largest r of the random splits."""
    splits: int
    """How many random splits there were."""
    p_value: float | None
    """The chance that random clients disagree at least as much: (1 + splits with at least this r) / (1 + splits)."""
    excess: float | None
    """r / r_random: 1 for IID clients."""
    between: float | None
    """Mean cosine between two clients' gradients."""
    between_random: float | None
    """The same after the random splits."""
    within: float | None
    """Mean cosine between two random halves of one client."""
    chance: float | None
    """The share of the disagreement that sampling noise within clients explains."""
    beta_low: float | None
    beta_high: float | None
    """The β to search in; None where the gradients agree so well that there is none."""
    beta_scaffold: float
    """α(K−1)/2, at which FedGA aligns as much as SCAFFOLD does."""
    trained: float
    """Examples that a client trains on in a round, K batches, in the mean over the measured clients."""
    gradient_examples: float
    """Examples of which a client takes the gradient beside them, to be aligned."""
    form: str
    """What alignment costs, and how to try it."""
    verdict: str
    """aligned, iid-like, misaligned, or unknown where no random split can tell."""
    sentence: str


def beta_range(*, relative: float, lr: float, steps: int) -> Range | None:
    """Return the β to search in, ¼ to 1 times αK‖ḡ‖/d with relative = d/‖ḡ‖; None when d or ‖ḡ‖ is next to nothing."""
    if not _LEAST <= relative <= _MOST:
        return None
    reach = lr * steps / relative
    return _SHORTEST * reach, _LONGEST * reach


def verdict_of(relative: float, excess: float | None, p_value: float | None) -> str:
    """Return aligned, iid-like, misaligned, or unknown when there is nothing to compare with."""
    if relative < ALIGNED:
        return "aligned"
    if excess is None or p_value is None:
        return "unknown"
    return "misaligned" if p_value <= LEVEL and excess >= IID_LIKE else "iid-like"


def diagnose(
    task: Task,
    *,
    lr: float = 0.1,
    steps: int = 10,
    clients: int | None = 20,
    examples: int | None = None,
    splits: int = SPLITS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    local: LocalTraining | None = None,
    weights: Literal["uniform", "examples"] = "uniform",
) -> Diagnosis:
    """Measure the clients' gradients at the model's first point and say whether they disagree more than by chance.

    Args:
        task: The model and the clients.
        lr: α, the local learning rate that will be used; it scales the suggested β.
        steps: K, the local steps of a round.
        clients: Measure at most this many clients; None measures all.
        examples: Use at most this many examples of each client. Fewer examples mean more sampling noise, in the
            clients and in the random splits alike.
        splits: How many random splits the clients are compared with; each costs one pass over the examples.
        seed: The seed of the model's first point and of every random choice.
        device: Where the model runs.
        local: How clients will train, for what alignment costs; K steps on the whole client when not given.
        weights: The clients' shares p_i of the mean: alike, or by their numbers of examples.
    """
    if len(task.clients) < 2:
        raise GradalignError(f"the task {task.name} has one client; a diagnosis compares at least 2")
    require("lr", lr, above=0.0)
    whole("steps", steps, 1)
    whole("splits", splits, SPLITS, 100_000)
    for name, value, least in (("clients", clients, 2), ("examples", examples, 1)):
        if value is not None:
            whole(name, value, least)
    chosen = probe_clients(len(task.clients), clients or len(task.clients), seed)
    with named_failure(f"the diagnosis of the task {task.name}"), one_thread():
        sizes = [len(task.client(client, seed)) for client in chosen]
        shares = sizes if weights == "examples" else None
        probe = Probe(task, clients=chosen, weights=shares, examples=examples, seed=seed, device=device)
        point = probe.start()
        found = spread(probe, point)
        if not math.isfinite(found.r) or found.mean_norm == 0.0:
            raise GradalignError(
                f"the mean gradient of the task {task.name} at its first point is "
                f"{'0' if math.isfinite(found.r) else 'not finite'}; check the model and the data"
            )
        halves = [within_client(probe, point, client) for client in probe.clients]
        null = null_of(probe, point, splits)
    return _conclude(probe, found, null, halves, lr, steps, _spent(local or LocalTraining(steps=steps), sizes))


def _spent(local: LocalTraining, sizes: Sequence[int]) -> Spent:
    """Return the examples that a client trains on in a round, of its gradient at x, and of a batch, in the mean."""
    trained = sum(local.steps_for(size) * local.batch_for(size) for size in sizes)
    measured = sum(min(size, local.gradient_examples or size) for size in sizes)
    return trained / len(sizes), measured / len(sizes), sum(map(local.batch_for, sizes)) / len(sizes)


def form_to_try(verdict: str, trained: float, gradient: float, batch: float) -> str:
    """Say what alignment costs in trips, vectors and gradients, and how to try it at the least cost that can help."""
    extra = f"the gradients of {gradient:,.0f} examples a client beside the {trained:,.0f} of its steps"
    costs = "FedGA() costs 1 trip a round as FedAvg does, a vector more down (about half again FedAvg's bytes) and "
    costs += f"{extra} (+{gradient / trained:.0%}); as in the paper it costs 2 trips, g_i up and the same gradients."
    if verdict == "aligned":
        return f"{costs} Stay with FedAvg: there is no alignment to gain."
    if trained <= batch:
        return f"{costs} Stay with FedAvg: with one local step FedGA()'s beta is 0, there is nothing to take back."
    if verdict == "misaligned":
        costs += " First try fewer local steps: with one class per client that brought more."
    if gradient > trained:
        costs += (
            f" Try FedGA() with local.gradient_examples = {batch:.0f} (+{batch / trained:.0%}): gradients of about "
        )
        return f"{costs}one mini-batch, 20 to 50 examples, were enough where they were tried. Its beta sets itself."
    return f"{costs} Try FedGA(): its beta sets itself; a sweep over beta is an option."


def _conclude(
    probe: Probe, found: Spread, null: Null, halves: Sequence[HalfSplit | None], lr: float, steps: int, spent: Spent
) -> Diagnosis:
    lengths = np.array(found.distances) / found.mean_norm
    relative = math.sqrt(2.0 * found.r) / found.mean_norm
    r_random = mean_of_known(null.values)
    excess = found.r / r_random if r_random else None
    p_value = null.p_value(found.r)
    noise = _noise(probe.weights, halves)
    betas = beta_range(relative=relative, lr=lr, steps=steps)
    verdict = verdict_of(relative, excess, p_value)
    return Diagnosis(
        task=probe.task.name,
        clients=len(probe.clients),
        examples=sum(len(probe.examples(client)) for client in probe.clients),
        lr=lr,
        steps=steps,
        mean_norm=found.mean_norm,
        relative_min=float(lengths.min()),
        relative_median=float(np.median(lengths)),
        relative_max=float(lengths.max()),
        relative=relative,
        r=found.r,
        r_random=r_random,
        r_random_low=min(null.values, default=None),
        r_random_high=max(null.values, default=None),
        splits=len(null.values),
        p_value=p_value,
        excess=excess,
        between=found.pairwise,
        between_random=null.pairwise,
        within=mean_of_known([None if half is None else half.cosine for half in halves]),
        chance=noise / (2.0 * found.r) if betas and noise is not None else None,
        beta_low=betas[0] if betas else None,
        beta_high=betas[1] if betas else None,
        beta_scaffold=0.5 * lr * (steps - 1),
        trained=spent[0],
        gradient_examples=spent[1],
        form=form_to_try(verdict, *spent),
        verdict=verdict,
        sentence=_sentence(verdict, relative, excess, p_value, betas, null.why_not, steps),
    )


def _noise(shares: Sequence[float], halves: Sequence[HalfSplit | None]) -> float | None:
    """Return what sampling noise adds to Σ p_i ‖g_i − ḡ‖², Σ p_i (1 − p_i) σ_i²; an unknown σ_i² is their mean.

    The mean takes p_i of a client's noise with it: with independent g_i of variance σ_i², E‖g_i − ḡ‖² has
    (1 − 2 p_i) σ_i² + Σ p_j² σ_j².
    """
    known = [(p * (1.0 - p), half.noise**2) for p, half in zip(shares, halves, strict=True) if half is not None]
    total = sum(factor for factor, _ in known)
    every = sum(p * (1.0 - p) for p in shares)
    return every / total * sum(factor * noise for factor, noise in known) if total else None


def _sentence(
    verdict: str, relative: float, excess: float | None, p: float | None, betas: Range | None, why_not: str, steps: int
) -> str:
    far = f"the clients' gradients lie {relative:.2g} times the mean gradient's length away from it"
    if excess is not None and p is not None:
        far += f", {excess:.2g} times the variance of random splits of the same data (p = {p:.2g})"
    search = "no β can be suggested" if betas is None else f"search β from {betas[0]:.2g} to {betas[1]:.2g}"
    leave = "let β set itself" if betas is None else f"let β set itself, or {search}"
    leave = leave if steps > 1 else search  # with one local step it would set itself to 0
    ends = {
        "aligned": "they agree already, so expect FedGA to do no better than FedAvg"
        + ("" if betas is None else f" (if you try, {search})"),
        "iid-like": f"they differ as random samples do, so alignment does what small batches do in SGD: {leave}",
        "misaligned": "they disagree more than chance explains, so alignment has something to act on; whether it helps "
        f"only training can tell: {leave}, and compare with FedAvg at as many communications",
        "unknown": f"whether by more than chance cannot be told, because {why_not}; if you try FedGA, {leave}",
    }
    text = f"{far}: {ends[verdict]}."
    return text[0].upper() + text[1:]

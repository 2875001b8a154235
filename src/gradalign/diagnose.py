"""Before training: are these clients' gradients misaligned enough for FedGA to help, and with which β?

All numbers are measured at the model's first point. With d = √(Σ p_i ‖ḡ − g_i‖²) = √(2r), three of them decide:

- d/‖ḡ‖, the disagreement relative to the mean. FedGA displaces a client by β‖ḡ − g_i‖; when all gradients are nearly
  ḡ already, as between the roles of Shakespeare's plays, there is nothing to align.
- r against r of a random split of the same examples into clients of the same sizes. About 1 means that the clients
  are as good as random: the disagreement is sampling noise, and aligning it does what small batches do in SGD.
- αK‖ḡ‖/d, which sets the scale of β. A round moves the server by about αK‖ḡ‖. The displacement βd should be a
  good part of that path, or it does nothing; and not longer, or the gradients are taken where the round never goes
  and Lemma 1 no longer describes them. So

      ¼ αK‖ḡ‖/d  ≤  β  ≤  αK‖ḡ‖/d.

  It is a range to search in, not a law; the factors ¼ and 1 were chosen to fit what follows, and no training run has
  tested them. Measured on a part of EMNIST with the paper's network and K = 10 it gives
  0.036 to 0.15 for one class per client (α = 0.05), where the paper found 0.025 to 0.05; and 0.3 to 1.2 for IID
  clients of 780 images (α = 0.1), where the paper, with 2,400 images and so a d smaller by √3, found 1.5 to 2.5.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradalign.alignment import HalfSplit, Probe, Spread, spread, within_client
from gradalign.engines.local import one_thread
from gradalign.errors import GradalignError
from gradalign.experiment.rounds import probe_clients
from gradalign.flat import Point
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.batches import join_batches
from gradalign.tasks.data import Examples
from gradalign.tasks.task import Task

ALIGNED = math.sqrt(0.1)
"""Below this d/‖ḡ‖ the variance is less than a tenth of ‖ḡ‖²: the gradients agree."""
IID_LIKE = 1.5
"""Below this r / r(random split) the clients are called IID-like."""
_SHORTEST, _LONGEST = 0.25, 1.0


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
    """r of a random split of the same examples; None when they cannot be mixed."""
    excess: float | None
    """r / r_random: 1 for IID clients."""
    between: float | None
    """Mean cosine between two clients' gradients."""
    between_random: float | None
    """The same after the random split."""
    within: float | None
    """Mean cosine between two random halves of one client."""
    chance: float | None
    """The share of the disagreement that sampling noise within clients explains."""
    beta_low: float
    beta_high: float
    beta_scaffold: float
    """α(K−1)/2, at which FedGA aligns as much as SCAFFOLD does."""
    verdict: str
    """aligned, iid-like or misaligned."""
    sentence: str


class Mixed(Examples):
    """Examples taken from several clients: row k is row ``rows[k]`` of source ``owners[k]``."""

    def __init__(self, sources: Sequence[Examples], owners: Tensor, rows: Tensor) -> None:
        self.sources, self.owners, self.rows = sources, owners, rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, index: Tensor) -> Any:
        """Return the rows, grouped by the client they come from."""
        owners, rows = self.owners[index], self.rows[index]
        parts = [self.sources[int(o)].batch(rows[owners == o]) for o in owners.unique()]
        return join_batches(parts)


def random_split(probe: Probe) -> list[Examples]:
    """Return the probe's examples dealt at random to clients of the same sizes."""
    sources = [probe.examples(client) for client in probe.clients]
    sizes = [len(source) for source in sources]
    owners = torch.repeat_interleave(torch.arange(len(sources)), torch.tensor(sizes))
    rows = torch.cat([torch.arange(size) for size in sizes])
    order = torch.as_tensor(numpy_stream(probe.seed, Purpose.PARTITION, len(sizes)).permutation(len(rows)))
    return [Mixed(sources, owners[part], rows[part]) for part in order.split(sizes)]


def _random_spread(probe: Probe, point: Point) -> Spread | None:
    try:
        return spread(probe, point, random_split(probe))
    except (GradalignError, TypeError, RuntimeError):
        return None  # examples of different shapes, or batches of a kind we cannot join


def beta_range(*, relative: float, lr: float, steps: int) -> tuple[float, float]:
    """Return the β to search in, ¼ to 1 times αK‖ḡ‖/d with relative = d/‖ḡ‖; infinite when d = 0."""
    reach = lr * steps / relative if relative > 0.0 else math.inf
    return _SHORTEST * reach, _LONGEST * reach


def verdict_of(relative: float, excess: float | None) -> str:
    """Return aligned, iid-like or misaligned."""
    if relative < ALIGNED:
        return "aligned"
    return "iid-like" if excess is not None and excess < IID_LIKE else "misaligned"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def diagnose(
    task: Task,
    *,
    lr: float = 0.1,
    steps: int = 10,
    clients: int | None = 20,
    examples: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Diagnosis:
    """Measure the clients' gradients at the model's first point and say whether FedGA can be expected to help.

    Args:
        task: The model and the clients.
        lr: α, the local learning rate that will be used; it scales the suggested β.
        steps: K, the local steps of a round.
        clients: Measure at most this many clients; None measures all.
        examples: Use at most this many examples of each client. Fewer examples mean more sampling noise, in the
            clients and in the random split alike.
        seed: The seed of the model's first point and of every random choice.
        device: Where the model runs.
    """
    if len(task.clients) < 2:
        raise GradalignError(f"the task {task.name} has one client; a diagnosis compares at least 2")
    if not (math.isfinite(lr) and lr > 0.0) or steps < 1:
        raise GradalignError(f"lr must be greater than 0 and steps at least 1, got lr = {lr:g}, steps = {steps}")
    for name, value, least in (("clients", clients, 2), ("examples", examples, 1)):
        if value is not None and value < least:
            raise GradalignError(f"{name} must be at least {least}, got {value}")
    chosen = probe_clients(len(task.clients), clients or len(task.clients), seed)
    probe = Probe(task, clients=chosen, examples=examples, seed=seed, device=device)
    point = probe.start()
    with one_thread():
        found = spread(probe, point)
        if not math.isfinite(found.r) or found.mean_norm == 0.0:
            raise GradalignError(
                f"the mean gradient of the task {task.name} at its first point is "
                f"{'0' if math.isfinite(found.r) else 'not finite'}; check the model and the data"
            )
        halves = [within_client(probe, point, client) for client in probe.clients]
        random = _random_spread(probe, point)
    return _conclude(probe, found, random, halves, lr, steps)


def _conclude(
    probe: Probe, found: Spread, random: Spread | None, halves: Sequence[HalfSplit | None], lr: float, steps: int
) -> Diagnosis:
    lengths = np.array(found.distances) / found.mean_norm
    relative = math.sqrt(2.0 * found.r) / found.mean_norm
    excess = found.r / random.r if random is not None and random.r > 0.0 else None
    noise = [None if half is None else half.noise**2 for half in halves]
    # The mean over n clients takes 1/n of the noise with it: E‖g_i − ḡ‖² is (1 − 1/n) of the variance of g_i.
    expected = (1.0 - 1.0 / len(halves)) * (_mean(noise) or 0.0)
    low, high = beta_range(relative=relative, lr=lr, steps=steps)
    verdict = verdict_of(relative, excess)
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
        r_random=None if random is None else random.r,
        excess=excess,
        between=found.pairwise,
        between_random=None if random is None else random.pairwise,
        within=_mean([None if half is None else half.cosine for half in halves]),
        chance=expected / (2.0 * found.r) if found.r > 0.0 and any(n is not None for n in noise) else None,
        beta_low=low,
        beta_high=high,
        beta_scaffold=0.5 * lr * (steps - 1),
        verdict=verdict,
        sentence=_sentence(verdict, relative, excess, low, high),
    )


def _sentence(verdict: str, relative: float, excess: float | None, low: float, high: float) -> str:
    far = f"the clients' gradients lie {relative:.2g} times the mean gradient's length away from it"
    against = "" if excess is None else f", {excess:.2g} times the variance of a random split of the same data"
    search = f"search β from {low:.2g} to {high:.2g}"
    ends = {
        "aligned": f"they agree already, so expect FedGA to do no better than FedAvg (if you try, {search})",
        "iid-like": f"they differ as random samples do, so expect a small gain from FedGA; {search}",
        "misaligned": f"they are misaligned, so FedGA can help; {search}",
    }
    text = f"{far}{against}: {ends[verdict]}."
    return text[0].upper() + text[1:]

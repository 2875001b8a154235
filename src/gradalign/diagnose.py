"""Before training: do these clients' gradients disagree more than chance explains, and which β is worth a search?

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

  It is a range to search in, not a law: the factors ¼ and 1 fit what the paper found on EMNIST.

"Misaligned" says that alignment has something to act on. It does not say that acting on it helps: docs/theory.md has a
table of both, made by ``benchmarks/diagnose_check.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradalign.alignment import HalfSplit, Probe, Rows, Spread, spread, within_client
from gradalign.batches import join_batches
from gradalign.checks import whole
from gradalign.engines.group import named_failure
from gradalign.engines.local import one_thread
from gradalign.errors import GradalignError
from gradalign.experiment.rounds import probe_clients
from gradalign.flat import Point
from gradalign.schedule import require
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.data import Examples
from gradalign.tasks.groups import spans_of
from gradalign.tasks.task import Task

ALIGNED = math.sqrt(0.1)
"""Below this d/‖ḡ‖ the variance is less than a tenth of ‖ḡ‖²: the gradients agree."""
IID_LIKE = 1.5
"""Below this r / r(random splits) the clients are called IID-like, however sure the difference is."""
LEVEL = 0.05
"""The share of random clients that may be called misaligned."""
SPLITS = 19
"""Random splits: the fewest that can tell at this level."""
_SHORTEST, _LONGEST = 0.25, 1.0
# Outside of this d/‖ḡ‖ no β makes sense: there is next to nothing to align, or the mean is 0 up to rounding.
_LEAST, _MOST = 0.01, 1e4


@dataclass(frozen=True, kw_only=True)
class Null:
    """r after random splits of the same examples, or why there is none."""

    values: tuple[float, ...] = ()
    pairwise: float | None = None
    """The mean cosine between two clients' gradients, over all splits."""
    why_not: str = ""

    def p_value(self, r: float) -> float | None:
        """Return the chance that random clients disagree at least this much; equal up to rounding counts as equal."""
        if not self.values:
            return None
        return (1 + sum(value >= r * (1.0 - 1e-6) for value in self.values)) / (1 + len(self.values))


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
    verdict: str
    """aligned, iid-like, misaligned, or unknown where no random split can tell."""
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


def random_split(probe: Probe, number: int = 0) -> list[Examples]:
    """Return the probe's examples dealt at random to clients of the same sizes; ``number`` tells splits apart."""
    sources = [probe.examples(client) for client in probe.clients]
    sizes = [len(source) for source in sources]
    owners = torch.repeat_interleave(torch.arange(len(sources)), torch.tensor(sizes))
    rows = torch.cat([torch.arange(size) for size in sizes])
    stream = numpy_stream(probe.seed, Purpose.PARTITION, len(sizes), number)
    if probe.task.groups is None:
        order = torch.as_tensor(stream.permutation(len(rows)))
    else:
        starts = np.cumsum([0, *sizes])
        pieces = [start + piece for own, start in zip(pieces_of(probe), starts, strict=False) for piece in own]
        order = torch.as_tensor(np.concatenate([pieces[place] for place in stream.permutation(len(pieces))]))
    return [Mixed(sources, owners[part], rows[part]) for part in order.split(sizes)]


def pieces_of(probe: Probe) -> list[list[NDArray[np.int64]]]:
    """Return each client's rows in pieces that belong together; what is long, such as a text, in eight or more.

    Rows that overlap are no independent draws: dealt out one by one they would make random clients too much alike.
    """
    found = []
    for client in probe.clients:
        examples = probe.examples(client)
        kept = examples.rows.numpy() if isinstance(examples, Rows) else np.arange(len(examples))
        spans = spans_of([probe.task.groups[client]], [len(probe.task.client(client))])[0][kept]  # type: ignore[index]
        order = np.argsort(spans[:, 0], kind="stable")
        apart = spans[order[1:], 0] > np.maximum.accumulate(spans[order, 1])[:-1]
        stretches = np.split(order, np.flatnonzero(apart) + 1)
        longest = math.ceil(len(order) / 8)
        found.append([part for s in stretches for part in np.array_split(s, math.ceil(len(s) / longest))])
    return found


def distinct_splits(sizes: Sequence[int]) -> float:
    """Return into how many different sets of clients of these sizes the examples can be dealt; at most 1e300."""
    logarithm = math.lgamma(sum(sizes) + 1) - math.fsum(math.lgamma(size + 1) for size in sizes)
    counts = np.unique(np.asarray(sizes), return_counts=True)[1]
    logarithm -= math.fsum(math.lgamma(int(count) + 1) for count in counts)  # clients of one size have no names
    return math.exp(min(logarithm, 690.0))


def null_of(probe: Probe, point: Point, splits: int) -> Null:
    """Measure r of random splits, or say why that cannot be."""
    sizes = [len(probe.examples(client)) for client in probe.clients]
    free = sizes if probe.task.groups is None else [len(own) for own in pieces_of(probe)]
    if distinct_splits(free) < 1.0 / LEVEL - 0.5:
        return Null(why_not=f"the clients' {sum(sizes)} examples are too few to be dealt out in other ways")
    try:
        found = [_r_and_cosine(probe, point, random_split(probe, number)) for number in range(splits)]
    except Exception as error:  # the clients' own data went through already: it is the mixture that fails
        reason = " ".join(str(error).split()) or type(error).__name__
        return Null(why_not=f"the clients' examples cannot be mixed ({reason})")
    if not all(math.isfinite(r) for r, _ in found):
        return Null(why_not="gradients of mixed examples are not finite")
    return Null(values=tuple(r for r, _ in found), pairwise=_mean([cosine for _, cosine in found]))


def _r_and_cosine(probe: Probe, point: Point, parts: Sequence[Examples]) -> tuple[float, float | None]:
    """Return r and the mean cosine between clients in one pass, with r = ½ (Σ p_i ‖g_i‖² − ‖ḡ‖²)."""
    mean, units, squares, count = probe.zeros(), probe.zeros(), 0.0, len(parts)
    for (client, share), examples in zip(probe.shares(), parts, strict=True):
        gradient = probe.gradient(point, client, examples)
        norm = float(gradient.norm())
        mean.add_(gradient, alpha=share)
        squares += share * norm**2
        units.add_(gradient, alpha=1.0 / norm if norm > 0.0 else math.nan)
    pairs = (float(units.square().sum()) - count) / (count * (count - 1))
    return 0.5 * max(squares - float(mean.square().sum()), 0.0), pairs if math.isfinite(pairs) else None


def beta_range(*, relative: float, lr: float, steps: int) -> tuple[float, float] | None:
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
    splits: int = SPLITS,
    seed: int = 0,
    device: torch.device | str = "cpu",
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
        probe = Probe(task, clients=chosen, examples=examples, seed=seed, device=device)
        point = probe.start()
        found = spread(probe, point)
        if not math.isfinite(found.r) or found.mean_norm == 0.0:
            raise GradalignError(
                f"the mean gradient of the task {task.name} at its first point is "
                f"{'0' if math.isfinite(found.r) else 'not finite'}; check the model and the data"
            )
        halves = [within_client(probe, point, client) for client in probe.clients]
        null = null_of(probe, point, splits)
    return _conclude(probe, found, null, halves, lr, steps)


def _conclude(
    probe: Probe, found: Spread, null: Null, halves: Sequence[HalfSplit | None], lr: float, steps: int
) -> Diagnosis:
    lengths = np.array(found.distances) / found.mean_norm
    relative = math.sqrt(2.0 * found.r) / found.mean_norm
    r_random = _mean(null.values)
    excess = found.r / r_random if r_random else None
    p_value = null.p_value(found.r)
    noise = [None if half is None else half.noise**2 for half in halves]
    # The mean over n clients takes 1/n of the noise with it: E‖g_i − ḡ‖² is (1 − 1/n) of the variance of g_i.
    expected = (1.0 - 1.0 / len(halves)) * (_mean(noise) or 0.0)
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
        within=_mean([None if half is None else half.cosine for half in halves]),
        chance=expected / (2.0 * found.r) if betas and any(n is not None for n in noise) else None,
        beta_low=betas[0] if betas else None,
        beta_high=betas[1] if betas else None,
        beta_scaffold=0.5 * lr * (steps - 1),
        verdict=verdict,
        sentence=_sentence(verdict, relative, excess, p_value, betas, null.why_not),
    )


def _sentence(
    verdict: str,
    relative: float,
    excess: float | None,
    p_value: float | None,
    betas: tuple[float, float] | None,
    why_not: str,
) -> str:
    far = f"the clients' gradients lie {relative:.2g} times the mean gradient's length away from it"
    if excess is not None and p_value is not None:
        far += f", {excess:.2g} times the variance of random splits of the same data (p = {p_value:.2g})"
    search = "no β can be suggested" if betas is None else f"search β from {betas[0]:.2g} to {betas[1]:.2g}"
    ends = {
        "aligned": "they agree already, so expect FedGA to do no better than FedAvg"
        + ("" if betas is None else f" (if you try, {search})"),
        "iid-like": f"they differ as random samples do, so alignment does what small batches do in SGD: {search}",
        "misaligned": "they disagree more than chance explains, so alignment has something to act on; whether it helps "
        f"only training can tell: {search}, and compare with FedAvg at as many communications",
        "unknown": f"whether by more than chance cannot be told, because {why_not}; if you try FedGA, {search}",
    }
    text = f"{far}: {ends[verdict]}."
    return text[0].upper() + text[1:]

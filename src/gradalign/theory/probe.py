"""The clients' gradients and curvature, measured at a point for what training itself does not need.

With g_i = ∇f_i(x), weights p_i that sum to one and ḡ = Σ p_i g_i:

    r(x) = ½ Σ p_i ‖g_i − ḡ‖²          half the variance of the gradients, the paper's regulariser
    ∇r(x) = Σ p_i ∇²f_i(x)(g_i − ḡ)    the direction in which FedGA and SCAFFOLD move beside the descent

A ``Probe`` goes to the clients of a task one at a time and comes back to them when it needs their gradients again, so
it holds a few vectors however many clients there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradalign.algorithms.plan import combine
from gradalign.client import LocalTraining
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import Point
from gradalign.client.trainer import Setup
from gradalign.errors import GradalignError
from gradalign.fast import client_trainer
from gradalign.seeding import Purpose, global_stream, torch_stream
from gradalign.tasks.batches import Examples
from gradalign.tasks.task import Task

_CHUNK = 600  # examples of a client that are differentiated at once, at most


class Probe:
    """A task's clients as functions f_i of the flat parameters, with their gradients and curvature.

    Every call sees the same examples and, where the model has dropout, the same masks, so f_i is one fixed function.

    Args:
        task: The model and the clients.
        clients: Which clients to measure; all by default.
        weights: p_i up to a factor, one per measured client; uniform by default.
        examples: At most this many examples of each client, chosen at random; all by default.
        seed: The seed of the model's first point, of the chosen examples and of dropout.
        device: Where the model runs.
    """

    def __init__(
        self,
        task: Task,
        *,
        clients: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        examples: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.task, self.seed, self.limit = task, seed, examples
        self.clients = tuple(range(len(task.clients)) if clients is None else clients)
        given = [1.0] * len(self.clients) if weights is None else [float(weight) for weight in weights]
        if not self.clients or len(given) != len(self.clients) or min(given) < 0.0 or sum(given) <= 0.0:
            raise GradalignError(
                f"a probe needs one weight of at least 0 for each of its {len(self.clients)} clients and a positive "
                f"sum, got {given}"
            )
        self.weights = tuple(weight / sum(given) for weight in given)
        # The trainer takes gradients in chunks of twice its batch size.
        local = LocalTraining(batch_size=_CHUNK // 2)
        self.trainer = client_trainer(Setup(task=task, local=local, seed=seed, device=device))

    def start(self) -> Point:
        """Return the model's first point."""
        return self.trainer.flat.read()

    def shares(self) -> Iterator[tuple[int, float]]:
        """Yield (client, p_i)."""
        return zip(self.clients, self.weights, strict=True)

    def rows(self, client: int, count: int) -> Tensor:
        """Return which of a client's ``count`` examples are measured."""
        if self.limit is None or self.limit >= count:
            return torch.arange(count)
        order = torch.randperm(count, generator=torch_stream(self.seed, Purpose.PROBE, client))
        return order[: self.limit].sort().values

    def examples(self, client: int) -> Examples:
        """Return the client's examples, cut down to the limit."""
        examples = self.task.client(client)
        rows = self.rows(client, len(examples))
        return examples if len(rows) == len(examples) else examples.select(rows)

    def gradient(self, point: Point, client: int, examples: Examples | None = None) -> Tensor:
        """Return a new float64 vector with ∇f_i(x), or the gradient over other examples given instead."""
        examples = self.examples(client) if examples is None else examples
        told = Broadcast(point=point, round=0, algorithm=combine())
        who = Participant(client=client, weight=1.0)
        return self.trainer.gradient(told, who, examples).vector.double().clone()

    def hessian_product(self, point: Point, client: int, vector: Tensor) -> Tensor:
        """Return a new float64 vector with ∇²f_i(x)·vector, exact: the gradient of ∇f_i(x)·vector."""
        flat, examples = self.trainer.flat, self.examples(client)
        flat.load(point)
        flat.module.train()
        parameters = [p for p in flat.module.parameters() if p.requires_grad]
        pieces = vector.to(flat.vector.device, flat.vector.dtype).split([p.numel() for p in parameters])
        product = torch.zeros_like(flat.vector)
        # cuDNN's fused recurrent kernels have no second derivative.
        with global_stream(self.seed, Purpose.GRADIENT, 0, client), torch.backends.cudnn.flags(enabled=False):
            for rows in self.trainer.gradient_parts(torch.arange(len(examples)), len(examples)):
                loss = self.trainer.loss(examples.batch(rows))[0] * (len(rows) / len(examples))
                slopes = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
                along = sum((s * v.view_as(s)).sum() for s, v in zip(slopes, pieces, strict=True))
                if isinstance(along, Tensor) and along.requires_grad:  # a loss linear in x has no curvature
                    bends = torch.autograd.grad(along, parameters, materialize_grads=True)
                    product += torch.cat([b.reshape(-1) for b in bends])
        return product.double()

    def zeros(self) -> Tensor:
        """Return a float64 zero vector on the model's device."""
        return torch.zeros_like(self.trainer.flat.vector, dtype=torch.float64)


def mean_gradient(probe: Probe, point: Point) -> Tensor:
    """Return ḡ = Σ p_i ∇f_i(x), in one pass over the clients."""
    mean = probe.zeros()
    for client, share in probe.shares():
        mean.add_(probe.gradient(point, client), alpha=share)
    return mean


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How the clients' gradients lie around their mean."""

    r: float
    mean_norm: float
    """‖ḡ‖."""
    distances: tuple[float, ...]
    """‖ḡ − g_i‖, client by client in the probe's order; the first one is the paper's drift."""
    pairwise: float | None
    """The mean of cos(g_i, g_j) over all pairs i ≠ j: 1 when they agree, 0 when they have nothing in common."""


def spread(probe: Probe, point: Point) -> Spread:
    """Measure the clients' gradients in two passes."""
    mean, units, norms = probe.zeros(), probe.zeros(), []
    for client, share in probe.shares():
        gradient = probe.gradient(point, client)
        norms.append(float(gradient.norm()))
        mean.add_(gradient, alpha=share)
        if norms[-1] > 0.0:
            units.add_(gradient, alpha=1.0 / norms[-1])
    r, distances = 0.0, []
    for client, share in probe.shares():
        distances.append(float((mean - probe.gradient(point, client)).norm()))
        r += 0.5 * share * distances[-1] ** 2
    count = len(norms)
    # ‖Σ u_i‖² counts every pair twice and every client once with itself.
    pairs = (float(units.square().sum()) - count) / (count * (count - 1)) if count > 1 and min(norms) > 0.0 else None
    return Spread(r=r, mean_norm=float(mean.norm()), distances=tuple(distances), pairwise=pairs)


def regulariser_gradient(probe: Probe, point: Point, *, exact: bool = True, step: float | None = None) -> Tensor:
    """Return ∇r(x) = Σ p_i ∇²f_i(x)(g_i − ḡ), in two passes over the clients.

    Args:
        probe: The clients.
        point: x.
        exact: Use Hessian-vector products. Otherwise use displaced gradients (Lemma 1), which need no second
            derivative and no more memory than training.
        step: Without ``exact``: the displacement is step·(g_i − ḡ) to one side, as in FedGA with β = step, and the
            error is of order 1 in step. None displaces to both sides by a length suited to the precision.
    """
    if step is not None and step <= 0.0:
        raise GradalignError(f"the displacement's step must be greater than 0, got {step:g}")
    mean, total = mean_gradient(probe, point), probe.zeros()
    for client, share in probe.shares():
        own = probe.gradient(point, client)
        if exact:
            product = probe.hessian_product(point, client, own - mean)
        else:
            product = _displaced(probe, point, client, own, mean, step)
        total.add_(product, alpha=share)
    return total


def _displaced(probe: Probe, point: Point, client: int, own: Tensor, mean: Tensor, step: float | None) -> Tensor:
    """Return ∇²f_i(x)(g_i − ḡ) from gradients at displaced points."""
    vector = own - mean

    def at(factor: float) -> Tensor:
        return probe.gradient(point.moved((factor * vector).to(point.x.device)), client)

    if step is not None:
        return (at(step) - own) / step
    length = float(vector.norm())
    if length == 0.0:
        return torch.zeros_like(vector)
    # Two-sided differences balance rounding (ε/h) against truncation (h²) at h = ε^(1/3), relative to x.
    precision = torch.finfo(probe.trainer.dtype).eps
    step = precision ** (1 / 3) * max(1.0, float(point.x.norm())) / length
    return (at(step) - at(-step)) / (2.0 * step)


@dataclass(frozen=True, kw_only=True)
class HalfSplit:
    """One client's gradient on two random halves of its examples."""

    cosine: float | None
    """cos(g_a, g_b): how well the client agrees with itself."""
    noise: float
    """The part of g_i that is chance: an estimate of the standard deviation of g_i over samples of the same size."""


def within_client(probe: Probe, point: Point, client: int) -> HalfSplit | None:
    """Compare a client with itself; None when it has a single example.

    With halves of m_a and m_b independent examples, E‖g_a − g_b‖² = σ²(1/m_a + 1/m_b), and the variance of g_i is
    σ²/(m_a + m_b).
    """
    examples = probe.examples(client)
    count = len(examples)
    if count < 2:
        return None
    order = torch.randperm(count, generator=torch_stream(probe.seed, Purpose.SPLIT, client))
    halves = order[: count // 2], order[count // 2 :]
    a, b = (probe.gradient(point, client, examples.select(half)) for half in halves)
    scale = (len(halves[0]) * len(halves[1])) ** 0.5 / count
    lengths = float(a.norm()) * float(b.norm())
    cosine = float(a @ b) / lengths if lengths > 0.0 else None
    return HalfSplit(cosine=cosine, noise=scale * float((a - b).norm()))

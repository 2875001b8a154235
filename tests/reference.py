"""A whole run written out once more, in float64 and plain loops, to compare the library's with.

It follows the four lines of the design and the papers' formulas, and shares no arithmetic with the library. From the
library it learns only what chance decided: who answered in each phase of each round, and which rows each batch had
(``record``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

import gradalign as ga

UNMEASURED = ga.Measure(test_every=0, train_every=0)
CLASSES = 3


@dataclass(frozen=True)
class Problem:
    """Clients of unequal sizes and a network inputs → hidden (batch norm, on request) → tanh → classes."""

    sizes: tuple[int, ...]
    inputs: int = 4
    hidden: int = 5
    norm: bool = False
    seed: int = 0

    @cached_property
    def data(self) -> tuple[Tensor, Tensor, Tensor]:
        """All inputs and labels, and which client holds each row."""
        random = torch.Generator().manual_seed(self.seed)
        owners = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))
        centres = torch.randn(len(self.sizes), self.inputs, generator=random, dtype=torch.float64)
        inputs = centres[owners] + torch.randn(len(owners), self.inputs, generator=random, dtype=torch.float64)
        labels = (torch.randint(2, (len(owners),), generator=random) + owners) % CLASSES
        return inputs, labels, owners

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + 1)
            middle = [nn.BatchNorm1d(self.hidden)] if self.norm else []
            layers = [nn.Linear(self.inputs, self.hidden), *middle, nn.Tanh(), nn.Linear(self.hidden, CLASSES)]
            return nn.Sequential(*layers).double()

    def task(self, **more: object) -> ga.Task:
        inputs, labels, owners = self.data
        mine = [owners == i for i in range(len(self.sizes))]
        clients = [(inputs[rows], labels[rows]) for rows in mine]
        return ga.Task(**({"model": self.model(), "clients": clients, "name": "reference"} | more))

    def loss(self, x: Tensor, rows: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy of these rows, and batch norm's running mean and variance after them."""
        inputs, labels, _ = self.data
        d, h = self.inputs, self.hidden
        shapes = [(h, d), (h,), *([(h,), (h,)] if self.norm else []), (CLASSES, h), (CLASSES,)]
        pieces = x.split([math.prod(shape) for shape in shapes])
        w1, b1, *scaling, w2, b2 = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        middle = inputs[rows] @ w1.T + b1
        if self.norm:
            mean, n = middle.mean(0), len(rows)
            variance = ((middle - mean) ** 2).mean(0)
            middle = (middle - mean) / torch.sqrt(variance + 1e-5) * scaling[0] + scaling[1]
            buffers = 0.9 * buffers + 0.1 * torch.cat([mean, variance * n / (n - 1)]).detach()
        outputs = torch.tanh(middle) @ w2.T + b2
        right = outputs[torch.arange(len(rows)), labels[rows]]
        return (torch.log(torch.exp(outputs).sum(1)) - right).mean(), buffers

    def gradient(self, x: Tensor, rows: Tensor, buffers: Tensor) -> tuple[Tensor, float, Tensor]:
        x = x.detach().requires_grad_()
        loss, buffers = self.loss(x, rows, buffers)
        return torch.autograd.grad(loss, x)[0], float(loss.detach()), buffers


@dataclass
class Chance:
    """What happened in a round: the rows of each client's gradient phase, and of each of its steps."""

    gradients: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))


class Recorder:
    """Writes down which rows the library takes; a tracker, so that it hears of every round's end."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.rounds, self._announced = problem, [Chance()], False
        inputs, labels, owners = problem.data
        self.owners = owners
        data = [(inputs[owners == i], labels[owners == i], torch.nonzero(owners == i)[:, 0]) for i in owners.unique()]
        self.task = problem.task(clients=data, predict=self.predict, augment=self.augment)

    def augment(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.rounds[-1].steps[int(self.owners[batch[2][0]])].append(batch[2])
        self._announced = True
        return batch

    def predict(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        if not self._announced:  # only local steps are augmented
            self.rounds[-1].gradients[int(self.owners[batch[2][0]])].append(batch[2])
        self._announced = False
        return model(batch[0]), batch[1]

    def start(self, run: object) -> None: ...

    def log(self, row: dict) -> None:
        if row["round"]:
            self.rounds.append(Chance())

    def end(self, summary: object) -> None: ...


def record(problem: Problem, algorithm: object, **settings: object) -> tuple[list[Chance], ga.Result]:
    """Run the library, one client at a time, and return what chance decided, with the result."""
    recorder = Recorder(problem)
    options = {"measure": UNMEASURED, "workers": 0, "fast": False, "trackers": [recorder], **settings}
    result = ga.run(recorder.task, algorithm, **options)
    return recorder.rounds[:-1], result


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One algorithm, or several that act together, in the papers' symbols."""

    beta: float = 0.0
    mean: str = "fresh"
    decay: float = 0.9
    every: int = 1
    inside: bool = False
    init: float = 0.0
    sam: float = 0.0
    lesam: float = 0.0
    cm: float = 0.0
    mu: float = 0.0
    scaffold: str = ""
    dyn: float = 0.0
    linear: bool | None = None
    """LinearScaling, aligned or not."""
    server: str = "average"
    server_lr: float = 1.0
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    @property
    def trips(self) -> int:
        """How often a client is asked in a round."""
        fresh = self.beta and self.mean == "fresh"
        return 2 if fresh or self.scaffold == "fresh" or self.linear else 1


@contextmanager
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Found:
    """Where the run ended, and each round's mean local loss."""

    x: Tensor
    floats: Tensor
    losses: list[float]


def play(
    problem: Problem, rounds: list[Chance], given: Settings, local: ga.LocalTraining, *, by_examples: bool
) -> Found:
    """Play the rounds."""
    with one_thread():
        return _play(problem, rounds, given, local, by_examples)


def _play(problem, rounds, given, local, by_examples) -> Found:
    x = torch.cat([p.detach().reshape(-1) for p in problem.model().parameters()])
    zero, total = torch.zeros_like(x), len(problem.sizes)
    buffers = torch.cat([torch.zeros(problem.hidden), torch.ones(problem.hidden)]).double()
    kept, control = defaultdict(lambda: zero), zero
    slopes, mean_slope = defaultdict(lambda: zero), zero
    m, v, losses = zero, torch.full_like(x, given.tau**2), []
    path = _Path(given, local)
    for number, chance in enumerate(rounds):
        weight = {i: float(problem.sizes[i]) if by_examples else 1.0 for i in range(total)}
        sampled, answering = list(chance.gradients) or list(chance.steps), list(chance.steps)
        share = {i: weight[i] / sum(weight[j] for j in sampled) for i in sampled}
        own = {i: _whole(problem, x, parts, buffers) for i, parts in chance.gradients.items()}
        mean = sum((share[i] * g for i, g in own.items()), zero)
        updates, floats, round_loss = {}, {}, {}
        lr = local.lr if isinstance(local.lr, float) else local.lr.at(number)
        for i in answering:
            start = path.start(number, x, i, own.get(i), mean)
            if given.linear:
                others = sum((share[j] * own[j] for j in sampled if j != i), zero)
                start = start - 0.5 * lr * len(sampled) * others
            turn = zero
            if given.scaffold == "fresh":
                turn = mean - own[i]
            elif given.scaffold == "kept":
                turn = control - kept[i]
            turn = turn - slopes[i] + path.turn(x)
            walked = _walk(problem, x, start, turn, given, local, lr, chance.steps[i], buffers)
            updates[i], floats[i], round_loss[i] = walked
        heard = sum(weight[i] for i in answering)
        update = sum((weight[i] / heard * updates[i] for i in answering), zero)
        buffers = sum((weight[i] / heard * floats[i] for i in answering), torch.zeros_like(buffers))
        losses.append(sum(weight[i] / heard * round_loss[i] for i in answering))
        path.learn(x, {i: (weight[i], updates[i], lr, len(chance.steps[i])) for i in answering})
        if given.scaffold == "kept":
            new = {i: kept[i] - control - updates[i] / _travel(local, lr, len(chance.steps[i])) for i in answering}
            kept.update(new)
            control = _mean_of_all(kept, weight, total)
        if given.linear is not None:
            update = len(answering) * update
        if given.dyn:
            new = {i: slopes[i] - given.dyn * updates[i] for i in answering}
            slopes.update(new)
            mean_slope = _mean_of_all(slopes, weight, total)
            update = update - mean_slope / given.dyn
        x, m, v = _serve(given, x, update, m, v)
    return Found(x, buffers if problem.norm else buffers[:0], losses)


class _Path:
    """What the alignment family carries from round to round, written with explicit sums over all earlier rounds."""

    def __init__(self, given: Settings, local: ga.LocalTraining) -> None:
        self.given, self.local = given, local
        self.means: list[Tensor] = []  # each round's −Σ p Δ/(αK) − wd·x
        self.mine: dict[int, Tensor] = {}  # the same of a client's last visit
        self.ends: dict[int, Tensor] = {}  # where a client last ended
        self.points: list[Tensor] = []  # earlier x
        self.direction: Tensor | None = None  # FedCM's
        self.mean_of_mine = 0.0
        self.weights: dict[int, float] = {}
        self._starts: dict[int, Tensor] = {}

    def start(self, number: int, x: Tensor, i: int, own: Tensor | None, mean: Tensor) -> Tensor:
        given, v = self.given, torch.zeros_like(x)
        if given.beta and number % given.every == 0:
            if given.mean == "fresh":
                v = v - given.beta * (mean - own)
            elif given.mean == "running" and self.means:
                powers = [given.decay**age if age else 1.0 for age in range(len(self.means))]
                s = sum(p * u for p, u in zip(powers, reversed(self.means), strict=True)) / sum(powers)
                v = v - given.beta * (s - own)
            elif given.mean == "kept" and i in self.mine:
                v = v - given.beta * (self.mean_of_mine - self.mine[i])
        if given.init and i in self.ends:
            v = v + given.init * (x - self.ends[i])
        if given.sam:
            v = v + given.sam * own / torch.sqrt((own * own).sum())
        if given.lesam and self.points:
            back = self.points[-1] - x
            v = v + given.lesam * back / torch.sqrt((back * back).sum())
        self._starts[i] = x + v
        return v

    def turn(self, x: Tensor) -> Tensor:
        if not self.given.cm or self.direction is None:
            return torch.zeros_like(x)
        return (1 - self.given.cm) / self.given.cm * self.direction

    def learn(self, x: Tensor, heard: dict[int, tuple[float, Tensor, float, int]]) -> None:
        wd, travels = self.local.weight_decay, {}
        for i, (_, update, lr, steps) in heard.items():
            travels[i] = _travel(self.local, lr, steps)
            self.mine[i] = -update / travels[i] - wd * x
            self.ends[i] = self._starts[i] + update
        whole = sum(weight for weight, *_ in heard.values())
        update = sum(weight / whole * u for weight, u, _, _ in heard.values())
        travel = sum(weight / whole * travels[i] for i, (weight, *_) in heard.items())
        self.means.append(-update / travel - wd * x)
        self.direction = -self.given.cm * update / travel
        self.points.append(x)
        self.weights |= {i: weight for i, (weight, *_) in heard.items()}
        known = sum(self.weights[i] for i in self.mine)
        self.mean_of_mine = sum(self.weights[i] / known * own for i, own in self.mine.items())


def _mean_of_all(kept: dict[int, Tensor], weight: dict[int, float], total: int) -> Tensor:
    """Return Σ w_i k_i/Σ w_i over all clients: those not seen yet have k_i = 0 and weigh like the mean of the seen."""
    typical = sum(weight[i] for i in kept) / len(kept)
    return sum(weight[i] * own for i, own in kept.items()) / (typical * total)


def _whole(problem: Problem, x: Tensor, parts: list[Tensor], buffers: Tensor) -> Tensor:
    rows = sum(len(part) for part in parts)
    return sum(len(part) / rows * problem.gradient(x, part, buffers)[0] for part in parts)


def _walk(problem, x, start, turn, given, local, lr, batches, buffers):
    """Return Δ = y_K − y_0, the buffers, and the mean of the steps' losses."""
    y, speed, loss = x + start, torch.zeros_like(x), 0.0
    inner = x
    for rows in batches:
        if given.inside:
            y = inner + start
        g, value, buffers = problem.gradient(y, rows, buffers)
        if local.clip_norm is not None and float(g.norm()) > local.clip_norm:
            g = g * local.clip_norm / g.norm()
        speed = local.momentum * speed + g + local.weight_decay * y + turn + (given.mu + given.dyn) * (y - x)
        y, inner = y - lr * speed, inner - lr * speed
        loss += value / len(batches)
    return (inner - x if given.inside else y - (x + start)), buffers, loss


def _travel(local: ga.LocalTraining, lr: float, steps: int) -> float:
    """Return the sum over the steps of how far a unit gradient given there moves y by the end."""
    return lr * sum(sum(local.momentum**j for j in range(steps - k)) for k in range(steps))


def _serve(given: Settings, x: Tensor, u: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take the server's step: the average, FedAvgM (Hsu et al. 2019), or algorithm 2 of Reddi et al. 2021."""
    if given.server == "average":
        return x + given.server_lr * u, m, v
    if given.server in ("momentum", "nesterov"):
        m = given.momentum * m + u
        return x + given.server_lr * (m if given.server == "momentum" else u + given.momentum * m), m, v
    m = given.beta1 * m + (1 - given.beta1) * u
    if given.server == "adagrad":
        v = v + u**2
    elif given.server == "adam":
        v = given.beta2 * v + (1 - given.beta2) * u**2
    else:
        v = v - (1 - given.beta2) * u**2 * torch.sign(v - u**2)
    return x + given.server_lr * m / (torch.sqrt(v) + given.tau), m, v

"""Weights that are not equal: in what is measured, and in the parts and ranks of GradAlign around an optimizer."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gradalign as ga
from gradalign.server.measure import alignment_of
from reference import Problem

BETA, LR, STEPS = 0.4, 0.3, 3


def unequal_alignment(rows: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """Return the paper's numbers from the definitions."""
    mean = p @ rows
    cosines = rows @ mean / np.linalg.norm(rows, axis=1) / np.linalg.norm(mean)
    drift = float(np.linalg.norm(mean - rows[0]))
    r = 0.5 * float(p @ np.square(rows - mean).sum(axis=1))
    return {"r": r, "cosine": float(p @ cosines), "drift": drift, "drift_ratio": drift / float(np.linalg.norm(mean))}


def test_alignment_of_unequal_weights_by_hand():
    rows, weights = np.array([[3.0, 0.0], [0.0, 4.0], [-1.0, 1.0]]), np.array([1.0, 2.0, 5.0])
    found = alignment_of([torch.tensor(row) for row in rows], weights.tolist())
    expected = unequal_alignment(rows, weights / 8)
    assert expected["r"] == pytest.approx(0.5 * ((9 + 0) / 8 + 16 * 2 / 8 + 2 * 5 / 8 - (0.25**2 + 1.625**2)))
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize("crowd", [False, True], ids=["one by one", "cohort"])
def test_what_is_measured_is_weighted_like_the_average(weights, crowd):
    sizes = tuple(2 + 3 * i for i in range(27 if crowd else 5))
    problem = Problem(sizes)
    measure = ga.Measure(test_every=0, train_every=1)
    result = ga.run(problem.task(), ga.FedAvg(), rounds=1, measure=measure, weights=weights, workers=0)
    x = torch.cat([p.detach().reshape(-1) for p in problem.model().parameters()])
    inputs, labels, owners = problem.data
    p = np.array(sizes, float) if weights == "examples" else np.ones(len(sizes))
    p /= p.sum()
    found = [problem.gradient(x, torch.nonzero(owners == i)[:, 0], x[:0]) for i in range(len(sizes))]
    expected = unequal_alignment(np.stack([g.numpy() for g, _, _ in found]), p)
    expected["train_loss"] = float(p @ np.array([loss for _, loss, _ in found]))
    right = (problem.model()(inputs).argmax(1) == labels).double()
    expected["train_accuracy"] = float(p @ np.array([float(right[owners == i].mean()) for i in range(len(sizes))]))
    for name, value in expected.items():
        assert result.history[name][0] == pytest.approx(value, rel=1e-9), name


# --- GradAlign around an optimizer


def model_of() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch_of(step: int, size: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * step + size)
    return torch.randn(size, 5, generator=random, dtype=torch.float64), torch.randint(3, (size,), generator=random)


def gradient(x: Tensor, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return one part's gradient and loss at a flat point, by plain autograd."""
    model, x = model_of(), x.detach().requires_grad_()
    names, sizes = zip(*[(n, p.shape) for n, p in model.named_parameters()], strict=True)
    pieces = x.split([s.numel() for s in sizes])
    values = {n: piece.view(s) for n, s, piece in zip(names, sizes, pieces, strict=True)}
    loss = F.cross_entropy(torch.func.functional_call(model, values, (part[0],)), part[1])
    return torch.autograd.grad(loss, x)[0], loss.detach()


def expected_end(
    parts_of, weights: list[float], *, beta: float = BETA, reuse: bool = False
) -> tuple[Tensor, list[float]]:
    """Return where x ← x − α Σ p_i ∇f_i(x − β(ḡ − g_i)) ends, and the mean losses at x."""
    x = torch.cat([p.detach().reshape(-1) for p in model_of().parameters()])
    p, losses, before = [w / sum(weights) for w in weights], [], None
    for step in range(STEPS):
        parts = parts_of(step)
        own, values = zip(*[gradient(x, part) for part in parts], strict=True)
        mean = sum(share * g for share, g in zip(p, own, strict=True))
        mean = before if reuse and before is not None else mean
        moved = [gradient(x - beta * (mean - g), part)[0] for g, part in zip(own, parts, strict=True)]
        before = sum(share * g for share, g in zip(p, moved, strict=True))
        losses.append(float(sum(share * value for share, value in zip(p, values, strict=True))))
        x = x - LR * before
    return x, losses


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def loss_of(model: nn.Module):
    return lambda inputs, targets: F.cross_entropy(model(inputs), targets)


def optimizer(model: nn.Module, **options) -> ga.GradAlign:
    return ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR), **({"beta": BETA} | options))


def cut(size: int, parts: int):
    return lambda step: list(zip(*(t.tensor_split(parts) for t in batch_of(step, size)), strict=True))


WAYS = pytest.mark.parametrize(
    "options", [{}, {"memory": "low"}, {"reuse": "previous"}, {"beta": 0.0}], ids=["full", "low", "reuse", "plain"]
)


@WAYS
def test_parts_of_a_batch_count_by_their_length(options):
    """11 examples in 4 parts are 3 + 3 + 3 + 2."""
    model = model_of()
    opt = optimizer(model, **options)
    losses = [float(opt.step(loss_of(model), *batch_of(step, 11), parts=4)) for step in range(STEPS)]
    x, expected = expected_end(cut(11, 4), [3, 3, 3, 2], beta=options.get("beta", BETA), reuse="reuse" in options)
    assert float((flat(model) - x).abs().max()) < 1e-12
    assert losses == pytest.approx(expected, rel=1e-12)


@WAYS
def test_given_weights_count_instead(options):
    model, weights = model_of(), [1.0, 6.0, 2.5]
    opt = optimizer(model, **options)
    for step in range(STEPS):
        opt.step(lambda part: loss_of(model)(*part), cut(11, 3)(step), weights=weights)
    x, _ = expected_end(cut(11, 3), weights, beta=options.get("beta", BETA), reuse="reuse" in options)
    assert float((flat(model) - x).abs().max()) < 1e-12


def verbs(opt: ga.GradAlign, model: nn.Module, parts, weights) -> None:
    opt.zero_grad()
    for part, weight in zip(parts, weights, strict=True):
        loss_of(model)(*part).backward()
        opt.collect(weight)
    for part in parts:
        if opt.displace():
            loss_of(model)(*part).backward()
    opt.step()


@WAYS
def test_collected_parts_are_weighted(options):
    model, weights = model_of(), [1.0, 6.0, 2.5]
    opt = optimizer(model, **options)
    for step in range(STEPS):
        verbs(opt, model, cut(11, 3)(step), weights)
    x, _ = expected_end(cut(11, 3), weights, beta=options.get("beta", BETA), reuse="reuse" in options)
    assert float((flat(model) - x).abs().max()) < 1e-12


def test_a_warning_names_the_user_s_line():
    model = model_of()
    with pytest.warns(UserWarning, match="nothing to align") as told:
        optimizer(model).step(lambda: loss_of(model)(*batch_of(0, 4)))
    assert told[0].filename == __file__
    opt = optimizer(model)
    loss_of(model)(*batch_of(0, 4)).backward()
    with pytest.warns(UserWarning, match="nothing to align") as told:
        opt.displace()
    assert told[0].filename == __file__
    opt.step()  # an open step watches all modules of the process


# Two ranks of 10 and 30 examples, each in two parts.
SIZES = (10, 30)
RANK_WAYS = {
    "closure": {},
    "low": {"memory": "low"},
    "reuse": {"reuse": "previous"},
    "plain": {"beta": 0.0},
    "verbs": {},
    "verbs plain": {"beta": 0.0},
    "a later group": {},
    "verbs, one part": {},
    "stock loop": {"beta": 0.0},
}


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for name, options in RANK_WAYS.items():
        model = model_of()
        if rank:
            nn.init.zeros_(model[0].weight)  # everybody starts from the first rank's point
        losses: list[float] = []
        if name == "a later group":
            opt = optimizer(model[0], **options)
            for later in model[2].parameters():
                if rank:
                    nn.init.zeros_(later)
                opt.add_param_group({"params": [later]})
        else:
            opt = optimizer(model, **options)
        for step in range(STEPS):
            if name == "stock loop":
                opt.zero_grad()
                loss_of(model)(*batch_of(step, SIZES[rank])).backward()
                opt.step()
            elif name.startswith("verbs"):
                parts = 1 if "one part" in name else 2
                verbs(opt, model, cut(SIZES[rank], parts)(step), [SIZES[rank] / parts] * parts)
            else:
                losses.append(float(opt.step(loss_of(model), *batch_of(step, SIZES[rank]), parts=2)))
        found[name] = flat(model), losses
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    os._exit(0)  # past gloo's threads


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    context, folder = multiprocessing.get_context("fork"), tmp_path_factory.mktemp("ranks")
    ranks = [context.Process(target=_rank, args=(rank, folder), daemon=True) for rank in range(2)]
    for one in ranks:
        one.start()
    while any(one.is_alive() for one in ranks) and all(one.exitcode in (None, 0) for one in ranks):
        wait([one.sentinel for one in ranks], timeout=0.1)
    for one in ranks:
        one.kill()  # who waits for one that has failed
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", RANK_WAYS)
def test_ranks_count_by_their_examples(two_ranks, name):
    number = 1 if name in ("verbs, one part", "stock loop") else 2

    def parts(step: int):
        return [part for size in SIZES for part in cut(size, number)(step)]

    options, weights = RANK_WAYS[name], [size / number for size in SIZES for _ in range(number)]
    weights = [1.0, 1.0] if name == "stock loop" else weights  # nobody has said what a rank's batch counts
    x, losses = expected_end(parts, weights, beta=options.get("beta", BETA), reuse="reuse" in options)
    for rank in range(2):
        end, told = two_ranks[rank][name]
        assert float((end - x).abs().max()) < 1e-12
        assert told == pytest.approx(losses[: len(told)], rel=1e-12)

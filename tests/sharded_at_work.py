"""What ranks do whose parameters or optimizer state are sharded (fully_shard, ZeRO): a part of trainers_at_work.py."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import ExponentialLR

import gradalign as ga
from algorithm1 import BETA, GAMMA, LIMIT, LR, MOMENTUM, START, Part, by_examples, halves, micro_batch

SETTINGS: dict[str, dict[str, Any]] = {
    "closure": {},
    "closure, low": {"memory": "low"},
    "closure, every": {"every": 2},
    "closure, plain": {"beta": 0.0},
    "closure, kept gathered": {},
    "closure, restarted": {},
    "verbs": {},
    "verbs, every": {"every": 2},
    "verbs, scaled": {},
    "verbs, twice": {},
}


def spanning_parts(equal: bool) -> list[tuple[list[Part], list[float]]]:
    """Three steps of two parts, each of which spans both ranks; with as many examples on each, or not."""
    steps = []
    for index in range(3):
        own = [halves(micro_batch(rank, index)) for rank in (0, 1)]
        least = [min(len(own[0][j][0]), len(own[1][j][0])) if equal else None for j in (0, 1)]
        parts = [
            tuple(np.concatenate([own[rank][j][k][: least[j]] for rank in (0, 1)]) for k in (0, 1)) for j in (0, 1)
        ]
        steps.append((parts, by_examples(parts)))
    return steps


def own_parts(index: int, equal: bool) -> list[tuple[Tensor, Tensor]]:
    parts = []
    for j, (x, y) in enumerate(halves(micro_batch(dist.get_rank(), index))):
        least = min(len(halves(micro_batch(rank, index))[j][0]) for rank in (0, 1)) if equal else len(x)
        parts.append((torch.tensor(x[:least]), torch.tensor(y[:least])))
    return parts


def sharded_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3, bias=False, dtype=torch.float64), nn.Identity())
    model[0].weight.data[:] = torch.tensor(START)  # three rows on two ranks
    fully_shard(model[0])
    return fully_shard(model)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((model(x) - y) ** 2).sum() / len(x)


def wrapped(model: nn.Module, **settings: Any) -> tuple[ga.GradAlign, ExponentialLR]:
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    opt = ga.GradAlign(sgd, **({"beta": BETA, "model": model} | settings))
    return opt, ExponentialLR(opt, GAMMA)


def whole(model: nn.Module) -> np.ndarray:
    return model[0].weight.full_tensor().detach().numpy().copy()


def verbs(opt: ga.GradAlign, model: nn.Module, parts: list[tuple[Tensor, Tensor]], name: str) -> None:
    opt.zero_grad()
    count = sum(len(y) for _, y in parts)
    times = 2 if "twice" in name else 1  # a part's gradient, accumulated over two backward calls
    for x, y in parts:
        for _ in range(times):
            (loss_of(model, x, y) * (len(y) / count if "scaled" in name else 1.0 / times)).backward()
        if "scaled" in name:
            opt.collect(scale=len(y) / count)
        else:
            opt.collect(weight=len(y))
    for x, y in parts:
        opt.displace()  # False in a plain step, whose second pass adds nothing
        for _ in range(times):
            (loss_of(model, x, y) * (len(y) / count if "scaled" in name else 1.0 / times)).backward()


def this_rank(name: str) -> tuple[np.ndarray, list[float]]:
    """Take three steps; return the end point and the steps' losses."""
    model = sharded_model()
    opt, schedule = wrapped(model, **SETTINGS[name])
    if "gathered" in name:
        model.set_reshard_after_backward(False)
    losses = []
    for index in range(3):
        parts = own_parts(index, equal="verbs" in name)
        if "verbs" in name:
            verbs(opt, model, parts, name)
        else:
            x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            losses.append(float(opt.align(partial(loss_of, model), x, y, parts=2)))
        opt.clip_grad_norm_(LIMIT)
        opt.step()
        schedule.step()
        if index == 1 and "restarted" in name:
            states = copy.deepcopy([part.state_dict() for part in (model, opt, schedule)])
            model = sharded_model()
            opt, schedule = wrapped(model, **SETTINGS[name])
            for part, state in zip((model, opt, schedule), states, strict=True):
                part.load_state_dict(state)
    return whole(model), losses


def zero() -> np.ndarray:
    """The optimizer's state is sharded, the parameters are whole: every rank's halves are parts."""
    model = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    model.weight.data[:] = torch.tensor(START)
    inner = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR, momentum=MOMENTUM)
    opt = ga.GradAlign(inner, beta=BETA)
    schedule = ExponentialLR(opt, GAMMA)
    for index in range(3):
        x, y = (torch.tensor(values) for values in micro_batch(dist.get_rank(), index))
        opt.align(lambda x, y: loss_of(model, x, y), x, y, parts=2)
        opt.clip_grad_norm_(LIMIT)
        opt.step()
        schedule.step()
    return model.weight.detach().numpy().copy()


def lost_shard() -> tuple[int, bool, bool]:
    """One part's gradient is infinite in the last row, which one rank holds: all skip the step, and go on."""
    model = sharded_model()
    opt, _ = wrapped(model)
    before = whole(model)
    x, y = (torch.cat(tensors) for tensors in zip(*own_parts(0, equal=False), strict=True))
    huge = y.clone()
    huge[0, 2] = float("inf")
    opt.step(lambda x, y: loss_of(model, x, y), x, huge, parts=2)
    kept = np.array_equal(before, whole(model))
    opt.step(lambda x, y: loss_of(model, x, y), x, y, parts=2)
    return opt.skipped_steps, kept, bool(np.isfinite(whole(model)).all())


def said(work: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            work()
        except ga.GradalignError as error:
            return str(error)
    return " ".join(str(one.message) for one in caught)


def mistakes() -> dict[str, str]:
    """What is said where numbers would be wrong."""
    model = sharded_model()
    opt, _ = wrapped(model)
    other, _ = wrapped(model)
    parts = own_parts(0, equal=False)
    x, y = parts[0]

    def clipped_by_torch() -> None:
        verbs(opt, model, own_parts(0, equal=True), "")
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        opt.step()

    def weighed_by_rank(first: bool) -> None:
        opt.zero_grad()
        for place in (0, 1):
            loss_of(model, x, y).backward()
            opt.collect(weight=1.0 + dist.get_rank() * (first == (place == 0)))
        opt.displace()

    return {
        "weights": said(lambda: verbs(opt, model, parts, "")),
        "first weight": said(lambda: weighed_by_rank(first=True)),
        "last weight": said(lambda: weighed_by_rank(first=False)),
        "counts": said(lambda: opt.step(lambda x, y: loss_of(model, x, y), x, y, parts=2 + dist.get_rank())),
        "alone": said(lambda: other.step(lambda: loss_of(model, x, y))),
        "clipped": said(clipped_by_torch),
        "half": said(lambda: wrapped(nn.ModuleList([model, nn.Linear(2, 2)]))),
    }


def report() -> dict[str, Any]:
    return {
        "ends": {name: this_rank(name) for name in SETTINGS},
        "zero": zero(),
        "lost": lost_shard(),
        "mistakes": mistakes(),
    }

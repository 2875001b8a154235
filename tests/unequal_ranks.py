"""What every rank does in test_optim_ranks.py: ranks with unequal batches, started by torchrun.

Each rank writes what it found to the folder given. The same problem is worked out in NumPy, without torch, by
``by_hand``: least squares, f_i(w) = ‖X_i w − y_i‖² / 2n_i for a part of n_i examples, and parts weighted by n_i.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradalign as ga

LR, BETA, LIMIT = 0.1, 0.7, 0.01
SIZES = [(10, 30), (10, 30), (7, 2)]
"""The examples of both ranks in each step, the last one smaller."""

# name: (settings, parts on each rank)
CASES: dict[str, tuple[dict, int]] = {
    "closure": ({}, 1),
    "closure, two parts": ({}, 2),
    "closure, low": ({"memory": "low"}, 2),
    "closure, reuse": ({"reuse": "previous"}, 2),
    "closure, plain": ({"beta": 0.0}, 2),
    "verbs": ({}, 1),
    "verbs, two parts": ({}, 2),
    "verbs, reuse": ({"reuse": "previous"}, 2),
    "verbs, plain": ({"beta": 0.0}, 2),
    "ddp closure": ({}, 1),
    "ddp verbs": ({}, 1),
    "overlap closure": ({"overlap": True}, 1),
    "overlap closure, views": ({"overlap": True}, 1),
    "overlap closure, low": ({"overlap": True, "memory": "low"}, 1),
    "overlap closure, reuse": ({"overlap": True, "reuse": "previous"}, 1),
    "overlap closure, plain": ({"overlap": True, "beta": 0.0}, 2),
    "overlap closure, every": ({"overlap": True, "every": 2}, 1),
    "overlap closure, own backward": ({"overlap": True}, 1),
    "overlap verbs": ({"overlap": True}, 1),
    "overlap verbs, reuse": ({"overlap": True, "reuse": "previous"}, 1),
    "overlap verbs, every": ({"overlap": True, "every": 2}, 1),
    # overlap=True, but DDP is kept from averaging the second pass, or passed by
    "overlap verbs, quiet": ({"overlap": True}, 1),
    "overlap verbs, quiet, reuse": ({"overlap": True, "reuse": "previous"}, 1),
    "overlap verbs, quiet, every": ({"overlap": True, "every": 2}, 1),
    "overlap closure, quiet": ({"overlap": True}, 1),
    "overlap closure, quiet, low": ({"overlap": True, "memory": "low"}, 1),
    "overlap closure, quiet, plain": ({"overlap": True, "beta": 0.0}, 2),
    "overlap closure, past DDP": ({"overlap": True, "reuse": "previous"}, 1),
    "verbs, clipped": ({}, 2),
    "overlap verbs, clipped by torch": ({"overlap": True}, 1),
    "verbs, plain, clipped by torch": ({"beta": 0.0}, 2),
}


def examples(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([step, rank])
    size = SIZES[step][rank]
    return random.normal(size=(size, 3)) + rank, random.normal(size=(size, 1))


def start(rank: int) -> np.ndarray:
    return np.array([0.5, -1.0, 2.0]) + rank


def gradient(part: tuple[np.ndarray, np.ndarray], w: np.ndarray) -> np.ndarray:
    x, y = part
    return x.T @ (x @ w - y[:, 0]) / len(x)


def by_hand(
    settings: dict, parts_each: int, *, clipped: bool = False, weighted: bool = True
) -> tuple[np.ndarray, list[float]]:
    """Algorithm 1 with weighted parts, over all ranks' parts at once; return the end point and the steps' losses."""
    w, previous, losses, velocity = start(0), None, [], np.zeros(3)
    for step in range(len(SIZES)):
        parts = []
        for rank in (0, 1):
            x, y = examples(step, rank)
            parts += list(zip(np.array_split(x, parts_each), np.array_split(y, parts_each), strict=True))
        count = sum(len(y) for _, y in parts)
        shares = [len(y) / count if weighted else 1 / len(parts) for _, y in parts]
        own = [gradient(part, w) for part in parts]
        mean = sum(s * g for s, g in zip(shares, own, strict=True))
        around = previous if previous is not None and settings.get("reuse") else mean
        beta = settings.get("beta", BETA) if step % settings.get("every", 1) == 0 else 0.0
        points = [w - beta * (around - g) for g in own]
        update = sum(s * gradient(part, p) for s, part, p in zip(shares, parts, points, strict=True))
        losses.append(sum(s * 0.5 * np.mean((x @ w - y[:, 0]) ** 2) for s, (x, y) in zip(shares, parts, strict=True)))
        previous = update
        if clipped:
            update = update * min(1.0, LIMIT / (np.linalg.norm(update) + 1e-6))  # torch's formula
        velocity = settings.get("momentum", 0.0) * velocity + update
        w = w - LR * velocity
    return w, losses


def linear(rank: int) -> nn.Module:
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    model.weight.data[:] = torch.tensor(start(rank))
    return model


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((model(x) - y) ** 2).mean()


def this_rank(name: str) -> tuple[np.ndarray, list[float], int, int]:
    """Take the steps; return the end point, the losses and how many warnings there were of changed gradients and of
    averaging that did not overlap.
    """
    settings, parts_each = CASES[name]
    rank = dist.get_rank()
    inner = model = linear(rank)  # different on purpose: all start from rank 0's
    if name.startswith(("ddp", "overlap")):
        model = DistributedDataParallel(inner, gradient_as_bucket_view="views" in name)
    inside = model if isinstance(model, DistributedDataParallel) else None
    opt = ga.GradAlign(torch.optim.SGD(inner.parameters(), lr=LR), **({"beta": BETA, "model": inside} | settings))
    losses = []
    if "past" in name:
        model = inner
    outer = inside.no_sync if inside is not None and "quiet" in name else nullcontext
    with warnings.catch_warnings(record=True) as caught, outer():
        warnings.simplefilter("always")
        for step in range(len(SIZES)):
            x, y = (torch.tensor(values) for values in examples(step, rank))
            if "verbs" in name:
                verbs(opt, model, list(zip(x.tensor_split(parts_each), y.tensor_split(parts_each), strict=True)))
                if "by torch" in name:
                    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
                elif "clipped" in name:
                    opt.clip_grad_norm_(LIMIT)
                opt.step()
            elif "own backward" in name:
                losses.append(opt.step(lambda x=x, y=y: backward(opt, model, x, y), weights=[len(y)]))
            else:
                losses.append(opt.step(lambda x, y: loss_of(model, x, y), x, y, parts=parts_each))
    changed = sum("between the last backward and step()" in str(warning.message) for warning in caught)
    idle = sum("overlap=True had no effect" in str(warning.message) for warning in caught)
    return inner.weight.detach().numpy()[0], [float(loss) for loss in losses], changed, idle


def backward(opt: ga.GradAlign, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    return loss


def verbs(opt: ga.GradAlign, model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Both passes; the second one of DDP with overlap=True is outside no_sync."""
    quiet = model.no_sync if isinstance(model, DistributedDataParallel) else nullcontext
    opt.zero_grad()
    with quiet():
        for x, y in parts:
            loss_of(model, x, y).backward()
            opt.collect(weight=len(y))
    with nullcontext() if opt.overlap else quiet():
        for x, y in parts:
            if opt.displace():
                loss_of(model, x, y).backward()


def clipped_rank_by_rank() -> int:
    """Clip this rank's own gradient where the mean is not known yet; return how many warnings there were."""
    model = linear(0)
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR), beta=BETA)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(len(SIZES)):
            x, y = (torch.tensor(values) for values in examples(step, dist.get_rank()))
            verbs(opt, model, [(x, y)])
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            opt.step()
    return sum("clip them with the optimizer's own clip_grad_norm_()" in str(one.message) for one in caught)


def averaged_by_ddp(name: str) -> tuple[str, bool, int]:
    """Let DDP average what is to be weighted first.

    Returns what is said, whether x is left as it was, and how often changed gradients were warned of.
    """
    inner = linear(0)
    model = DistributedDataParallel(inner)
    given = {"given": model, "inside": nn.Sequential(model), "collect": model, "parts": model, "inner": inner}.get(name)
    opt = ga.GradAlign(torch.optim.SGD(inner.parameters(), lr=LR), beta=BETA, model=given)
    x, y = (torch.tensor(values) for values in examples(0, dist.get_rank()))
    message = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(2 if name == "parts" else 1):
                with nullcontext() if name == "collect" else model.no_sync():
                    loss_of(model, x, y).backward()
                opt.collect(weight=len(y))
            opt.displace()
            loss_of(model, x, y).backward()
            opt.step()
        except ga.GradalignError as error:
            message = str(error)
    changed = sum("with model.no_sync()" in str(one.message) for one in caught)
    return message, np.array_equal(inner.weight.detach().numpy()[0], start(0)), changed


def never_displaced(quiet: bool) -> list[float]:
    """overlap=True and a loop that was left as it is, inside no_sync and outside; return its end."""
    model = DistributedDataParallel(linear(0))
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR), beta=0.0, model=model, overlap=True)
    for step in range(len(SIZES)):
        x, y = (torch.tensor(values) for values in examples(step, dist.get_rank()))
        opt.zero_grad()
        with model.no_sync() if quiet else nullcontext():
            loss_of(model, x, y).backward()
        opt.step()
    return model.module.weight.detach().tolist()[0]


def lost_gradient(way: str) -> tuple[int, list[float]]:
    """overlap and reuse, and rank 1's first pass is not finite in step 1: all skip it, nobody waits for the other."""
    model = DistributedDataParallel(linear(0))
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    opt = ga.GradAlign(inner, beta=BETA, model=model, overlap=True, reuse="previous")
    for step in range(len(SIZES)):
        x, y = (torch.tensor(values) for values in examples(step, dist.get_rank()))
        if step == 1 and dist.get_rank() == 1:
            x[0, 0] = float("inf")
        if way == "closure":
            opt.step(lambda x, y: loss_of(model, x, y), x, y, parts=1)
        else:
            verbs(opt, model, [(x, y)])
            opt.step()
    return opt.skipped_steps, model.module.weight.detach().tolist()[0]


def sharded() -> dict[str, tuple[str, bool]]:
    """What is said to someone whose parameters are sharded, and whether they were left as they were."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, cpu = init_device_mesh("cpu", (dist.get_world_size(),)), torch.device("cpu")
    models = {
        "FSDP": FullyShardedDataParallel(nn.Linear(4, 4), device_id=cpu, use_orig_params=False),
        "FSDP, original parameters": FullyShardedDataParallel(nn.Linear(4, 4), device_id=cpu, use_orig_params=True),
        "fully_shard": fully_shard(nn.Linear(4, 4), mesh=mesh),
        "tensor parallel": parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()),
    }
    said = {}
    for name, model in models.items():
        before = [held(p) for p in model.parameters()]
        for kind, arguments in (("model", {"model": model}), ("optimizer", {})):
            trained = [nn.Parameter(torch.ones(2))] if arguments else model.parameters()
            try:
                ga.GradAlign(torch.optim.SGD(trained, lr=0.1), beta=0.1, **arguments)
                message = ""
            except ga.GradalignError as error:
                message = str(error)
            equal = all(torch.equal(b, held(p)) for b, p in zip(before, model.parameters(), strict=True))
            said[f"{name}, by the {kind}"] = message, equal
        opt = ga.GradAlign(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), beta=0.1)
        try:
            opt.add_param_group({"params": list(model.parameters())})
        except ga.GradalignError as error:
            said[f"{name}, added"] = str(error), len(opt.param_groups) == 1
    return said


def held(parameter: Tensor) -> Tensor:
    """This rank's values of a parameter."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach().clone()


class LateGroup:
    """Wrappers that are made, and used, before there is a process group."""

    def __init__(self) -> None:
        rank = int(os.environ["RANK"])
        self.models = {name: linear(rank) for name in ("closure", "verbs", "too late", "after steps", "added")}
        self.opts = {
            name: ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), beta=BETA)
            for name, model in self.models.items()
        }
        self.extra = nn.Parameter(torch.full((2,), float(rank), dtype=torch.float64))
        for step in range(2 + rank):  # unequal numbers, unequal points, unequal momentum
            x, y = (torch.tensor(values) for values in examples(step, rank))
            self.opts["after steps"].step(lambda x, y: loss_of(self.models["after steps"], x, y), x, y, parts=2)

    def go_on(self) -> dict[str, list[float] | str | int]:
        """Use them now that there is a group; return where they end."""
        found: dict[str, list[float] | str | int] = {}
        self.opts["added"].optimizer.add_param_group({"params": [self.extra]})  # not through the wrapper
        for name, opt in self.opts.items():
            model = self.models[name]
            try:
                self.steps(name, opt, model)
            except ga.GradalignError as error:
                found["said"] = str(error)
            found[name] = model.weight.detach().tolist()[0]
        found["extra"] = self.extra.tolist()
        found["steps"] = self.opts["after steps"].steps
        return found

    def steps(self, name: str, opt: ga.GradAlign, model: nn.Module) -> None:
        for step in range(len(SIZES)):
            x, y = (torch.tensor(values) for values in examples(step, dist.get_rank()))
            if name == "verbs":
                verbs(opt, model, [(x, y)])
                opt.step()
            elif name == "too late":
                loss_of(model, x, y).backward()
                opt.displace()
            else:
                opt.step(lambda x, y: loss_of(model, x, y), x, y, parts=1)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    late = LateGroup()
    dist.init_process_group("gloo")
    report = {
        "ends": {name: this_rank(name) for name in CASES},
        "late": late.go_on(),
        "clipped": clipped_rank_by_rank(),
        "lost": {way: lost_gradient(way) for way in ("closure", "verbs")},
        "averaged": {
            name: averaged_by_ddp(name) for name in ("given", "not given", "inside", "collect", "parts", "inner")
        },
        "never displaced": [never_displaced(quiet) for quiet in (True, False)],
        "sharded": sharded(),
    }
    dist.barrier()
    again = linear(0)
    opt = ga.GradAlign(torch.optim.SGD(again.parameters(), lr=LR), beta=BETA)
    for step in range(len(SIZES)):
        if step == 1:  # the group ends, and another one begins
            rank, size = dist.get_rank(), dist.get_world_size()
            dist.destroy_process_group()
            meeting = f"file://{folder.resolve() / 'meeting'}"  # torchrun's store still has the first group's addresses
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        x, y = (torch.tensor(values) for values in examples(step, dist.get_rank()))
        opt.step(lambda x, y: loss_of(again, x, y), x, y, parts=1)
    report["again"] = again.weight.detach().tolist()[0]
    torch.save(report, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # past the interpreter's end, where a thread of gloo that DDP keeps alive can abort the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What every rank does in test_distributed.py: started by torchrun, it writes its end points to the folder given.

The problem itself is shared with the test, which solves it in one process.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradalign as ga
from conftest import blobs, vector

STEPS, SIZE, BETA = 4, 12, 0.3
SETTINGS: dict[str, dict] = {
    "closure": {},
    "verbs": {},
    "ddp closure": {},
    "ddp verbs": {},
    "ddp overlap": {"overlap": True},
    "low": {"memory": "low"},
    "every": {"every": 2},
    "reuse": {"reuse": "previous"},
    "reuse verbs": {"reuse": "previous"},
    "plain": {"beta": 0.0},
    "two parts each": {},
    "clipped": {},
}


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def part_of(step: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(SIZE, 8, generator=generator).double(), torch.randint(4, (SIZE,), generator=generator)


def optimizer(trained: nn.Module, name: str, **options) -> ga.GradAlign:
    inner = torch.optim.SGD(trained.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    return ga.GradAlign(inner, **({"beta": BETA} | SETTINGS[name] | options))


def one_process(name: str, ranks: int) -> Tensor:
    """Solve the same problem in one process: the reference."""
    model = model_of(0)
    opt = optimizer(model, name, overlap=False)
    parts = 2 * ranks if name == "two parts each" else ranks
    for step in range(STEPS):
        given = [part_of(step, part) for part in range(parts)]
        opt.align(lambda part: F.cross_entropy(model(part[0]), part[1]), given)
        if name == "clipped":
            opt.clip_grad_norm_(0.1)
        opt.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def this_rank(name: str) -> tuple[Tensor, list[int]]:
    """Do this rank's share; return the parameters and the numbers of all-reduces of the steps."""
    rank = dist.get_rank()
    model = model_of(rank)  # different on purpose: GradAlign, or DDP, starts everyone from rank 0's
    inner: nn.Module = model
    if name.startswith("ddp"):
        model = DistributedDataParallel(model)
    opt = optimizer(inner, name, model=model if name.startswith("ddp") else None)
    counts = []
    for step in range(STEPS):
        before = Counter.calls
        if name == "two parts each":
            parts = [part_of(step, 2 * rank), part_of(step, 2 * rank + 1)]
            opt.step(lambda part: F.cross_entropy(model(part[0]), part[1]), parts)
        elif "verbs" in name:
            _verbs(opt, model, part_of(step, rank))
        elif name == "clipped":
            opt.align(lambda step=step: F.cross_entropy(model(part_of(step, rank)[0]), part_of(step, rank)[1]))
            opt.clip_grad_norm_(0.1)
            opt.step()
        else:
            inputs, targets = part_of(step, rank)
            opt.step(lambda inputs=inputs, targets=targets: F.cross_entropy(model(inputs), targets))
        counts.append(Counter.calls - before)
    return torch.cat([p.detach().reshape(-1) for p in inner.parameters()]), counts


def _verbs(opt: ga.GradAlign, model: nn.Module, part: tuple[Tensor, Tensor]) -> None:
    parallel = isinstance(model, DistributedDataParallel)
    opt.zero_grad()
    with model.no_sync() if parallel else nullcontext():
        F.cross_entropy(model(part[0]), part[1]).backward()
        opt.displace()
        F.cross_entropy(model(part[0]), part[1]).backward()
    opt.step()


def run_of_everything(engine: str | None = None) -> ga.Result:
    """An experiment with everything in it that could go out of step."""
    algorithm = ga.FedGA(beta=0.1) + ga.FedProx(mu=0.1) + ga.Scaffold(control="kept") + ga.FedAdam(lr=0.05)
    workers = 0 if engine == "local" else None
    local = ga.LocalTraining(lr=0.1, steps=3, batch_size=8)
    task = blobs()
    own = [None, *task.clients[1:]]
    task = replace(task, client_tests=own, metrics={"widest": lambda outputs, targets: (outputs.T - targets).max()})
    measure = ga.Measure(personalized=True, clients_every=2)
    options = {"rounds": 3, "clients_per_round": 5, "engine": engine, "workers": workers, "measure": measure}
    return ga.run(task, algorithm, local=local, **options)


def run_with_silent_clients(engine: str | None = None) -> ga.Result:
    """Clients that fall silent after their gradient leave some ranks with more to train than others."""
    workers = 0 if engine == "local" else None
    local = ga.LocalTraining(lr=0.1, steps=2, batch_size=8)
    options = {"rounds": 3, "clients_per_round": 8, "dropout": 0.4, "engine": engine, "workers": workers}
    return ga.run(blobs(clients=9), ga.FedGA(beta=0.1), local=local, measure=ga.Measure(train_every=1), **options)


def run_in_one_trip(engine: str | None = None) -> ga.Result:
    """Clients take their own gradients, and report a number beside their update."""
    algorithm = ga.FedGA(beta="auto", length=0.5, mean="running") + ga.FedInit()
    workers, local = (
        0 if engine == "local" else None,
        ga.LocalTraining(lr=0.1, steps=2, batch_size=8, gradient_examples=9),
    )
    options = {"rounds": 4, "clients_per_round": 8, "dropout": 0.4, "engine": engine, "workers": workers}
    return ga.run(blobs(clients=9), algorithm, local=local, **options)


class Counter:
    """Counts the all-reduces that Python code asks for."""

    calls = 0
    real = staticmethod(dist.all_reduce)

    @classmethod
    def all_reduce(cls, *args, **kwargs):
        cls.calls += 1
        return cls.real(*args, **kwargs)


def skips_together() -> tuple[int, bool]:
    """One rank's gradient is not finite: all skip that step, and go on."""
    model = model_of(0)
    opt = optimizer(model, "closure")
    for step in range(3):
        inputs, targets = part_of(step, dist.get_rank())
        factor = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        opt.step(lambda i=inputs, t=targets, f=factor: f * F.cross_entropy(model(i), t))
    return opt.skipped_steps, all(bool(torch.isfinite(p).all()) for p in model.parameters())


def unused_somewhere() -> list[bool]:
    """A parameter that only rank 0 uses gets a gradient everywhere, one that nobody uses stays without."""
    used, never = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    common = nn.Parameter(torch.ones(1))
    opt = ga.GradAlign(torch.optim.SGD([common, used, never], lr=0.1), beta=0.1)
    opt.step(lambda: (common**2).sum() + ((used**2).sum() if dist.get_rank() == 0 else 0.0))
    return [p.grad is not None for p in (common, used, never)]


def complaints() -> dict[str, str]:
    """What is said to someone who lets DDP average the first pass."""
    model = DistributedDataParallel(model_of(0))
    inputs, targets = part_of(0, dist.get_rank())
    found = {}
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=0.1), beta=0.1)
    try:
        opt.step(lambda: F.cross_entropy(model(inputs), targets))
    except ga.GradalignError as error:
        found["closure"] = str(error)
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=0.1), beta=0.1)
    F.cross_entropy(model(inputs), targets).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.displace()
        found["verbs"] = str(caught[0].message) if caught else ""
    opt.restore()
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.all_reduce = Counter.all_reduce
    ends = {name: this_rank(name) for name in SETTINGS}
    result = run_of_everything()
    report = {
        "ends": ends,
        "run": vector(result),
        "test accuracy": result.history["test_accuracy"],
        "widest": result.history["test_widest"],
        "clients": [asdict(one) for one in (*result.clients, *result.personalized)],
        "silent": vector(run_with_silent_clients()),
        "one trip": vector(run_in_one_trip()),
        "skips": skips_together(),
        "unused": unused_somewhere(),
        "complaints": complaints(),
    }
    torch.save(report, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # past the interpreter's end, where a thread of gloo that DDP keeps alive can abort the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))

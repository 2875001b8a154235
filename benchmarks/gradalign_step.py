"""What a GradAlign step costs beside a plain SGD step on the same total batch.

    python -m benchmarks.gradalign_step

Prints the ratio of times (two passes instead of one: about 2), with --lightning also inside Lightning, the peak
memory of a process that takes such steps, and the share of a step that is spent in all-reduce with two ranks. Plain and
aligned steps alternate, and medians are compared, so that a busy machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gradalign as ga

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        ),
        (3, 32, 32),
    ),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)),
        (784,),
    ),
}


class Bench:
    """One model with one large batch of random data, and the steps to compare."""

    def __init__(self, model: str, parts: int, small: int) -> None:
        torch.manual_seed(0)
        make, shape = MODELS[model]
        self.model, self.parts = make(), parts
        self.inputs, self.targets = torch.randn(parts * small, *shape), torch.randint(10, (parts * small,))
        self.opt = ga.GradAlign(torch.optim.SGD(self.model.parameters(), lr=1e-3), beta=1e-3)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of some of the batch."""
        return F.cross_entropy(self.model(inputs), targets)

    def whole(self) -> None:
        """Take a plain step, the whole batch in one pass."""
        self.opt.optimizer.zero_grad()
        self.loss(self.inputs, self.targets).backward()
        self.opt.optimizer.step()

    def accumulated(self) -> None:
        """Take a plain step, gradients accumulated over the parts."""
        self.opt.optimizer.zero_grad()
        for x, y in zip(self.inputs.chunk(self.parts), self.targets.chunk(self.parts), strict=True):
            (self.loss(x, y) / self.parts).backward()
        self.opt.optimizer.step()

    def full(self) -> None:
        """Take a GradAlign step."""
        self.opt.memory = "full"
        self.opt.step(self.loss, self.inputs, self.targets, parts=self.parts)

    def low(self) -> None:
        """Take a GradAlign step in little memory."""
        self.opt.memory = "low"
        self.opt.step(self.loss, self.inputs, self.targets, parts=self.parts)


def lightning_times(bench: Bench, repeats: int) -> dict[str, float]:
    """Return the median seconds of a whole training step inside Lightning, SGD by parts and GradAlign in turn."""
    import lightning.pytorch as pl

    times: dict[str, list[float]] = {"accumulated": [], "full": []}
    batch = (bench.inputs, bench.targets)

    class Module(pl.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.net = bench.model

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            plain, opt = self.optimizers()
            began = time.perf_counter()
            if batch_idx % 2:
                opt.step(bench.loss, *batch, parts=bench.parts)
            else:
                plain.zero_grad()
                for x, y in zip(*(given.chunk(bench.parts) for given in batch), strict=True):
                    self.manual_backward(bench.loss(x, y) / bench.parts)
                plain.step()
            times["full" if batch_idx % 2 else "accumulated"].append(time.perf_counter() - began)

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            sgd = torch.optim.SGD(self.parameters(), lr=1e-3)
            return [sgd, ga.GradAlign(torch.optim.SGD(self.parameters(), lr=1e-3), beta=1e-3)]

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader([batch] * (2 * repeats + 2), batch_size=None))
    return {kind: median(seconds[1:]) for kind, seconds in times.items()}


KINDS = ("whole", "accumulated", "full", "low")


def step_times(bench: Bench, repeats: int) -> dict[str, float]:
    """Return the median seconds of every kind of step."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(repeats + 1):
        for kind in KINDS:
            began = time.perf_counter()
            getattr(bench, kind)()
            times[kind].append(time.perf_counter() - began)
    return {kind: median(seconds[1:]) for kind, seconds in times.items()}


def child(*words: str, ranks: int = 0) -> dict[str, float]:
    """Run this module in processes of its own and return what it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, "-m", "benchmarks.gradalign_step", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def memory_now(field: str) -> int:
    """Return a line of this process's status in bytes: VmRSS is what it uses now, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("peak memory is read from /proc, which this system does not have")


def print_memory(bench: Bench, kind: str) -> None:
    """Print, as a child, by how much three steps of one kind raise the peak memory, in bytes and gradient sizes."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory_now("VmRSS")
    for _ in range(3):
        getattr(bench, kind)()
    added = memory_now("VmHWM") - before
    size = 4 * sum(p.numel() for p in bench.model.parameters())
    print(json.dumps({"bytes": added, "vectors": added / size}))


def print_share(bench: Bench, repeats: int) -> None:
    """Print, as one of two ranks, the share of a step spent in all-reduce, waiting for the other rank included."""
    spent, real = [0.0], dist.all_reduce

    def timed(*args: object, **kwargs: object) -> object:
        began = time.perf_counter()
        try:
            return real(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            spent[0] += time.perf_counter() - began

    dist.init_process_group("gloo")
    dist.all_reduce = timed
    bench.opt = ga.GradAlign(torch.optim.SGD(bench.model.parameters(), lr=1e-3), beta=1e-3)
    half = slice(dist.get_rank(), None, 2)
    inputs, targets = bench.inputs[half], bench.targets[half]
    steps, reduces = [], []
    for _ in range(repeats + 1):
        dist.barrier()
        spent[0], began = 0.0, time.perf_counter()
        bench.opt.step(lambda: bench.loss(inputs, targets))
        steps.append(time.perf_counter() - began)
        reduces.append(spent[0])
    if dist.get_rank() == 0:
        share = median(r / s for r, s in zip(reduces[1:], steps[1:], strict=True))
        print(json.dumps({"share": share, "step_seconds": median(steps[1:])}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="lenet")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--small", type=int, default=64, help="examples in a part")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--lightning", action="store_true", help="measure inside Lightning, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options.model, options.parts, options.small)
    if options.child == "share":
        return print_share(bench, options.repeats)
    if options.child:
        return print_memory(bench, options.child)
    words = [f"--{name}={getattr(options, name)}" for name in ("model", "parts", "small", "repeats")]
    times = step_times(bench, options.repeats)
    memory = {kind: child(*words, f"--child={kind}") for kind in KINDS}
    share = child(*words, "--child=share", ranks=2)
    inside = lightning_times(bench, options.repeats) if options.lightning else None
    if options.json:
        found = {"seconds": times, "memory": memory, "two_ranks": share, "lightning_seconds": inside}
        print(json.dumps(found, indent=1))
        return None
    size = sum(p.numel() for p in bench.model.parameters())
    print(f"{options.model}, {size:,} parameters, {options.parts} parts of {options.small} examples, one thread")
    for kind, name in zip(KINDS, ("SGD, one pass", "SGD, by parts", "GradAlign", "GradAlign, low"), strict=True):
        ratio = times[kind] / times["accumulated"]
        print(
            f"{name:15} {1e3 * times[kind]:8.1f} ms a step, {ratio:5.2f} x SGD by parts, "
            f"peak memory +{memory[kind]['bytes'] / 2**20:.0f} MiB ({memory[kind]['vectors']:.1f} gradients)"
        )
    if inside is not None:
        print(f"inside Lightning: {inside['full'] / inside['accumulated']:5.2f} x SGD by parts there")
    print(f"two ranks: {100 * share['share']:.1f} % of a GradAlign step in all-reduce, waiting included")
    return None


if __name__ == "__main__":
    main()

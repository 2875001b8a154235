"""Large batches on EMNIST: does GradAlign keep the test accuracy that small batches have?

    python examples/large_batch/measure.py --data DATA/EMNIST/raw --out results.json

Every method sees the same images in the same order and starts from the same weights. One update of the large-batch
methods takes PARTS small batches at once; the small-batch reference takes them one after the other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import emnist
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradalign as ga


@dataclass(frozen=True)
class Method:
    """One line of the picture."""

    name: str
    lr: float
    beta: float = 0.0
    sequential: bool = False
    """Take the parts one after the other: small-batch SGD."""


def network() -> nn.Module:
    """Return the model: 784 pixels, one hidden layer of 128, 47 classes; 106,543 parameters."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 47))


def batches(examples: int, size: int, updates: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of every large batch: without replacement within a pass, the same for all methods."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.empty(0, dtype=torch.long)
    for _ in range(updates):
        while len(rows) < size:
            rows = torch.cat([rows, torch.randperm(examples, generator=generator)])
        yield rows[:size]
        rows = rows[size:]


@torch.no_grad()
def score(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return accuracy and loss."""
    model.eval()
    outputs = torch.cat([model(part) for part in data[0].split(1000)])
    model.train()
    return float((outputs.argmax(1) == data[1]).double().mean()), float(F.cross_entropy(outputs, data[1]))


def train(method: Method, seed: int, train_data, test_data, options: argparse.Namespace) -> dict:
    """Train once; return the curve."""
    torch.manual_seed(seed)
    model = network()
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=method.lr), beta=method.beta)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    curve, began = [], time.perf_counter()
    every = max(1, options.updates // 25)
    size = options.parts * options.small
    for update, rows in enumerate(batches(len(train_data[1]), size, options.updates, seed), start=1):
        inputs, targets = train_data[0][rows], train_data[1][rows]
        if method.sequential:
            for part in zip(inputs.split(options.small), targets.split(options.small), strict=True):
                opt.zero_grad()
                loss(*part).backward()
                opt.step()
        else:
            opt.step(loss, inputs, targets, parts=options.parts)
        if update % every == 0:
            accuracy, test_loss = score(model, test_data)
            curve.append({"update": update, "test_accuracy": accuracy, "test_loss": test_loss})
    accuracy, train_loss = score(model, (train_data[0][:4000], train_data[1][:4000]))
    return {
        "method": asdict(method),
        "seed": seed,
        "curve": curve,
        "train_accuracy": accuracy,
        "train_loss": train_loss,
        "seconds": time.perf_counter() - began,
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with the emnist-balanced-* files")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--examples", type=int, default=9400, help="training examples")
    parser.add_argument("--updates", type=int, default=400, help="large-batch updates")
    parser.add_argument("--parts", type=int, default=8, help="small batches in a large one")
    parser.add_argument("--small", type=int, default=250, help="examples in a small batch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--small-lr", type=float, default=0.4, help="the learning rate of small-batch SGD")
    parser.add_argument("--large-lr", type=float, nargs="*", default=[0.4, 0.8], help="those of large-batch SGD")
    parser.add_argument("--aligned-lr", type=float, default=0.4, help="the learning rate of GradAlign")
    parser.add_argument("--betas", type=float, nargs="*", default=[0.3, 1.0, 3.0])
    parser.add_argument("--only", nargs="*", help="names of methods to run; all when left out")
    return parser.parse_args()


def main() -> None:
    """Run every method with every seed."""
    options = parse()
    torch.set_num_threads(1)
    train_data, test_data = emnist.load(options.data, "train", options.examples), emnist.load(options.data, "test")
    methods = [
        Method("small-batch SGD", options.small_lr, sequential=True),
        *(Method("large-batch SGD", lr) for lr in options.large_lr),
        Method("linear scaling", options.small_lr * options.parts),
        *(Method(f"GradAlign β={beta:g}", options.aligned_lr, beta) for beta in options.betas),
    ]
    results = []
    for method in methods:
        if options.only and not any(word in method.name for word in options.only):
            continue
        for seed in options.seeds:
            result = train(method, seed, train_data, test_data, options)
            results.append(result)
            last = result["curve"][-1]
            print(
                f"{method.name:18} lr {method.lr:<5g} seed {seed}: test accuracy {last['test_accuracy']:.4f}, "
                f"train {result['train_accuracy']:.4f}, {result['seconds']:.0f} s",
                flush=True,
            )
            shown = {name: value for name, value in vars(options).items() if name not in ("data", "out", "only")}
            options.out.write_text(json.dumps({"settings": shown, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Is ``gradalign diagnose`` right? Its verdict beside what training gives, on tasks of several kinds.

``python -m benchmarks.diagnose_check [TASK …]`` diagnoses each task, trains FedAvg, and FedGA with three β of the
suggested range, over some seeds, and prints a row: the verdict, and the gain of the best β over FedAvg after as many
rounds and after as many communications (FedAvg then plays twice the rounds), in points of test accuracy with its
standard deviation over the seeds. A gain counts when it is larger than that. The best of three β is chosen by the same
test accuracy, which favours FedGA.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import gradalign as ga
from gradalign.tasks.digits import digits
from gradalign.tasks.paper import cifar100, emnist, shakespeare
from gradalign.theory.diagnose import diagnose


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A task and how it is trained."""

    what: str
    make: Callable[[int], ga.Task]
    lr: float
    steps: int
    batch: int | None = None
    rounds: int = 30
    sampled: int | None = None
    seeds: int = 3
    clip: float | None = None


def table(name: str, column: int | None, clients: int) -> Callable[[int], ga.Task]:
    """Return a maker of a tabular task from scikit-learn: hospitals that differ in a column, or (None) at random."""

    def make(seed: int) -> ga.Task:
        import sklearn.datasets

        inputs, labels = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
        inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
        order = np.random.default_rng(seed).permutation(len(labels))
        test, train = order[: len(order) // 4], order[len(order) // 4 :]
        if column is not None:
            train = train[np.argsort(inputs[train, column], kind="stable")]
        tensors = torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(labels)
        width, classes = inputs.shape[1], int(labels.max()) + 1
        return ga.Task(
            name=name,
            model=lambda: nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, classes)),
            clients=ga.PartitionedClients(tensors, np.array_split(train, clients)),
            test=tuple(part[test] for part in tensors),
        )

    return make


def logistic(seed: int) -> ga.Task:
    """Logistic regression: every client has a truth of its own around a common one."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=10)

    def draw(examples: int, truth: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = rng.normal(size=(examples, 10))
        labels = (inputs @ truth + rng.logistic(size=examples) > 0).astype(np.int64)
        return torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(labels)

    own = [draw(40, common + 2.0 * rng.normal(size=10)) for _ in range(20)]
    return ga.Task(name="logistic", model=lambda: nn.Linear(10, 2), clients=own, test=draw(2000, common))


TRIALS = {
    "digits-iid": Trial(
        what="digits, IID, 20 clients",
        make=lambda s: digits(seed=s, partition="iid"), lr=0.1, steps=10, batch=20, sampled=5,
    ),
    "digits-classes": Trial(
        what="digits, 2 classes a client", make=lambda s: digits(seed=s), lr=0.1, steps=10, batch=20, sampled=5
    ),
    "emnist-one-class": Trial(
        what="EMNIST (a part), one class a client",
        make=lambda s: emnist(seed=s, partition="one-class", clients=47, data_share=0.03, test_limit=940),
        lr=0.05, steps=10, rounds=10, sampled=10, seeds=2,
    ),
    "cifar100-classes": Trial(
        what="CIFAR-100 (a part), 2 classes a client",
        make=lambda s: cifar100(seed=s, partition="classes", classes_per_client=2, clients=50, data_share=0.5),
        lr=0.05, steps=5, batch=24, rounds=12, sampled=5, seeds=2, clip=5.0,
    ),
    "shakespeare-roles": Trial(
        what="Shakespeare (a part), roles",
        make=lambda s: shakespeare(seed=s, clients=20, data_share=0.02, test_limit=500),
        lr=0.8, steps=5, batch=10, rounds=10, sampled=5, seeds=2,
    ),
    "breast-cancer-column": Trial(
        what="breast cancer, 6 hospitals by tumour radius",
        make=table("breast_cancer", 0, 6), lr=0.05, steps=10, batch=20, rounds=30,
    ),
    "breast-cancer-random": Trial(
        what="breast cancer, 6 hospitals at random", make=table("breast_cancer", None, 6), lr=0.05, steps=10, batch=20
    ),
    "wine-column": Trial(
        what="wine, 5 growers by alcohol", make=table("wine", 0, 5), lr=0.05, steps=10, batch=10, rounds=20
    ),
    "logistic": Trial(what="synthetic logistic, 20 truths", make=logistic, lr=0.2, steps=10, batch=10, sampled=5),
}  # fmt: skip


def train(trial: Trial, algorithm: Any, seed: int, rounds: int) -> list[float]:
    """Return the test accuracy after every round."""
    local = ga.LocalTraining(lr=trial.lr, steps=trial.steps, batch_size=trial.batch, clip_norm=trial.clip)
    measure = ga.Measure(test_every=trial.rounds, train_every=0)
    options = {"rounds": rounds, "clients_per_round": trial.sampled, "local": local, "measure": measure}
    return ga.run(trial.make(seed), algorithm, seed=seed, workers=0, progress=False, **options).history["test_accuracy"]


def gain(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Return the mean of the seeds' differences and their standard deviation."""
    differences = [100 * (a - b) for a, b in zip(ours, theirs, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences)


def check(trial: Trial) -> str:
    """Return a row of the table."""
    found = diagnose(trial.make(0), lr=trial.lr, steps=trial.steps, examples=200)
    low, high = (found.beta_low or 0.1), (found.beta_high or 0.4)
    seeds = range(trial.seeds)
    plain = [train(trial, ga.FedAvg(), seed, 2 * trial.rounds) for seed in seeds]
    same, twice = [run[trial.rounds] for run in plain], [run[2 * trial.rounds] for run in plain]
    gains = []
    for beta in (low, math.sqrt(low * high), high):
        ours = [train(trial, ga.FedGA(beta=beta), seed, trial.rounds)[-1] for seed in seeds]
        gains.append((beta, gain(ours, same), gain(ours, twice)))
    rounds, messages = max(gains, key=lambda one: one[1][0]), max(gains, key=lambda one: one[2][0])

    def told(best: tuple[float, float]) -> str:
        return f"{best[0]:+.1f} ± {best[1]:.1f}, {'yes' if best[0] > best[1] else 'no'}"

    excess = "–" if found.excess is None else f"{found.excess:.2g}"
    return (
        f"| {trial.what} | {found.verdict} | {excess} | {found.p_value or math.nan:.2g} | {low:.2g} to {high:.2g} "
        f"| {100 * statistics.fmean(same):.1f} | {told(rounds[1])} (β {rounds[0]:.2g}) "
        f"| {told(messages[2])} (β {messages[0]:.2g}) |"
    )


def main(names: list[str]) -> None:
    """Print the table."""
    unknown = sorted(set(names) - set(TRIALS))
    if unknown:
        raise SystemExit(f"unknown task {unknown[0]}; known are {', '.join(TRIALS)}")
    print(
        "| task | verdict | r / random | p | β searched | FedAvg, % | gain, equal rounds | gain, equal communication |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in names or TRIALS:
        print(check(TRIALS[name]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

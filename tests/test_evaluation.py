"""What is told about a run: losses and accuracies over uneven pieces, in the right mode, and what they cost."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradalign as ga
from gradalign.report.budgets import target_of
from gradalign.report.experiments import arrange
from gradalign.runs.read import gather
from gradalign.server.measure import rounds_to
from run_folders import write_comparison

LOCAL = ga.LocalTraining(lr=0.3, steps=2, batch_size=20)


def data(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels that get harder towards the end, so that no piece stands for another."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 6, generator=random, dtype=torch.float64)
    noise = torch.linspace(0, 4, n).unsqueeze(1) * torch.randn(n, 3, generator=random)
    return inputs, (inputs[:, :3] + noise).argmax(dim=1)


def task_of(sizes: tuple[int, ...], test: int, *, moody: bool = True, **more) -> ga.Task:
    """With batch norm and dropout evaluation in training mode gives another number."""
    layers = [nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5)] if moody else [nn.Tanh()]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3)).double()
    clients = [data(n, i) for i, n in enumerate(sizes)]
    return ga.Task(**({"model": model, "clients": clients, "test": data(test, 99)} | more))


def scores(model: nn.Module, pair) -> tuple[float, float]:
    with torch.no_grad():
        outputs = model(pair[0])
    return float(F.cross_entropy(outputs, pair[1])), float((outputs.argmax(1) == pair[1]).double().mean())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_test_score_is_the_mean_over_all_examples_in_evaluation_mode(workers):
    """2,300 examples do not divide into equal pieces."""
    task = task_of((60, 40), 2300)
    result = ga.run(task, ga.FedAvg(), rounds=2, local=LOCAL, workers=workers)
    loss, accuracy = scores(result.model.eval(), task.test)
    assert result.summary["final_test_loss"] == pytest.approx(loss, rel=1e-12)
    assert result.summary["final_test_accuracy"] == pytest.approx(accuracy, rel=1e-12)
    assert scores(result.model.train(), task.test)[0] != pytest.approx(loss, rel=1e-3)
    start_loss, start_accuracy = scores(task.model.eval(), task.test)
    assert result.history["test_loss"][0] == pytest.approx(start_loss, rel=1e-12)
    assert result.history["test_accuracy"][0] == pytest.approx(start_accuracy, rel=1e-12)


@pytest.mark.parametrize("sizes", [(701, 50), (701, 50, 301, *[10 + i for i in range(24)])], ids=["few", "cohort"])
def test_training_scores_of_large_clients(sizes):
    """A client of 701 examples is measured in pieces; each counts by its length, and clients count alike."""
    task = task_of(sizes, 10, moody=False)
    measure = ga.Measure(test_every=0, train_every=1)
    result = ga.run(task, ga.FedAvg(), rounds=1, local=LOCAL, workers=0, measure=measure)
    each = [scores(task.model, pair) for pair in task.clients]
    assert result.history["train_loss"][0] == pytest.approx(sum(loss for loss, _ in each) / len(each), rel=1e-12)
    assert result.history["train_accuracy"][0] == pytest.approx(sum(right for _, right in each) / len(each), rel=1e-12)


def test_wrong_everywhere_is_an_accuracy_of_zero():
    """Of a client in pieces, and of the test set."""
    task = task_of((701, 50), 700, moody=False)
    with torch.no_grad():
        pairs = [(inputs, task.model(inputs).argmin(dim=1)) for inputs, _ in (*task.clients, task.test)]
    wrong = ga.Task(model=task.model, clients=pairs[:2], test=pairs[2])
    row = ga.run(wrong, ga.FedAvg(), rounds=1, local=LOCAL, workers=0, measure=ga.Measure(train_every=1)).history
    assert (row["train_accuracy"][0], row["test_accuracy"][0]) == (0.0, 0.0)


def test_communication_to_a_target_counts_both_phases():
    task = task_of((60, 40), 200, moody=False)
    plain = ga.run(task, ga.FedGA(beta=0.1), rounds=6, local=LOCAL, workers=0)
    reached = plain.history["test_accuracy"]
    round_of_best = reached.index(max(reached))
    assert round_of_best > 1
    target = max(reached)  # reached exactly: at least, not above
    result = ga.run(
        task, ga.FedGA(beta=0.1), rounds=6, local=LOCAL, workers=0, measure=ga.Measure(target_accuracy=target)
    )
    assert result.summary["communication_rounds_to_target"] == 2 * round_of_best
    assert result.summary["best_round"] == round_of_best
    assert result.summary["best_test_accuracy"] == target
    assert result.summary["final_test_accuracy"] == reached[-1]
    assert result.summary["communication_rounds"] == 12


def row(rounds: int, test: float | None, validation: float | None = None) -> dict:
    found = {"round": rounds, "communication_rounds": 2 * rounds, "test_accuracy": test}
    return found | ({} if validation is None else {"validation_accuracy": validation})


def test_the_first_row_that_reaches_the_target_is_told():
    rows = [row(0, 0.1), row(1, None), row(2, 0.5), row(3, 0.4), row(4, 0.9)]
    assert rounds_to(rows, 0.5) == 4
    assert rounds_to(rows, 0.51) == 8
    assert rounds_to(rows, 0.91) is None
    assert rounds_to(rows, None) is None
    assert rounds_to([row(0, None, 0.2), row(3, None, 0.6)], 0.6) == 6


def test_a_comparison_s_target_is_what_every_algorithm_can_reach(tmp_path):
    """95 % of the lowest of the algorithms' best, not of the best of all."""

    def target(name: str, **changes) -> float | None:
        # The algorithms' means over their seeds are 0.8, 0.6 and 0.7.
        folder = write_comparison(tmp_path / name, {"a": [0.8], "b": [0.5, 0.7], "c": [0.7]}, **changes)
        (experiment,) = arrange(gather([folder]).runs)
        return target_of(experiment)

    assert target("usual") == pytest.approx(0.95 * 0.6)
    assert target("given", measure={"target_accuracy": 0.3}) == 0.3


def test_costs_by_hand():
    """Two phases, three clients, float64: x down, ḡ down, g_i up, Δ_i up; buffers go with x and Δ_i."""
    task = task_of((10, 10, 10), 5)
    model = task.model
    numbers = sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() for b in model.buffers())
    one = 8 * (numbers + buffers)
    result = ga.run(task, ga.FedGA(beta=0.1), rounds=2, local=ga.LocalTraining(steps=3, batch_size=4), workers=0)
    assert result.summary["bytes_down"] == 2 * 3 * (one + 8 * numbers)
    assert result.summary["bytes_up"] == 2 * 3 * (one + 8 * numbers)
    assert result.summary["local_updates"] == 2 * 3 * 3
    plain = ga.run(task, ga.Scaffold(control="kept"), rounds=2, local=ga.LocalTraining(steps=3), workers=0)
    assert plain.summary["bytes_up"] == plain.summary["bytes_down"] == 2 * 3 * (one + 8 * numbers)
    assert plain.summary["communication_rounds"] == 2


@pytest.mark.parametrize("every", [1, 2, 3, 5, 7])
def test_what_is_due_is_measured_and_nothing_else(every):
    """Every so many rounds, the start and the end included."""
    task = task_of((10, 10), 5, moody=False)
    measure = ga.Measure(test_every=every, train_every=every)
    result = ga.run(task, ga.FedAvg(), rounds=5, local=ga.LocalTraining(), workers=0, measure=measure)
    expected = [r % every == 0 or r == 5 for r in range(6)]
    for name in ("test_loss", "r"):
        assert [value is not None for value in result.history[name]] == expected
    assert list(itertools.accumulate([0, 1, 1, 1, 1, 1])) == result.history["communication_rounds"]


def test_a_loss_that_is_not_finite_is_told_with_its_time():
    """Before any training the data or the model is at fault; later it is the step size."""
    inputs, labels = data(20, 0)
    broken = task_of((20,), 5, moody=False, clients=[(inputs * math.inf, labels)])
    with pytest.raises(ga.GradalignError, match="before any training"):
        ga.run(broken, ga.FedAvg(), rounds=1, workers=0)
    task = task_of((20, 30), 5, moody=False, loss=lambda outputs, targets: outputs.square().sum())
    with pytest.raises(ga.GradalignError, match=r"in round \d+|after round \d+"):
        ga.run(task, ga.FedAvg(), rounds=30, local=ga.LocalTraining(lr=1e30, steps=3), workers=0)


class Slowly(nn.Module):
    """Finite in a client's training, not finite where the server then stands."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs[:, :2] * self.w
        return outputs if self.training else outputs * torch.where(self.w.abs().sum() > 0, math.inf, 1.0)


def test_a_test_loss_that_is_not_finite_after_a_round():
    pair = data(20, 0)[0], torch.zeros(20, dtype=torch.int64)
    task = ga.Task(model=Slowly(), clients=[pair], test=pair)
    with pytest.raises(ga.GradalignError, match="test loss became NaN or infinite after round 1"):
        ga.run(task, ga.FedAvg(), rounds=2, workers=0)

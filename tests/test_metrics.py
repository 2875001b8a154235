"""Metrics of all predictions at once: their values against scikit-learn's, and the same bits whoever made them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import nn
from torch.nn import functional as F

import gradalign as ga
from gradalign.tasks.metrics import NamedMetric

LOCAL = ga.LocalTraining(lr=0.3, steps=2)


def data(count: int, seed: int, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes that are not equally common, so that no mean of means is right."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=random) * torch.randint(2, (count,), generator=random)
    return torch.randn(count, 4, generator=random) + F.one_hot(labels, 4), labels


def task_of(**more) -> ga.Task:
    clients = [data(20, seed) for seed in range(3)]
    given = {"model": lambda: nn.Linear(4, 3), "clients": clients, "test": data(2300, 9), "client_tests": clients}
    return ga.Task(**(given | more))


def squared_share(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """No mean over examples: the square of one."""
    return float((outputs.argmax(1) == targets).double().mean() ** 2)


class Largest:
    """An object like torchmetrics' ones."""

    higher_is_better = False

    def reset(self) -> None:
        self.seen = []

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.seen.append(outputs.max())

    def compute(self) -> torch.Tensor:
        return torch.stack(self.seen).max()


def test_a_metric_is_taken_over_all_examples_by_any_number_of_workers():
    """2,300 examples are three pieces; F1 by scikit-learn."""
    import torchmetrics

    own = {"square": squared_share, "largest": Largest()}
    own["micro"] = torchmetrics.F1Score(task="multiclass", num_classes=3, average="micro")
    measure = ga.Measure(metrics=["f1", "auc"], clients_every=1)
    runs = [
        ga.run(task_of(metrics=own), ga.FedAvg(), rounds=2, local=LOCAL, workers=workers, measure=measure)
        for workers in (0, 2)
    ]
    result, (inputs, labels) = runs[0], task_of().test
    assert runs[1].clients == result.clients
    for name in (name for name in result.history if name != "seconds"):
        assert runs[1].history[name] == result.history[name], name
    with torch.no_grad():
        outputs = result.model(inputs)
    guessed, scores = outputs.argmax(1).numpy(), outputs.softmax(1).numpy()
    expected = {
        "f1": sklearn_metrics.f1_score(labels, guessed, average="macro"),
        "auc": sklearn_metrics.roc_auc_score(labels, scores, multi_class="ovr"),
        "micro": sklearn_metrics.f1_score(labels, guessed, average="micro"),
        "square": result.summary["final_test_accuracy"] ** 2,
        "largest": float(outputs.max()),
    }
    for name, value in expected.items():
        assert result.summary[f"final_test_{name}"] == result.history[f"test_{name}"][-1]
        assert result.history[f"test_{name}"][-1] == pytest.approx(value, rel=1e-5), name
    with torch.no_grad():
        each = [squared_share(result.model(inputs), targets) for inputs, targets in task_of().clients]
    assert [one.metrics["square"] for one in result.clients] == pytest.approx(each)
    assert result.history["clients_worst_square"][-1] == pytest.approx(min(each))
    largest = [one.metrics["largest"] for one in result.clients]
    assert result.history["clients_worst_largest"][-1] == max(largest), "its own word on what is better counts"


@pytest.mark.parametrize("name", ["f1", "auc", "precision", "recall", "average_precision", "mcc"])
@pytest.mark.parametrize("classes", [1, 3])
def test_metrics_by_name_are_scikit_learns(name, classes):
    _, labels = data(300, 5, classes=max(2, classes))
    outputs = torch.randn(300, classes, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outputs += F.one_hot(labels, 3)[:, 1 : 1 + classes] if classes == 1 else F.one_hot(labels, 3)
    scores = outputs.sigmoid().numpy() if classes == 1 else outputs.softmax(1).numpy()
    guessed = (scores[:, 0] > 0.5).astype(int) if classes == 1 else scores.argmax(1)
    truth = labels.numpy()
    average = "binary" if classes == 1 else "macro"
    ranked = scores[:, 0] if classes == 1 else scores
    expected = {
        "f1": lambda: sklearn_metrics.f1_score(truth, guessed, average=average),
        "precision": lambda: sklearn_metrics.precision_score(truth, guessed, average=average),
        "recall": lambda: sklearn_metrics.recall_score(truth, guessed, average=average),
        "mcc": lambda: sklearn_metrics.matthews_corrcoef(truth, guessed),
        "auc": lambda: sklearn_metrics.roc_auc_score(truth, ranked, multi_class="ovr"),
        "average_precision": lambda: sklearn_metrics.average_precision_score(truth, ranked),
    }[name]()
    targets = labels.double().unsqueeze(1) if classes == 1 else labels  # a binary loss has floating targets
    assert float(NamedMetric(name)(outputs, targets)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["mae", "mse", "r2"])
def test_metrics_of_numbers_by_name_are_scikit_learns(name):
    random = np.random.default_rng(3)
    truth = random.normal(size=(50, 1))
    guess = truth + random.normal(size=truth.shape)
    function = {"mae": "mean_absolute_error", "mse": "mean_squared_error", "r2": "r2_score"}[name]
    found = NamedMetric(name)(torch.as_tensor(guess), torch.as_tensor(truth))
    assert float(found) == pytest.approx(getattr(sklearn_metrics, function)(truth, guess))
    assert NamedMetric(name).higher_is_better == (name == "r2")


def test_a_metric_that_is_not_defined_for_a_client_is_left_out():
    """A client with one class has no AUC; classes that nobody has do not count as zero."""
    inputs, labels = data(40, 1)
    tests = [(inputs, labels), (inputs[labels == 0], labels[labels == 0]), (inputs[labels < 2], labels[labels < 2])]
    result = ga.run(
        task_of(client_tests=tests), ga.FedAvg(), rounds=1, local=LOCAL, workers=0, measure=ga.Measure(metrics=["auc"])
    )
    assert "auc" not in result.clients[1].metrics
    with torch.no_grad():
        scores = result.model(tests[2][0]).softmax(1)
    each = [sklearn_metrics.roc_auc_score(tests[2][1] == one, scores[:, one]) for one in (0, 1)]
    assert result.clients[2].metrics["auc"] == pytest.approx(np.mean(each), rel=1e-5)
    known = [result.clients[client].metrics["auc"] for client in (0, 2)]
    assert result.summary["final_clients_mean_auc"] == pytest.approx(np.mean(known))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"metrics": ["f1"]}, "must be a dictionary"),
        ({"metrics": {"loss": squared_share}}, "'loss' is not a metric's name"),
        ({"metrics": {"my f1": squared_share}}, "'my f1' is not a metric's name"),
        ({"metrics": {"f1": 3}}, "f1 must be a function or a torchmetrics.Metric"),
        ({"metrics": {"f1": Largest}}, "f1 must be a function"),
    ],
)
def test_metrics_that_are_none_are_refused(more, words):
    with pytest.raises(ga.GradalignError, match=words):
        task_of(**more)


def test_a_metric_that_fails_is_named():
    def broken(outputs, targets):
        raise KeyError("nothing here")

    with pytest.raises(ga.GradalignError, match=r'the metric "mine" failed: KeyError'):
        ga.run(task_of(metrics={"mine": broken}), ga.FedAvg(), rounds=1, workers=0)
    with pytest.raises(ga.GradalignError, match=r"needs outputs that are a tensor"):
        ga.run(
            task_of(
                metrics={"mine": broken},
                predict=lambda model, batch: ([model(batch[0])], batch[1]),
                loss=lambda outputs, targets: F.cross_entropy(outputs[0], targets),
            ),
            ga.FedAvg(),
            rounds=1,
            workers=0,
        )


def test_names_that_are_not_known_or_not_installed(monkeypatch):
    with pytest.raises(ga.GradalignError, match=r'"f2" is not known; known are auc, .*, f1'):
        ga.run(task_of(), ga.FedAvg(), rounds=1, workers=0, measure=ga.Measure(metrics=["f2"]))
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ga.GradalignError, match=r"pip install 'gradalign\[metrics\]'"):
        ga.run(task_of(), ga.FedAvg(), rounds=1, workers=0, measure=ga.Measure(metrics=["f1"]))

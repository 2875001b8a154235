"""Results for people who work in Python and in notebooks: short words, frames, pictures, comparisons, a line."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import gradalign as ga
from conftest import blobs
from gradalign.algorithms import known_algorithms
from gradalign.algorithms.plan import combine
from gradalign.errors import GradalignWarning
from gradalign.flower.strategy import RemoteClients
from gradalign.recipes.build import build_task
from gradalign.report import write_report
from gradalign.server.federation import Federation, make_federation, without_effect
from gradalign.tracking import in_notebook, rounds_line

LOCAL = ga.LocalTraining(lr=0.1, steps=2, batch_size=10)


@pytest.fixture(scope="module")
def result() -> ga.Result:
    task = build_task("digits", seed=0, options={"clients": 5})
    return ga.run(task, ga.FedAvg(), rounds=3, local=LOCAL, workers=0, measure=ga.Measure(personalized=True))


def test_words_are_short(result):
    accuracy = result.summary["final_test_accuracy"]
    assert repr(result) == f"<Result: fedavg, 3 rounds, test accuracy {100 * accuracy:.2f} %, 5 clients>"
    task = build_task("digits", seed=0, options={"clients": 5})
    assert repr(task) == "<Task digits: 5 clients, 1,348 training examples, 449 test examples, tests of clients>"
    assert repr(ga.Task(model=nn.Linear(1, 1), clients=[[1]])) == "<Task custom: 1 client, 1 training examples>"
    assert repr(LOCAL) == "LocalTraining(lr=0.1, steps=2, batch_size=10)"
    assert repr(ga.LocalTraining()) == "LocalTraining(lr=0.1)"
    both = combine(ga.FedProx(mu=0.5) + ga.FedAdam(lr=0.25))
    assert repr(both) == f"FedProx(mu=0.5) + {ga.FedAdam(lr=0.25)!r}"
    assert repr(combine(ga.FedProx(mu=0.5))) == "FedProx(mu=0.5)"


def test_frames(result):
    frame = result.to_frame()
    assert frame["round"].tolist() == [0, 1, 2, 3]
    assert frame["test_loss"].iloc[-1] == result.summary["final_test_loss"]
    clients = result.to_frame("clients")
    assert clients["accuracy"].tolist() == [one.accuracy for one in result.clients]
    assert clients["personalized_loss"].tolist() == [one.loss for one in result.personalized]
    assert clients["examples"].tolist() == [one.examples for one in result.clients]
    assert result.to_frame("summary")["final_test_accuracy"].tolist() == [result.summary["final_test_accuracy"]]
    with pytest.raises(ga.GradalignError, match='"history", "clients" and "summary"'):
        result.to_frame("rounds")


def test_pictures(result):
    axes = result.plot("test_accuracy", "test_loss", over="round").axes
    assert [one.get_ylabel() for one in axes] == ["test accuracy", "test loss"]
    assert axes[1].lines[0].get_ydata().tolist() == result.history["test_loss"]
    assert axes[1].lines[0].get_xdata().tolist() == [0, 1, 2, 3]
    assert [one.get_ylabel() for one in result.plot().axes] == ["test accuracy", "r"]
    with pytest.raises(ga.GradalignError, match='there is no column "accuracy" to draw; there are round, '):
        result.plot("accuracy")


def test_comparing(tmp_path):
    """Names of one's own; a seed's task is made once for all; what diverges is noted."""
    made = []

    def task(seed: int) -> ga.Task:
        made.append(seed)
        return blobs(seed=seed)

    algorithms = {"plain": ga.FedAvg(), "aligned": ga.FedGA(beta=0.1), "wild": ga.FedAvgM(lr=1e30)}
    options = {"rounds": 2, "local": LOCAL, "workers": 0}
    found = ga.compare(task, algorithms, seeds=[3, 5], out=tmp_path, **options)
    assert made == [3, 5]
    alone = ga.run(blobs(seed=5), ga.FedGA(beta=0.1), seed=5, **options)
    for name, column in alone.history.items():
        assert name == "seconds" or found.results["aligned"][1].history[name] == column
    assert set(found.failures) == {("wild", 3), ("wild", 5)}
    assert "NaN or infinite" in repr(found)
    frame = found.to_frame()
    own = frame[(frame["algorithm"] == "aligned") & (frame["seed"] == 5)]
    assert own["test_loss"].tolist() == alone.history["test_loss"]
    assert len(frame) == 4 * 3
    assert found.to_frame("summary")["algorithm"].tolist() == ["plain", "plain", "aligned", "aligned"]
    lines = found.plot("test_loss").axes[0].lines
    assert [line.get_xdata().tolist() for line in lines] == [[0, 1, 2]] * 2 + [[0, 2, 4]] * 2, "at equal communication"
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "aligned" in page
    assert (
        ga.compare(task, algorithms, seeds=[3, 5], out=tmp_path, resume=True, **options).results.keys()
        == algorithms.keys()
    )
    with pytest.raises(ga.GradalignError, match="already holds a comparison"):
        ga.compare(task, algorithms, seeds=[3, 5], out=tmp_path, **options)


def test_comparing_what_has_no_names():
    found = ga.compare(blobs(), [ga.FedAvg(), ga.FedProx(mu=0.1)], seeds=1, rounds=1, local=LOCAL, workers=0)
    assert list(found.results) == ["fedavg", "fedprox"]
    for wrong in ([ga.FedProx(mu=0.1), ga.FedProx(mu=0.2)], []):
        with pytest.raises(ga.GradalignError, match="give them in a dictionary by name"):
            ga.compare(blobs(), wrong, seeds=1, rounds=1)
    with pytest.raises(ga.GradalignError, match=r"takes seeds, not seed; seeds=\[1\] is that one alone"):
        ga.compare(blobs(), [ga.FedAvg()], seed=1)


def test_a_line_is_written_over():
    file = io.StringIO()
    with rounds_line(2, "fedavg", file) as write:
        for number, accuracy in ((0, 0.125), (1, None), (2, 0.5)):
            write({"round": number, "test_accuracy": accuracy})
    shown = file.getvalue()
    assert shown.startswith("\rfedavg: round 0 of 2, test accuracy 12.5%, 0 s")
    assert shown.split("\r")[-1] == "fedavg: round 2 of 2, test accuracy 50.0%, 0 s\n"


def test_progress_needs_no_package(monkeypatch, capsys):
    """In a notebook the line goes to the page; without rich it goes to standard error."""
    monkeypatch.setitem(sys.modules, "rich", None)
    ga.run(blobs(), ga.FedAvg(), rounds=2, workers=0, local=LOCAL, progress=True)
    assert "\rfedavg: round 0 of 2" in capsys.readouterr().err
    assert not in_notebook()
    monkeypatch.setattr("gradalign.server.runner.in_notebook", lambda: True)
    ga.run(blobs(), ga.FedAvg(), rounds=2, workers=0, local=LOCAL)
    shown = capsys.readouterr()
    assert shown.out.endswith("s\n")
    assert "round 2 of 2" in shown.out
    assert shown.err == ""


def test_the_notebook_of_the_docs_runs_and_was_run(monkeypatch, tmp_path):
    """Its code cells in this process, with fewer rounds; what it shows was made by executing it."""
    import matplotlib
    import nbformat

    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    path = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    names: dict = {}
    for cell in cells:
        exec(compile(cell.source.replace("rounds=30", "rounds=3"), str(path), "exec"), names)
    assert names["comparison"].results


class OwnProx(ga.FedProx):
    """A class of the user's, which may do anything."""


def test_clients_of_a_flower_app_take_their_own_steps():
    def federation(task: ga.Task) -> Federation:
        given = {"per_round": None, "weights": "uniform", "dropout": 0.0, "seed": 0}
        return make_federation(task, combine(ga.FedGA()), WHOLE, **given)

    assert "fedga" in without_effect(federation(blobs()))
    assert without_effect(federation(replace(blobs(), clients=RemoteClients(6, {})))) is None


ONE_STEP, WHOLE = ga.LocalTraining(steps=1, batch_size=4), ga.LocalTraining()


@pytest.mark.parametrize(
    ("algorithm", "local", "label"),
    [
        (ga.FedGA(), WHOLE, "fedga"),
        (ga.FedGA(), ONE_STEP, "fedga"),
        (ga.FedGA() + ga.FedAdam(lr=0.1), ONE_STEP, "fedga"),
        (ga.FedProx(mu=0.1), ONE_STEP, "fedprox"),
        (ga.Scaffold(), ONE_STEP, "scaffold"),
        (ga.Scaffold(), ga.LocalTraining(steps=1, batch_size=4, clip_norm=0.1, weight_decay=0.1), "scaffold"),
        (ga.Scaffold(), ga.LocalTraining(lr=0.01, steps=1, optimizer="adam"), None),  # its steps are no sums
        (ga.Scaffold(control="kept"), ONE_STEP, None),  # of gradients of before
        (ga.FedProx(mu=0.0), ONE_STEP, None),  # FedAvg by name
        (ga.FedProx(mu=0.1), LOCAL, None),
        (ga.FedGA(), ga.LocalTraining(batch_size=4), None),
        (ga.FedGA(beta=0.1), ONE_STEP, None),
        (ga.FedGA(beta=0.1) + ga.FedProx(mu=0.1), ONE_STEP, None),  # pulls back what β displaces
        (known_algorithms()["gradalign"](), ONE_STEP, None),
        (ga.FedGA(), ga.LocalTraining(batch_size=64), "fedga"),  # clients have 20 examples
        (ga.FedGA(), ga.LocalTraining(batch_size=64, epochs=2), None),
        (OwnProx(mu=0.1), ONE_STEP, None),
    ],
)
def test_an_algorithm_that_does_nothing_with_one_local_step_says_so(algorithm, local, label, recwarn):
    done = ga.run(blobs(), algorithm, rounds=12, local=local, workers=0)
    told = [one for one in recwarn if one.category is GradalignWarning]
    assert [str(one.message).split(" round ")[1].split()[0] for one in told] == ([label] if label else [])
    if label:  # and so it is
        assert told[0].filename == __file__
        server = combine(algorithm).server
        plain = ga.run(blobs(), combine(ga.FedAvg(), server), rounds=12, local=local, workers=0)
        assert done.history["test_loss"] == pytest.approx(plain.history["test_loss"], rel=1e-5)

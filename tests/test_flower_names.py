"""Flower as Flower users know it: its names, its evaluation, its result; and its quickstart, turned into FedGA."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gradalign as ga
from conftest import blobs, vector

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'gradalign[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, Result

import gradalign.flower as gf
from gradalign.algorithms.plan import combine
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.flower.engine import in_process_engine
from gradalign.server.federation import make_federation

EXAMPLE = Path(__file__).parent.parent / "examples" / "flower-fedga"
QUICK = gf.Patience(connect_seconds=0.3, gradient_seconds=0.3, train_seconds=0.3, retries=0, poll_seconds=0.02)
RUN_CONFIG = {"num-server-rounds": 2, "fraction-evaluate": 1.0, "local-epochs": 1, "learning-rate": 0.02}
TWO_TRIPS = '    strategy = AlignedStrategy(FedGA(beta=0.1), fraction_evaluate=config["fraction-evaluate"])\n'


class LoggedGrid(gf.InProcessGrid):
    def __init__(self, app, clients, **more):
        super().__init__(app, clients, **more)
        self.log = []

    def answer(self, message, client):
        config = message.content.config_records.get("config", {})
        self.log.append((message.metadata.message_type, client, config.get("server-round")))
        return super().answer(message, client)


# The quickstart


def files(folder):
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.[pt]*[yl]")}


def changed_lines(before, after):
    """Return the lines that one app has and the other has not."""
    assert before.keys() == after.keys()
    lines = []
    for name in before:
        diff = difflib.ndiff(before[name].splitlines(), after[name].splitlines())
        lines += [line[2:] for line in diff if line.startswith("+ ")]
    return lines


def quickstart(monkeypatch, tmp_path, sources):
    """Return the apps of a quickstart's files."""
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        monkeypatch.delitem(sys.modules, name)
    from quickstart import client_app, server_app

    return client_app, server_app


@pytest.mark.parametrize("form", ["stock", "one-trip", "two-trips"])
def test_flowers_quickstart_becomes_fedga_in_three_lines(form, monkeypatch, tmp_path, capsys):
    """And in three lines with two trips; the app trains, its evaluate function is called, its metrics are there."""
    stock, one_trip = files(EXAMPLE / "stock"), files(EXAMPLE / "one-trip")
    sources = stock if form == "stock" else dict(one_trip)
    if form == "two-trips":
        server = sources["quickstart/server_app.py"].replace("import FedGA, OneTrip", "import AlignedStrategy, FedGA")
        server = re.sub(r"    strategy = .*\n", lambda _: TWO_TRIPS, server)
        assert TWO_TRIPS.strip() in (EXAMPLE.parent.parent / "docs/flower.md").read_text(encoding="utf-8")
        sources["quickstart/server_app.py"] = server
    changed = changed_lines(stock, sources)
    assert len([line for line in changed if not line.startswith("dependencies")]) == (0 if form == "stock" else 3)
    assert len(changed) <= 4
    client_app, server_app = quickstart(monkeypatch, tmp_path, sources)
    results, start = [], server_app.FedAvg.start
    monkeypatch.setattr(gf.AlignedStrategy, "start", _kept(gf.AlignedStrategy.start, results))
    monkeypatch.setattr(server_app.FedAvg, "start", _kept(start, results))
    monkeypatch.setattr(gf.OneTrip, "start", _kept(gf.OneTrip.start, results), raising=False)
    grid = LoggedGrid(client_app.app, 4, run_config={**RUN_CONFIG, "batch-size": 32})
    server_app.app(grid, Context(1, 1, {}, RecordDict(), run_config=RUN_CONFIG))
    (result,) = results
    assert "accuracy at the clients: 0." in capsys.readouterr().out
    assert set(torch.load("final_model.pt")) == set(server_app.Net().state_dict())
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]
    assert sorted(result.evaluate_metrics_clientapp) == sorted(result.train_metrics_clientapp) == [1, 2]
    assert set(result.evaluate_metrics_clientapp[2]) == {"eval_loss", "eval_acc"}
    assert "train_loss" in result.train_metrics_clientapp[1]
    evaluated = [(client, server_round) for kind, client, server_round in grid.log if kind == "evaluate"]
    assert sorted(evaluated) == [(client, server_round) for client in range(4) for server_round in (1, 2)]
    assert len([1 for kind, _, _ in grid.log if kind == "train.gradient"]) == (8 if form == "two-trips" else 0)
    losses = [result.evaluate_metrics_clientapp[r]["eval_loss"] for r in (1, 2)]
    assert losses[1] < losses[0]


def _kept(start, results):
    def kept(self, *args, **more):
        results.append(start(self, *args, **more))
        return results[-1]

    return kept


# Names


def telling_app(sizes, says=lambda client: {}):
    """An app that trains nothing: it returns what it was sent, and says what it is told to."""
    app = gf.ClientApp()

    @app.train()
    def train(message, context):
        client = context.node_config["partition-id"]
        arrays = message.content["there"]
        values = {name: torch.from_numpy(array.numpy() + client) for name, array in arrays.items()}
        metrics = {"num-examples": sizes[client], "mine": float(client), **says(client)}
        return Message(RecordDict({"there": ArrayRecord(values), "metrics": MetricRecord(metrics)}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        client = context.node_config["partition-id"]
        assert message.content["asked"]["deep"] == 3
        metrics = {"val_loss": 2.0 * client, "val_accuracy": 0.25 * client, "num-examples": sizes[client], "f1": 0.5}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def start(app, rounds=1, clients=4, config=None, evaluate_fn=None, timeout=None, there=None, **names):
    grid = LoggedGrid(app, there or clients)
    names = {"arrayrecord_key": "there", "configrecord_key": "asked", "patience": QUICK} | names
    strategy = gf.AlignedStrategy(ga.FedAvg(), clients=clients if there else None, **names)
    arrays = ArrayRecord({"w": torch.tensor([1.0, 2.0], dtype=torch.float64)})
    asked = ConfigRecord({"deep": 3})
    return strategy.start(grid, arrays, rounds, timeout, config, asked, evaluate_fn), grid


SIZES = [1, 2, 3, 10]


def test_clients_weigh_their_examples_as_in_flower_and_every_metric_is_told(tmp_path):
    """The average of what client i adds, i, by 1, 2, 3 and 10 examples; by another key; by none; by one's function."""
    app = telling_app(SIZES, says=lambda client: {"mass": 0.5 if client == 1 else 1.5})
    mean = sum(i * size for i, size in enumerate(SIZES)) / sum(SIZES)
    result, _ = start(app, out=tmp_path / "run")
    np.testing.assert_allclose(result.arrays["w"].numpy(), [1 + mean, 2 + mean], rtol=1e-15)
    assert result.train_metrics_clientapp[1]["mine"] == pytest.approx(mean)
    assert result.evaluate_metrics_clientapp[1]["val_loss"] == pytest.approx(2 * mean)
    assert isinstance(result, ga.Result)
    assert {name for name in vars(Result()) if not hasattr(result, name)} == set()
    scores = result.client_scores[1]
    assert [(s.client, s.examples, s.loss, s.accuracy, dict(s.metrics)) for s in scores] == [
        (i, SIZES[i], 2.0 * i, 0.25 * i, {"f1": 0.5}) for i in range(4)
    ]
    assert list(result.clients) == scores
    assert result.history["clients_mean_accuracy"] == [None, 0.375]
    assert (tmp_path / "run" / "clients.json").exists()
    other, _ = start(app, weighted_by_key="mass")
    np.testing.assert_allclose(other.arrays["w"].numpy()[0], 1 + (0.5 + 1.5 * 2 + 1.5 * 3) / 5.0)
    even, _ = start(app, weights="uniform")
    np.testing.assert_allclose(even.arrays["w"].numpy()[0], 1 + 1.5)

    def largest(records, key):
        return MetricRecord({key: max(record["metrics"]["num-examples"] for record in records)})

    mine, _ = start(app, train_metrics_aggr_fn=largest, evaluate_metrics_aggr_fn=largest)
    assert mine.train_metrics_clientapp[1] == mine.evaluate_metrics_clientapp[1] == {"num-examples": 10}


def test_those_that_are_sampled_need_not_wait_for_all_to_connect():
    """Two of six nodes are there; they weigh what they say when they are asked, 20 each, and nobody waits for four."""
    task = blobs()
    local = ga.LocalTraining(lr=0.1, steps=1)

    class Two(gf.InProcessGrid):
        def get_node_ids(self):
            return super().get_node_ids()[:2]

    strategy = gf.AlignedStrategy(
        ga.FedAvg(), task, local=local, clients=6, fraction_train=0.4, min_fraction=0.0, patience=QUICK, seed=3
    )
    result = strategy.start(Two(gf.client_app(task), 6), num_rounds=4)
    assert max(n for n in result.history["reported"] if n is not None) >= 1
    assert all(np.isfinite(loss) for loss in result.history["local_loss"] if loss is not None)


@pytest.mark.parametrize(
    ("names", "trained", "evaluated"),
    [
        ({"fraction_train": 0.5, "fraction_evaluate": 0.0}, 3, 0),
        ({"fraction_train": 0.1, "fraction_evaluate": 0.7}, 2, 4),
        ({"fraction_train": 0.1, "min_train_nodes": 5, "min_evaluate_nodes": 6}, 5, 6),
        ({"clients_per_round": 1, "fraction_evaluate": 0.1}, 1, 2),
    ],
)
def test_fractions_and_least_numbers_are_flowers(names, trained, evaluated):
    _, grid = start(telling_app([1] * 6), clients=6, **names)
    counts = [sum(kind == wanted for kind, _, _ in grid.log) for wanted in ("train", "evaluate")]
    assert counts == [trained, evaluated]


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"fraction_fit": 1.0}, "AlignedStrategy has no argument fraction_fit; of Flower's it takes fraction_train"),
        ({"min_train_nodes": 9}, "min_train_nodes is 9, but there are 4 clients"),
        ({"min_available_nodes": 5}, "min_available_nodes is 5, but there are 4 clients"),
        ({"fraction_train": 1.5}, "fraction_train must be from 0 to 1"),
        ({"fraction_train": 0.0}, "nobody trains with 0"),
        (
            {"min_available_nodes": 4, "there": 3},
            "min_available_nodes is 4, and after 0.3 s 3 are connected",
        ),
        ({"weighted_by_key": "mass"}, "no number called mass"),
    ],
)
def test_names_that_cannot_be_are_refused(names, sentence):
    with pytest.raises(ga.GradalignError, match=sentence):
        start(telling_app(SIZES), **names)


def test_the_names_and_their_order_are_those_of_flowers_fedavg():
    import inspect

    from gradalign.flower.strategy import FlowerNames

    assert list(FlowerNames.__annotations__) == list(inspect.signature(FedAvg).parameters)
    ours, theirs = (list(inspect.signature(kind.start).parameters) for kind in (gf.AlignedStrategy, FedAvg))
    assert ours == theirs


def test_the_users_function_sees_every_round_and_trackers_every_row():
    class Told(list):
        def start(self, run):
            self.append(run.rounds)

        def log(self, row):
            self.append(row["round"])

        def end(self, summary):
            self.append("end")

    told, seen = Told(), {}

    def evaluate_fn(server_round, arrays):
        seen[server_round] = float(arrays["w"].numpy()[0])
        return MetricRecord({"first": seen[server_round]}) if server_round else None

    result, _ = start(telling_app([1] * 4), rounds=2, evaluate_fn=evaluate_fn, trackers=[told])
    assert seen == {0: 1.0, 1: 2.5, 2: 4.0}
    assert result.evaluate_metrics_serverapp == {1: {"first": 2.5}, 2: {"first": 4.0}}
    assert told == [2, 0, 1, 2, "end"]


# Evaluation


def test_a_model_in_bfloat16_comes_back_in_numbers_that_flower_can_carry():
    task = ga.Task(model=lambda: torch.nn.Linear(8, 4).bfloat16(), clients=blobs().clients)
    strategy = gf.AlignedStrategy(ga.FedAvg(), task, local=ga.LocalTraining(steps=1), patience=QUICK)
    result = strategy.start(LoggedGrid(gf.client_app(task), 6), num_rounds=1)
    for name, value in result.model.state_dict().items():
        assert (result.arrays[name].numpy() == value.float().numpy()).all()


@pytest.mark.parametrize("tuned", [False, True])
def test_clients_of_a_task_score_as_in_the_local_engine(tuned):
    task = blobs()
    tests = [(x[:k], y[:k]) for k, (x, y) in enumerate(task.clients, start=3)]
    task = ga.Task(model=task.model, clients=task.clients, test=task.test, client_tests=tests)
    local = ga.LocalTraining(lr=0.1, steps=3, batch_size=8)
    federation = make_federation(
        task, combine(ga.FedAvg()), local, per_round=None, weights="uniform", dropout=0.0, seed=0
    )
    told = Broadcast(
        point=FlatModel(task.make_model(5)).read(), round=2, algorithm=combine(ga.FedAvg()), lr=0.1, participants=6
    )
    who = [Participant(client=client) for client in (0, 2, 5)]
    here = InProcessEngine(Setup(task=task, local=local))
    expected = list(here.evaluate_clients(told, who, tuned=tuned))
    assert list(in_process_engine(federation).evaluate_clients(told, who, tuned=tuned)) == expected
    assert [score.examples for score in expected] == [3, 5, 8]


def test_one_trip_with_a_loop_of_ones_own():
    """LocalRound takes the gradient at x from its losses, where no gradient phase has."""
    task = blobs()
    task = ga.Task(model=lambda: torch.nn.Linear(8, 4).double(), clients=[(x.double(), y) for x, y in task.clients])
    app, algorithm = gf.aligned_app(), ga.FedGA(beta=0.3, mean="running")

    def halves(model, x, y):
        for part in (slice(0, 8), slice(8, 20)):
            yield torch.nn.functional.cross_entropy(model(x[part]), y[part]), len(y[part])

    @app.train()
    def train(message, context):
        model, (x, y) = task.model(), task.clients[context.node_config["partition-id"]]
        losses = halves(model, x, y) if message.content["config"].get("know") else None
        work = gf.LocalRound(message, context, model, losses=losses)
        optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
        for _ in range(2):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            work.correct()
            optimizer.step()
        return work.reply(loss=loss.item(), examples=len(y), metrics={"mine": 4.0})

    local = ga.LocalTraining(lr=0.1, steps=2)
    expected = ga.run(task, algorithm, rounds=3, local=local, workers=0)
    strategy = gf.AlignedStrategy(algorithm, task, local=local, patience=QUICK)
    result = strategy.start(LoggedGrid(app, 6), num_rounds=3, train_config=ConfigRecord({"know": 1}))
    torch.testing.assert_close(vector(result), vector(expected), rtol=1e-10, atol=1e-10)
    assert result.train_metrics_clientapp[2] == pytest.approx({"loss": result.history["local_loss"][2], "mine": 4.0})
    with pytest.raises(ga.GradalignError, match=r"give LocalRound\(losses=...\)"):
        strategy.start(LoggedGrid(app, 6), num_rounds=3)

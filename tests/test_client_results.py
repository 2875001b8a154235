"""How every client fares: on its own test examples, before and after tuning at home, in every engine alike."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import gradalign as ga
from conftest import vector
from gradalign.algorithms.plan import combine
from gradalign.cli.app import app
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.engines.pool import PoolEngine
from gradalign.recipes.build import build_task
from gradalign.report import write_report
from gradalign.runs.read import gather
from gradalign.server.clients import ClientResults, score_clients, spread_over_clients
from gradalign.server.federation import make_federation
from gradalign.server.state import ServerState
from run_folders import spec_of, write_run

LOCAL = ga.LocalTraining(lr=0.2, steps=3, weight_decay=0.01)


def data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, generator=random, dtype=torch.float64)
    return inputs, torch.randint(3, (count,), generator=random)


def task_of(sizes=(30, 12, 7, 20), tests=(1203, None, 4, 11), **more) -> ga.Task:
    """Uneven clients; the first one's tests are more than one piece, the second one has none."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Linear(5, 3).double()
    own = [None if count is None else data(count, 50 + i) for i, count in enumerate(tests)]
    clients = [data(count, i) for i, count in enumerate(sizes)]
    return ga.Task(**({"model": model, "clients": clients, "client_tests": own, "test": data(40, 99)} | more))


def by_hand(task: ga.Task, client: int, *, tuned: bool) -> tuple[float, float]:
    """Score a client with torch's own optimizer and nothing of ours."""
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LOCAL.lr, weight_decay=LOCAL.weight_decay)
    for _ in range(LOCAL.steps if tuned else 0):
        optimizer.zero_grad()
        F.cross_entropy(model(task.clients[client][0]), task.clients[client][1]).backward()
        optimizer.step()
    inputs, labels = task.client_tests[client]
    with torch.no_grad():
        outputs = model(inputs)
    return float(F.cross_entropy(outputs, labels)), float((outputs.argmax(1) == labels).double().mean())


@pytest.mark.parametrize("tuned", [False, True], ids=["as it is", "tuned"])
def test_every_client_is_scored_on_its_own_examples(tuned):
    task = task_of()
    setup = Setup(task=task, local=LOCAL, algorithm=combine(ga.FedAvg()))
    point = FlatModel(task.make_model(0)).read()
    told = Broadcast(point=point, round=4, algorithm=setup.algorithm, lr=LOCAL.lr)
    who, before = [Participant(client=client) for client in (0, 1, 3, 2)], point.x.clone()
    with InProcessEngine(setup) as here, PoolEngine(setup, 2) as pool:
        scores = list(here.evaluate_clients(told, who, tuned=tuned))
        assert list(pool.evaluate_clients(told, who, tuned=tuned)) == scores, "to the last bit"
    assert [(one.client, one.examples) for one in scores] == [(0, 1203), (3, 11), (2, 4)]
    for one in scores:
        assert (one.loss, one.accuracy) == pytest.approx(by_hand(task, one.client, tuned=tuned), rel=1e-12)
    assert torch.equal(point.x, before), "what is tuned is thrown away"


def plain_statistics(values: list[float], *, larger: bool) -> dict[str, float]:
    """Mean, worst, mean of the worst tenth and standard deviation, with NumPy."""
    ordered = np.sort(values) if larger else np.sort(values)[::-1]
    tenth = ordered[: int(np.ceil(len(values) / 10))]
    return {"mean": np.mean(values), "worst": ordered[0], "worst_tenth": tenth.mean(), "spread": np.std(values)}


def run(task: ga.Task, **more) -> ga.Result:
    options = {"rounds": 2, "local": LOCAL, "workers": 0, "measure": ga.Measure(personalized=True)}
    return ga.run(task, ga.FedAvg(), **(options | more))


def test_rows_and_summary_have_the_spread_over_clients():
    """Eleven clients: the worst tenth is two of them, and the one without tests is not among them."""
    tests = (1203, None, *range(3, 13))
    task = task_of(sizes=(30, *[5] * 11), tests=tests)
    result = run(task)
    assert [one.client for one in result.clients] == [0, *range(2, 12)] == [one.client for one in result.personalized]
    assert [one.examples for one in result.clients] == [1203, *range(3, 13)]
    for prefix, scores in (("clients", result.clients), ("personalized", result.personalized)):
        for metric, larger in (("accuracy", True), ("loss", False)):
            expected = plain_statistics([getattr(one, metric) for one in scores], larger=larger)
            for what, value in expected.items():
                name = f"{prefix}_{what}_{metric}"
                assert result.history[name][:-1] == [None, None], "at the end alone, when nothing else is asked for"
                assert result.history[name][-1] == pytest.approx(value, rel=1e-12)
                assert result.summary[f"final_{name}"] == result.history[name][-1]
    final = task_of(sizes=(30, *[5] * 11), tests=tests, model=result.model)
    for one, tuned in zip(result.clients, result.personalized, strict=True):
        assert one.loss == pytest.approx(by_hand(final, one.client, tuned=False)[0], rel=1e-12)
        assert tuned.loss == pytest.approx(by_hand(final, one.client, tuned=True)[0], rel=1e-12)


def test_clients_tune_with_the_learning_rate_of_the_last_round():
    """A cosine from 0.4 to 0 is at 0.2 in the second of two rounds, and at 0 after them."""
    local = replace(LOCAL, lr=ga.Cosine(value=0.4, end=0.0))
    result = run(task_of(), local=local)
    final = task_of(model=result.model)
    for one in result.personalized:
        assert one.loss == pytest.approx(by_hand(final, one.client, tuned=True)[0], rel=1e-12)


@pytest.mark.parametrize(("rounds", "lr"), [(None, 0.02), (4, 0.02), (3, 0.1)])
def test_clients_tune_as_in_the_round_to_come_or_else_the_last(rounds, lr):
    """After three rounds lr is that of round 3, counted from 0, or of round 2 where the run has three."""
    task, local = task_of(), ga.LocalTraining(lr=ga.Steps(value=0.1, at_rounds={3: 0.02}))
    settings = {"per_round": None, "weights": "uniform", "dropout": 0.0, "seed": 0, "rounds": rounds}
    federation = make_federation(task, combine(ga.FedAvg()), local, **settings)
    told = []

    class Listening(InProcessEngine):
        def evaluate_clients(self, what, who, *, tuned=False):
            told.append(what.lr)
            return super().evaluate_clients(what, who, tuned=tuned)

    engine = Listening(Setup(task=task, local=ga.LocalTraining(lr=0.1)))
    state = ServerState(point=FlatModel(task.make_model(0)).read(), round=3)
    score_clients(state, federation, ga.Measure(clients_every=1, personalized=True), engine, [0, 2])
    assert told == [lr, lr]


def test_measuring_clients_changes_no_training_and_no_other_number():
    watched = run(task_of(), measure=ga.Measure(personalized=True, clients_every=1), rounds=3)
    plain = run(task_of(client_tests=None), measure=ga.Measure(), rounds=3)
    assert torch.equal(vector(watched), vector(plain))
    assert plain.clients == ()
    assert not [name for name in plain.history if name.startswith("clients")]
    for name, column in plain.history.items():
        assert name == "seconds" or watched.history[name] == column
    assert None not in watched.history["personalized_worst_loss"]


@pytest.mark.parametrize("engine", ["workers", "stopped and resumed"])
def test_the_same_bits_wherever_and_however_often(engine, tmp_path):
    task = task_of(augment=lambda batch: (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))
    local = ga.LocalTraining(lr=0.2, epochs=2, batch_size=4)
    expected = run(task, local=local, rounds=4)
    if engine == "workers":
        found = run(task, local=local, rounds=4, workers=3)
    else:
        options = {"local": local, "rounds": 4, "out": tmp_path, "checkpoint_seconds": 0.0}
        with pytest.raises(KeyboardInterrupt):
            run(task, **options, on_round=lambda row: interrupt(row, 3))
        found = run(task, **options, resume=True)
        again = run(task, **options, resume=True)
        assert (again.clients, again.personalized) == (found.clients, found.personalized), "read, and not made anew"
    assert found.clients == expected.clients
    assert found.personalized == expected.personalized
    assert torch.equal(vector(found), vector(expected))


class Made:
    """A sequence that makes its entries on demand."""

    def __init__(self, count: int, make) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, client: int):
        return self.make(client)


def interrupt(row, when: int) -> None:
    if row["round"] == when:
        raise KeyboardInterrupt


def test_very_many_clients_are_scored_in_part():
    count, asked = 5000, []
    tests = Made(count, lambda client: asked.append(client) or data(2, client))
    own = [data(2, client) for client in range(50)] * (count // 50)
    task = task_of(sizes=(), tests=(), clients=own, client_tests=tests)
    result = run(task, rounds=1, clients_per_round=3, measure=ga.Measure(train_every=0))
    assert len(asked) == len(set(asked)) == len(result.clients) == 1000
    assert result.client_results.of == count
    assert result.clients[0].client == 0


def test_held_out_examples_are_the_clients_own_tests():
    """What is held out from a client is its test, whoever keeps the clients: a partition, a list or a sequence."""
    inputs, labels = data(60, 3)
    rows = [torch.arange(0, 30), torch.arange(30, 36), torch.arange(36, 37), torch.arange(37, 60)]
    pool = ga.PartitionedClients((inputs, labels), rows)
    entries = [(inputs[own], labels[own]) for own in rows]
    made = Made(len(entries), entries.__getitem__)
    held = [ga.hold_out(task_of(clients=clients, client_tests=None), 0.3, seed=1) for clients in (pool, entries, made)]
    for task in held:
        for client, own in enumerate(rows):
            test = task.client_test(client)
            seen = [] if test is None else test.batch(torch.arange(len(test)))[0].tolist()
            trained = task.client(client).batch(torch.arange(len(task.client(client))))[0].tolist()
            assert sorted(seen + trained) == sorted(inputs[own].tolist()), "each example on one side"
        assert task.client_test(2) is None, "one example is trained on"
        assert sum(len(task.client_test(client) or ()) for client in range(4)) == len(task.test_examples)
    result = run(held[0])
    scored = sum(one.loss * one.examples for one in result.clients) / sum(one.examples for one in result.clients)
    assert scored == pytest.approx(result.summary["final_validation_loss"], rel=1e-12)


def test_test_examples_made_on_demand_are_not_the_training_examples():
    drawn = Made(2, lambda client: (torch.randn(4, 5).double(), torch.zeros(4, dtype=torch.int64)))
    task = task_of(clients=drawn, client_tests=drawn)
    trained, tested = (one.batch(torch.arange(4))[0] for one in (task.client(1, 7), task.client_test(1, 7)))
    assert torch.equal(tested, task.client_test(1, 7).batch(torch.arange(4))[0])
    assert not torch.equal(trained, tested)


def test_the_digits_that_a_client_is_tested_on_are_of_its_classes():
    task = build_task("digits", seed=0)
    for client in range(len(task.clients)):
        labels = [one.batch(torch.arange(len(one)))[1] for one in (task.client(client), task.client_test(client))]
        assert set(labels[0].tolist()) == set(labels[1].tolist())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"measure": ga.Measure(clients_every=2)}, "measure.clients_every is set, but .* has no test examples"),
        ({"measure": ga.Measure(personalized=True)}, "measure.personalized is set"),
    ],
)
def test_what_cannot_be_measured_is_said(more, words):
    with pytest.raises(ga.GradalignError, match=words):
        run(task_of(client_tests=None), **more)


def test_a_test_that_fails_at_the_end_costs_no_training(tmp_path):
    """The model does not fit the examples of client 2: the rounds before are kept, and gone on from."""
    wrong = [data(3, 0), None, (torch.zeros(4, 9).double(), torch.zeros(4, dtype=torch.int64)), None]
    with pytest.raises(ga.GradalignError, match="client 2 failed: RuntimeError"):
        run(task_of(client_tests=wrong), out=tmp_path, rounds=3)
    assert (tmp_path / "checkpoint.safetensors").exists()
    played = []
    found = run(task_of(), out=tmp_path, rounds=3, resume=True, on_round=lambda row: played.append(row["round"]))
    assert played == [3]
    assert found.clients == run(task_of(), rounds=3).clients


def test_client_tests_must_be_examples():
    with pytest.raises(ga.GradalignError, match=r"Task.client_tests, client 3: cannot read examples from int"):
        task_of(client_tests=[None, None, None, 3])


def test_client_tests_must_fit_the_clients():
    with pytest.raises(ga.GradalignError, match=r"Task.client_tests must be a sequence with one entry for each of 4"):
        task_of(client_tests=[None])


def test_a_client_whose_tuning_diverges_hides_nothing():
    """Its loss is unknown, so the losses' mean and worst are; the accuracies are not. A metric may be undefined."""
    scores = [
        ga.ClientScore(client=3, examples=2, loss=math.nan, accuracy=0.5, metrics={"auc": 0.9}),
        ga.ClientScore(client=5, examples=4, loss=1.0, accuracy=0.25),
    ]
    results = ClientResults(round=1, of=9, clients=tuple(scores), personalized=(scores[1],))
    found = spread_over_clients(results, task_of())
    assert found["clients_worst_accuracy"] == 0.25
    assert found["clients_spread_accuracy"] == 0.125
    assert found["clients_mean_auc"] == 0.9
    assert "clients_worst_loss" not in found
    assert found["personalized_worst_loss"] == 1.0
    back = ClientResults.from_table(json.loads(json.dumps(results.to_table(), allow_nan=False)))
    assert math.isnan(back.clients[0].loss)
    assert back.clients[1] == scores[1]
    assert back.personalized == (scores[1],)


def folder_with(path, clients: object, **finals) -> None:
    """A finished run by hand, with this clients.json."""
    text = clients if isinstance(clients, str) else json.dumps(clients)
    write_run(path, spec_of("fedavg"), clients=text)
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | finals))


def test_the_page_tells_of_single_clients(tmp_path):
    table = {"client": [0, 7], "examples": [1200, 3], "loss": [0.5, None], "accuracy": [0.75, 0.125], "f1": [None, 1]}
    finals = {f"final_clients_{what}_accuracy": 0.125 for what in ("mean", "worst", "worst_tenth", "spread")}
    folder_with(tmp_path / "run", {"round": 4, "of": 9, "clients": table, "personalized": {}}, **finals)
    (run,) = gather([tmp_path]).runs
    assert run.clients.clients["accuracy"] == [0.75, 0.125]
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    section = page.split("Client by client")[1].split("<h3>")[0]
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", section)
    assert cells[:10] == ["algorithm", "mean", "worst", "worst tenth", "spread", "fedavg", *["12.50"] * 4]
    assert cells[10:] == ["client", "examples", "fedavg", "0", "1,200", "75.00", "7", "3", "12.50"]
    assert "The first 2 of 9." in section


@pytest.mark.parametrize(
    "clients",
    [
        "no JSON",
        [],
        {"of": 2},
        {"of": 2, "clients": {"client": 3}},
        {"of": 2, "clients": {"client": [0, 1], "accuracy": [0.5]}},
        {"of": -1, "clients": {"client": [0]}},
        {"of": 2, "clients": {"client": ["<script>"]}},
        {"of": 2, "clients": {"client": [0], "accuracy": "0.5"}},
        {"of": 2, "clients": {"client": [True]}},
        {"of": 2, "clients": {"client": [0]}, "personalized": 3},
    ],
)
def test_a_table_of_clients_that_is_none_is_left_out(tmp_path, clients):
    folder_with(tmp_path / "run", clients)
    (run,) = gather([tmp_path]).runs
    assert run.clients is None


def test_numbers_that_nobody_can_reckon_with_are_left_out(tmp_path):
    folder_with(tmp_path / "run", '{"of": 1, "clients": {"client": [0], "loss": [1e999], "accuracy": ["<b>"]}}')
    (run,) = gather([tmp_path]).runs
    assert run.clients.clients == {"client": [0.0], "loss": [None], "accuracy": [None]}


def test_results_that_were_changed_are_not_taken_for_the_runs(tmp_path):
    run(task_of(), out=tmp_path, rounds=1)
    path = tmp_path / "clients.json"
    path.write_text(path.read_text().replace('"of": 4', '"of": 5'))
    with pytest.raises(ga.GradalignError, match=r"clients.json was changed or cut"):
        run(task_of(), out=tmp_path, rounds=1, resume=True)


def test_the_command_line_tells_of_clients_and_of_an_early_end(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    stop = ["measure.early_stopping={patience=1,min_delta=0.99}", "measure.personalized=true", "measure.metrics=['f1']"]
    words = [word for setting in ("rounds=5", *stop) for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["run", "digits", *words, "--workers", "0", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 1
    assert f"worst {summary['final_clients_worst_accuracy']:.2%}" in done.output
    assert re.search(r"tuned at home +accuracy: mean ", done.output)
    assert f"{summary['final_test_f1']:.4g}" in done.output
    assert re.search(r"best round +\d, test accuracy 0\.\d", done.output)
    assert "test accuracy did not get better by more than 0.99 in the last measurement" in done.output

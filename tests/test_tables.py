"""A table as a task: types, gaps, the split, statistics of training rows alone, and what is refused in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score, root_mean_squared_error
from sklearn.preprocessing import StandardScaler

import gradalign as ga
from conftest import vector
from gradalign.errors import GradalignError
from gradalign.tasks.columns import Column
from gradalign.tasks.encode import encode, moments
from hospitals import patients, write_csv
from test_cli import call

COLUMNS = ("--target", "outcome", "--client", "hospital")
QUICK = ("--set", "rounds=2", "--set", "local.steps=2", "--workers", 0)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def table(tmp_path) -> Path:
    return write_csv(tmp_path / "patients.csv", patients())


def numbers(rows, name):
    return np.array([np.nan if row[name] == "" else float(row[name]) for row in rows])


def rows_of(task: ga.Task) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return each client's training rows and test rows."""
    return tuple([own.rows.numpy() for own in entries] for entries in (task.clients, task.client_tests))


def few(text: str, name: str = "few.csv", **settings) -> ga.Task:
    Path(name).write_text(text)
    return ga.table_task(name, "y", "who", **settings)


def test_means_and_deviations_come_from_sums():
    random = np.random.default_rng(0)
    parts = [random.normal(5, 3, size) for size in (1, 7, 40)]
    parts[1][2:4] = np.nan
    together = np.concatenate(parts)
    assert moments(parts) == pytest.approx((np.nanmean(together), np.nanstd(together)), rel=1e-12)
    far = [part + 1e9 for part in parts]  # where Σx²/n − mean² has no digit left
    assert moments(far)[1] == pytest.approx(np.nanstd(together), rel=1e-6)
    assert moments([np.full(3, 0.1)]) == (pytest.approx(0.1), 1.0)
    assert np.isnan(moments([np.array([np.nan])])).all()


@pytest.mark.parametrize("statistics", ["federation", "client"])
def test_numbers_are_standardised_by_training_rows(table, statistics):
    rows = patients()
    task = ga.table_task(table, "outcome", "hospital", statistics=statistics)
    train, tests = rows_of(task)
    inputs = task.clients.tensors[0].double().numpy()
    raw = np.stack([numbers(rows, "age"), numbers(rows, "pressure")], axis=1)
    gaps = np.isnan(raw[:, 1])
    assert np.array_equal(inputs[:, 2], gaps), "a column marks the gaps"
    for own, test in zip(train, tests, strict=True):
        learned = own if statistics == "client" else np.concatenate(train)
        expected = StandardScaler().fit(raw[learned]).transform(raw)  # ignores NaN
        some = np.concatenate([own, test])
        assert inputs[some, 0] == pytest.approx(expected[some, 0], abs=1e-5)
        assert inputs[some, 1] == pytest.approx(np.nan_to_num(expected[some, 1]), abs=1e-5)


def test_the_inputs_by_hand():
    """Six training rows and two test rows that bring what was never seen."""
    text = "who,y,x,truth,kind\n" + "".join(
        f"{who},{y},{x},{truth},{kind}\n"
        for who, y, x, truth, kind in [
            *(("a", 0.5, 1, "true", "p"), ("a", 1.5, 3, "false", "q"), ("a", 2.5, "", "true", "")),
            *(("b", 3.5, 1, "true", "p"), ("b", 4.5, 3, "false", "q"), ("b", 5.5, 2, "", "p")),
        ]
    )
    for seed in range(20):  # a split that tests the two last rows of the clients
        task = few(text, min_rows=2, test_share=0.34, seed=seed)
        if [own.tolist() for own in rows_of(task)[1]] == [[2], [5]]:
            break
    x, truth = np.array([-1, 1, 0, -1, 1, 0]), np.array([1, -1, 1, 1, -1, 0])
    p, q = np.array([1, 0, 0, 1, 0, 1]), np.array([0, 1, 0, 0, 1, 0])
    assert task.clients.tensors[0].tolist() == np.stack([x, truth, p, q], axis=1).tolist()
    scaled = (np.arange(6) + 0.5 - 2.5) / np.std([0.5, 1.5, 3.5, 4.5])
    assert task.clients.tensors[1].flatten().tolist() == pytest.approx(scaled)


@pytest.mark.parametrize(("target", "model"), [("outcome", "linear"), ("stay", "mlp")])
def test_what_test_rows_hold_moves_no_bit_of_training(table, target, model):
    settings = {"drop": ["outcome" if target == "stay" else "stay"], "model": model}
    before = ga.table_task(table, target, "hospital", **settings)
    rows = patients()
    for row in np.concatenate(rows_of(before)[1]):
        rows[row] |= {
            "age": 1e6,
            "pressure": -1e6,
            "ward": "new",
            "country": "Y",
            "admitted": "1900-01-01",
            "note": "n",
        }
        if target == "stay":
            rows[row]["stay"] = 999.0
    after = ga.table_task(write_csv(Path("other.csv"), rows), target, "hospital", **settings)
    train, test = (np.concatenate(side) for side in rows_of(before))
    for one, other in zip(before.clients.tensors, after.clients.tensors, strict=True):
        assert torch.equal(one[train], other[train])
    assert not torch.equal(before.clients.tensors[0][test], after.clients.tensors[0][test])
    short = {"rounds": 2, "local": ga.LocalTraining(lr=0.1, steps=2, batch_size=16), "workers": 0}
    results = [ga.run(task, ga.FedGA(beta=0.1), **short) for task in (before, after)]
    assert torch.equal(*map(vector, results))
    assert results[0].summary["final_test_loss"] != results[1].summary["final_test_loss"]


def test_every_client_has_its_share_of_test_rows_of_each_class(table):
    rows = patients()
    ill = np.array([row["outcome"] == "ill" for row in rows])
    who = np.array([row["hospital"] for row in rows])
    task = ga.table_task(table, "outcome", "hospital", test_share=0.25)
    train, tests = rows_of(task)
    for name, own, test in zip(sorted(set(who)), train, tests, strict=True):
        assert set(who[own]) == set(who[test]) == {name}
        assert sorted([*own, *test]) == np.flatnonzero(who == name).tolist()
        for label in (True, False):
            share = 0.25 * np.count_nonzero(ill[who == name] == label)
            assert np.floor(share) <= np.count_nonzero(ill[test] == label) <= np.ceil(share)
    assert task.test_examples.rows.tolist() == np.concatenate(tests).tolist()
    other = ga.table_task(table, "outcome", "hospital", seed=1)
    assert rows_of(other)[1][0].tolist() != tests[0].tolist()


def test_rows_that_belong_together_are_not_torn_apart(tmp_path):
    rows = [row | {"family": f"f{i // 3}"} for i, row in enumerate(patients())]
    task = ga.table_task(write_csv(tmp_path / "f.csv", rows), "outcome", "hospital", group="family")
    train, tests = ({rows[row]["family"] for part in side for row in part} for side in rows_of(task))
    assert tests
    assert not train & tests
    assert not {row["family"] for row in rows} - train - tests
    held = ga.hold_out(task, 0.2)
    trained, validated = (
        {rows[row]["family"] for row in part.tolist()} for part in (held.clients.rows, held.test.rows)
    )
    assert validated
    assert not validated & (trained | tests)


@pytest.mark.parametrize(
    ("values", "settings", "words"),
    [
        (["yes", "no"], {}, "y of 2 classes (no, yes)"),
        (["True", "False"], {}, "y of 2 classes (0, 1)"),
        ([3, 1, 2], {}, "y of 3 classes (1, 2, 3)"),
        ([3.0, 1.0], {}, "y of 2 classes (1, 3)"),
        (range(40), {}, "y as (y − "),
        ([0.5, 1.5], {}, "y as (y − "),
        ([3, 1, 2], {"kind": "regression"}, "y as (y − "),
        ([0.5, 1.5], {"kind": "classes"}, "y of 2 classes (0.5, 1.5)"),
    ],
)
def test_the_target_says_whether_it_is_a_class(values, settings, words):
    values = list(values)
    lines = [f"{'ab'[i % 2]},{values[i // 2 % len(values)]},{i % 7}" for i in range(80)]
    task = few("\n".join(["who,y,x", *lines]), **settings)
    assert task.facts["target"].startswith(words)
    task.make_model(0)


def test_what_is_left_out_is_told(table):
    task = ga.table_task(table, "outcome", "hospital")
    left_out = task.facts["left out"]
    assert "patient_id (an id: whole numbers, all different)" in left_out
    assert "different texts)" in left_out
    assert "country (the same in every row)" in left_out
    assert task.facts["inputs"] == "6 columns as 10 inputs", "age, pressure, its gaps, smoker, three wards, no ward, …"
    more = ga.table_task(table, "outcome", "hospital", keep="patient_id", drop=["age", "ward"])
    assert more.facts["inputs"] == "5 columns as 6 inputs"
    lines = [f"{'ab'[i % 2]},{i % 3},{i % 7},,{10**18 + i * i}" for i in range(80)] + ["c,1,1,,5"] * 3
    task = few("\n".join(["who,y,x,void,number", *lines]))
    assert "void (empty)" in task.facts["left out"]
    assert "number (an id" in task.facts["left out"]
    assert task.facts["small clients"] == "clients left out for fewer than 5 rows: c (3)"
    assert len(few("\n".join(["who,y,x,void,number", *lines]), min_rows=1).clients) == 3


@pytest.mark.parametrize(
    ("rows", "different", "kept"), [(80, 40, True), (80, 41, False), (200, 50, True), (200, 51, False)]
)
def test_texts_are_a_category_unless_more_than_half_are_different_or_there_are_too_many(rows, different, kept):
    levels = tuple(f"word{level}" for level in range(different))
    words = Column(name="words", values=np.arange(rows) % different + 0.0, levels=levels)
    number = Column(name="number", values=np.arange(rows) / 3)
    _, left_out = encode([words, number], [np.arange(rows)], None, [])
    assert left_out == ({} if kept else {"words": f"{different} different texts"})


def test_whole_numbers_that_are_all_different_are_an_id_when_they_are_dense_or_huge_or_called_so():
    columns = {"dense": lambda i: i + i // 2, "huge": lambda i: 10**10 + 1000 * i * i, "wide": lambda i: 100 * i * i,
               "wide_id": lambda i: 100 * i * i}  # fmt: skip
    lines = [f"{'ab'[i % 2]},{i % 3}," + ",".join(str(of(i)) for of in columns.values()) for i in range(80)]
    left_out = few("\n".join([f"who,y,{','.join(columns)}", *lines])).facts["left out"]
    assert [name for name in columns if f"{name} (an id" in left_out] == ["dense", "huge", "wide_id"]


def test_parquet_and_other_marks_give_the_same(table):
    from pyarrow import csv, parquet

    expected = ga.table_task(table, "outcome", "hospital").clients
    parquet.write_table(csv.read_csv(table, convert_options=csv.ConvertOptions(strings_can_be_null=True)), "p.parquet")
    Path("semicolons.csv").write_text("\ufeff" + table.read_text().replace(",", ";"), encoding="utf-8")
    for other in ("p.parquet", "semicolons.csv"):
        found = ga.table_task(other, "outcome", "hospital").clients
        assert all(torch.equal(*pair) for pair in zip(found.tensors, expected.tensors, strict=True))
        assert torch.equal(found.rows, expected.rows)


def test_a_regression_finds_the_least_squares(tmp_path):
    rows = patients(hospitals={"a": (50.0, 40), "b": (50.0, 50)})
    path = write_csv(tmp_path / "t.csv", [{k: row[k] for k in ("hospital", "age", "smoker", "stay")} for row in rows])
    task = ga.table_task(path, "stay", "hospital")
    train, test = (np.concatenate(side) for side in rows_of(task))
    features, stay = np.stack([numbers(rows, "age"), numbers(rows, "smoker")], axis=1), numbers(rows, "stay")
    predicted = LinearRegression().fit(features[train], stay[train]).predict(features[test])
    local = ga.LocalTraining(lr=0.2, steps=1)  # whole clients, by their rows: gradient descent on all of them
    result = ga.run(task, ga.FedAvg(), rounds=100, local=local, weights="examples", workers=0)
    with torch.no_grad():
        outputs = result.model(task.clients.tensors[0][test])
    targets = task.clients.tensors[1][test]
    expected = root_mean_squared_error(stay[test], predicted), r2_score(stay[test], predicted)
    assert [task.metrics[name](outputs, targets) for name in ("rmse", "r2")] == pytest.approx(expected, rel=1e-4)
    assert [result.summary[f"final_test_{name}"] for name in ("rmse", "r2")] == pytest.approx(expected, rel=1e-4)
    of_a = root_mean_squared_error(stay[rows_of(task)[1][0]], predicted[: len(rows_of(task)[1][0])])
    assert result.clients[0].metrics["rmse"] == pytest.approx(of_a, rel=1e-4)
    assert result.summary["final_test_accuracy"] is None
    mean_squared = np.mean((stay[test] - predicted) ** 2) / np.var(stay[train])
    assert result.summary["final_test_loss"] == pytest.approx(mean_squared, rel=1e-3)


def test_engines_agree_and_a_changed_file_is_not_gone_on_with(table):
    pytest.importorskip("flwr")
    words = ("run", "--csv", table.name, *COLUMNS, "--set", "rounds=2", "--set", "local.steps=2", "--set", "fast=false")
    call(*words, "--workers", 0, "--out", "a")
    call(*words, "--workers", 2, "--out", "b")
    call(*words, "--engine", "flower", "--out", "c")
    models = [Path(out, "model.safetensors").read_bytes() for out in "abc"]
    assert models[0] == models[1] == models[2]
    call("run", "a/spec.toml", "--workers", 0, "--out", "again")
    assert Path("again/model.safetensors").read_bytes() == models[0]
    Path("a/summary.json").unlink()
    write_csv(table, patients(seed=1))
    assert "task.sha256" in call(*words, "--workers", 0, "--out", "a", "--resume", code=2).stderr
    assert "patients.csv has changed" in call("run", "a/spec.toml", "--out", "d", code=2).stderr
    assert not Path("d").exists()
    task = ga.table_task(table, "outcome", "hospital")
    ga.run(task, ga.FedAvg(), rounds=1, workers=0, out="py")
    write_csv(table, patients())
    with pytest.raises(GradalignError, match="task"):
        ga.run(ga.table_task(table, "outcome", "hospital"), ga.FedAvg(), rounds=1, workers=0, out="py", resume=True)


def test_commands_and_recipes_take_tables(table):
    tested = [len(own) for own in rows_of(ga.table_task(table, "outcome", "hospital"))[1]]
    call("compare", "--csv", table.name, *COLUMNS, *QUICK, "--seeds", 1, "--algorithms", "fedavg", "--out", "c")
    assert json.loads(Path("c/summary.json").read_text())["task"]["clients"] == 3
    every = Path("c/report.html").read_text().split("<summary>Every client</summary>")[1].split("</details>")[0]
    assert re.findall(r'<th scope="row">(\w+)</th><td>(\d+)</td>', every) == [
        (name, str(own)) for name, own in zip(("north", "south", "west"), tested, strict=True)
    ]
    assert json.loads(Path("c/fedavg/seed0/holdings.json").read_text())["names"] == ["ill", "well"]
    grid = [word for name in ("lr=0.1", "K=2", "weight_decay=0", "mu=0.1") for word in ("--grid", name)]
    once = ("--algorithm", "fedavg", "--finalists", 1, "--seeds", 1)
    call(
        "sweep", "--csv", table.name, "--target", "stay", "--client", "hospital", *QUICK, *grid[:6], *once, "--out", "s"
    )
    assert json.loads(Path("s/summary.json").read_text())["score"] == "loss"
    found = json.loads(call("diagnose", "--csv", table.name, *COLUMNS, "--set", "model=mlp", "--json").stdout)
    assert (found["task"], found["clients"]) == ("patients", 3)
    recipe = f'[task]\nname = "table"\npath = "{table.name}"\ntarget = "smoker"\nclient = "hospital"\nhidden = 4\n'
    Path("mine.toml").write_text(recipe + 'model = "mlp"\n[algorithm]\nname = "fedavg"\n')
    call("run", "mine.toml", *QUICK, "--out", "m")
    summary = json.loads(Path("m/summary.json").read_text())
    assert summary["task"]["target"] == "smoker of 2 classes (0, 1)"
    call("run", "digits", "--csv", table.name, *COLUMNS, "--regression", *QUICK, "--set", "clients.per_round=2", code=2)
    call("run", "digits", "--csv", table.name, *COLUMNS, *QUICK, "--set", "clients.per_round=2", "--out", "d")


GOOD = [f"{who},{i % 2},{i}" for who in "ab" for i in range(10)]
BAD = {
    "nothing": ("", "is empty"),
    "a header alone": ("who,y,x\n", "has no rows"),
    "no target": ("who,x\n" + "a,1\nb,2\n" * 5, 'no column "y"'),
    "no client": ("y,whom\n" + "1,a\n2,b\n" * 5, 'did you mean "whom"?'),
    "one client": ("who,y,x\n" + "a,1,2\na,0,1\n" * 5, 'one client alone, "a"'),
    "a client for each row": ("\n".join(["who,y,x", *(f"{i},{i % 2},{i % 3}" for i in range(20))]), "right column?"),
    "one class": ("who,y,x\n" + "a,1,2\nb,1,1\n" * 5, '"y" is 1 in every row'),
    "a class for each row": ("\n".join(["who,y,x", *(f"a,n{i},1\nb,m{i},2" for i in range(9))]), "right column?"),
    "gaps in the target": ("\n".join(["who,y,x", *GOOD, "a,,3"]), "empty in 1 of 21 rows, first in row 21"),
    "gaps in the client": ("\n".join(["who,y,x", *GOOD, ",1,3"]), "the client, is empty in 1 of 21 rows"),
    "nothing to learn from": ("who,y,x,z\n" + "a,1,,2\nb,0,,2\n" * 5, "(x: empty; z: the same in every row)"),
    "infinite": ("\n".join(["who,y,x", *GOOD, "a,1,inf"]), '"x" is infinite or beyond 1e100 in 1 rows'),
    "a field too many": ("\n".join(["who,y,x", *GOOD, "a,1,2,3"]), "Expected 3 columns, got 4"),
    "two columns alike": ("\n".join(["who,y,y", *GOOD]), 'two columns with the name "y"'),
    "not UTF-8": (b"who,y,x\n" + b"a,1,caf\xe9\nb,0,t\xe9\n" * 5, '"x" is not text in UTF-8'),
    "a name not UTF-8": (b"who,y,\xe9\n" + b"a,1,2\nb,0,3\n" * 5, "not a table in UTF-8"),
    "a picture": (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "not a CSV file"),
    "a spreadsheet": (b"PK\x03\x04whatever", "is a spreadsheet or an archive"),
    "half of a Parquet file": (b"PAR1\x15\x04", "not a whole Parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_gets_one_sentence(name):
    content, sentence = BAD[name]
    Path("t.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    told = call("run", "--csv", "t.csv", "--target", "y", "--client", "who", code=2).stderr
    assert sentence in told
    assert len(told.strip().splitlines()) == 1
    assert sorted(path.name for path in Path().iterdir()) == ["t.csv"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--csv", "t.csv"), "--csv needs --target too, one of the columns of t.csv: who, y, x"),
        (("--csv", "t.csv", "--target", "y"), "--csv needs --client too"),
        (("--csv", "t.csv", "--target", "y", "--client", "y"), "are the same column"),
        (("--csv", "no.csv", "--target", "y", "--client", "who"), "there is no file no.csv"),
        (("--csv", ".", "--target", "y", "--client", "who"), "is a folder"),
        (("--target", "y"), "--target belongs to a table"),
        (("--regression",), "--regression belongs to a table"),
        ((), "name a recipe"),
        (("--csv", "t.csv", "--target", "y", "--client", "who", "--task", "a:b"), "--task and --csv both"),
        (("--csv", "t.csv", "--target", "who", "--client", "y", "--regression"), "has texts"),
        *(
            (("--csv", "t.csv", "--target", "y", "--client", "who", "--set", f"task.{setting}"), sentence)
            for setting, sentence in (
                ("model=tree", "task.model must be linear or mlp"),
                ("test_share=1", "task.test_share must be a number in [0, 1)"),
                ("test_share=0", "no row is left for testing"),
                ("drop=z", 'no column "z"'),
                ("min_rows=11", "0 of 2 clients have 11 rows"),
                ("group=z", 'no column "z"'),
                ("statistics=all", "task.statistics must be"),
                ("tree=1", "task.tree is not a setting of the task table"),
            )
        ),
        (("table",), "task.path is needed"),
    ],
)
def test_bad_options_get_one_sentence(words, sentence):
    Path("t.csv").write_text("\n".join(["who,y,x", *GOOD]))
    told = call("run", *words, code=2).stderr
    assert sentence in told
    assert len(told.strip().splitlines()) == 1
    assert not Path("runs").exists()

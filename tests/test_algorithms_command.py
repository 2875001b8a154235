"""``gradalign algorithms``: everything there is, with what it costs."""

from __future__ import annotations

import json

import pytest

from gradalign.algorithms import known_algorithms
from gradalign.algorithms.rules import known_rules
from gradalign.cli import algorithms as command
from test_cli import call

# communications, vectors down and up beside x and Δ, vectors kept per client: from the papers' pseudo-code.
COSTS = {
    ("fedavg", ""): (1, 0, 0, 0),
    ("fedprox", ""): (1, 0, 0, 0),
    ("fedga", ""): (1, 1, 0, 0),
    ("fedga", "fresh"): (2, 1, 1, 0),
    ("fedga", "kept"): (1, 1, 1, 1),
    ("gradalign", ""): (2, 1, 1, 0),
    ("scaffold", ""): (2, 1, 1, 0),
    ("scaffold", "kept"): (1, 1, 1, 1),
    ("feddyn", ""): (1, 0, 0, 1),
    ("fedsam", ""): (1, 0, 0, 0),
    ("fedlesam", ""): (1, 1, 0, 0),
    ("fedinit", ""): (1, 0, 0, 1),
    ("fedcm", ""): (1, 1, 0, 0),
    ("largebatchsgd", ""): (1, 0, 0, 0),
    ("linearscaling", ""): (2, 1, 1, 0),
    ("linearscaling", "False"): (1, 0, 0, 0),
}
RULES = {"fedavgm", "fedadagrad", "fedadam", "fedyogi"}


NAMES = [*dict.fromkeys(name for name, _ in COSTS), *sorted(RULES)]  # other tests may have defined more


def test_costs_are_the_papers():
    rows = json.loads(call("algorithms", *NAMES, "--json").stdout)["algorithms"]
    keys = ("communications", "extra_down", "extra_up", "kept_per_client")
    found = {
        (row["name"], "".join(str(value) for value in row["form"].values())): tuple(row[key] for key in keys)
        for row in rows
        if "form" in row
    }
    assert found == COSTS
    assert {row["name"] for row in rows if row.get("server_rule")} == RULES
    adam = next(row for row in rows if row["name"] == "fedadam")
    assert adam["settings"] == {"lr": 0.1, "beta1": 0.9, "tau": 0.001, "beta2": 0.99}
    assert next(row for row in rows if row["name"] == "fedga")["required"] == []


def test_fedga_is_shown_as_its_default_is_and_each_form_with_its_own_formula(monkeypatch):
    """One trip is of the running mean s; ḡ of this round is the paper's, in two."""
    rows = json.loads(call("algorithms", "fedga", "--json").stdout)["algorithms"]
    formulas = ["−β(s − g_i)", "−β(ḡ − g_i)", "−β(s − k_i)"]
    assert [row["communications"] for row in rows] == [1, 2, 1]
    for row, formula in zip(rows, formulas, strict=True):
        assert [other in row["description"] for other in formulas] == [other == formula for other in formulas]
        assert row["description"].startswith("Federated Gradient Alignment (Dandi, Barba & Jaggi 2022, Algorithm 2)")
    assert rows[0]["settings"]["mean"] == "running"
    monkeypatch.setenv("COLUMNS", "100")
    text = " ".join(call("algorithms", "fedga").stdout.split())
    places = [text.index(formula) for formula in formulas]
    assert places == sorted(places)
    assert "mean='running'" in text
    assert f"with mean=fresh: v_i = {formulas[1]}, the paper's. 2 1 1 0" in text


def test_without_names_it_lists_all_that_come_with_the_library():
    rows = json.loads(call("algorithms", "--json").stdout)["algorithms"]
    own = {
        name for name, kind in (known_algorithms() | known_rules()).items() if kind.__module__.startswith("gradalign.")
    }
    assert own == set(NAMES)
    assert own <= {row["name"] for row in rows}


def test_the_table_fits_eighty_columns_and_breaks_no_word(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = call("algorithms", *NAMES).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    words = set(text.split())
    for row in command.describe_algorithms(NAMES):
        settings = ", ".join(
            name if name in row["required"] else f"{name}={row['settings'][name]!r}" for name in row["settings"]
        )
        shown = f"{row['name']} {row['description']} {row['class']}({settings})"
        assert set(shown.split()) <= words, shown


@pytest.mark.parametrize("name", ["nope", "json:loads", "absent:X"])
def test_a_wrong_name_is_one_sentence(name):
    told = call("algorithms", name, code=2).stderr
    assert told.startswith("error: algorithm.name: ")
    assert told.count("\n") == 1

"""Validation examples held out from training: disjoint, complete, per client, seeded."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

import gradalign as ga
from gradalign.recipes.build import task_of
from gradalign.recipes.spec import validate
from gradalign.runs.metrics import read_metrics
from gradalign.tasks.holdout import hold_out, split_rows
from gradalign.tasks.task import PartitionedClients
from test_cli import call


@given(st.integers(1, 200), st.floats(0.01, 0.99), st.integers(0, 5), st.integers(0, 5))
def test_a_client_is_split_in_two(examples, share, seed, client):
    train, valid = split_rows(examples, share, seed, client)
    assert sorted([*train.tolist(), *valid.tolist()]) == list(range(examples)), "disjoint, and nothing is lost"
    assert len(train) >= 1
    whole = {math.floor(share * examples), math.ceil(share * examples)}
    assert len(valid) in {min(count, examples - 1) for count in whole}
    again = split_rows(examples, share, seed, client)
    assert torch.equal(train, again[0])
    assert torch.equal(valid, again[1])


def test_every_example_has_the_same_chance_also_at_small_clients():
    """Clients of three examples cannot give a tenth of one: three in ten give one, each example in one of ten."""
    held = np.zeros(3)
    for client in range(4000):
        for row in split_rows(3, 0.1, 0, client)[1]:
            held[int(row)] += 1
    # 4000 draws of probability 0.1: standard deviation of a share sqrt(0.1·0.9/4000) = 0.0047.
    assert held / 4000 == pytest.approx([0.1] * 3, abs=5 * 0.0047)


def test_seeds_and_clients_differ():
    splits = {tuple(split_rows(50, 0.2, seed, client)[1].tolist()) for seed in range(5) for client in range(5)}
    assert len(splits) == 25


def identities(examples) -> list[int]:
    """Inputs that are numbers name their examples."""
    return [int(x) for x in examples.batch(torch.arange(len(examples)))[0].reshape(len(examples), -1)[:, 0]]


class Numbers(Dataset):
    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int):
        return torch.tensor([float(self.start + i)]), 0


SIZES = (10, 1, 40, 2, 25)
STARTS = tuple(int(n) for n in np.cumsum((0, *SIZES[:-1])))


class MadeOnDemand:
    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, i: int):
        if not 0 <= i < len(SIZES):
            raise IndexError
        torch.rand(1)  # draws from the stream that a client has of its own
        return (
            torch.arange(STARTS[i], STARTS[i] + SIZES[i])[:, None].float(),
            torch.zeros(SIZES[i], dtype=torch.int64),
        )


def clients_of(kind: str):
    pool = torch.arange(sum(SIZES))[:, None].float(), torch.zeros(sum(SIZES), dtype=torch.int64)
    rows = [np.arange(start, start + size) for start, size in zip(STARTS, SIZES, strict=True)]
    return {
        "partition": PartitionedClients(pool, rows),
        "tensors": [(pool[0][r], pool[1][r]) for r in rows],
        "datasets": [Numbers(start, size) for start, size in zip(STARTS, SIZES, strict=True)],
        "on demand": MadeOnDemand(),
    }[kind]


@pytest.mark.parametrize("kind", ["partition", "tensors", "datasets", "on demand"])
def test_every_form_of_clients_is_split_in_the_same_way(kind):
    task = ga.Task(model=lambda: nn.Linear(1, 2), clients=clients_of(kind), test=(torch.zeros(3, 1), torch.zeros(3)))
    split = hold_out(task, 0.2, seed=3)
    held = identities(split.test_examples)
    for client, (start, size) in enumerate(zip(STARTS, SIZES, strict=True)):
        own = set(range(start, start + size))
        trained = set(identities(split.client(client, 3)))
        assert trained | (own & set(held)) == own
        assert not trained & set(held)
        expected = {start + int(row) for row in split_rows(size, 0.2, 3, client)[1]}
        assert own & set(held) == expected
    assert len(held) == len(set(held)), "nothing twice"
    assert split.scored_on == "validation"
    assert len(task.test_examples) == 3, "the task itself is as it was"
    result = ga.run(split, ga.FedAvg(), rounds=2, workers=0, local=ga.LocalTraining(lr=0.001, steps=1))
    assert result.history["test_accuracy"] == [None] * 3
    assert all(value is not None for value in result.history["validation_accuracy"])


def test_nothing_to_hold_out_and_bad_shares():
    single = ga.Task(model=lambda: nn.Linear(1, 2), clients=[(torch.zeros(1, 1), torch.zeros(1).long())] * 3)
    with pytest.raises(ga.GradalignError, match="gives no validation example"):
        hold_out(single, 0.5)
    for share in (0.0, 1.0):
        with pytest.raises(ga.GradalignError, match="between 0 and 1"):
            hold_out(single, share)


def test_a_recipe_may_hold_out_and_its_summary_says_so(tmp_path):
    plain = task_of(validate({"task": {"name": "digits"}, "algorithm": {"beta": 0.1}}, "r"))
    spec = validate({"task": {"name": "digits"}, "algorithm": {"beta": 0.1}, "clients": {"holdout": 0.25}}, "r")
    facts, whole = task_of(spec).describe(), plain.describe()
    assert facts["train_examples"] + facts["validation_examples"] == whole["train_examples"]
    assert facts["test_examples"] == 0
    assert facts["validation_examples"] == pytest.approx(0.25 * whole["train_examples"], abs=20)


def test_a_comparison_on_held_out_examples_is_told_by_them(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # the table's heads in one line
    words = ("--seeds", 2, "--algorithms", "fedga,fedavg", "--workers", 0, "--set", "rounds=3")
    result = call("compare", "digits", *words, "--set", "clients.holdout=0.2", "--out", tmp_path / "c")
    assert "digits: validation accuracy, 2 seeds" in " ".join(result.stdout.split())
    summary = json.loads((tmp_path / "c/summary.json").read_text())
    assert summary["scored_on"] == "validation"
    for entry in summary["algorithms"]:
        runs = [read_metrics(tmp_path / "c" / run["folder"]) for run in entry["runs"]]
        finals = [rows[-1]["validation_accuracy"] for rows in runs]
        assert entry["final_validation_accuracy"]["mean"] == pytest.approx(sum(finals) / 2)
        assert entry["final_validation_accuracy"]["std"] == pytest.approx(abs(finals[0] - finals[1]) / 2**0.5)
        assert "final_test_accuracy" not in entry

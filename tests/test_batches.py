"""Batches of every form keep their form wherever they go: training, holding out, diagnosing, verifying."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

import gradalign as ga
from gradalign.tasks.batches import Examples, batch_length, example_count, join_batches, map_tensors, take_examples
from gradalign.tasks.holdout import hold_out
from gradalign.theory.diagnose import diagnose
from gradalign.theory.problems import Calculus


class Pair(NamedTuple):
    inputs: Tensor
    target: Tensor


Nested = namedtuple("Nested", "pair mask")


class Own(dict):
    """A mapping with an attribute of its own."""

    unit = "mm"


FORMS = {
    "tuple": (lambda x, y: (x, y), lambda b: (b[0], b[1])),
    "list": (lambda x, y: [x, y], lambda b: (b[0], b[1])),
    "named tuple": (Pair, lambda b: (b.inputs, b.target)),
    "nested": (lambda x, y: Nested((x, {"y": y}), torch.ones(len(x))), lambda b: (b.pair[0], b.pair[1]["y"])),
    "dictionary": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "ordered": (lambda x, y: OrderedDict(x=x, y=y), lambda b: (b["x"], b["y"])),
    "user's mapping": (lambda x, y: UserDict(x=x, y=y), lambda b: (b["x"], b["y"])),
    "dict subclass": (lambda x, y: Own(x=x, y=y), lambda b: (b["x"], b["y"])),
    "with texts": (lambda x, y: {"x": x, "y": y, "name": ["a"] * len(x)}, lambda b: (b["x"], b["y"])),
}


class Formed(Examples):
    """Examples whose batches have a given form."""

    def __init__(self, x: Tensor, y: Tensor, make) -> None:
        self.x, self.y, self.make = x, y, make

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, index: Tensor):
        return self.make(self.x[index], self.y[index])


def clients() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 3, generator=generator), torch.arange(n) % 2) for n in (9, 14, 6, 11)]


def model() -> nn.Module:
    return nn.Linear(3, 2)


def task_of(form: str) -> ga.Task:
    make, take = FORMS[form]

    def predict(model, batch):
        inputs, targets = take(batch)
        return model(inputs), targets

    return ga.Task(model=model, clients=[Formed(x, y, make) for x, y in clients()], predict=predict)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_holds_out_and_diagnoses_as_the_plain_pair_does(form):
    plain = ga.Task(model=model, clients=clients())
    found, expected = diagnose(task_of(form)), diagnose(plain)
    assert found.verdict == expected.verdict
    assert found.r == pytest.approx(expected.r, rel=1e-5)
    assert found.r_random == pytest.approx(expected.r_random, rel=1e-5)
    options = {"rounds": 2, "workers": 0, "local": ga.LocalTraining(lr=0.1, steps=2, batch_size=4)}
    results = [ga.run(hold_out(task, 0.3, seed=1), ga.FedGA(beta=0.1), **options) for task in (task_of(form), plain)]
    for name in ("validation_loss", "validation_accuracy"):
        assert results[0].history[name] == pytest.approx(results[1].history[name], rel=1e-5)
    x = torch.zeros(8, dtype=torch.float64)
    assert torch.equal(Calculus(task_of(form), 0).gradient(x, 1), Calculus(plain, 0).gradient(x, 1))


class Items(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Pair:
        return Pair(torch.full((3,), float(i)), torch.tensor(i % 2))


@pytest.mark.parametrize("client", [Items(), Pair(torch.randn(8, 3), torch.arange(8) % 2)], ids=["dataset", "tensors"])
def test_named_tuples_keep_their_names(client):
    seen = []

    def predict(model, batch):
        seen.append(type(batch))
        return model(batch.inputs), batch.target

    task = ga.Task(model=model, clients=[client, client, client], predict=predict)
    ga.run(hold_out(task, 0.25), ga.FedAvg(), rounds=1, workers=0)
    diagnose(task)
    assert set(seen) == {Pair}


@pytest.mark.parametrize("data", [(torch.tensor(1.0), torch.tensor(2.0)), (torch.ones(3), torch.tensor(2.0))])
def test_a_client_of_single_numbers_is_refused_in_one_sentence(data):
    with pytest.raises(ga.GradalignError):
        example_count(data)


def test_what_cannot_be_joined_is_one_sentence():
    @dataclass
    class Record:
        x: Tensor

    with pytest.raises(ga.GradalignError, match="Record cannot be joined"):
        join_batches([Record(torch.zeros(1)), Record(torch.zeros(1))])
    for batches in (
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        [torch.tensor(1.0), torch.tensor(2.0)],
        [torch.zeros(2), (torch.zeros(2),)],
        [(torch.zeros(2),), (torch.zeros(2), torch.zeros(2))],
        [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}],
        [(torch.zeros(2),), [torch.zeros(2)]],
    ):
        with pytest.raises(ga.GradalignError, match="differ in"):
            join_batches(batches)


tensors = st.lists(st.integers(0, 9), min_size=4, max_size=4).map(torch.tensor)
forms = st.recursive(
    tensors,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
    ),
    max_leaves=6,
)


def leaves(batch) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, batch)
    return found


@given(forms)
def test_cutting_a_batch_and_joining_it_gives_it_back(batch):
    parts = [take_examples(batch, torch.tensor(rows)) for rows in ([0, 1], [2], [3])]
    whole = join_batches(parts)
    assert type(whole) is type(batch)
    assert batch_length(whole) == batch_length(batch) == 4
    for ours, theirs in zip(leaves(whole), leaves(batch), strict=True):
        assert torch.equal(ours, theirs)
    doubled = map_tensors(lambda tensor: 2 * tensor, batch)
    assert type(doubled) is type(batch)
    assert [t.tolist() for t in leaves(doubled)] == [(2 * t).tolist() for t in leaves(batch)]

"""Examples that belong together are never on both sides of a hold-out: overlapping text, patients, twins."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradalign as ga
from gradalign.tasks.holdout import hold_out, spans_of, split_groups, stretches_of, touching
from gradalign.tasks.paper import cifar100, shakespeare
from gradalign.tasks.readers import LETTERS, SEQUENCE, window_starts
from gradalign.tasks.task import PartitionedClients
from small_files import cifar_batch, write_pickle

LENGTHS = (600, 300, 900, 450, 90, 500)


@cache
def texts() -> list[str]:
    """Random letters: a stretch of ten of them occurs once."""
    rng = np.random.default_rng(5)
    return ["".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), length)) for length in LENGTHS]


def write_plays(folder, stride: int) -> None:
    for split in ("train", "test"):
        data = {}
        for number, text in enumerate(texts()):
            starts = range(0, len(text) - SEQUENCE, stride)
            data[f"ROLE{number}"] = {
                "x": [text[i : i + SEQUENCE] for i in starts],
                "y": [text[i + SEQUENCE] for i in starts],
            }
        content = {"users": list(data), "num_samples": [len(own["y"]) for own in data.values()], "user_data": data}
        path = folder / f"shakespeare/{split}/all.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))


def places(examples) -> list[tuple[int, int]]:
    """Return (role, first letter) of every window, found again in the texts."""
    inputs, labels = examples.batch(torch.arange(len(examples)))
    found = []
    for window, label in zip(inputs.tolist(), labels.tolist(), strict=True):
        letters = "".join(LETTERS[code] for code in [*window, label])
        found.append(next((role, text.find(letters)) for role, text in enumerate(texts()) if letters in text))
    return found


def letters_of(windows: list[tuple[int, int]]) -> set[tuple[int, int]]:
    return {(role, start + k) for role, start in windows for k in range(SEQUENCE + 1)}


@pytest.mark.parametrize(
    ("stride", "settings"),
    [
        (1, {}),
        (7, {}),
        (1, {"data_share": 0.4}),
        (1, {"partition": "iid", "clients": 4}),
        (3, {"partition": "dirichlet", "clients": 3}),
        (SEQUENCE + 1, {"partition": "iid", "clients": 4}),
    ],
    ids=str,
)
def test_no_letter_is_both_trained_on_and_scored(tmp_path, monkeypatch, stride, settings):
    monkeypatch.setenv("GRADALIGN_CACHE", str(tmp_path / "cache"))
    write_plays(tmp_path, stride)
    task = shakespeare(data_dir=str(tmp_path), **settings)
    split = hold_out(task, 0.2, seed=2)
    held = places(split.test_examples)
    assert held
    scored = letters_of(held)
    # A gap of one window on either side: nobody trains on the letters that lead to a scored window, or follow it.
    near = {(role, place + k) for role, place in scored for k in (-SEQUENCE, SEQUENCE)} | scored
    total = 0
    for client in range(len(split.clients)):
        trained = places(split.client(client))
        assert trained, "every client keeps something to train on"
        assert not letters_of(trained) & near
        assert set(trained) <= set(places(task.client(client)))
        total += len(trained)
    assert len(set(held)) == len(held)
    examples = int(task.clients.sizes().sum())
    assert abs(len(held) - 0.2 * examples) <= 0.1 * examples
    assert total > 0.3 * examples, "a hold-out must not cost the training set"


def test_where_windows_begin_by_hand():
    text = np.arange(30, dtype=np.uint8)
    starts = [0, 1, 2, 5, 12, 20]  # 5 to 12: neighbours without a common letter; 12 to 20: one letter apart
    windows = np.stack([text[start : start + 7] for start in starts])
    assert window_starts(windows).tolist() == [0, 1, 2, 5, 12, 19]
    assert window_starts(windows[:1]).tolist() == [0]
    assert window_starts(windows[:0]).tolist() == []


def patients_task(groups) -> ga.Task:
    sizes = [len(own) for own in groups]
    pool = torch.arange(sum(sizes))[:, None].float(), torch.zeros(sum(sizes), dtype=torch.int64)
    offsets = np.cumsum([0, *sizes])
    rows = [np.arange(a, b) for a, b in pairwise(offsets)]
    return ga.Task(model=lambda: nn.Linear(1, 2), clients=PartitionedClients(pool, rows), groups=groups)


def whose(examples, groups) -> set:
    flat = [name for own in groups for name in own]
    return {flat[int(x)] for x in examples.batch(torch.arange(len(examples)))[0][:, 0]}


@pytest.mark.parametrize("kind", ["names", "numbers", "list of clients"])
def test_a_patient_is_on_one_side_also_across_hospitals(kind):
    names = [
        ["ann", "ann", "bob", "eve", "eve", "eve"],
        ["dan", "dan", "ann", "kim", "joe"],
        ["sue", "tim", "tim", "ula"],
    ]
    known = sorted({name for own in names for name in own})
    groups = names if kind == "names" else [[known.index(name) for name in own] for own in names]
    task = patients_task(groups)
    if kind == "list of clients":
        whole = [task.client(i).batch(torch.arange(len(names[i]))) for i in range(3)]
        task = ga.Task(model=task.model, clients=whole, groups=groups)
    for seed in range(20):
        try:
            split = hold_out(task, 0.3, seed)
            again = hold_out(split, 0.3, seed + 1)
        except ga.GradalignError:
            continue  # this seed gives nobody
        held = whose(split.test_examples, groups)
        for client in range(3):
            assert not whose(split.client(client), groups) & held
        assert len(split.test_examples) + sum(len(split.client(i)) for i in range(3)) == 15, "nobody is lost"
        assert not whose(again.test_examples, groups) & whose(again.client(0), groups), "the groups go along"


@settings(max_examples=60)
@given(st.data())
def test_the_law_of_groups(data):
    """No unit on both sides, every client trains, held and trained rows are disjoint: for any spans."""
    spans = [
        np.array(
            data.draw(
                st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=15), label="first, more"
            )
        )
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    spans = [np.stack([own[:, 0], own.sum(axis=1)], axis=1) for own in spans]
    trained, held = split_groups(spans, data.draw(st.floats(0.05, 0.9)), data.draw(st.integers(0, 9)))
    units = [
        {
            int(unit)
            for own, rows in zip(spans, side, strict=True)
            for first, last in own[rows]
            for unit in range(first, last + 1)
        }
        for side in (trained, held)
    ]
    assert not units[0] & units[1]
    for own, kept, out in zip(spans, trained, held, strict=True):
        assert len(kept)
        assert not set(kept) & set(out)
        assert len(kept) + len(out) <= len(own)


@pytest.mark.parametrize(("size", "share"), [(1000, 0.1), (300, 0.1), (400, 0.25)])
def test_every_part_of_a_text_has_the_same_chance(size, share):
    """Each tenth is held out with chance ``share``: the least and the most of 400 seeds stay near it."""
    starts = np.arange(size)
    spans = np.stack([starts, starts + SEQUENCE], axis=1)
    times = np.zeros(size)
    for seed in range(400):
        (trained,), (held,) = split_groups([spans], share, seed)
        times[held] += 1
        assert len(held) == share * size
        assert np.abs(np.subtract.outer(held, trained)).min() > SEQUENCE
        assert len(trained) >= (size - len(held)) / 3
    chances = times.reshape(10, -1).mean(axis=1) / 400
    assert chances.max() < 2 * chances.min()
    assert 0.7 * share < chances.min()
    assert chances.max() < 1.4 * share


def test_a_short_text_gives_a_piece_near_an_end_and_a_tiny_one_nothing():
    starts = np.arange(200)
    spans = np.stack([starts, starts + SEQUENCE], axis=1)
    for seed in range(50):
        (trained,), (held,) = split_groups([spans], 0.1, seed)
        assert len(held) == 20
        # 180 others: a third of them, 60, are left if the near end is at most 40 away, where the far gap takes 80.
        assert len(trained) >= 60
        assert min(held.min(), 199 - held.max()) <= 40
        (trained,), (held,) = split_groups([spans[:SEQUENCE]], 0.1, seed)
        assert (len(trained), len(held)) == (SEQUENCE, 0)


def test_lone_examples_lose_nobody_and_touching_is_symmetric():
    spans = [np.repeat(np.arange(start, start + 50)[:, None], 2, axis=1) for start in (0, 50, 100)]
    trained, held = split_groups(spans, 0.2, seed=0)
    for kept, out in zip(trained, held, strict=True):
        assert len(out) == 10
        assert sorted([*kept, *out]) == list(range(50))
    spans = np.array([[0, 3], [5, 6], [3, 4], [9, 9]])
    assert touching(spans, np.array([True, False, False, False])).tolist() == [True, False, True, False]
    assert touching(spans, np.array([False, False, True, False])).tolist() == [True, False, True, False]
    assert stretches_of(spans).tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize("groups", [[[1, 2]], [[1.0, 2.0, 3.0]], [[[2, 1]] * 3], [[None, 1, 2]], []], ids=str)
def test_bad_groups_are_refused(groups):
    with pytest.raises(ga.GradalignError, match=r"Task\.groups"):
        hold_out(
            ga.Task(model=nn.Linear(1, 2), clients=[(torch.zeros(3, 1), torch.zeros(3).long())], groups=groups), 0.3
        )
    assert spans_of([np.array(["a", "b"])], [2])[0].shape == (2, 2)


def test_the_same_picture_twice_is_one_example(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADALIGN_CACHE", str(tmp_path / "cache"))
    content = cifar_batch(300, 100, 1)
    content["data"][150:] = content["data"][:150]  # every picture twice
    write_pickle(tmp_path / "cifar-100-python/train", content)
    write_pickle(tmp_path / "cifar-100-python/test", cifar_batch(100, 100, 2))
    task = cifar100(data_dir=str(tmp_path), partition="iid", clients=3)
    split = hold_out(task, 0.3)

    def pictures(rows):
        return {content["data"][row].tobytes() for row in rows.tolist()}

    assert len(split.test_examples.rows) > 50
    assert not pictures(split.test_examples.rows) & pictures(split.clients.rows)

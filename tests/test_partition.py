"""The laws of the partitions: no row twice, nobody empty, all rows given and classes held where promised."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradalign.errors import GradalignError
from gradalign.tasks import partition
from gradalign.tasks.divide import Division, even_choice, spaced_choice

labels_and_clients = st.lists(st.integers(0, 6), min_size=1, max_size=80).flatmap(
    lambda labels: st.tuples(st.just(np.array(labels)), st.integers(1, len(labels)))
)
seeds = st.integers(0, 5)


def check(parts, examples, clients, *, complete=True):
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 1
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows)
    if complete:
        assert sorted(rows) == list(range(examples))


@given(labels_and_clients, seeds)
def test_iid_is_complete_and_even(case, seed):
    labels, clients = case
    parts = partition.iid(labels, clients, seed)
    check(parts, len(labels), clients)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(labels_and_clients, seeds, st.floats(0, 1))
def test_sorted_with_iid_is_complete_and_even(case, seed, share):
    labels, clients = case
    parts = partition.sorted_with_iid(labels, clients, share, seed)
    check(parts, len(labels), clients)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(labels_and_clients, seeds)
def test_wholly_sorted_blocks_do_not_interleave(case, seed):
    labels, clients = case
    blocks = [labels[part] for part in partition.sorted_with_iid(labels, clients, 0.0, seed)]
    assert all(a.max() <= b.min() for a, b in itertools.pairwise(blocks))


@given(labels_and_clients, seeds, st.floats(min_value=1e-320, max_value=1e300))
def test_dirichlet_ends_for_any_alpha_and_leaves_nobody_empty(case, seed, alpha):
    labels, clients = case
    check(partition.dirichlet(labels, clients, alpha, seed), len(labels), clients)


def test_dirichlet_goes_from_one_holder_to_iid():
    labels = np.repeat(np.arange(10), 500)
    for alpha, low, high in ((1e-3, 0.9, 1.0), (1e5, 0.09, 0.115)):
        parts = partition.dirichlet(labels, 10, alpha, 0)
        largest = [max(np.sum(labels[part] == c) for part in parts) / 500 for c in range(10)]
        assert low <= np.mean(largest) <= high


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), seeds)
def test_separate_classes_never_overlap(classes, clients, per_client, seed):
    labels = np.repeat(np.arange(classes), 3)
    if clients * per_client > classes:
        with pytest.raises(GradalignError):
            partition.separate_classes(labels, clients, per_client, seed)
        return
    parts = partition.separate_classes(labels, clients, per_client, seed)
    check(parts, len(labels), clients, complete=clients * per_client == classes)
    held = [set(labels[part]) for part in parts]
    assert all(len(own) == per_client for own in held)
    assert len(set.union(*held)) == clients * per_client
    assert all(len(part) == 3 * per_client for part in parts), "a class is held whole"


@given(st.integers(1, 8), st.integers(1, 20), seeds)
def test_one_class_per_client(classes, clients, seed):
    labels = np.repeat(np.arange(classes), 20)
    parts = partition.one_class(labels, clients, seed)
    check(parts, len(labels), clients, complete=clients >= classes)
    assert all(len(set(labels[part])) == 1 for part in parts)


@given(st.integers(2, 8), st.integers(1, 20), st.integers(1, 3), seeds)
def test_classes_per_client_holds_every_class(classes, clients, per_client, seed):
    labels = np.repeat(np.arange(classes), 60)
    if per_client > classes or clients * per_client < classes:
        return
    parts = partition.by_classes(labels, clients, per_client, seed)
    check(parts, len(labels), clients)
    assert all(len(set(labels[part])) == per_client for part in parts)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=50), seeds)
def test_natural_gives_each_owner_what_it_owns(owners, seed):
    owners = np.array(owners)
    parts = partition.natural(owners, None, seed)
    check(parts, len(owners), len(np.unique(owners)))
    assert all(len(set(owners[part])) == 1 for part in parts)
    some = partition.natural(owners, 1, seed)
    assert len(some[0]) == np.sum(owners == owners[some[0][0]])


def test_partitions_follow_the_seed():
    labels = np.repeat(np.arange(6), 30)
    for name in ("iid", "one-class", "separate", "classes", "sorted", "dirichlet"):
        division = Division(partition=name, clients=6, iid_share=0.2)
        once, again, other = (division.divide(labels, seed) for seed in (1, 1, 2))
        assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))
        assert any(not np.array_equal(a, b) for a, b in zip(once, other, strict=True)), name


def test_custom_lists(tmp_path):
    assert [part.tolist() for part in partition.custom(5, [[4, 0], [2]])] == [[4, 0], [2]]
    path = tmp_path / "who.json"
    path.write_text(json.dumps([[0], [1, 2]]))
    assert [part.tolist() for part in partition.custom(3, str(path))] == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[0], []], "client 1 needs a list"),
        ([[0], [0]], "client 1 names a row that is taken"),
        ([[1, 1]], "client 0 names a row that is taken"),
        ([[9]], "outside 0 to 4"),
        ([[-1]], "outside 0 to 4"),
        ([[0.5]], "needs a list of one or more row numbers"),
        ([], "must be a list of lists"),
        ("nowhere.json", "cannot read nowhere.json"),
    ],
)
def test_bad_custom_lists(lists, message):
    with pytest.raises(GradalignError, match=message):
        partition.custom(5, lists)


@given(labels_and_clients, st.integers(1, 90))
def test_even_choice_is_as_balanced_as_can_be(case, count):
    labels, _ = case
    chosen = even_choice(labels, count)
    assert len(chosen) == min(count, len(labels))
    kept, had = np.bincount(labels[chosen], minlength=7), np.bincount(labels, minlength=7)
    for a in range(7):
        assert all(kept[a] >= kept[b] - 1 for b in range(7) if kept[a] < had[a]), "no class waits while another leads"
    assert len(spaced_choice(labels, count)) == len(chosen)
    assert len(np.unique(spaced_choice(labels, count))) == len(chosen)


def test_shares_keep_some_clients_and_some_of_their_examples():
    labels = np.repeat(np.arange(10), 20)
    division = Division(partition="classes", clients=10, classes_per_client=2, client_share=0.2, data_share=0.25)
    whole = division.divide(labels, 3)
    kept = division.subset(whole, labels, 3)
    assert {len(part) for part in kept} == {5}, "a quarter of two halves of a class"
    assert all(any(set(part) <= set(full) for full in whole) for part in kept)
    assert set(labels[np.concatenate(kept)]) == set(range(10)), "every class has somebody"
    assert 5 <= len(kept) < 10, "but nobody is there for nothing"
    few = Division(partition="separate", clients=5, classes_per_client=2, client_share=0.4, data_share=0.001)
    kept = few.subset(few.divide(labels, 3), labels, 3)
    assert [np.unique(labels[part]).size for part in kept] == [2] * 5, "one of each class of theirs"
    assert [len(part) for part in kept] == [2] * 5
    assert division.describe(5, 2)["kept"] == "scaled to 2 of 5 clients with 25 % of their examples"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "odd", "clients": 2}, "task.partition must be one of iid"),
        ({"partition": "iid", "clients": None}, "task.clients is needed"),
        ({"partition": "iid", "clients": 0}, "task.clients must be at least 1"),
        ({"partition": "iid", "clients": 99}, "only 30 examples"),
        ({"partition": "dirichlet", "clients": 2, "alpha": 0.0}, "task.alpha must be above 0"),
        ({"partition": "dirichlet", "clients": 2, "alpha": float("nan")}, "task.alpha must be above 0"),
        ({"partition": "sorted", "clients": 2, "iid_share": 2.0}, "task.iid_share must be between 0 and 1"),
        (
            {"partition": "separate", "clients": 2, "classes_per_client": 9},
            "task.classes_per_client must be from 1 to 3",
        ),
        ({"partition": "natural", "clients": 2}, "no owners"),
        ({"partition": "custom", "clients": 2}, "belong together"),
        ({"partition": "iid", "clients": 2, "parts": [[1]]}, "belong together"),
        ({"partition": "iid", "clients": 2, "data_share": 0.0}, "task.data_share must be above 0"),
    ],
)
def test_impossible_divisions_get_one_sentence(settings, message):
    with pytest.raises(GradalignError, match=message):
        Division(**settings).divide(np.repeat(np.arange(3), 10), 0)


def test_a_json_file_of_parts_that_is_not_json(tmp_path):
    path = Path(tmp_path / "who.json")
    path.write_text("[[1,")
    with pytest.raises(GradalignError, match="is not JSON"):
        partition.custom(5, str(path))

"""The edges of what may be given: the last value that is allowed, and the first that is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import gradalign as ga
from gradalign.tasks import partition
from gradalign.tasks.batches import TensorExamples
from gradalign.tasks.divide import Division, even_choice, spaced_choice
from gradalign.tasks.holdout import hold_out
from gradalign.tasks.task import PartitionedClients
from gradalign.theory.probe import Probe, regulariser_gradient
from reference import Problem

LABELS = np.array([0, 0, 0, 1, 1, 1, 2, 2])
TASK = Problem((4, 3)).task()
OWNERS = np.array([5, 5, 7, 7, 7, 9, 9, 9])


def schedules(make):
    """Every number a schedule is made of is looked at."""
    return [
        lambda bad: make(ga.Steps(value=bad)),
        lambda bad: make(ga.Steps(value=0.1, at_rounds={3: bad})),
        lambda bad: make(ga.Warmup(value=bad, rounds=3)),
        lambda bad: make(ga.Warmup(value=0.1, start=bad, rounds=3)),
        lambda bad: make(ga.OffUntil(value=bad, round=3)),
        lambda bad: make(ga.Cosine(value=bad, rounds=3)),
        lambda bad: make(ga.Cosine(value=0.1, end=bad, rounds=3)),
    ]


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def wrapper(**options):
    return ga.GradAlign(torch.optim.SGD([parameter()], lr=0.1), **({"beta": 0.1} | options))


def split_in(parts: int, weights=None):
    weight = parameter()
    opt = ga.GradAlign(torch.optim.SGD([weight], lr=0.1), beta=0.1)
    return opt.step(lambda rows: (weight * rows).sum(), torch.ones(3, 2), parts=parts, weights=weights)


LOCAL, TINY = ga.LocalTraining, 1e-9
CASES = {
    "lr": (lambda v: LOCAL(lr=v), [TINY, 5.0], [0.0, -TINY, math.inf, math.nan, "x", True]),
    "weight_decay": (lambda v: LOCAL(weight_decay=v), [0.0, 3.0], [-TINY, math.inf, math.nan]),
    "momentum": (lambda v: LOCAL(momentum=v), [0.0, 0.999], [1.0, -TINY, math.nan]),
    "clip_norm": (lambda v: LOCAL(clip_norm=v), [TINY, None], [0.0, -1.0, math.nan]),
    **{
        name: (lambda v, name=name: LOCAL(**{name: v}), [1, 7, None, np.int64(3)], [0, -1, 1.5, True])
        for name in ("steps", "epochs", "batch_size", "gradient_examples")
    },
    "precision": (lambda v: LOCAL(precision=v), [None, "bf16"], ["fp16", ""]),
    "mu": (lambda v: ga.FedProx(mu=v), [0.0, 2.0], [-TINY, math.inf]),
    "beta": (lambda v: ga.FedGA(beta=v), [0.0, 2.0, np.float32(0.5)], [-TINY, math.nan, "x"]),
    "form": (lambda v: ga.FedGA(beta=0.1, form=v), ["start", "step"], ["", "end"]),
    "control": (lambda v: ga.Scaffold(control=v), ["fresh", "kept"], ["", "old"]),
    "alpha": (lambda v: ga.FedDyn(alpha=v), [TINY], [0.0, -1.0]),
    "server lr": (lambda v: ga.ServerRule(lr=v), [TINY, 2.0], [0.0, -1.0]),
    "server momentum": (lambda v: ga.FedAvgM(momentum=v), [0.0, 0.99], [1.0, -TINY]),
    "beta1": (lambda v: ga.FedAdam(beta1=v), [0.0, 0.99], [1.0, -TINY]),
    "beta2": (lambda v: ga.FedAdam(beta2=v), [0.0, 0.999], [1.0, -TINY]),
    "tau": (lambda v: ga.FedYogi(tau=v), [TINY], [0.0, -1.0]),
    "warmup": (lambda v: ga.Warmup(value=1.0, rounds=v), [1, 2], [0, -1]),
    "cosine": (lambda v: ga.Cosine(value=1.0, rounds=v), [1, 2], [0, -1]),
    "test_every": (lambda v: ga.Measure(test_every=v), [None, 0, 1], [-1, 1.5]),
    "train_every": (lambda v: ga.Measure(train_every=v), [None, 0, 1], [-1, 1.5]),
    "train_clients": (lambda v: ga.Measure(train_clients=v), [1, 2], [0, -1, 1.5]),
    "iid clients": (lambda v: partition.iid(LABELS, v, 0), [1, 8], [0, 9, -1]),
    "by_classes": (lambda v: partition.by_classes(LABELS, 2, v, 0), [2, 3], [0, 1, 4]),
    "by_classes clients": (lambda v: partition.by_classes(LABELS, v, 1, 0), [3, 4], [0, 2]),
    "separate": (lambda v: partition.separate_classes(LABELS, v, 1, 0), [1, 3], [0, 4]),
    "separate classes": (lambda v: partition.separate_classes(LABELS, 1, v, 0), [1, 3], [0, 4]),
    "one_class": (lambda v: partition.one_class(LABELS, v, 0), [1, 3, 6], [0, 9]),
    "iid_share": (lambda v: partition.sorted_with_iid(LABELS, 2, v, 0), [0.0, 0.5, 1.0], [-TINY, 1.0 + TINY]),
    "dirichlet": (lambda v: partition.dirichlet(LABELS, 2, v, 0), [TINY, 1e12], [0.0, -1.0, math.inf]),
    "natural": (lambda v: partition.natural(OWNERS, v, 0), [1, 3, None], [0, 4]),
    "custom": (
        lambda v: partition.custom(8, v), [[[0, 7], [3]]], [[[8]], [[-1]], [[0, 0]], [[0], [0]], [[]], [], [[0.5]]],
    ),
    "client_share": (
        lambda v: Division(partition="iid", clients=2, client_share=v), [TINY, 1.0], [0.0, -1.0, 1.0 + TINY],
    ),
    "data_share": (lambda v: Division(partition="iid", clients=2, data_share=v), [TINY, 1.0], [0.0, 1.0 + TINY]),
    "partition": (lambda v: Division(partition=v, clients=2), ["iid", "natural", "sorted"], ["", "custom", "x"]),
    "parts": (lambda v: Division(partition=v, clients=None, parts=[[0]]), ["custom"], ["iid", "natural"]),
    "no clients": (lambda v: Division(partition=v, clients=None), ["natural"], ["iid", "dirichlet", "custom"]),
    "spaced": (lambda v: spaced_choice(LABELS, v), [1, 8, 9, None], [0, -1]),
    "even": (lambda v: even_choice(LABELS, v), [1, 8, 9, None], [0, -1]),
    "hold_out": (lambda v: hold_out(TASK, v), [0.5, 0.9], [0.0, 1.0, -0.1, 1.1, math.nan]),
    "lengths": (
        lambda v: TensorExamples((torch.zeros(3), torch.zeros(v))), [3], [2, 4],
    ),
    "pool": (lambda v: PartitionedClients((torch.zeros(3),), v), [[[0, 2]], [[1], [0]]], [[[3]], [[-1]], []]),
    "probe weights": (lambda v: Probe(TASK, weights=v), [(0.0, 1.0), (2, 3)], [(0, 0), (-1, 2), (1,), (1, 1, 1)]),
    "probe step": (
        lambda v: regulariser_gradient(Probe(TASK), Probe(TASK).start(), exact=False, step=v), [0.1], [0.0, -0.1],
    ),
    "every": (lambda v: wrapper(every=v), [1, 5], [0, -1]),
    "wrapper beta": (lambda v: wrapper(beta=v), [0.0, 1.0], [-TINY, math.inf]),
    "reuse": (lambda v: wrapper(reuse=v), [None, "previous"], ["next"]),
    "memory": (lambda v: wrapper(memory=v), ["full", "low"], ["none"]),
    "number of parts": (split_in, [2, 3], [0, -1]),
    "weights of parts": (lambda v: split_in(2, v), [[TINY, 1.0]], [[0.0, 1.0], [-1.0, 2.0], [1.0], [1.0, 1.0, 1.0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_last_allowed_and_the_first_refused(name):
    make, allowed, refused = CASES[name]
    for value in allowed:
        make(value)
    for value in refused:
        with pytest.raises(ga.GradalignError):
            make(value)


@pytest.mark.parametrize("make", [lambda s: LOCAL(lr=s), lambda s: ga.FedGA(beta=s)], ids=["lr", "beta"])
def test_every_number_of_a_schedule_is_looked_at(make):
    for schedule in schedules(make):
        schedule(0.0)
        schedule(0.3)
        for bad in (-TINY, math.inf, math.nan):
            with pytest.raises(ga.GradalignError):
                schedule(bad)


def test_one_of_steps_and_epochs():
    with pytest.raises(ga.GradalignError, match="choose one"):
        LOCAL(steps=1, epochs=1)


def test_choices_of_rows_by_hand():
    assert spaced_choice(LABELS, 3).tolist() == [0, 2, 5]
    assert spaced_choice(LABELS, None).tolist() == spaced_choice(LABELS, 9).tolist() == list(range(8))
    # Every class's first, then every class's second, ...
    assert even_choice(LABELS, 3).tolist() == [0, 3, 6]
    assert even_choice(LABELS, 5).tolist() == [0, 1, 3, 4, 6]
    assert even_choice(LABELS, 6).tolist() == [0, 1, 3, 4, 6, 7]
    assert even_choice(LABELS, 7).tolist() == [0, 1, 2, 3, 4, 6, 7]


def test_what_a_scale_keeps_of_a_partition():
    """A share of the clients, at least two; a share of each one's rows, rounded up, and one of each class at least."""
    labels = np.arange(40) // 20
    whole = partition.iid(labels, 8, 0)
    kept = Division(partition="iid", clients=8, client_share=0.5, data_share=0.5).subset(whole, labels, 0)
    assert len(kept) == 4
    assert all(len(rows) == 3 for rows in kept), "half of five, rounded up"
    assert all(any(set(rows) <= set(part) for part in whole) for rows in kept)
    few = Division(partition="iid", clients=8, client_share=0.01).subset(whole, labels, 0)
    assert len(few) == 2
    assert all(any(np.array_equal(rows, part) for part in whole) for rows in few)
    assert Division(partition="iid", clients=1, client_share=0.1).subset(whole[:1], labels, 0)[0].tolist() == list(
        whole[0]
    )
    everything = Division(partition="iid", clients=8).subset(whole, labels, 0)
    assert all(np.array_equal(a, b) for a, b in zip(everything, whole, strict=True))


def test_owners_and_blocks():
    assert [rows.tolist() for rows in partition.natural(OWNERS, None, 0)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    labels = np.array([2, 0, 1, 0, 2, 1, 0])
    blocks = partition.sorted_with_iid(labels, 3, 0.0, 0)
    assert [len(rows) for rows in blocks] == [3, 2, 2]
    assert [sorted(labels[rows]) for rows in blocks] == [[0, 0, 0], [1, 1], [2, 2]]

"""Flower: the local engine's bits, faults that leave the others right, and Flower's own parts on our messages."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import gradalign as ga
from conftest import Quadratics, blobs, final_point, vector

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'gradalign[flower]'")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod

import gradalign.flower as gf
from gradalign.experiment.api import Where, _run, describe
from gradalign.experiment.build import make_federation
from gradalign.experiment.rounds import ServerState, play_round
from gradalign.flat import FlatModel
from gradalign.flower.engine import FlowerEngine, in_process_engine
from gradalign.flower.exchange import Exchange, Roster
from gradalign.plan import combine

LOCAL = ga.LocalTraining(lr=0.1, steps=3, batch_size=8)
QUICK = gf.Patience(connect_seconds=0.3, gradient_seconds=0.3, train_seconds=0.3, retries=1, poll_seconds=0.02)
KEEPING = ga.FedGA(beta=0.1) + ga.Scaffold(control="kept") + ga.FedDyn(alpha=0.1) + ga.FedYogi(lr=0.05)
ALGORITHMS = {
    "fedavg": ga.FedAvg(),
    "fedga": ga.FedGA(beta=ga.Warmup(value=0.2, rounds=3)),
    "fedga-every-step": ga.FedGA(beta=0.1, form="step") + ga.FedProx(mu=0.1),
    "scaffold": ga.Scaffold(),
    "scaffold-kept": ga.Scaffold(control="kept"),
    "feddyn": ga.FedDyn(alpha=0.1) + ga.FedAdam(lr=0.05),
    "everything": KEEPING,
}


def on_flower(task, algorithm, *, rounds=4, per_round=4, local=LOCAL, weights="uniform", measure=None, **where):
    federation = make_federation(
        task, combine(algorithm), local, per_round=per_round, weights=weights, dropout=0.0, seed=0
    )
    measure = measure or ga.Measure()
    spec = {"rounds": rounds, **describe(federation, measure)}
    return _run(federation, spec, rounds, measure, Where(engine="flower", **where))


def same(a: ga.Result, b: ga.Result) -> None:
    assert torch.equal(vector(a), vector(b))
    for name, column in a.history.items():
        assert name == "seconds" or column == b.history[name], name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_bits_of_the_local_engine(name):
    """The issue's promise: one spec and seed, the same parameters, buffers and metrics to the last bit."""
    local = ga.run(blobs(), ALGORITHMS[name], rounds=4, clients_per_round=4, local=LOCAL, workers=0)
    same(on_flower(blobs(), ALGORITHMS[name]), local)


@pytest.mark.parametrize(
    ("algorithm", "local"),
    [
        (ga.GradAlign(beta=0.1), ga.LocalTraining(lr=0.1, batch_size=8, gradient_examples=8)),
        (ga.LinearScaling(), ga.LocalTraining(lr=0.02, batch_size=8)),
        (
            ga.FedGA(beta=0.1) + ga.Scaffold(control="kept"),
            ga.LocalTraining(
                lr=ga.Steps(value=0.1, at_rounds={2: 0.05}),
                epochs=2,
                batch_size=7,
                momentum=0.5,
                weight_decay=0.01,
                clip_norm=1,
            ),
        ),
    ],
)
def test_the_bits_with_every_local_setting(algorithm, local):
    options = {"weights": "examples", "local": local}
    here = ga.run(blobs(), algorithm, rounds=4, clients_per_round=4, workers=0, **options)
    same(on_flower(blobs(), algorithm, **options), here)


class FaultyGrid(gf.InProcessGrid):
    """A grid on which things go wrong: ``fault(message, client, reply)`` may change a reply, raise, or return None."""

    def __init__(self, app, clients, fault=lambda message, client, reply: reply):
        super().__init__(app, clients)
        self.fault, self.log = fault, []

    def answer(self, message, client):
        self.log.append((message.metadata.message_type, client))
        reply = super().answer(message, client)
        return self.fault(message, client, reply)

    def pull_messages(self, message_ids):
        return [reply for reply in super().pull_messages(message_ids) if reply is not None]


def spoil(name, value):
    """Return a fault that replaces one array of the reply."""

    def fault(message, client, reply):
        arrays = reply.content.array_records["arrays"]
        if name in arrays:
            reply.content["arrays"] = ArrayRecord({**arrays, name: Array(value(arrays[name].numpy()))})
        return reply

    return fault


def error_reply(message, client, reply):
    from flwr.app import Error

    return Message(Error(code=2, reason="ValueError: broken"), reply_to=message)


FAULTS = {
    "raises": (error_reply, "it failed: ValueError: broken"),
    "silent": (lambda message, client, reply: None, "no answer within 0.3 s"),
    "nan": (
        lambda m, c, r: spoil("update", lambda a: a * float("nan"))(
            m, c, spoil("gradient", lambda a: a * float("nan"))(m, c, r)
        ),
        "NaN or infinite",
    ),
    "shape": (
        lambda m, c, r: spoil("update", lambda a: a[:-1])(m, c, spoil("gradient", lambda a: a[:-1])(m, c, r)),
        "has shape",
    ),
    "empty": (lambda m, c, r: Message(RecordDict({"metrics": MetricRecord()}), reply_to=m), "lacks the records"),
}


def fedga_by_hand(problem, x, *, beta, lr, steps, answered, reported):
    """One round of FedGA on quadratics in NumPy: ḡ over those who answered, the average over those who reported."""
    gradients = {i: problem.gradient(i, x) for i in answered}
    mean = sum(gradients.values()) / len(answered)
    total = 0
    for i in reported:
        start = x - beta * (mean - gradients[i])
        y = start.copy()
        for _ in range(steps):
            y = y - lr * problem.gradient(i, y)
        total = total + (y - start)
    return x + total / len(reported)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("phase", ["train.gradient", "train"])
def test_a_client_that_fails_is_left_out_and_the_others_give_what_the_formula_gives(kind, phase, caplog):
    """Client 2 of 4 fails in one phase of round 2 of 3; numbers from the formula, in NumPy."""
    problem = Quadratics.make(4)
    change, reason = FAULTS[kind]

    def fault(message, client, reply):
        hit = message.metadata.message_type == phase and message.metadata.group_id == "2" and client == 2
        return change(message, client, reply) if hit else reply

    grid = FaultyGrid(gf.client_app(problem.task()), 4, fault)
    strategy = gf.AlignedStrategy(
        ga.FedGA(beta=0.3), problem.task(), local=ga.LocalTraining(lr=0.05, steps=3), patience=QUICK
    )
    with caplog.at_level(logging.WARNING, logger="flwr.gradalign"):
        result = strategy.start(grid, num_rounds=3)
    x = problem.start
    for index in range(3):
        everyone, others = [0, 1, 2, 3], [0, 1, 3]
        answered = others if index == 1 and phase == "train.gradient" else everyone
        reported = others if index == 1 else everyone
        x = fedga_by_hand(problem, x, beta=0.3, lr=0.05, steps=3, answered=answered, reported=reported)
    torch.testing.assert_close(torch.as_tensor(final_point(result)), torch.as_tensor(x), rtol=1e-12, atol=1e-12)
    assert result.history["failed"] == [None, 0, 1, 0]
    assert result.history["reported"] == [None, 4, 3, 4]
    assert any("client 2 is left out" in text and reason in text for text in caplog.messages), caplog.messages
    if phase == "train.gradient":  # not asked to train in the round it failed in
        assert grid.log.count(("train", 2)) == 2

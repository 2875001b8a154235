"""Flower: the local engine's bits, faults that leave the others right, and Flower's own parts on our messages."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from typer.testing import CliRunner

import gradalign as ga
from conftest import Quadratics, blobs, final_point, vector

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'gradalign[flower]'")

from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod

import gradalign.flower as gf
from gradalign.algorithms import LargeBatchGradAlign
from gradalign.algorithms.plan import Algorithm
from gradalign.algorithms.view import Plan
from gradalign.cli.app import app
from gradalign.runs.metrics import read_metrics

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
    "running": ga.FedGA(beta=0.1, mean="running") + ga.FedProx(mu=0.1),
    "running-auto": ga.FedGA(beta="auto", length=0.5, mean="running"),
    "kept": ga.FedGA(beta="auto", length=0.5, mean="kept") + ga.FedInit(beta=0.1),
    "sharpness": ga.FedSAM(rho=0.1) + ga.FedLESAM(rho=0.05) + ga.FedCM(alpha=0.5),
}


def same(a: ga.Result, b: ga.Result) -> None:
    assert torch.equal(vector(a), vector(b))
    for name, column in a.history.items():
        assert name == "seconds" or column == b.history[name], name


def test_patience_may_be_without_end_and_rounds_are_no_arrays():
    assert gf.Patience(train_seconds=math.inf).train_seconds == math.inf
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(ga.GradalignError, match=r"patience.train_seconds must be above 0"):
            gf.Patience(train_seconds=value)
    with pytest.raises(ga.GradalignError, match="initial_arrays is an ArrayRecord, got 3; rounds are num_rounds="):
        gf.AlignedStrategy(ga.FedAvg(), blobs().model, local=LOCAL).start(None, 3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_bits_of_the_local_engine(name):
    """The promise: one spec and seed, the same parameters, buffers and metrics to the last bit."""
    local = ga.run(blobs(), ALGORITHMS[name], rounds=4, clients_per_round=4, local=LOCAL, workers=0)
    flower = ga.run(blobs(), ALGORITHMS[name], rounds=4, clients_per_round=4, local=LOCAL, engine="flower")
    same(flower, local)


@pytest.mark.parametrize(
    ("algorithm", "local"),
    [
        (LargeBatchGradAlign(beta=0.1), ga.LocalTraining(lr=0.1, batch_size=8, gradient_examples=8)),
        (ga.FedGA(beta="auto", length=0.5, mean="fresh"), ga.LocalTraining(lr=0.1, batch_size=8, gradient_examples=9)),
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
    options = {"rounds": 4, "clients_per_round": 4, "weights": "examples", "local": local}
    here = ga.run(blobs(), algorithm, workers=0, **options)
    same(ga.run(blobs(), algorithm, engine="flower", **options), here)


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


def spoil_both(value):
    return lambda m, c, r: spoil("update", value)(m, c, spoil("gradient", value)(m, c, r))


def error_reply(message, client, reply):
    return Message(Error(code=2, reason="ValueError: broken"), reply_to=message)


FAULTS = {
    "raises": (error_reply, "it failed: ValueError: broken"),
    "silent": (lambda message, client, reply: None, "no answer within 0.3 s"),
    "nan": (spoil_both(lambda a: a * float("nan")), "NaN or infinite"),
    "shape": (spoil_both(lambda a: a[:-1]), "has shape"),
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


def test_a_node_that_flower_calls_unavailable_is_not_waited_for_again():
    """The SuperLink's own answer for a dead node: it must say who it is before it is asked for work again."""

    def fault(message, client, reply):
        first = message.metadata.message_type == "train" and message.metadata.group_id == "1" and client == 2
        return Message(Error(code=5, reason="Node Unavailable"), reply_to=message) if first else reply

    grid = FaultyGrid(gf.client_app(blobs()), 6, fault)
    result = start(blobs(), ga.FedAvg(), grid, rounds=2, per_round=None)
    assert result.history["failed"] == [None, 1, 0]
    assert [grid.log.count(("query.partition", client)) for client in (1, 2)] == [1, 2]


def start(task, algorithm, grid, *, rounds=4, per_round=4, patience=QUICK, **more):
    strategy = gf.AlignedStrategy(
        algorithm, task, local=LOCAL, clients_per_round=per_round, patience=patience, measure=ga.Measure(), **more
    )
    return strategy.start(grid, num_rounds=rounds)


class ShuffledGrid(FaultyGrid):
    """Node ids in an order that has nothing to do with the partitions."""

    def node_id(self, client):
        return super().node_id((client * 5 + 3) % self._clients)


def test_the_strategy_gives_the_local_bits_whatever_nodes_flower_names():
    expected = ga.run(blobs(), KEEPING, rounds=4, clients_per_round=4, local=LOCAL, workers=0, weights="examples")
    task = blobs()
    only_a_model = ga.Task(model=task.model, clients=[task.clients[0]], test=task.test)  # the server has no data
    grid = ShuffledGrid(gf.client_app(task), 6)
    result = start(only_a_model, KEEPING, grid, weights="examples")
    assert torch.equal(vector(result), vector(expected))
    assert result.history["r"] == expected.history["r"]
    assert {kind for kind, _ in grid.log} == {"query.partition", "train.gradient", "train"}


def test_a_node_may_bring_only_its_own_data():
    """A task made from the context with the node's one client, as on a machine of its own."""
    expected = ga.run(blobs(), KEEPING, rounds=2, local=LOCAL, workers=0)
    task, made = blobs(), []

    def own_task(context):
        made.append(context.node_config["partition-id"])
        return ga.Task(model=task.model, clients=[task.clients[context.node_config["partition-id"]]])

    result = start(blobs(), KEEPING, FaultyGrid(gf.client_app(own_task), 6), rounds=2, per_round=None)
    assert torch.equal(vector(result), vector(expected))
    assert set(made) == set(range(6))


def test_a_task_with_all_clients_is_made_once_in_a_process():
    made = []

    def whole_task(context):
        made.append(1)
        return blobs()

    start(blobs(), ga.FedAvg(), FaultyGrid(gf.client_app(whole_task), 6), rounds=2, per_round=None)
    assert len(made) == 1


def test_one_phase_when_no_gradients_are_needed():
    grid = FaultyGrid(gf.client_app(blobs()), 6)
    strategy = gf.AlignedStrategy(ga.FedProx(mu=0.1), blobs().model, local=LOCAL, patience=QUICK)
    strategy.start(grid, num_rounds=2)
    assert [kind for kind, _ in grid.log] == ["query.partition"] * 6 + ["train"] * 12


@pytest.mark.parametrize("when", ["between the phases", "between the rounds", "reply lost"])
def test_lost_client_state_changes_no_bit(when):
    """A SuperNode's restart empties context.state, and a reply may be lost after the client moved its k_i on."""
    expected = ga.run(blobs(), KEEPING, rounds=4, local=LOCAL, workers=0)
    lost = []

    def fault(message, client, reply):
        kind, group = message.metadata.message_type, message.metadata.group_id
        if client != 1 or kind == "query.partition":
            return reply
        if when == "between the phases" and kind == "train.gradient":
            grid.context(1).state.clear()
        if when == "between the rounds" and kind == "train":
            grid.context(1).state.clear()
        if when == "reply lost" and kind == "train" and group == "3" and not lost:
            lost.append(group)
            return None
        return reply

    grid = FaultyGrid(gf.client_app(blobs()), 6, fault)
    result = start(blobs(), KEEPING, grid, per_round=None, min_fraction=1.0)
    assert torch.equal(vector(result), vector(expected))
    assert result.history["failed"] == [None, 0, 0, 0, 0]


def test_state_lives_at_the_client():
    grid = FaultyGrid(gf.client_app(blobs()), 6)
    start(blobs(), KEEPING, grid)
    sampled = {client for kind, client in grid.log if kind == "train"}
    for client in sampled:
        kept = grid.context(client).state.array_records["gradalign.kept"]
        assert {name.split("@")[0] for name in kept} == {"scaffold", "feddyn"}
        assert len(kept) <= 4  # two versions of each
        assert "gradalign.gradient" in grid.context(client).state.array_records


@pytest.mark.parametrize("phase", ["train.gradient", "train"])
def test_too_few_answers_are_retried_then_stop_with_a_checkpoint_that_goes_on(tmp_path, phase):
    """From round 3 on three of six clients fall silent; 60 % are needed. When they are back, the bits are the same."""
    expected = ga.run(blobs(), KEEPING, rounds=5, local=LOCAL, workers=0)
    options = {"rounds": 5, "per_round": None, "min_fraction": 0.6, "out": tmp_path / "run", "checkpoint_seconds": 0}

    def fault(message, client, reply):
        hit = message.metadata.message_type == phase and message.metadata.group_id == "3" and client < 3
        return None if hit else reply

    grid = FaultyGrid(gf.client_app(blobs()), 6, fault)
    needed = "only 3 of 6 clients answered the .* phase of round 3, and 4 are needed; client 0: no answer within"
    with pytest.raises(ga.GradalignError, match=needed):
        start(blobs(), KEEPING, grid, **options)
    # Training: rounds 1 and 2, then 3 and its retry. Gradients: measured at three points, then asked for again twice.
    assert grid.log.count((phase, 0)) == (2 + 2 if phase == "train" else 3 + 2)
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    result = start(blobs(), KEEPING, gf.InProcessGrid(gf.client_app(blobs()), 6, run_id=2), **options)
    assert torch.equal(vector(result), vector(expected))


class LateGrid(FaultyGrid):
    """A grid whose nodes connect one after the other, one at each look."""

    def __init__(self, app, clients, there):
        super().__init__(app, clients)
        self.there = there

    def get_node_ids(self):
        self.there += 1
        return super().get_node_ids()[: max(0, self.there)]


def test_waiting_for_nodes_has_an_end():
    with pytest.raises(ga.GradalignError, match=r"no node told its num-partitions within 0.3 s"):
        start(blobs(), ga.FedAvg(), LateGrid(gf.client_app(blobs()), 6, there=-(10**6)))
    with pytest.raises(ga.GradalignError, match=r"only 0 of 4 clients answered .* no connected node has its data"):
        start(blobs(), ga.FedAvg(), LateGrid(gf.client_app(blobs()), 6, there=-(10**6)), clients=6)


def test_nodes_that_come_late_are_waited_for():
    expected = ga.run(blobs(), ga.FedGA(beta=0.1), rounds=4, clients_per_round=4, local=LOCAL, workers=0)
    patience = gf.Patience(connect_seconds=20, poll_seconds=0.01)
    result = start(blobs(), ga.FedGA(beta=0.1), LateGrid(gf.client_app(blobs()), 6, there=-3), patience=patience)
    assert torch.equal(vector(result), vector(expected))


class MovingGrid(FaultyGrid):
    """Every client comes back under another node id in every round, as after a restart of its SuperNode."""

    moved = 0

    def node_id(self, client):
        return super().node_id(client) + self.moved

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        if any(reply.metadata.message_type == "train" for reply in replies):
            self.moved += 1
            self.__dict__.pop("_client_of", None)
        return replies


def test_a_node_that_comes_back_under_another_number_is_found():
    expected = ga.run(blobs(), KEEPING, rounds=4, local=LOCAL, workers=0)
    result = start(blobs(), KEEPING, MovingGrid(gf.client_app(blobs()), 6), per_round=None)
    assert torch.equal(vector(result), vector(expected))


def test_a_node_without_a_partition_is_named(caplog):
    grid = FaultyGrid(gf.client_app(blobs()), 6)
    del grid.context(0).node_config["partition-id"]
    with caplog.at_level(logging.WARNING, logger="flwr.gradalign"):
        result = start(blobs(), ga.FedAvg(), grid, rounds=1, per_round=None)
    assert result.history["reported"] == [None, 5]
    assert any("has no partition-id; start it with" in text for text in caplog.messages)


def test_another_model_at_the_client_is_a_clear_reason(caplog):
    other = ga.Task(model=lambda: torch.nn.Linear(8, 4), clients=blobs().clients)
    with pytest.raises(ga.GradalignError, match="both sides must make the same model"):
        start(blobs(), ga.FedAvg(), FaultyGrid(gf.client_app(other), 6), rounds=1)


class Pinned(ga.FedProx):
    """An algorithm of the user's own."""


def test_algorithms_of_ones_own_are_given_to_both_sides():
    with pytest.raises(ga.GradalignError, match='does not know the algorithm "pinned"'):
        start(blobs(), Pinned(mu=0.3), FaultyGrid(gf.client_app(blobs()), 6))
    result = start(blobs(), Pinned(mu=0.3), FaultyGrid(gf.client_app(blobs(), algorithms=[Pinned]), 6))
    expected = ga.run(blobs(), ga.FedProx(mu=0.3), rounds=4, clients_per_round=4, local=LOCAL, workers=0)
    assert torch.equal(vector(result), vector(expected))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uphill(Algorithm):
    """Displaces by β g_i, without a gradient phase: a client takes its own gradient before it trains."""

    beta: float = 0.1
    uses_own_gradient = True

    def plan(self, view):
        return Plan(displacement=self.beta * view.gradient)


def test_a_client_takes_its_own_gradient_without_a_trip_to_the_server():
    local = dataclasses.replace(LOCAL, gradient_examples=8)
    options = {"rounds": 2, "local": local, "measure": ga.Measure(train_every=0)}
    here = ga.run(blobs(), Uphill(), workers=0, **options)
    same(ga.run(blobs(), Uphill(), engine="flower", **options), here)
    plain = ga.run(blobs(), ga.FedAvg(), workers=0, **options)
    assert not torch.equal(vector(here), vector(plain))
    assert here.history["communication_rounds"] == plain.history["communication_rounds"]


# Flower's own parts


def test_flowers_size_mod_sees_our_messages():
    from flwr.clientapp.mod import message_size_mod

    expected = ga.run(blobs(), KEEPING, rounds=2, local=LOCAL, workers=0)
    result = start(
        blobs(), KEEPING, FaultyGrid(gf.client_app(blobs(), mods=[message_size_mod]), 6), rounds=2, per_round=None
    )
    assert torch.equal(vector(result), vector(expected))


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod])
def test_flowers_clipping_mods_clip_each_update(mod):
    """FedAvg with every Δ_i scaled to norm 0.01 when longer: the formula by hand, on quadratics."""
    problem, clip = Quadratics.make(4), 0.01
    app = gf.client_app(problem.task(), mods=[gf.on_update(mod)])
    local = ga.LocalTraining(lr=0.05, steps=3)
    strategy = gf.AlignedStrategy(
        ga.FedAvg(), problem.task(), local=local, patience=QUICK, train_config={"clipping_norm": clip}
    )
    result = strategy.start(FaultyGrid(app, 4), num_rounds=2)
    x = problem.start
    for _ in range(2):
        total = 0
        for i in range(4):
            y = x.copy()
            for _ in range(3):
                y = y - 0.05 * problem.gradient(i, y)
            total = total + (y - x) * min(1.0, clip / float(((y - x) ** 2).sum() ** 0.5))
        x = x + total / 4
    torch.testing.assert_close(torch.as_tensor(final_point(result)), torch.as_tensor(x), rtol=1e-9, atol=1e-12)


def test_a_clipping_norm_out_of_reach_leaves_every_bit_of_both_phases():
    expected = ga.run(blobs(), KEEPING, rounds=3, local=LOCAL, workers=0)
    app = gf.client_app(blobs(), mods=[gf.on_update(fixedclipping_mod)])
    result = start(blobs(), KEEPING, FaultyGrid(app, 6), rounds=3, per_round=None, train_config={"clipping_norm": 1e9})
    assert torch.equal(vector(result), vector(expected))


def test_local_privacy_noise_reaches_the_server():
    """With Δ clipped to 1e-9 the average of 4 noisy updates of deviation s has deviation s/2, within 5 of its own."""
    app = gf.client_app(blobs(clients=4), mods=[gf.on_update(LocalDpMod(1e-9, 1.0, 10.0, 0.1))])
    task = blobs(clients=4)
    result = gf.AlignedStrategy(ga.FedAvg(), task, local=LOCAL, patience=QUICK).start(FaultyGrid(app, 4), num_rounds=1)
    before = torch.nn.utils.parameters_to_vector(task.make_model(0).parameters())
    moved = torch.nn.utils.parameters_to_vector(result.model.parameters()) - before
    moved = moved.detach()
    deviation = (2 * torch.log(torch.tensor(1.25 / 0.1))).sqrt() / 10.0 / 2
    assert abs(float(moved.std() / deviation) - 1) < 5 / (2 * len(moved)) ** 0.5


def test_a_mod_that_fails_leaves_the_client_out():
    app = gf.client_app(blobs(), mods=[gf.on_update(fixedclipping_mod)])
    with pytest.raises(ga.GradalignError, match="requires the key 'clipping_norm'"):
        start(blobs(), ga.FedAvg(), FaultyGrid(app, 6), rounds=1)


# A training loop of one's own


def own_app(task, **total):
    """The loops of docs/flower.md on whole clients: what client_app does with steps=3 and no batch size."""
    app = gf.aligned_app(examples=lambda context: len(task.clients[context.node_config["partition-id"]][1]))

    def data(context):
        return task.clients[context.node_config["partition-id"]]

    @app.train("gradient")
    def gradient(message, context):
        model, (x, y) = task.model(), data(context)
        halves = ((x[:8], y[:8]), (x[8:], y[8:]))  # unequal batches: their losses are weighted
        return gf.gradient_reply(message, context, model, ((F.cross_entropy(model(x), y), len(y)) for x, y in halves))

    @app.train()
    def train(message, context):
        model, (x, y) = task.model(), data(context)
        work = gf.LocalRound(message, context, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
        for _ in range(3):
            optimizer.zero_grad()
            value = F.cross_entropy(model(x), y)
            value.backward()
            work.correct()
            optimizer.step()
        return work.reply(loss=float(value.detach()), examples=len(y), seen=3 * len(y), **total)

    return app


def linear_task():
    def model():
        return torch.nn.Sequential(torch.nn.Linear(8, 4)).double()

    return ga.Task(model=model, clients=[(x.double(), y) for x, y in blobs().clients])


def test_a_loop_of_ones_own_trains_like_the_task():
    """The same mathematics in another order of operations: equal within rounding after three rounds."""
    task = linear_task()
    algorithm = ga.FedGA(beta=0.2) + ga.FedProx(mu=0.1) + ga.Scaffold(control="kept") + ga.FedDyn(alpha=0.1)
    expected = ga.run(task, algorithm, rounds=3, local=ga.LocalTraining(lr=0.1, steps=3), workers=0)
    strategy = gf.AlignedStrategy(
        algorithm, task, local=ga.LocalTraining(lr=0.1, steps=3), patience=QUICK, min_fraction=1.0
    )
    result = strategy.start(FaultyGrid(own_app(task), 6), num_rounds=3)
    torch.testing.assert_close(vector(result), vector(expected), rtol=1e-10, atol=1e-10)


def test_a_loop_of_ones_own_may_say_its_total_step_size():
    task, algorithm = linear_task(), ga.Scaffold(control="kept")

    def run(**total):
        strategy = gf.AlignedStrategy(algorithm, task, local=LOCAL, patience=QUICK)
        return vector(strategy.start(FaultyGrid(own_app(task, **total), 6), num_rounds=2))

    assert torch.equal(run(total_step_size=LOCAL.lr * 3), run())
    assert not torch.equal(run(total_step_size=0.7), run())


# The command line


def invoke(*words):
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


RECIPE = """
name = "small"
rounds = 12
[task]
clients = 8
classes_per_client = 3
[algorithm]
name = "fedga+scaffold+fedadam"
control = "kept"
beta = 0.1
[local]
steps = 2
batch_size = 16
[clients]
per_round = 4
"""


def test_the_command_line_runs_on_flower_and_resumes_after_kill_9(tmp_path):
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE)
    assert invoke("run", recipe, "--out", tmp_path / "local", "--workers", 0).exit_code == 0
    run = ["run", recipe, "--out", tmp_path / "flower", "--engine", "flower", "--checkpoint-seconds", 0]
    command = [sys.executable, "-m", "gradalign", *(str(word) for word in run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not (tmp_path / "flower/metrics.jsonl").exists() or len(read_metrics(tmp_path / "flower")) < 5:
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "flower/summary.json").exists()
    assert invoke(*run, "--resume").exit_code == 0
    rows = [
        [{key: value for key, value in row.items() if key != "seconds"} for row in read_metrics(tmp_path / name)]
        for name in ("local", "flower")
    ]
    assert rows[0] == rows[1]
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("local", "flower")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_an_unknown_engine_is_refused_before_anything_is_written(tmp_path):
    done = invoke("run", "digits", "--engine", "ray", "--out", tmp_path / "r")
    assert done.exit_code == 2
    assert done.stderr == 'error: the engine must be local or flower or distributed, got "ray"\n'
    assert not (tmp_path / "r").exists()


def test_without_flower_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "gradalign.flower")
    monkeypatch.setitem(sys.modules, "flwr", None)
    done = invoke("run", "digits", "--engine", "flower", "--out", tmp_path / "r")
    assert done.exit_code == 2
    wanted = "Flower needs the package flwr; install it with: pip install 'gradalign[flower]'"
    assert done.stderr == f"error: {wanted}\n"
    assert not (tmp_path / "r").exists()


def test_help_loads_neither_torch_nor_flower():
    code = (
        "import sys; from typer.testing import CliRunner; from gradalign.cli.app import app\n"
        "assert CliRunner().invoke(app, ['run', '--help']).exit_code == 0\n"
        "assert not {'torch', 'flwr'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The documentation


def test_the_ten_lines_of_the_documentation_train(tmp_path, monkeypatch):
    """Both blocks of docs/flower.md as they stand, with the reader's own Net and load_data, on Flower's apps."""
    page = (Path(__file__).parent.parent / "docs" / "flower.md").read_text(encoding="utf-8")
    server, client = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    task = blobs()

    def load_data(context):
        data = torch.utils.data.TensorDataset(*task.clients[context.node_config["partition-id"]])
        return torch.utils.data.DataLoader(data, batch_size=5)

    mine = types.ModuleType("my_app")
    mine.Net, mine.load_data = lambda: torch.nn.Linear(8, 4), load_data
    monkeypatch.setitem(sys.modules, "my_app", mine)
    monkeypatch.chdir(tmp_path)
    names = {"server": {}, "client": {}}
    exec(compile(server, "server_app.py", "exec"), names["server"])
    exec(compile(client, "client_app.py", "exec"), names["client"])
    grid = FaultyGrid(names["client"]["app"], 6)
    names["server"]["app"](grid, grid.context(0))
    assert grid.log.count(("train.gradient", 0)) == grid.log.count(("train", 0)) == 3
    model = torch.nn.Linear(8, 4)
    model.load_state_dict(torch.load("final_model.pt"))
    inputs, labels = task.test
    assert float((model(inputs).argmax(1) == labels).double().mean()) > 0.8
    changed = [line for block in (server, client) for line in block.splitlines() if re.search(r"# +\d+", line)]
    assert len(changed) == 10

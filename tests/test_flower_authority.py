"""Flower: the server's numbers are those that count, whatever happens to a reply on its way; no setting is ignored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gradalign as ga
from conftest import Quadratics, final_point, vector

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'gradalign[flower]'")

from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.clientapp.mod import fixedclipping_mod

import gradalign.flower as gf
from gradalign.algorithms import LargeBatchGradAlign

QUICK = gf.Patience(connect_seconds=0.3, gradient_seconds=0.3, train_seconds=0.3, retries=0, poll_seconds=0.02)
SIZES = (1, 2, 3, 5)
LR, STEPS, CLIP, BETA, ALPHA = 0.05, 3, 0.05, 0.3, 0.4
CLIENTS = range(len(SIZES))
ALGORITHMS = {
    "scaffold-kept": ga.Scaffold(control="kept"),
    "feddyn": ga.FedDyn(alpha=ALPHA),
    "fedga": ga.FedGA(beta=BETA),
    "scaffold": ga.Scaffold(),
}


class LoggedGrid(gf.InProcessGrid):
    """A grid that counts training messages and may change replies after they have left the client."""

    def __init__(self, app, clients, change=lambda message, client, reply: reply):
        super().__init__(app, clients)
        self.change, self.log = change, []

    def answer(self, message, client):
        self.log.append((message.metadata.message_type, client))
        return self.change(message, client, super().answer(message, client))


def clipped(vector):
    return vector * min(1.0, CLIP / float(np.linalg.norm(vector)))


def by_hand(problem, name, rounds, on_way=lambda client, vector: clipped(vector)):
    """Return x and the k_i after some rounds in NumPy; ``on_way`` is what happens to each g_i and Δ_i."""
    p = [size / sum(SIZES) for size in SIZES]
    x, s = problem.start, np.zeros(3)
    kept = [np.zeros(3) for _ in CLIENTS]
    for _ in range(rounds):
        sent = [on_way(i, problem.gradient(i, x)) for i in CLIENTS]
        mean = sum(p[i] * sent[i] for i in CLIENTS)
        total, change = 0.0, 0.0
        for i in CLIENTS:
            c = {"scaffold-kept": s - kept[i], "feddyn": -kept[i], "scaffold": mean - sent[i]}.get(name, 0.0)
            start = x - BETA * (mean - sent[i]) if name == "fedga" else x
            y = start.copy()
            for _ in range(STEPS):
                y = y - LR * (problem.gradient(i, y) + c + (ALPHA if name == "feddyn" else 0.0) * (y - x))
            update = on_way(i, y - start)
            total = total + p[i] * update
            law = {"scaffold-kept": -s - update / (LR * STEPS), "feddyn": -ALPHA * update}.get(name, 0.0)
            kept[i] = kept[i] + law
            change = change + p[i] * law
        s = s + change
        x = x + total - (s / ALPHA if name == "feddyn" else 0.0)
    return x, kept


def strategy(algorithm, task, **more):
    local = ga.LocalTraining(lr=LR, steps=STEPS)
    return gf.AlignedStrategy(algorithm, task, **{"local": local, "patience": QUICK, "weights": "examples"} | more)


def remembered(grid, label, client, rounds):
    """Return the k_i that a client holds after this many rounds."""
    return grid.context(client).state.array_records["gradalign.kept"][f"{label}@1:{rounds - 1}"].numpy()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_both_sides_mean_the_vectors_that_were_sent(name):
    """With Δ_i (and g_i) clipped by Flower's own mod, three rounds are those of the formula with clipped vectors."""
    problem = Quadratics.make(4, examples=SIZES)
    grid = LoggedGrid(gf.client_app(problem.task(), mods=[gf.on_update(fixedclipping_mod)]), 4)
    run = strategy(ALGORITHMS[name], problem.task(), train_config={"clipping_norm": CLIP})
    result = run.start(grid, num_rounds=3)
    x, kept = by_hand(problem, name, 3)
    np.testing.assert_allclose(final_point(result), x, rtol=1e-10, atol=1e-13)
    raw, _ = by_hand(problem, name, 3, lambda client, vector: vector)
    assert np.linalg.norm(raw - x) > 0.01  # the clipping is felt
    for client in CLIENTS if ALGORITHMS[name].keeps else ():
        held = remembered(grid, ALGORITHMS[name].label, client, 3)
        np.testing.assert_allclose(held, kept[client], rtol=1e-10, atol=1e-13)
    assert grid.log.count(("train", 1)) == 3  # nobody had to be asked twice


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_reply_changed_behind_the_clients_back_binds_the_client_too(name):
    """Client 1's vectors are halved where no mod of the app can see it: it takes over what the server has of it."""
    problem = Quadratics.make(4, examples=SIZES)

    def halve(message, client, reply):
        if client == 1 and "arrays" in reply.content.array_records:
            arrays = reply.content.array_records["arrays"]
            changed = {key: Array(a.numpy() / 2) for key, a in arrays.items() if key in ("update", "gradient")}
            reply.content["arrays"] = ArrayRecord({**arrays, **changed})
        return reply

    grid = LoggedGrid(gf.client_app(problem.task()), 4, halve)
    result = strategy(ALGORITHMS[name], problem.task()).start(grid, num_rounds=3)
    x, _ = by_hand(problem, name, 3, lambda client, vector: vector / 2 if client == 1 else vector)
    np.testing.assert_allclose(final_point(result), x, rtol=1e-10, atol=1e-13)
    assert grid.log.count(("train", 1)) == 4  # asked again once; from then on the server sends its vectors along
    assert grid.log.count(("train", 2)) == 3


# A training loop of one's own


def uneven_task():
    generator = torch.Generator().manual_seed(3)
    clients = []
    for size in (4, 9, 20, 33):
        labels = torch.randint(3, (size,), generator=generator)
        clients.append((torch.randn(size, 5, generator=generator).double() + labels[:, None], labels))
    return ga.Task(model=lambda: torch.nn.Sequential(torch.nn.Linear(5, 3)).double(), clients=clients)


def own_app(task, *, steps=2, look=False, strip=False, corrects=True, says=len):
    """The two functions of docs/flower.md on whole clients, and an app that was told nothing about examples."""
    app = gf.aligned_app()

    def data(context):
        return task.clients[context.node_config["partition-id"]]

    @app.train("gradient")
    def gradient(message, context):
        model, (x, y) = task.model(), data(context)
        batches = ((x[i : i + 4], y[i : i + 4]) for i in range(0, len(y), 4))
        losses = ((F.cross_entropy(model(x), y), len(y)) for x, y in batches)
        return gf.gradient_reply(message, context, model, losses)

    @app.train()
    def train(message, context):
        model, (x, y) = task.model(), data(context)
        work = gf.LocalRound(message, context, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=work.local.momentum if look else 0.0)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if corrects:
                work.correct()
            optimizer.step()
        answer = work.reply(loss=float(loss.detach()), examples=says(y), seen=steps * len(y))
        if strip:
            metrics = answer.content.metric_records["metrics"]
            answer.content["metrics"] = MetricRecord({k: v for k, v in metrics.items() if k != "num-examples"})
        return answer

    return app


TWO_STEPS = ga.LocalTraining(lr=0.1, steps=2)


@pytest.mark.parametrize("algorithm", [ga.FedAvg(), ga.FedGA(beta=0.3) + ga.FedDyn(alpha=0.1)])
def test_replies_weigh_clients_that_told_no_size(algorithm):
    """Clients of 4, 9, 20 and 33 examples: weights="examples" is what the local engine makes of the same task."""
    task, local = uneven_task(), TWO_STEPS
    expected = ga.run(task, algorithm, rounds=3, local=local, weights="examples", workers=0)
    uniform = ga.run(task, algorithm, rounds=3, local=local, workers=0)
    result = strategy(algorithm, task, local=local).start(LoggedGrid(own_app(task), 4), num_rounds=3)
    torch.testing.assert_close(vector(result), vector(expected), rtol=1e-10, atol=1e-10)
    assert float((vector(uniform) - vector(expected)).norm()) > 1e-3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"strip": True}, "no number called num-examples"), ({"says": lambda y: 0}, "needs at least 1")],
)
def test_a_reply_without_its_examples_is_named(options, sentence):
    task = uneven_task()
    with pytest.raises(ga.GradalignError, match=rf"only 0 of 4 clients answered the training phase.*{sentence}"):
        strategy(ga.FedAvg(), task, local=TWO_STEPS).start(LoggedGrid(own_app(task, **options), 4), num_rounds=1)


def test_a_size_that_is_no_number_of_examples_keeps_a_node_out(caplog):
    app = gf.aligned_app(examples=lambda context: 0)
    with pytest.raises(ga.GradalignError, match="only 0 of 4"):
        strategy(ga.FedAvg(), uneven_task(), clients=4).start(LoggedGrid(app, 4), num_rounds=1)
    assert "it says that it has 0 examples" in caplog.text


def test_a_loop_of_ones_own_takes_as_many_steps_as_the_algorithm_allows():
    task = uneven_task()
    one_step = strategy(LargeBatchGradAlign(beta=0.1), task, local=ga.LocalTraining(lr=0.1))
    with pytest.raises(ga.GradalignError, match=r"asks for local\.steps = 1, and this loop took 2"):
        one_step.start(LoggedGrid(own_app(task), 4), num_rounds=1)


def test_a_beta_that_sets_itself_needs_the_steps_of_a_loop_of_ones_own():
    task = uneven_task()
    auto = strategy(ga.FedGA(beta="auto", length=0.5, mean="fresh"), task, local=TWO_STEPS)
    with pytest.raises(ga.GradalignError, match=r"call correct\(\) before every optimizer step"):
        auto.start(LoggedGrid(own_app(task, corrects=False), 4), num_rounds=1)


@pytest.mark.parametrize("look", [True, False])
def test_settings_that_a_loop_of_ones_own_leaves_aside_are_told_once(look, caplog):
    warmup = ga.Warmup(value=0.1, rounds=1)  # the first round's lr is 0
    task, local = uneven_task(), ga.LocalTraining(lr=warmup, steps=2, momentum=0.5)
    grid = LoggedGrid(own_app(task, look=look), 4)
    result = strategy(ga.FedDyn(alpha=0.1), task, local=local).start(grid, num_rounds=2)
    assert caplog.text.count("did not look at the strategy's local: momentum") == (0 if look else 1)
    if look:
        expected = ga.run(task, ga.FedDyn(alpha=0.1), rounds=2, local=local, weights="examples", workers=0)
        torch.testing.assert_close(vector(result), vector(expected), rtol=1e-10, atol=1e-10)


def test_the_gradient_phase_of_ones_own_loop_stops_at_gradient_examples():
    """Of 33 examples in batches of 4, eight are asked for: the gradient is that of the first two batches."""
    task = uneven_task()
    seen = {}

    def look(message, client, reply):
        if message.metadata.message_type == "train.gradient":
            seen[client] = reply.content.metric_records["metrics"]["examples-seen"]
        return reply

    local, grid = ga.LocalTraining(lr=0.1, steps=2, gradient_examples=8), LoggedGrid(own_app(task), 4, look)
    strategy(ga.FedGA(beta=0.1), task, local=local, weights="uniform").start(grid, num_rounds=1)
    assert seen == {0: 4, 1: 8, 2: 8, 3: 8}
    with pytest.raises(ga.GradalignError, match=r"no number called num-examples.*give aligned_app\(examples=…\)"):
        strategy(ga.FedGA(beta=0.1), task, local=local).start(grid, num_rounds=1)  # eight seen are not its weight

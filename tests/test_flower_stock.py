"""Flower apps as they stand, which know of no algorithm: numbers from formulas, through their own train functions."""

from __future__ import annotations

import itertools
import random
import re
import types

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gradalign as ga
from conftest import PointModel, Quadratics, quadratic_value, vector

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'gradalign[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp as FlowerClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
)
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod

import gradalign.flower as gf
from gradalign.flower.messages import Order
from gradalign.flower.own_loop import add_up
from gradalign.flower.steps import Steps

SIZES = (1, 2, 3, 5)
P = [size / sum(SIZES) for size in SIZES]
LR, STEPS, BETA, DECAY = 0.05, 3, 0.3, 0.6
QUICK = gf.Patience(connect_seconds=0.3, gradient_seconds=0.3, train_seconds=0.3, retries=0, poll_seconds=0.02)
RUNNING = ga.FedGA(beta=BETA, mean="running", decay=DECAY)


@pytest.fixture
def problem():
    return Quadratics.make(4, examples=SIZES)


def quadratic_app(problem, kind=gf.ClientApp, optimizer=torch.optim.SGD, options=None, inside=None, **more):
    """An app as Flower's own quickstart has it, on whole clients of quadratics."""
    app = kind(**more)

    def load(message, context):
        model = PointModel(np.zeros(3))
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        i = context.node_config["partition-id"]
        return model, (torch.as_tensor(problem.matrices[i]), torch.as_tensor(problem.centres[i]))

    @app.train(mods=inside)
    def train(message, context):
        model, batch = load(message, context)
        config = message.content["config"]
        steps = optimizer(model.parameters(), **({"lr": config["lr"]} | (options or {})))
        for _ in range(STEPS):
            steps.zero_grad()
            loss = quadratic_value(model, batch)[0].mean()
            loss.backward()
            steps.step()
        metrics = {"train_loss": loss.item(), "round": config["server-round"], "num-examples": len(batch[0])}
        arrays = ArrayRecord(model.state_dict())
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        model, batch = load(message, context)
        found = {
            "eval_loss": quadratic_value(model, batch)[0].mean().item(),
            "mine": 7.0,
            "num-examples": len(batch[0]),
        }
        return Message(RecordDict({"metrics": MetricRecord(found)}), reply_to=message)

    return app


def start_arrays(problem):
    return ArrayRecord(PointModel(problem.start).state_dict())


def by_hand(problem, rounds, on_way=lambda v: v, beta=BETA):
    """Return x after rounds of FedGA with a running mean, in NumPy: s is known from the second round on."""
    x, s = problem.start, None
    for seen in range(1, rounds + 1):
        total = 0.0
        for i in range(4):
            v = 0.0 if s is None else -beta * (s - problem.gradient(i, x))
            y = x + v
            for _ in range(STEPS):
                y = y - LR * problem.gradient(i, y)
            total = total + P[i] * on_way(y - (x + v))
        new, share = -total / (LR * STEPS), (1 - DECAY) / (1 - DECAY**seen)
        s = new if s is None else s + share * (new - s)
        x = x + total
    return x


def play(strategy, app, problem, rounds=4, grid=None, **more):
    grid = grid or gf.InProcessGrid(app, 4)
    random.seed(0)  # Flower draws the order in which it sums from here
    config = ConfigRecord({"lr": LR})
    return strategy.start(grid, start_arrays(problem), num_rounds=rounds, train_config=config, **more)


def point(result):
    return result.arrays["w"].numpy()


def test_one_trip_on_flowers_own_fedavg_is_the_formula(problem):
    result = play(gf.OneTrip(FedAvg(), RUNNING), quadratic_app(problem), problem)
    np.testing.assert_allclose(point(result), by_hand(problem, 4), rtol=1e-12)
    assert np.linalg.norm(by_hand(problem, 4) - by_hand(problem, 4, beta=0.0)) > 0.01
    assert result.train_metrics_clientapp[3]["round"] == pytest.approx(3.0)  # the user's own, and nothing of ours
    assert set(result.train_metrics_clientapp[3]) == {"train_loss", "round"}
    assert result.evaluate_metrics_clientapp[4]["mine"] == pytest.approx(7.0)


class Noting(gf.InProcessGrid):
    """Writes down each round's β and gradient examples as the clients are told them, and what clients say."""

    def __init__(self, app, clients):
        super().__init__(app, clients)
        self.betas, self.limits, self.said = {}, {}, []

    def answer(self, message, client):
        reply = super().answer(message, client)
        if message.metadata.message_type == "train":
            order = Order.of(message)
            (part,) = (one for one in order.parts if one["name"] == "fedga")
            self.betas[order.round], self.limits[order.round] = part["beta"], order.limit
            self.said += [set(reply.content["metrics"])] if reply.has_content() else []
        return reply


def one_by_one(problem):
    """Losses of single examples, of which a limit takes the first ones."""

    def gradient(message, context):
        model, i = PointModel(np.zeros(3)), context.node_config["partition-id"]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        pairs = zip(torch.as_tensor(problem.matrices[i]), torch.as_tensor(problem.centres[i]), strict=True)
        return model, ((quadratic_value(model, (a[None], b[None]))[0].mean(), 1) for a, b in pairs)

    return gradient


def fails_at_times(message, context, call_next):
    """A mod with which client 2 falls out of two rounds, one of them among the first that measure."""
    training = message.metadata.message_type == "train" and context.node_config["partition-id"] == 2
    if training and message.content["config"]["server-round"] in (4, 9):
        raise RuntimeError("no power")
    return call_next(message, context)


SHORT = ga.FedGA(decay=DECAY, length=ga.OffUntil(value=0.02, share=0.1))


@pytest.mark.parametrize(
    ("algorithm", "limit"), [(ga.FedGA(), None), (SHORT, None), (SHORT, 2), (SHORT + ga.FedProx(mu=0.1), 2)]
)
def test_a_beta_that_sets_itself_is_the_same_around_flowers_fedavg(problem, algorithm, limit):
    """The β of every round and the model of ``AlignedStrategy``: clients of 1, 2, 3 and 5 examples, one that fails."""
    app = quadratic_app(problem, gradient=one_by_one(problem), mods=[fails_at_times])
    ours, theirs = Noting(app, 4), Noting(app, 4)
    strategy = gf.OneTrip(FedAvg(fraction_evaluate=0.0), algorithm, gradient_examples=limit)
    found = play(strategy, app, problem, rounds=20, grid=ours)
    local = ga.LocalTraining(lr=LR, gradient_examples=limit)
    aligned = gf.AlignedStrategy(algorithm, local=local, patience=QUICK, fraction_evaluate=0.0)
    expected = play(aligned, app, problem, rounds=20, grid=theirs)
    betas = expected.history["beta"][1:]
    assert [ours.betas[index] for index in range(20)] == pytest.approx(betas, rel=1e-9)
    np.testing.assert_allclose(point(found), point(expected), rtol=1e-9)
    # The first tenth is FedAvg's; then a round measures before β is more than 0, two where half of the examples count.
    zeros = 3 if limit is None else 4
    assert betas[:zeros] == [0.0] * zeros
    assert min(betas[zeros:]) > 0.0
    assert max(betas) == pytest.approx(LR / 2, rel=1e-12) if limit is None else max(betas) < LR / 2
    assert ours.limits == theirs.limits
    assert set(ours.limits.values()) == {limit, limit and 1}
    assert found.train_metrics_clientapp[20].keys() == {"train_loss", "round"}  # nothing of ours
    assert sum("fact.fedga.square" in said for said in ours.said) == 18 * 4 - 2  # every answer after the first tenth
    assert not any("fact.fedga.square" in said for said in ours.said[:8])
    # Each client that answers says it trained on all of its examples; from the third round on its gradient counts, too.
    answers = [(size, r) for r in range(20) for i, size in enumerate(SIZES) if (i, r) not in ((2, 3), (2, 8))]
    looked_at = sum(min(size, ours.limits[r] or size) for size, r in answers if r >= 2)
    assert expected.history["examples"][-1] == sum(size for size, _ in answers) + looked_at


def test_a_beta_that_sets_itself_sees_trained_arrays_alone():
    """Batch norm's running means move, too, and are no disagreement; α of clients with momentum is more than lr."""
    task, rounds = linear_task(), 5
    algorithm = ga.FedGA(length=ga.OffUntil(value=0.02, round=1))
    ours = Noting(task_app(task, momentum=0.5), 4)
    arrays = ArrayRecord(task.make_model(0).state_dict())
    found = gf.OneTrip(FedAvg(fraction_evaluate=0.0), algorithm).start(ours, arrays, rounds)
    local = ga.LocalTraining(lr=0.1, steps=3, momentum=0.5)
    expected = ga.run(task, algorithm, rounds=rounds, local=local, weights="examples", workers=0)
    betas = expected.history["beta"][1:]
    assert [ours.betas[index] for index in range(rounds)] == pytest.approx(betas, rel=1e-9)
    assert 0.0 < betas[-1] < 0.1 * (1.0 + 1.5 + 1.75) / 3 / 2  # within what α/2 allows: there ρ/d is less
    for name, value in expected.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(found.arrays.to_torch_state_dict()[name], value, rtol=1e-9, atol=1e-9)


def test_equal_clients_are_left_to_flowers_fedavg():
    task, length = linear_task(), ga.OffUntil(value=0.5, round=1)
    same = ga.Task(model=task.model, clients=[task.clients[0]] * 4)
    ours, arrays = Noting(task_app(same), 4), ArrayRecord(task.make_model(0).state_dict())
    gf.OneTrip(FedAvg(fraction_evaluate=0.0), ga.FedGA(length=length)).start(ours, arrays, 5)
    assert sum("fact.fedga.mark" in said for said in ours.said) == 4 * 4  # measured in all rounds but the first
    assert set(ours.betas.values()) == {0.0}


def test_fewer_gradient_examples_than_all_need_losses_to_take_them_of(problem):
    app = quadratic_app(problem)
    grid = MaskedGrid(app, 4)
    play(gf.OneTrip(FedAvg(), ga.FedGA(), gradient_examples=2), app, problem, rounds=1, grid=grid)
    assert len(grid.errors) == 4
    assert all("for gradient_examples give ClientApp(gradient=...)" in error for error in grid.errors)


def private(strategy):
    return DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, 0.5, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gf.OneTrip(FedAvg(), ga.FedGA(), total_step_size=LR * STEPS),
        lambda: gf.OneTrip(private(FedAvg()), ga.FedGA()),
        lambda: gf.SecureOneTrip(ga.FedGA()),
    ],
    ids=["told sizes", "noise", "masks"],
)
def test_numbers_that_nothing_protects_are_not_asked_for(make):
    with pytest.raises(ga.GradalignError, match=r"fedga has every client tell numbers of its gradient.*give a beta"):
        make()


def test_what_is_around_one_trip_cannot_protect_clients(problem):
    strategy = private(gf.OneTrip(FedAvg(), ga.FedGA(length=0.5)))
    with pytest.raises(ga.GradalignError, match="OneTrip must be the outermost strategy"):
        play(strategy, quadratic_app(problem), problem, rounds=1)


def test_metrics_of_a_user_s_own_that_begin_like_ours_stay(problem):
    def more(message, context, call_next):
        reply = call_next(message, context)
        reply.content["metrics"]["fact.checks"] = 3.0
        return reply

    result = play(gf.OneTrip(FedAvg(), RUNNING), quadratic_app(problem, inside=[more]), problem)
    assert result.train_metrics_clientapp[4]["fact.checks"] == pytest.approx(3.0)


def test_batches_that_are_too_large_to_halve_are_said_once(caplog):
    def losses(count):
        return [(torch.ones(1, requires_grad=True).sum(), count)] * 3

    assert add_up(losses(3), 6) == (1.0, 6)
    assert not caplog.records
    assert [add_up(losses(7), 6), add_up(losses(7), 6)] == [(1.0, 7)] * 2
    assert caplog.text.count("asks for a gradient of 6 examples, and the first batches have 7") == 1


def test_a_strategy_begins_anew_with_every_start(problem):
    """s, the step sizes and a schedule's length are of one run."""
    falling = ga.Cosine(value=BETA, share=1.0)
    strategy, app = gf.OneTrip(FedAvg(), ga.FedGA(beta=falling, mean="running", decay=DECAY)), quadratic_app(problem)
    long = point(play(strategy, app, problem, rounds=4))
    assert (point(play(strategy, app, problem, rounds=2)) != long).any()
    assert (point(play(strategy, app, problem, rounds=4)) == long).all()


@pytest.mark.parametrize("kind", [gf.ClientApp, FlowerClientApp])
def test_with_nothing_to_do_every_bit_is_flowers(problem, kind):
    """FedAvg around FedAvg, and our ClientApp with Flower's server."""
    expected = play(FedAvg(), quadratic_app(problem, FlowerClientApp), problem)
    strategy = gf.OneTrip(FedAvg(), ga.FedAvg()) if kind is gf.ClientApp else FedAvg()
    assert (point(play(strategy, quadratic_app(problem, kind), problem)) == point(expected)).all()


def linear_task(sizes=(4, 9, 20, 33)):
    generator = torch.Generator().manual_seed(3)
    clients = []
    for size in sizes:
        labels = torch.randint(3, (size,), generator=generator)
        clients.append((torch.randn(size, 5, generator=generator).double() + labels[:, None], labels))

    def model():
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).double()

    return ga.Task(model=model, clients=clients)


def task_app(task, *, steps=3, gradient=None, parts=1, **options):
    """The task's model and whole clients in a stock app's loop, in ``parts`` batches a step's worth each."""
    app = gf.ClientApp(gradient=gradient)

    @app.train()
    def train(message, context):
        model, (x, y) = task.make_model(0), task.clients[context.node_config["partition-id"]]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **({"lr": 0.1} | options))
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(y)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    return app


ALGORITHMS = {
    "fedga": ga.FedGA(beta=0.3),
    "fedga-running": ga.FedGA(beta=0.3, mean="running") + ga.FedProx(mu=0.1),
    "fedga-kept": ga.FedGA(beta=0.3, mean="kept"),
    "scaffold-kept": ga.Scaffold(control="kept") + ga.FedAdam(lr=0.05),
    "scaffold": ga.Scaffold() + ga.FedDyn(alpha=0.1),
    "fedlesam": ga.FedLESAM(rho=0.1),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_every_algorithm_trains_a_stock_app_as_it_trains_a_task(name, momentum):
    """Clients of 4, 9, 20 and 33 examples with batch norm, weighted by them: the local engine's numbers.

    With the model on the server, and with nothing but its arrays there.
    """
    task, algorithm = linear_task(), ALGORITHMS[name]
    local = ga.LocalTraining(lr=0.1, steps=3, momentum=momentum, weight_decay=0.01)
    expected = ga.run(task, algorithm, rounds=4, local=local, weights="examples", workers=0)
    app, grid_of = task_app(task, momentum=momentum, weight_decay=0.01), gf.InProcessGrid
    strategy = gf.AlignedStrategy(algorithm, task.make_model(0), local=local, patience=QUICK)
    result = strategy.start(grid_of(app, 4), num_rounds=4)
    torch.testing.assert_close(vector(result), vector(expected), rtol=1e-9, atol=1e-9)
    if name == "fedlesam":
        return
    arrays = ArrayRecord(task.make_model(0).state_dict())
    without = gf.AlignedStrategy(algorithm, local=local, patience=QUICK).start(grid_of(app, 4), arrays, 4)
    torch.testing.assert_close(vector(without), vector(expected), rtol=1e-9, atol=1e-9)


def test_mods_of_the_train_function_see_its_own_arrays(problem):
    """Flower's clipping mod as it is, around the function instead of the app, with AlignedStrategy."""
    strategy = gf.AlignedStrategy(RUNNING, patience=QUICK, train_config={"clipping_norm": 0.05})
    result = play(strategy, quadratic_app(problem, inside=[fixedclipping_mod]), problem)
    clipped = by_hand(problem, 4, lambda v: v * min(1.0, 0.05 / np.linalg.norm(v)))
    np.testing.assert_allclose(point(result), clipped, rtol=1e-9)


@pytest.mark.parametrize("clip", [0.05, 1e9])
@pytest.mark.parametrize("side", ["client", "server"])
def test_flowers_differential_privacy_around_one_trip(problem, side, clip):
    """Without noise: FedAvg's clipping of each Δ_i, and s of the clipped ones."""
    kind, mods = DifferentialPrivacyClientSideFixedClipping, [fixedclipping_mod]
    if side == "server":
        kind, mods = DifferentialPrivacyServerSideFixedClipping, []
    strategy = gf.OneTrip(kind(FedAvg(), 0.0, clip, 4), RUNNING)
    result = play(strategy, quadratic_app(problem, mods=mods), problem)
    clipped = by_hand(problem, 4, lambda v: v * min(1.0, clip / np.linalg.norm(v)))
    np.testing.assert_allclose(point(result), clipped, rtol=1e-9)
    assert (np.linalg.norm(clipped - by_hand(problem, 4)) > 0.01) == (clip < 1)


class Counted:
    """Writes down every private release that Flower tells its accountant of; theirs does not install with our numpy."""

    def __init__(self):
        self.config = PrivacyConfig(
            target_delta=1e-5,
            population_size=4,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
        )
        self.events = []

    def compose(self, event, count=1):
        self.events += [event] * count

    def get_privacy_spent(self):
        return types.SimpleNamespace(epsilon=0.0, delta=1e-5, num_releases=len(self.events))


def test_s_tells_nothing_that_the_noisy_points_do_not_and_costs_no_release(problem):
    """With noise, s is a function of the points that were given out; Flower accounts for FedAvg's releases."""
    told, said, equal = [], [], Quadratics.make(4, examples=(2, 2, 2, 2))

    def look(message, context, call_next):
        told.append((message.content["arrays"]["w"].numpy(), dict(message.content["config"])))
        reply = call_next(message, context)
        said.append(reply.content["metrics"].get("total-step-size"))
        return reply

    def releases(wrap):
        accountant = Counted()
        private = DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 0.05, 4, accountant=accountant)
        play(wrap(private), quadratic_app(equal, mods=[look, fixedclipping_mod]), equal)
        return accountant.events

    ours = releases(lambda private: gf.OneTrip(private, RUNNING, total_step_size=LR * STEPS))
    rounds, s = [one for one in told if "clipping_norm" in one[1]][::4], None
    for seen, ((before, _), (x, config)) in enumerate(itertools.pairwise(rounds), start=1):
        new, share = -(x - before) / (LR * STEPS), (1 - DECAY) / (1 - DECAY**seen)
        s = new if s is None else s + share * (new - s)
        np.testing.assert_allclose(np.frombuffer(config["gradalign.shared.fedga"]), s, rtol=1e-12)
    assert seen == 3
    assert {number for number in said if number is not None} == {0.0}  # nor do clients tell their steps
    assert ours == releases(lambda private: private)
    assert len(ours) == 4


def quadratic_client(problem):
    """The same in Flower's older form, which SecAgg+ works with."""

    class Client(NumPyClient):
        def __init__(self, client):
            self.batch = torch.as_tensor(problem.matrices[client]), torch.as_tensor(problem.centres[client])

        def fit(self, parameters, config):
            model = PointModel(parameters[0])
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for _ in range(STEPS):
                optimizer.zero_grad()
                quadratic_value(model, self.batch)[0].mean().backward()
                optimizer.step()
            return [model.w.detach().numpy()], len(self.batch[0]), {}

    return lambda context: Client(context.node_config["partition-id"]).to_client()


class MaskedGrid(gf.InProcessGrid):
    """Keeps what leaves the clients."""

    def __init__(self, app, clients):
        super().__init__(app, clients)
        self.sent, self.errors = [], []

    def answer(self, message, client):
        reply = super().answer(message, client)
        if reply.has_error():
            self.errors.append(reply.error.reason)
        else:
            self.sent += list(reply.content.array_records.values())
        reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id  # as Flower's SuperLink does
        return reply


def secure_rounds(problem, app, rounds, **more):
    first = ndarrays_to_parameters([problem.start])
    strategy = gf.SecureOneTrip(
        RUNNING, initial_parameters=first, fraction_evaluate=0.0, min_fit_clients=4, min_available_clients=4, **more
    )
    context = LegacyContext(Context(1, 1, {}, RecordDict(), {}), ServerConfig(num_rounds=rounds), strategy)
    grid, workflow = MaskedGrid(app, 4), SecAggPlusWorkflow(4, 3, max_weight=5.0, clipping_range=3.0)
    DefaultWorkflow(fit_workflow=workflow)(grid, context)
    return context.state.array_records["parameters"], grid


def test_one_trip_under_secure_aggregation(problem):
    """SecAgg+ rounds each number to 6/2²² of the range; no client's arrays leave it but under a mask."""
    app = gf.ClientApp(quadratic_client(problem), mods=[secaggplus_mod])
    arrays, grid = secure_rounds(problem, app, 3)
    assert not grid.errors
    (found,) = arrays.to_numpy_ndarrays()
    np.testing.assert_allclose(found, by_hand(problem, 3), atol=2e-5)
    assert np.linalg.norm(by_hand(problem, 3) - by_hand(problem, 3, beta=0.0)) > 0.005
    assert grid.sent
    assert not any(grid.sent)


REASONS = {
    "no mask": ([], "the server aggregates securely; give this app mods=[secaggplus_mod]"),
    "no clipping": ([], "the server sends a clipping_norm, and this app has no mod that clips updates"),
    "a mask for nobody": ([secaggplus_mod], "the server does not run Flower's SecAggPlusWorkflow"),
    "not adapted": ([fixedclipping_mod], "With AlignedStrategy, a mod that works on arrays goes in as on_update(mod)."),
}


@pytest.mark.parametrize("what", REASONS)
def test_a_wrong_or_missing_mod_says_so(problem, what):
    mods, reason = REASONS[what]
    if what == "no mask":
        _, grid = secure_rounds(problem, gf.ClientApp(quadratic_client(problem)), 1)
        assert grid.errors
        assert all(reason in error for error in grid.errors)
        return
    strategy = gf.AlignedStrategy(ga.FedGA(beta=0.1), patience=QUICK, train_config={"clipping_norm": 0.1})
    with pytest.raises(ga.GradalignError, match=re.escape(reason)):
        play(strategy, quadratic_app(problem, mods=mods), problem, rounds=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.5, "dampening": 0.3},
    ],
)
def test_total_step_sizes_are_how_far_a_gradient_of_one_leads(options):
    """Under a constant gradient of 1, torch's own SGD moves by the sum of the step sizes, also when lr changes."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.1, **options)
    with Steps({"p": torch.zeros(1, dtype=torch.float64)}) as steps:
        for k in range(5):
            optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert -p.item() == pytest.approx(steps.total_step_size(0.0), rel=1e-12)
    assert steps.count == 5


@pytest.mark.parametrize(("mean", "decay"), [("fresh", 0.0), ("fresh", 0.01), ("running", 0.0), ("kept", 0.0)])
def test_a_beta_that_sets_itself_is_capped_by_the_apps_own_steps(mean, decay):
    """α = 0.5 and K = 10 are the app's: α/2 = 0.25; the strategy's lr of 0.1 is nobody's.

    Where no gradient is worked out from updates, the server need not know of the app's weight decay.
    """
    task = linear_task()
    strategy = gf.AlignedStrategy(ga.FedGA(beta="auto", length=1e6, mean=mean), task.make_model(0), patience=QUICK)
    result = strategy.start(gf.InProcessGrid(task_app(task, steps=10, lr=0.5, weight_decay=decay), 4), num_rounds=3)
    assert result.history["beta"][-1] == pytest.approx(0.25, rel=1e-12)


def test_a_beta_that_sets_itself_needs_steps_that_can_be_seen(problem):
    def gradient(message, context):
        model, i = PointModel(problem.start), context.node_config["partition-id"]
        batch = torch.as_tensor(problem.matrices[i]), torch.as_tensor(problem.centres[i])
        return model, [(quadratic_value(model, batch)[0].mean(), len(batch[0]))]

    app = quadratic_app(problem, optimizer=lambda *_, **__: Still(), gradient=gradient)
    with pytest.raises(ga.GradalignError, match="took no step with a torch optimizer; its steps are unknown"):
        play(gf.AlignedStrategy(ga.FedGA(beta="auto", mean="fresh"), patience=QUICK), app, problem, rounds=2)


@pytest.mark.parametrize(("wanted", "warnings"), [(0.2, 1), (0.3, 0), (None, 0)])
def test_a_learning_rate_that_the_app_does_not_take_is_said(caplog, wanted, warnings):
    task, local = linear_task(), None if wanted is None else ga.LocalTraining(lr=wanted)
    strategy = gf.AlignedStrategy(ga.FedAvg(), task.make_model(0), local=local, patience=QUICK)
    strategy.start(gf.InProcessGrid(task_app(task, lr=0.3), 4), num_rounds=2)
    assert caplog.text.count("did not look at the strategy's local: lr") == warnings


def test_the_gradient_of_ones_own_losses_weighs_uneven_batches():
    """A gradient over batches of 4 and fewer is the whole client's; held-back steps count batches alike."""
    task, local = linear_task(), ga.LocalTraining(lr=0.1, steps=3)
    task = ga.Task(model=lambda: torch.nn.Linear(5, 3).double(), clients=task.clients)

    def gradient(message, context):
        model, (x, y) = task.make_model(0), task.clients[context.node_config["partition-id"]]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model, ((F.cross_entropy(model(a), b), len(b)) for a, b in zip(x.split(4), y.split(4), strict=True))

    expected = ga.run(task, ga.FedGA(beta=0.3), rounds=3, local=local, weights="examples", workers=0)
    strategy = gf.AlignedStrategy(ga.FedGA(beta=0.3), task.make_model(0), local=local, patience=QUICK)
    result = strategy.start(gf.InProcessGrid(task_app(task, gradient=gradient), 4), num_rounds=3)
    torch.testing.assert_close(vector(result), vector(expected), rtol=1e-10, atol=1e-10)


class Tied(torch.nn.Module):
    """A frozen layer, and one that is used twice under two names."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(5, 4).double().requires_grad_(False)
        self.first = torch.nn.Linear(4, 4).double()
        self.again = self.first
        self.last = torch.nn.Linear(4, 3).double()

    def forward(self, x):
        return self.last(torch.tanh(self.again(torch.tanh(self.first(self.frozen(x))))))


def test_frozen_and_tied_layers_and_a_client_that_forgets_between_the_phases():
    task = ga.Task(model=Tied, clients=linear_task().clients)
    local = ga.LocalTraining(lr=0.1, steps=3)
    expected = ga.run(task, ga.FedGA(beta=0.3), rounds=3, local=local, weights="examples", workers=0)

    class Forgetful(gf.InProcessGrid):
        def answer(self, message, client):
            reply = super().answer(message, client)
            if client == 1 and message.metadata.message_type == "train.gradient":
                self.context(1).state.clear()
            return reply

    strategy = gf.AlignedStrategy(ga.FedGA(beta=0.3), task.make_model(0), local=local, patience=QUICK)
    result = strategy.start(Forgetful(task_app(task), 4), num_rounds=3)
    torch.testing.assert_close(vector(result), vector(expected), rtol=1e-10, atol=1e-10)
    assert result.history["failed"] == [None, 0, 0, 0]


class Alike(torch.nn.Module):
    """Two layers that begin with the same numbers; the first one is frozen."""

    def __init__(self):
        super().__init__()
        self.before, self.after = (torch.nn.LayerNorm(5, dtype=torch.float64) for _ in range(2))
        self.last = torch.nn.Linear(5, 3).double()
        self.before.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.after(torch.tanh(self.before(x)))))


def test_a_frozen_layer_with_the_same_numbers_takes_no_gradient():
    task, local = ga.Task(model=Alike, clients=linear_task().clients), ga.LocalTraining(lr=0.1, steps=3)
    expected = ga.run(task, ga.FedGA(beta=0.3), rounds=1, local=local, weights="examples", workers=0)
    app, strategy = task_app(task), gf.AlignedStrategy(ga.FedGA(beta=0.3), task.make_model(0), local=local)
    result = strategy.start(gf.InProcessGrid(app, 4), num_rounds=1)
    torch.testing.assert_close(vector(result), vector(expected), rtol=1e-10, atol=1e-10)


class WithClosure(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(lambda: 0.0)


REFUSED = {
    "another optimizer": ({"optimizer": torch.optim.Adam}, RUNNING, "the app trains with Adam, whose steps do not"),
    "weight decay": ({"options": {"weight_decay": 0.1}}, RUNNING, r"give AlignedStrategy\(local=.*weight_decay=0.1"),
    "a closure": ({"optimizer": WithClosure}, ga.FedGA(beta=0.1), "steps with a closure; give ClientApp"),
    "no optimizer": (
        {"optimizer": lambda *_, **__: Still()},
        ga.FedGA(beta=0.1),
        "took no step with a torch optimizer",
    ),
}


class Still:
    def zero_grad(self):
        pass

    def step(self):
        pass


def test_two_trips_with_another_optimizer(problem):
    """Adam from the displaced start, two rounds: torch's own steps beside NumPy's gradients."""
    x = problem.start
    for _ in range(2):
        gradients = [problem.gradient(i, x) for i in range(4)]
        mean, total = sum(p * g for p, g in zip(P, gradients, strict=True)), 0.0
        for i in range(4):
            start = x - BETA * (mean - gradients[i])
            y = torch.nn.Parameter(torch.tensor(start))
            adam = torch.optim.Adam([y], lr=LR)
            for _ in range(STEPS):
                y.grad = torch.tensor(problem.gradient(i, y.detach().numpy()))
                adam.step()
            total = total + P[i] * (y.detach().numpy() - start)
        x = x + total
    strategy = gf.AlignedStrategy(ga.FedGA(beta=BETA), patience=QUICK)
    result = play(strategy, quadratic_app(problem, optimizer=torch.optim.Adam), problem, rounds=2)
    np.testing.assert_allclose(point(result), x, rtol=1e-9)


def test_an_app_of_flowers_own_cannot_take_two_trips(problem):
    with pytest.raises(ga.GradalignError, match=r"no node can take part.*must be made by gradalign\.flower"):
        play(gf.AlignedStrategy(RUNNING, patience=QUICK), quadratic_app(problem, FlowerClientApp), problem)


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_stock_app_cannot_have_is_said(problem, what):
    options, algorithm, sentence = REFUSED[what]
    with pytest.raises(ga.GradalignError, match=sentence):
        play(gf.AlignedStrategy(algorithm, patience=QUICK), quadratic_app(problem, **options), problem, rounds=2)


@pytest.mark.parametrize(
    ("strategy", "algorithm", "sentence"),
    [
        (FedAvg(), ga.FedGA(beta=0.1), "fedga needs more of clients than one trip"),
        (FedAvg(), ga.FedProx(mu=0.1) + ga.FedAdam(), "the server's rule is the strategy's here"),
        (FedAdam(), RUNNING, "FedAdam does not average"),
        (FedAvg(), RUNNING, "a client's app is not a gradalign.flower.ClientApp"),
    ],
)
def test_what_one_trip_cannot_carry_is_refused(problem, strategy, algorithm, sentence):
    with pytest.raises(ga.GradalignError, match=sentence):
        play(gf.OneTrip(strategy, algorithm), quadratic_app(problem, FlowerClientApp), problem)


def test_flowers_simulation_can_pickle_every_app(problem):
    cloudpickle = pytest.importorskip("cloudpickle")
    mods = [fixedclipping_mod, gf.on_update(fixedclipping_mod)]
    apps = [quadratic_app(problem, mods=mods), gf.aligned_app(mods=mods), gf.client_app(problem.task(), mods=mods)]
    for app in apps:
        assert isinstance(cloudpickle.loads(cloudpickle.dumps(app)), FlowerClientApp)

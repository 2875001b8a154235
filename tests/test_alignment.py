"""FedGA's one-trip forms and their neighbours: rounds by hand, what they cost, and where they coincide."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import gradalign as ga
from conftest import Quadratics, vector
from gradalign.algorithms.auto import beta_of, halves, mark, measured, own_share
from gradalign.algorithms.plan import combine
from gradalign.algorithms.view import SharedSums
from gradalign.client.flat import FlatModel, Point
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.server.federation import make_federation
from gradalign.server.rounds import Sums, play_round
from gradalign.server.state import ServerState

UNMEASURED = ga.Measure(test_every=0, train_every=0)


def run(problem: Quadratics, algorithm, *, rounds: int, lr: float = 0.1, **options) -> ga.Result:
    local = options.pop("local", ga.LocalTraining(lr=lr, steps=1))
    return ga.run(problem.task(), algorithm, rounds=rounds, local=local, workers=0, measure=UNMEASURED, **options)


def test_two_rounds_of_the_running_mean_by_hand():
    """Unequal weights: s after round 1 is the weighted mean gradient; round 2 starts at x − β(s − g_i)."""
    problem, lr, beta = Quadratics.make(3, examples=(1, 2, 5)), 0.1, 0.4
    shares, x = np.array([1, 2, 5]) / 8, problem.start
    own = [problem.gradient(i, x) for i in range(3)]
    s = sum(p * g for p, g in zip(shares, own, strict=True))
    x = x - lr * s
    own = [problem.gradient(i, x) for i in range(3)]
    moved = [problem.gradient(i, x - beta * (s - own[i])) for i in range(3)]
    x = x - lr * sum(p * g for p, g in zip(shares, moved, strict=True))
    found = run(problem, ga.FedGA(beta=beta, mean="running"), rounds=2, weights="examples")
    assert vector(found).numpy() == pytest.approx(x, abs=1e-14)
    assert found.history["beta"] == [None, 0.0, beta]


def of_constant_gradients() -> tuple[ga.Task, np.ndarray]:
    """Return a task of three clients whose losses are linear, and their slopes."""
    start, slopes = Quadratics.make(3).task().model, np.array([[1.0, 0.0, 2.0], [0.0, -1.0, 0.0], [3.0, 1.0, 1.0]])

    def linear(model, batch):
        return model.w @ batch[1].mT, None

    clients = [(torch.zeros(1, 3, 3, dtype=torch.float64), torch.tensor(slope)[None]) for slope in slopes]
    return ga.Task(model=start, clients=clients, predict=linear, loss=lambda values, _: values.mean()), slopes


def test_the_running_mean_is_corrected_for_its_start():
    """With λ = 0.9 and constant gradients s is their mean after one round, not a tenth of it."""
    task, slopes = of_constant_gradients()
    federation, engine, state = server(task, ga.FedGA(beta=0.1, mean="running"), ga.LocalTraining(lr=0.5, steps=2))
    for _ in range(3):
        state, _ = play_round(federation, engine, state)
        assert state.shared["fedga"].numpy() == pytest.approx(slopes.mean(axis=0), abs=1e-14)


def server(task, algorithm, local, *, per_round=None, weights="uniform"):
    made = make_federation(task, combine(algorithm), local, per_round=per_round, weights=weights, dropout=0.0, seed=0)
    engine = InProcessEngine(Setup(task=task, local=local, clients_per_round=made.per_round))
    return made, engine, ServerState(point=FlatModel(task.make_model(0)).read())


def test_at_a_point_that_stays_the_last_mean_is_the_fresh_one():
    """λ = 0, everyone takes part, K = 1: s of a round at x is ḡ at x, so another round there is the fresh form's."""
    problem, local = Quadratics.make(4), ga.LocalTraining(lr=0.1, steps=1)
    federation, engine, start = server(problem.task(), ga.FedGA(beta=0.3, mean="running", decay=0.0), local)
    after, _ = play_round(federation, engine, start)
    again = ServerState(point=start.point, round=1, shared=after.shared, numbers=after.numbers)
    running, _ = play_round(federation, engine, again)
    fresh, _ = play_round(*server(problem.task(), ga.FedGA(beta=0.3), local))
    plain, _ = play_round(*server(problem.task(), ga.FedAvg(), local))
    assert torch.allclose(running.point.x, fresh.point.x, rtol=0, atol=1e-15)
    assert not torch.allclose(plain.point.x, fresh.point.x, rtol=0, atol=1e-3)


def test_a_mean_displacement_that_is_not_zero_does_not_move_the_server():
    """Δ_i = y_K − y_0: with gradients that do not change, FedGA is FedAvg wherever its clients start."""
    task, slopes = of_constant_gradients()
    federation, engine, state = server(task, ga.FedGA(beta=0.5, mean="running"), ga.LocalTraining(lr=0.5), per_round=2)
    x = state.point.x.numpy()
    displaced = []
    for number in range(4):
        who = federation.sample(number)
        if number:
            s = state.shared["fedga"].numpy()
            displaced.append(np.abs(-0.5 * (s - slopes[who].mean(axis=0))).max())
        x = x - 0.5 * slopes[who].mean(axis=0)
        state, _ = play_round(federation, engine, state)
        assert state.point.x.numpy() == pytest.approx(x, abs=1e-12)
    assert max(displaced) > 0.1, "the clients' mean displacement is far from 0"


def test_what_clients_keep_has_the_mean_of_what_they_keep():
    """Unequal weights, three of eight clients a round: s is Σ w_i k_i/Σ w_i, however often who was there."""
    sizes = (1, 9, 2, 30, 4, 7, 1, 16)
    problem = Quadratics.make(8, examples=sizes)
    for algorithm in (ga.FedGA(beta=0.1, mean="kept"), ga.Scaffold(control="kept"), ga.FedDyn(alpha=0.1)):
        federation, engine, state = server(
            problem.task(), algorithm, ga.LocalTraining(lr=0.05, steps=2), per_round=3, weights="examples"
        )
        for number in range(40):
            state, _ = play_round(federation, engine, state)
            kept = state.kept[algorithm.label]
            seen = sum(sizes[i] for i in kept)
            # Those that nobody has seen yet have nothing to keep, and weigh like the others.
            all_of_them = seen if algorithm.label == "fedga" else seen / len(kept) * 8
            mean = sum(sizes[i] * k.double() for i, k in kept.items()) / all_of_them
            assert state.shared[algorithm.label].numpy() == pytest.approx(mean.numpy(), abs=1e-12)
            if number == 20:
                state = ServerState.from_tensors(*state.to_tensors())
        assert len(kept) == 8


def test_a_client_whose_data_have_grown_counts_with_its_new_weight():
    """k goes from 1 with weight 2 to 5 with weight 6: Σ w k grows by 6·5 − 2·1 = 28."""
    x = torch.zeros(1)
    sums = Sums(Point(x, x[:0], x[:0]))
    sums.add_kept("fedga", 0, (torch.tensor([1.0]), 2.0), torch.tensor([5.0]), 6.0)
    assert sums.kept_change["fedga"].item() == 28.0
    told = {"update": x, "total_step_size": 1.0, "reported": 1, "clients": 4, "x": x, "weight": 6.0}
    seen = SharedSums(kept_change=torch.tensor([28.0]) / 6.0, known=(2, 2), known_weight=(4.0, 8.0), **told)
    # Before: (2·1 + 2·3)/4 = 2 with another client that keeps 3. After: (6·5 + 2·3)/8 = 4.5.
    assert ga.FedGA(beta=0.1, mean="kept").next_shared(torch.tensor([2.0]), seen).item() == pytest.approx(4.5)
    # Of all four, two not seen: (2·1 + 2·3)/8 = 1 before and (6·5 + 2·3)/16 = 2.25 after.
    assert ga.Scaffold(control="kept").next_shared(torch.tensor([1.0]), seen).item() == pytest.approx(2.25)


def test_kept_gradients_by_hand_and_a_client_never_seen_is_not_displaced():
    """Two of three clients a round, weight decay: k_i = −Δ_i/(αK) − wd·x; s is the mean over those seen."""
    problem, lr, beta, wd = Quadratics.make(3), 0.1, 0.4, 0.05
    local = ga.LocalTraining(lr=lr, steps=1, weight_decay=wd)
    options = {"clients_per_round": 2, "local": local, "seed": 1}
    federation = make_federation(
        problem.task(), combine(ga.FedAvg()), local, per_round=2, weights="uniform", dropout=0.0, seed=1
    )
    x, kept = problem.start, {}
    newcomers = 0
    for number in range(4):
        moves = {}
        mean = sum(kept.values()) / len(kept) if kept else None
        for i in federation.sample(number):
            newcomers += i not in kept and mean is not None
            start = x - beta * (mean - kept[i]) if i in kept else x
            moves[i] = -lr * (problem.gradient(i, start) + wd * start)
        kept |= {i: -move / lr - wd * x for i, move in moves.items()}
        x = x + sum(moves.values()) / 2
    assert newcomers, "a client joined later"
    found = run(problem, ga.FedGA(beta=beta, mean="kept"), rounds=4, **options)
    assert vector(found).numpy() == pytest.approx(x, abs=1e-13)


@given(
    st.sampled_from(["fresh", "running", "kept"]),
    st.integers(0, 3),
    st.sampled_from(["uniform", "examples"]),
    st.sampled_from([0.0, 0.4]),
)
def test_without_beta_every_form_is_fedavg_to_the_bit(mean, seed, weights, dropout):
    problem = Quadratics.make(4, seed, examples=(3, 1, 4, 2))
    local = ga.LocalTraining(lr=0.1, steps=3, batch_size=2, weight_decay=0.01)
    options = {"rounds": 3, "clients_per_round": 3, "local": local, "weights": weights, "dropout": dropout}
    plain, aligned = (run(problem, a, seed=seed, **options) for a in (ga.FedAvg(), ga.FedGA(beta=0.0, mean=mean)))
    assert torch.equal(vector(plain), vector(aligned))
    for name in ("communication_rounds", "examples", "bytes_down"):
        assert plain.history[name] == aligned.history[name]


def test_what_each_form_costs():
    """Three rounds with four clients of three numbers in float64: 24 bytes a vector."""
    problem, vectors = Quadratics.make(4, examples=(2, 2, 2, 2)), 4 * 24

    def cost(algorithm) -> tuple[int, int, int, int]:
        last = run(problem, algorithm, rounds=3).summary
        names = ("communication_rounds", "bytes_down", "bytes_up", "examples")
        down, up = last["bytes_down"] / vectors, last["bytes_up"] / vectors
        return last[names[0]], down, up, last[names[3]]

    assert cost(ga.FedAvg()) == (3, 3, 3, 24)
    assert cost(ga.FedGA(beta=0.1)) == (6, 6, 6, 48)
    # In the first round there is no mean yet: nothing is sent, no gradient is taken.
    assert cost(ga.FedGA(beta=0.1, mean="running")) == (3, 5, 3, 40)
    assert cost(ga.FedGA(beta=0.1, mean="running", gradient_every=2)) == (3, 4, 3, 32)
    assert cost(ga.FedGA(beta=0.1, gradient_every=2)) == (5, 5, 5, 40)
    assert cost(ga.FedGA(beta=0.1, mean="kept")) == (3, 5, 6, 24)
    assert cost(ga.FedInit()) == (3, 3, 3, 24)
    assert cost(ga.FedSAM()) == (3, 3, 3, 48)
    assert cost(ga.FedLESAM()) == cost(ga.FedCM()) == (3, 5, 3, 24)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("mean", ["fresh", "running", "kept"])
def test_a_beta_that_sets_itself_by_hand(mean, steps):
    """β = min(ρ/d, α/2) with K of 2 or 3, d² the running mean of Σ p_i‖g_i − s‖² of earlier rounds; weights unequal."""
    problem, lr, rho, decay = Quadratics.make(3, examples=(1, 2, 5)), 0.3, 0.04, 0.8
    shares, x, kept = np.array([1, 2, 5]) / 8, problem.start, None
    means, squares, betas = [], [], []
    for number in range(5):
        ages = decay ** np.arange(len(means))
        own = kept if mean == "kept" else [problem.gradient(i, x) for i in range(3)]
        if mean == "fresh":
            s = sum(p * g for p, g in zip(shares, own, strict=True))
        elif number:
            s = (ages[:, None] * np.array(means)[::-1]).sum(axis=0) / ages.sum() if mean == "running" else means[-1]
        known = mean == "fresh" or number > 0
        past = decay ** np.arange(len(squares))
        apart = np.sqrt((past * np.array(squares)[::-1]).sum() / past.sum()) if squares else np.inf
        beta = min(rho / apart, lr / 2) if known and squares else 0.0
        moves = []
        for i in range(3):
            start = x - beta * (s - own[i]) if beta else x
            place = start
            for _ in range(steps):
                place = place - lr * problem.gradient(i, place)
            moves.append(place - start)
        if known:
            squares.append(sum(p * ((g - s) ** 2).sum() for p, g in zip(shares, own, strict=True)))
        kept = [-move / (lr * steps) for move in moves]
        update = sum(p * move for p, move in zip(shares, moves, strict=True))
        # Kept: s moves by (|S|/N) Σ p_i (k_i⁺ − k_i) of three among three, so it is the weighted mean.
        means.append(-update / (lr * steps))
        x = x + update
        betas.append(beta)
    assert 0.0 < min(betas[2:]) < lr / 2, "the length decides in some rounds"
    algorithm = ga.FedGA(beta="auto", length=rho, decay=decay, mean=mean)
    local = ga.LocalTraining(lr=lr, steps=steps)
    found = run(problem, algorithm, rounds=5, local=local, weights="examples")
    assert found.history["beta"][1:] == pytest.approx(betas, abs=1e-14)
    assert vector(found).numpy() == pytest.approx(x, abs=1e-13)


@pytest.mark.parametrize("mean", ["fresh", "running", "kept"])
def test_with_one_local_step_there_is_nothing_to_take_back(mean):
    """α(K−1)/2 is 0 with K = 1: the run is FedAvg's to the bit, however far apart clients are."""
    problem = Quadratics.make(4, examples=(1, 2, 5, 3))
    plain, aligned = (
        run(problem, one, rounds=6, weights="examples")
        for one in (ga.FedAvg(), ga.FedGA(beta="auto", length=0.5, mean=mean))
    )
    assert set(aligned.history["beta"][1:]) == {0.0}
    assert torch.equal(vector(aligned), vector(plain))


def test_gradalign_s_one_step_keeps_its_beta():
    """What small batches do by themselves, α/2: there K = 1 is the point."""
    found = run(Quadratics.make(4), ga.LargeBatchGradAlign(length=1e6), rounds=4)
    assert found.history["beta"][2:] == [0.05] * 3


def test_the_bound_is_of_a_running_mean_of_the_clients_steps():
    """Rounds of 1, 3 and 1 steps, the mean of K − 1, at most 1 a round, with decay ½: 0, (1/2)/(3/4), (1/2)/(7/4)."""
    numbers: dict = {}
    betas = []
    for steps in (1.0, 3.0, 1.0):
        given = {"update": torch.zeros(1), "kept_change": None, "x": torch.zeros(1), "reported": 1, "clients": 1}
        sums = SharedSums(**given, total_step_size=0.1 * steps, step_size=0.1, lr=0.1, facts={"square": 1.0})
        numbers = measured(numbers, sums, 0.5)
        betas.append(beta_of(1e6, numbers, 0.1))
    assert betas == pytest.approx([0.0, 0.05 * 2 / 3, 0.05 * 2 / 7])


def test_where_steps_are_not_told_they_bound_nothing():
    """An app that tells what its steps add up to, 5 of 0.01, but not how many, beside a server's lr of 0.1."""
    given = {"update": torch.zeros(1), "kept_change": None, "x": torch.zeros(1), "reported": 1, "clients": 1}
    sums = SharedSums(**given, total_step_size=0.05, step_size=0.1, lr=0.1, facts={"square": 1.0})
    assert beta_of(1e6, measured({}, sums, 0.9), 0.1) == 0.05


@pytest.mark.parametrize("mean", ["fresh", "running", "kept"])
def test_equal_clients_leave_a_beta_that_sets_itself_finite_and_the_run_fedavg_s(mean):
    one = Quadratics.make(1)
    same = Quadratics(one.matrices * 4, one.centres * 4, one.start)
    local = ga.LocalTraining(lr=0.1, steps=2)
    pair = (ga.FedAvg(), ga.FedGA(beta="auto", length=0.5, mean=mean))
    plain, aligned = (run(same, one, rounds=6, local=local) for one in pair)
    assert all(beta <= 0.05 for beta in aligned.history["beta"][1:])
    assert vector(aligned).numpy() == pytest.approx(vector(plain).numpy(), abs=1e-15)
    flat = Quadratics([np.zeros((1, 3, 3))] * 3, [np.zeros((1, 3))] * 3, np.ones(3))
    assert vector(run(flat, ga.FedGA(beta="auto", length=0.5, mean=mean), rounds=4, local=local)).tolist() == [
        1.0,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize("size", [5, 1024, 3000])
def test_the_mark_is_a_product_with_one_vector(size):
    """Entry n of it is c(n // 1024)·c(n mod 1024), c(j) being the fraction of (j + 1)/φ less a half."""
    gradient = torch.linspace(-1.0, 2.0, size, dtype=torch.float64)
    place, golden = np.arange(size), (math.sqrt(5) - 1) / 2

    def uneven(number):
        return (golden * (number + 1)) % 1 - 0.5

    expected = (uneven(place // 1024) * uneven(place % 1024)) @ gradient.numpy()
    assert mark(gradient) == pytest.approx(expected, rel=1e-5)


def test_mirrored_clients_are_not_alike_and_one_alone_tells_nothing():
    eye, start = np.eye(2)[None], np.array([1.0, 0.0])
    mirrored = Quadratics([eye, eye], [np.array([[0.0, 1.0]]), np.array([[0.0, -1.0]])], start)
    local = ga.LocalTraining(lr=0.1, steps=2)
    betas = run(mirrored, ga.FedGA(length=0.5), rounds=4, local=local).history["beta"]
    assert betas[1:] == [0.0, 0.0, 0.05, 0.05]  # α/2 once there is an s, and a d that was measured beside it
    alone = run(mirrored, ga.FedGA(length=0.5), rounds=6, clients_per_round=1, local=local).history["beta"]
    assert alone[3:] == [0.05] * 4


def after(square: float, before: dict, *, lr: float = 0.1, steps: float = 5.0, sample=None, halved=False) -> dict:
    """Return the numbers after a round that measured d², with gradients of ``sample`` = n of N examples."""
    nothing, facts = torch.zeros(1), {"square": square}
    if sample is not None:
        facts |= {"inverse": 1 / sample[0], "inverse all": 1 / sample[1]}
    given = {"update": nothing, "kept_change": None, "x": nothing, "reported": 1, "clients": 1, "facts": facts}
    given |= {"total_step_size": lr * steps, "step_size": lr, "gradient_share": 0.5 if halved else 1.0}
    return measured(before, SharedSums(**given, lr=lr, numbers=before), 0.9)


def test_where_only_clients_know_their_step_size_it_is_theirs():
    """The server says nothing of α, before or after: β is half of what the clients' steps add up to."""
    given = {"update": torch.zeros(1), "kept_change": None, "x": torch.zeros(1), "reported": 1, "clients": 1}
    sums = SharedSums(**given, total_step_size=0.9, step_size=0.3, facts={"square": 4.0})
    assert beta_of(100.0, measured({}, sums, 0.9), 0.0) == pytest.approx(0.15)


def test_a_distance_that_is_not_finite_teaches_nothing():
    known = after(36.0, {})  # d = 6, α = 0.1
    assert beta_of(0.24, known, 0.1) == pytest.approx(0.04)
    assert after(math.inf, known) == after(math.nan, known) == after(1.0, known, lr=0.0) == known
    assert beta_of(0.3, {}, 0.1) == 0.0
    assert beta_of(0.3, after(1e-300, {}), 0.1) == beta_of(9.0, known, 0.1) == 0.05
    bounds = {1.0: 0.0, 1.5: 0.025, 2.0: 0.05, 3.0: 0.05}  # α(K−1)/2 up to α/2; 1.5 is a mean over clients
    for steps, bound in bounds.items():
        assert beta_of(9.0, after(4.0, {}, steps=steps), 0.1) == pytest.approx(bound)
    assert beta_of(9.0, known, 0.01) == pytest.approx(0.005), "the bound is of this round's α"


@given(
    own=st.floats(0.0, 100.0),
    noise=st.floats(0.0, 100.0),
    examples=st.integers(2, 99),
    more=st.integers(0, 99),
)
def test_what_is_sampling_noise_in_the_distance_is_not_aligned(own, noise, examples, more):
    """d² = h² + σ²(1/n − 1/N), measured with n and with half of n, gives back q = h²/d²; β is q of what it would be."""
    half, everyone = examples // 2, examples + more
    whole, halved = (own + noise * (1 / n - 1 / everyone) for n in (examples, half))
    assume(whole > 1e-6)
    numbers = after(whole, after(halved, {}, sample=(half, everyone), halved=True), sample=(examples, everyone))
    assert own_share(numbers) == pytest.approx(own / whole, abs=1e-6)
    assert beta_of(9e9, numbers, 0.1) == pytest.approx(0.05 * own / whole, abs=1e-6)
    assert own_share(after(whole, {}, sample=(examples, everyone))) == 1.0, "nothing to compare with"


@pytest.mark.parametrize(
    ("algorithm", "spent"),
    [
        (ga.FedGA(beta="auto", length=0.5, mean="running"), [24, 36, 48, 48, 36, 36, 48]),  # no s in the first round
        (ga.FedGA(beta="auto", length=0.5, mean="running") + ga.FedProx(mu=0.1), [24, 36, 48, 48, 36, 36, 48]),
        (ga.FedGA(beta="auto", length=0.5, mean="fresh"), [36, 48, 48, 36, 36, 48, 48]),
        (ga.FedGA(beta="auto", length=0.5, mean="fresh") + ga.Scaffold(), [48] * 7),  # not SCAFFOLD's to pay
        (ga.FedGA(beta=0.1, mean="fresh"), [48] * 7),
        (ga.FedGA(beta="auto", length=0.5, mean="kept"), [24] * 7),
    ],
    ids=lambda given: getattr(given, "label", ""),
)
def test_half_of_the_measuring_rounds_take_half_of_the_gradient_examples(algorithm, spent):
    """Four clients, two steps of three examples each: 24 a round; gradients of six cost 24 more, of half 12."""
    features, labels = torch.randn(40, 3), torch.arange(40) % 2
    clients = ga.PartitionedClients((features, labels), torch.arange(40).view(4, 10))
    task = ga.Task(model=lambda: nn.Linear(3, 2), clients=clients)
    local = ga.LocalTraining(lr=0.1, steps=2, batch_size=3, gradient_examples=6)
    found = ga.run(task, algorithm, rounds=7, local=local, workers=0, measure=UNMEASURED).history["examples"]
    assert [after - before for before, after in itertools.pairwise(found)] == spent


def test_a_share_stays_within_none_and_all_and_is_all_where_samples_are_not_known():
    def share(whole: float, halved: float, sample=None, fewer=None) -> float:
        return own_share(after(whole, after(halved, {}, halved=True, sample=fewer), sample=sample))

    assert share(1.0, 5.0, (10, 1000), (5, 1000)) == 0.0, "more noise than distance, by chance"
    assert share(5.0, 1.0, (10, 1000), (5, 1000)) == 1.0, "less than no noise, by chance"
    assert share(1.0, 5.0) == 1.0, "an app that does not say how many examples it took"
    assert share(1.0, 5.0, None, (5, 1000)) == share(1.0, 5.0, (10, 1000)) == 1.0, "it says so in some rounds only"
    assert share(1.0, 5.0, (4, 4), (4, 4)) == 1.0, "small clients take all examples either way"


def test_a_distance_that_falls_is_not_taken_for_noise():
    """No noise, d² a hundredth less every round: half, whole, whole, half leaves q near 1; half first would not."""
    numbers: dict = {}
    order = ""
    for number in range(60):
        halved = halves(40, numbers)
        order += "h" if halved else "w"
        numbers = after(0.99**number, numbers, sample=(20 if halved else 40, 1000), halved=halved)
    assert order.startswith("hwwhhwwh")
    assert own_share(numbers) > 0.97


def test_the_bound_is_half_of_the_mean_step_whatever_the_clients_lengths():
    """Clients of 1 and 18 steps, weighted by their examples: β is α/2, not a mix of weighted and plain means."""
    problem = Quadratics.make(3, examples=(2, 2, 36))
    local = ga.LocalTraining(lr=0.02, epochs=1, batch_size=2)
    found = run(problem, ga.FedGA(beta="auto", length=1e6, mean="fresh"), rounds=3, local=local, weights="examples")
    assert found.history["beta"][2:] == pytest.approx([0.01, 0.01], rel=1e-12)


@pytest.mark.parametrize("mean", ["fresh", "running"])
def test_every_other_measuring_round_takes_half_of_the_gradient_examples(mean):
    """Of 4 gradient examples: 2, 4, 4, 2, 2 at each of three clients, from the first round that measures on."""
    problem = Quadratics.make(3, examples=(8, 9, 10))
    local = ga.LocalTraining(lr=0.1, steps=1, batch_size=2, gradient_examples=4)
    found = run(problem, ga.FedGA(beta="auto", length=0.5, mean=mean), rounds=5, local=local)
    first = [0] if mean == "running" else []
    taken = [*first, 2, 4, 4, 2, 2][:5]
    assert found.history["examples"] == list(itertools.accumulate((3 * (2 + own) for own in taken), initial=0))
    both = run(problem, ga.FedGA(beta="auto", length=0.5, mean=mean) + ga.FedSAM(), rounds=5, local=local)
    assert both.history["examples"][-1] == 5 * 3 * (2 + 4), "a second user of the gradients gets all of them"


def test_clients_that_differ_by_their_samples_alone_are_hardly_aligned():
    """Clients with the same examples and gradients of a few: d² is noise, so q is near 0; different ones: near 1."""

    def late_betas(centre: float) -> list[float]:
        rng = np.random.default_rng(5)
        noise = rng.normal(size=(40, 3))
        centres = [noise + centre * np.eye(3)[i % 3] for i in range(6)]
        problem = Quadratics([np.tile(np.eye(3), (40, 1, 1))] * 6, centres, np.zeros(3))
        local = ga.LocalTraining(lr=0.1, steps=2, batch_size=4, gradient_examples=4)
        algorithm = ga.FedGA(beta="auto", length=1e6, mean="running", decay=0.98)
        return run(problem, algorithm, rounds=60, local=local).history["beta"][40:]

    assert max(late_betas(0.0)) < 0.05 * 0.35
    assert min(late_betas(20.0)) > 0.05 * 0.97


def test_the_bound_follows_a_learning_rate_that_falls():
    """α from 0.2 to 0.002: β ≤ α/2 in the very round that it falls in."""
    local = ga.LocalTraining(lr=ga.Steps(value=0.2, at_rounds={3: 0.002}), steps=5)
    found = run(Quadratics.make(4), ga.FedGA(beta="auto", length=1e6, mean="fresh"), rounds=4, local=local)
    assert found.history["beta"][1:] == pytest.approx([0.0, 0.1, 0.1, 0.001])


@pytest.mark.parametrize("other", [ga.FedGA(beta=0.1, mean="running"), ga.Scaffold(control="kept")])
def test_a_momentum_for_all_is_not_taken_for_a_gradient(other):
    with pytest.raises(ga.GradalignError, match="would take fedcm's momentum for a gradient"):
        other + ga.FedCM()
    assert (ga.FedGA(beta=0.1) + ga.FedCM()).label == "fedga+fedcm"


def test_a_length_may_follow_the_rounds_and_rests_cost_one_trip():
    late = ga.FedGA(beta="auto", length=ga.OffUntil(value=0.2, round=2), mean="fresh")
    found = run(Quadratics.make(4), late, rounds=4, local=ga.LocalTraining(lr=0.1, steps=2))
    assert found.history["communication_rounds"] == [0, 1, 2, 4, 6]
    assert found.history["beta"][1:4] == [0.0, 0.0, 0.0]
    assert found.history["beta"][4] > 0.0


def test_some_examples_are_enough_for_a_client_s_own_gradient():
    problem = Quadratics.make(3, examples=(4, 5, 6))
    local = ga.LocalTraining(lr=0.1, steps=2, batch_size=2, gradient_examples=3)
    found = run(problem, ga.FedGA(beta=0.1, mean="running"), rounds=2, local=local)
    assert found.history["examples"] == [0, 12, 12 + 12 + 9]


def test_zero_gradients_and_a_server_that_stands_still_displace_nobody():
    flat = Quadratics([np.zeros((1, 3, 3))] * 2, [np.zeros((1, 3))] * 2, np.ones(3))
    for algorithm in (ga.FedSAM(rho=1.0), ga.FedLESAM(rho=1.0), ga.FedCM(), ga.FedInit(beta=1.0)):
        assert vector(run(flat, algorithm, rounds=3)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: ga.FedGA(beta=0.1, mean="stale"),
            'algorithm.mean must be "fresh" or "running" or "kept", got "stale"',
        ),
        (lambda: ga.FedGA(beta="much"), 'algorithm.beta must be a number, a schedule or "auto", got "much"'),
        (lambda: ga.FedGA(beta="auto", length=-1.0, mean="fresh"), "algorithm.length must be at least 0"),
        (lambda: combine(ga.FedGA(beta=0.1, length=0.1)), 'algorithm.length is for beta = "auto"'),
        (lambda: ga.FedGA(beta=0.1, decay=1.0), "algorithm.decay must be"),
        (lambda: ga.FedGA(beta=0.1, decay=float("nan")), "algorithm.decay must be"),
        (lambda: ga.FedGA(beta=0.1, gradient_every=0), "algorithm.gradient_every must be"),
        (lambda: ga.FedInit(beta=-1.0), "algorithm.beta must be at least 0"),
        (lambda: ga.FedSAM(rho=0.0), "algorithm.rho must be greater than 0"),
        (lambda: ga.FedLESAM(rho=float("inf")), "algorithm.rho must be a finite number"),
        (lambda: ga.FedCM(alpha=0.0), "algorithm.alpha must be greater than 0"),
        (lambda: ga.FedCM(alpha=1.5), "algorithm.alpha must be"),
    ],
)
def test_values_that_make_no_sense_are_refused(make, problem):
    with pytest.raises(ga.GradalignError, match="^" + problem.replace(".", r"\.")):
        make()


def test_without_settings_fedga_is_the_form_that_earned_it_and_a_beta_of_ones_own_is_the_papers():
    assert ga.FedGA() == ga.FedGA(beta="auto", mean="running")
    assert ga.FedGA(beta=0.1) == ga.FedGA(beta=0.1, mean="fresh")
    found = run(Quadratics.make(4), ga.FedGA(), rounds=20, local=ga.LocalTraining(lr=0.1, steps=2))
    assert found.history["communication_rounds"] == list(range(21))
    assert found.history["beta"][1:4] == [0.0, 0.0, 0.0], "a tenth of the run, and the round that measures"
    assert all(0.0 < beta <= 0.05 for beta in found.history["beta"][4:])

"""GradAlign in the loops people write: weights, clipping, schedules, stock loops, last batches."""

from __future__ import annotations

import gc
import io
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gradalign as ga
from gradalign.optim.pending import PlainGradient

LR = 0.1
MATRICES = [np.diag([1.0, 2.0]), np.diag([3.0, 0.5]), np.array([[2.0, 0.5], [0.5, 1.0]])]
CENTRES = [np.array([1.0, -2.0]), np.array([-1.0, 0.5]), np.array([0.0, 3.0])]
START = np.array([2.0, 1.0])


def gradient(part: int, w: np.ndarray) -> np.ndarray:
    return MATRICES[part] @ (w - CENTRES[part])


def by_hand(weights: list[float], betas: list[float], *, reuse: bool = False, limit: float = np.inf) -> np.ndarray:
    """Algorithm 1 for weighted parts, line by line: one step for each β."""
    shares, w, previous = np.array(weights) / np.sum(weights), START, None
    for beta in betas:
        own = [gradient(i, w) for i in range(len(weights))]
        mean = sum(s * g for s, g in zip(shares, own, strict=True))
        around = previous if reuse and previous is not None else mean
        update = sum(s * gradient(i, w - beta * (around - own[i])) for i, s in enumerate(shares))
        previous = update
        w = w - LR * update * min(1.0, limit / (np.linalg.norm(update) + 1e-6))  # torch's formula
    return w


class Point(nn.Module):
    """f_i(w) = ½ (w − b_i)ᵀ A_i (w − b_i)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(START))

    def forward(self, part: int) -> Tensor:
        distance = self.w - torch.tensor(CENTRES[part])
        return 0.5 * distance @ torch.tensor(MATRICES[part]) @ distance

    @property
    def end(self) -> np.ndarray:
        return self.w.detach().numpy()


def wrapped(model: nn.Module, beta, **options) -> ga.GradAlign:
    return ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR), beta, **options)


def verbs(opt: ga.GradAlign, model: Point, weights: list[float], *, zero: bool = False, always: bool = False) -> None:
    """Both passes; ``zero`` clears the gradients before every backward, ``always`` makes useless second passes too."""
    opt.zero_grad()
    for part, weight in enumerate(weights):
        if zero:
            opt.zero_grad()
        model(part).backward()
        opt.collect(weight=weight)
    for part in range(len(weights)):
        displaced = opt.displace()
        if zero:
            opt.zero_grad()
        if displaced or always:
            model(part).backward()


WAYS = {
    "closure": {},
    "low": {"memory": "low"},
    "reuse": {"reuse": "previous"},
    "verbs": {},
    "verbs, reuse": {"reuse": "previous"},
}


@pytest.mark.parametrize("way", WAYS)
@given(weights=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=3), beta=st.sampled_from([0.0, 0.3]))
@settings(max_examples=15, deadline=None)
def test_parts_count_by_their_weights_in_both_passes(way, weights, beta):
    model = Point()
    opt = wrapped(model, beta, **WAYS[way])
    losses = []
    for _ in range(3):
        w = model.end.copy()
        if way.startswith("verbs"):
            verbs(opt, model, weights)
            opt.step()
        else:
            losses.append(float(opt.step(model, range(len(weights)), weights=weights)))
            values = [0.5 * (w - b) @ a @ (w - b) for a, b in zip(MATRICES, CENTRES, strict=True)]
            assert losses[-1] == pytest.approx(np.average(values[: len(weights)], weights=weights), rel=1e-12)
    expected = by_hand(weights, [beta] * 3, reuse="reuse" in way)
    assert np.abs(model.end - expected).max() < 1e-12


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), "many", None])
def test_weights_that_are_none_are_refused(weight):
    model = Point()
    opt = wrapped(model, 0.3)
    with pytest.raises(ga.GradalignError, match="the weight of a part must be a positive number"):
        opt.step(model, [0, 1], weights=[1.0, weight])
    model(0).backward()
    if weight is not None:  # left out, there
        with pytest.raises(ga.GradalignError, match="the weight of a part must be a positive number"):
            opt.collect(weight=weight)
        with pytest.raises(ga.GradalignError, match="the scale of a part's loss must be a positive number"):
            opt.collect(scale=weight)
    assert np.array_equal(model.end, START)


CLIPPERS = {
    "torch's": lambda opt, model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "the wrapper's": lambda opt, model: opt.clip_grad_norm_(0.01),
}


@pytest.mark.parametrize("clipper", CLIPPERS)
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero_grad"])
@pytest.mark.parametrize(("beta", "always"), [(0.3, True), (0.0, True), (0.0, False)])
def test_the_mean_of_all_parts_is_clipped(clipper, zero, beta, always):
    weights, model = [1.0, 4.0, 2.5], Point()
    opt = wrapped(model, beta)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            verbs(opt, model, weights, zero=zero, always=always)
            CLIPPERS[clipper](opt, model)
            opt.step()
            assert float(model.w.grad.norm()) == pytest.approx(0.01, rel=1e-4)
    assert np.abs(model.end - by_hand(weights, [beta] * 2, limit=0.01)).max() < 1e-12


def test_clipping_sees_parameters_that_only_an_earlier_part_used():
    """By hand: β = 1, f_1 = ½u², f_2 = ½w², both at 1: g_1 = (1, 0), g_2 = (0, 1), ḡ = (½, ½)."""
    u, w = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))
    opt = ga.GradAlign(torch.optim.SGD([u, w], lr=1.0), beta=1.0)
    parts = [lambda: 0.5 * u**2, lambda: 0.5 * w**2]
    for part in parts:
        part().backward()
        opt.collect()
    for part in parts:
        opt.displace()
        part().backward()
    # u_1 = 1 − (½ − 1) = 1.5, w_2 alike: the mean is (0.75, 0.75)
    assert float(nn.utils.clip_grad_norm_([u, w], 100.0)) == pytest.approx(0.75 * 2**0.5)
    opt.step()
    assert u.item() == w.item() == pytest.approx(0.25)


def test_gradients_may_be_put_into_place_by_hand_and_in_pieces():
    weights, model = [1.0, 4.0, 2.5], Point()
    opt = wrapped(model, 0.3)
    for part, weight in enumerate(weights):
        (model.w.grad,) = torch.autograd.grad(model(part), [model.w])
        opt.collect(weight=weight)
    for part in range(3):
        opt.displace()
        if part < 2:
            (model.w.grad,) = torch.autograd.grad(model(part), [model.w])
        else:
            for _ in range(2):
                (model(part) / 2).backward()
    opt.step()
    assert np.abs(model.end - by_hand(weights, [0.3])).max() < 1e-14
    other = Point()
    opt = wrapped(other, 0.3)
    for part, weight in enumerate(weights):
        other.w.grad = torch.tensor(gradient(part, other.end))
        opt.collect(weight=weight)
    for part in range(3):
        opt.displace()
        other.w.grad = torch.tensor(gradient(part, other.end))
    opt.step()
    assert np.abs(other.end - by_hand(weights, [0.3])).max() < 1e-14


def test_a_part_without_its_second_backward_is_noticed():
    model = Point()
    opt = wrapped(model, 0.3)
    for part in range(3):
        model(part).backward()
        opt.collect()
    opt.displace()
    with pytest.raises(ga.GradalignError, match="without a second backward for the one before"):
        opt.displace()
    assert np.array_equal(model.end, START)
    verbs(opt, model, [1.0, 1.0, 1.0])
    opt.step()
    assert np.abs(model.end - by_hand([1.0] * 3, [0.3])).max() < 1e-14


def test_a_step_leaves_no_hook_behind():
    """Of a model without buffers too: a hook for all modules would slow down every model from then on."""
    hooks, model = nn.modules.module._global_forward_pre_hooks, Point()
    before, opt = len(hooks), wrapped(model, 0.3)
    for _ in range(2):
        verbs(opt, model, [1.0, 2.0, 3.0])
        opt.step()
        assert len(hooks) == before
    model(0).backward()
    opt.collect()
    model(1).backward()
    opt.collect()
    opt.displace()
    assert len(hooks) == before + 1
    del opt  # given up in the middle of a step, as after an error in a notebook
    gc.collect()
    assert len(hooks) == before


@pytest.mark.filterwarnings("ignore:step.. came without displace")
@pytest.mark.parametrize("passes", ["displaced", "finished", "finished without displace"])
def test_collecting_after_the_first_pass_is_refused(passes):
    model = Point()
    opt = wrapped(model, 0.3)
    for part in range(2):
        model(part).backward()
        opt.collect()
    for part in range(2) if passes != "finished without displace" else ():
        opt.displace()
        model(part).backward()
    if passes != "displaced":
        opt.finish()
    with pytest.raises(ga.GradalignError, match="belongs to the first pass"):
        opt.collect()
    opt.restore()


def test_clipping_past_the_wrapper_is_told_where_reuse_keeps_the_gradient():
    model = Point()
    opt = wrapped(model, 0.3, reuse="previous")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            verbs(opt, model, [1.0, 2.0])
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            opt.step()
    assert [str(one.message)[:26] for one in caught] == ["the gradients were changed"]


@pytest.mark.parametrize("collected", [False, True])
def test_a_stock_loop_is_told_once_that_nothing_is_aligned(collected):
    model = Point()
    opt = wrapped(model, 0.3)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            opt.zero_grad()
            model(0).backward()
            if collected:
                opt.collect()
            opt.step()
            schedule.step()
    said = [str(one.message) for one in caught]
    assert len(said) == 1
    assert said[0].startswith("step() came without displace(), so nothing was aligned")
    assert np.abs(model.end - by_hand([1.0], [0.0] * 3)).max() < 1e-14


def test_a_stock_loop_without_alignment_is_told_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for beta, every in ((0.0, 1), (ga.OffUntil(value=0.3, round=5), 1)):
            model = Point()
            opt = wrapped(model, beta, every=every)
            opt.step()  # no gradient, no step
            for _ in range(3):
                opt.zero_grad()
                model(0).backward()
                opt.step()


SCHEDULES = [
    (ga.Warmup(value=0.4, rounds=2), [0.0, 0.2, 0.4, 0.4]),
    (ga.Cosine(value=0.4, rounds=2), [0.4, 0.2, 0.0, 0.0]),
    (ga.OffUntil(value=0.4, round=2), [0.0, 0.0, 0.4, 0.4]),
    (ga.Steps(value=0.1, at_rounds={1: 0.4, 3: 0.0}), [0.1, 0.4, 0.4, 0.0]),
]


@pytest.mark.parametrize(("beta", "betas"), SCHEDULES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("way", ["closure", "verbs"])
def test_beta_may_be_a_schedule_over_steps_and_survives_a_state_dict(way, beta, betas):
    weights, model = [1.0, 4.0, 2.5], Point()
    opt = wrapped(model, beta)
    lr = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    for step, now in enumerate(betas):
        if step == 2:
            file = io.BytesIO()
            torch.save(opt.state_dict(), file)
            file.seek(0)
            opt = wrapped(model, 77.0)
            opt.load_state_dict(torch.load(file, weights_only=True))
            assert opt.beta == beta
        assert opt.beta_now == pytest.approx(now, abs=1e-15)
        if way == "verbs":
            verbs(opt, model, weights)
            opt.step()
        else:
            opt.step(model, range(3), weights=weights)
        lr.step()
    assert np.abs(model.end - by_hand(weights, betas)).max() < 1e-14


def test_beta_is_checked_wherever_it_comes_from():
    model = Point()
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    opt = ga.GradAlign(inner, 0.3)
    assert opt.beta == 0.3
    for bad in (
        -1.0,
        float("nan"),
        "strong",
        ga.Warmup(value=-1.0, rounds=3),
        ga.Warmup(value=0.1, share=0.5),
        ga.Cosine(value=1.0),
    ):
        with pytest.raises(ga.GradalignError, match=r"beta must be|needs the run's length"):
            opt.beta = bad
        with pytest.raises(ga.GradalignError, match=r"beta must be|needs the run's length"):
            ga.GradAlign(inner, bad)
    opt.beta = np.float32(0.5)
    assert opt.beta == 0.5
    state = opt.state_dict()
    state["gradalign"]["beta"] = {"kind": "Sine", "value": 0.1}
    with pytest.raises(ga.GradalignError, match="a schedule that this version does not know"):
        opt.load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda inner: ga.GradAlign(inner), "missing a required argument: 'beta'"),
        (lambda inner: ga.GradAlign(inner, 0.1, 2), "too many positional arguments"),
        (lambda inner: ga.GradAlign(inner, betas=0.1), "missing a required argument: 'beta'"),
        (lambda inner: ga.GradAlign(inner, 0.1, everyone=2), "unexpected keyword argument 'everyone'"),
        (
            lambda inner: ga.GradAlign(0.1),
            "wraps a torch.optim optimizer, got float; without one it is LargeBatchGradAlign(beta",
        ),
        (lambda inner: ga.GradAlign(inner, 0.1, every=1.5), "every must be at least 1"),
    ],
)
def test_wrong_arguments_are_told_with_the_public_name(call, sentence):
    with pytest.raises(ga.GradalignError) as caught:
        call(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=LR))
    assert sentence in str(caught.value)
    assert "TwoPassSteps" not in str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_last_batch_smaller_than_parts_has_fewer_parts(size):
    """Every example is a part then; the same as giving them one by one."""
    inputs, targets = torch.randn(size, 3, dtype=torch.float64), torch.randn(size, 1, dtype=torch.float64)
    ends = []
    for whole in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 1, dtype=torch.float64)
        opt = wrapped(model, 0.5)

        def loss(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return F.mse_loss(model(x), y)

        with warnings.catch_warnings():
            warnings.simplefilter("error" if whole else "ignore")
            if whole:
                opt.step(loss, inputs, targets, parts=4)
            else:
                pieces = list(zip(inputs.tensor_split(min(4, size)), targets.tensor_split(min(4, size)), strict=True))
                opt.step(lambda part, loss=loss: loss(*part), pieces, weights=[len(y) for _, y in pieces])
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(ends[0], ends[1])


@pytest.mark.parametrize("unscale", ["no", "yes", "and clip"])
def test_a_grad_scalers_scale_is_undone_once_in_plain_and_in_aligned_steps(unscale):
    """Scales that are powers of two change no bit; every second step is plain, its second pass made or left out."""
    ends = []
    for scale in (1.0, 1024.0):
        model = Point()
        opt = wrapped(model, 0.2, reuse="previous", every=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        for step in range(4):
            opt.zero_grad()
            scaler.scale(model(step % 3)).backward()
            if opt.displace(scaler=scaler) or step == 3:
                scaler.scale(model(step % 3)).backward()
            if unscale != "no":
                scaler.unscale_(opt)
            if unscale == "and clip":
                opt.clip_grad_norm_(0.01)
            scaler.step(opt)
            scaler.update()
        ends.append(model.end.copy())
        assert opt.skipped_steps == 0
    assert np.array_equal(ends[0], ends[1])
    assert not np.array_equal(ends[0], START)


def test_clipping_before_a_grad_scaler_told_its_scale_does_not_lose_the_scale():
    model = Point()
    opt = wrapped(model, 0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler.scale(model(0)).backward()
        opt.displace(scaler=scaler)
        opt.clip_grad_norm_(1e9)  # no limit
        scaler.step(opt)
    assert np.abs(model.end - by_hand([1.0], [0.0])).max() < 1e-12


def test_a_grad_scaler_that_is_off_bars_nothing():
    """Several parts cannot be scaled; with enabled=False nothing is."""
    model = Point()
    opt, scaler = wrapped(model, 0.2), torch.amp.GradScaler("cpu", enabled=False)
    for part in range(2):
        scaler.scale(model(part)).backward()
        opt.collect()
    for part in range(2):
        opt.displace(scaler=scaler)
        scaler.scale(model(part)).backward()
    scaler.step(opt)
    assert np.abs(model.end - by_hand([1.0, 1.0], [0.2])).max() < 1e-12


def test_a_plain_steps_gradient_comes_back_where_it_was_cleared_and_strangers_go():
    own, used, unused = torch.tensor([1.0, 2.0]), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    plain = PlainGradient([used, unused], [own, None])
    used.grad, unused.grad = None, torch.ones(2)
    plain.finish()
    assert torch.equal(used.grad, own)
    assert unused.grad is None

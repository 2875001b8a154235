"""GradAlign in one process: the paper's arithmetic, and everything a torch optimizer is expected to do."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradalign as ga
from conftest import Quadratics, final_point
from gradalign.algorithms import LargeBatchGradAlign

PARTS = 4


class Point(nn.Module):
    """f_i(w) = ½ (w − b_i)ᵀ A_i (w − b_i), in float64."""

    def __init__(self, problem: Quadratics) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(problem.start))
        self.a = [torch.tensor(a[0]) for a in problem.matrices]
        self.b = [torch.tensor(b[0]) for b in problem.centres]

    def forward(self, part: int) -> torch.Tensor:
        distance = self.w - self.b[part]
        return 0.5 * distance @ self.a[part] @ distance


def algorithm_1(problem: Quadratics, x: np.ndarray, lr: float, beta: float, steps: int) -> np.ndarray:
    """The paper's Algorithm 1, line by line."""
    n = len(problem.centres)
    for _ in range(steps):
        full = sum(problem.gradient(i, x) for i in range(n)) / n
        ends = []
        for i in range(n):
            v = full - problem.gradient(i, x)
            ends.append(x - lr * problem.gradient(i, x - beta * v))
        x = sum(ends) / n
    return x


@pytest.mark.parametrize("memory", ["full", "low"])
def test_a_step_is_the_papers_algorithm_1(quadratics, memory):
    model = Point(quadratics)
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=0.05), beta=0.3, memory=memory)
    losses = [opt.step(model, range(PARTS)) for _ in range(3)]
    expected = algorithm_1(quadratics, quadratics.start, 0.05, 0.3, 3)
    assert np.abs(model.w.detach().numpy() - expected).max() < 1e-14
    at_start = np.mean([float(Point(quadratics)(i).detach()) for i in range(PARTS)])
    assert float(losses[0]) == pytest.approx(at_start, rel=1e-14)


def test_the_two_verbs_give_the_same_step(quadratics):
    model = Point(quadratics)
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=0.05), beta=0.3)
    for _ in range(3):
        opt.zero_grad()
        for part in range(PARTS):
            model(part).backward()
            opt.collect()
        for part in range(PARTS):
            assert opt.displace()
            model(part).backward()
        opt.step()
    expected = algorithm_1(quadratics, quadratics.start, 0.05, 0.3, 3)
    assert np.abs(model.w.detach().numpy() - expected).max() < 1e-14


def test_the_runners_gradalign_and_fedga_with_one_step_take_the_same_steps(quadratics):
    model = Point(quadratics)
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=0.05), beta=0.3)
    for _ in range(3):
        opt.step(model, range(PARTS))
    local = ga.LocalTraining(lr=0.05, steps=1)
    for algorithm in (LargeBatchGradAlign(beta=0.3), ga.FedGA(beta=0.3)):
        runner = final_point(ga.run(quadratics.task(), algorithm, rounds=3, local=local, workers=0))
        assert np.abs(model.w.detach().numpy() - runner).max() < 1e-14


def network(seed: int = 0, *, dropout: float = 0.0, norm: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))


def batch(size: int = 32, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)


def loss_of(model: nn.Module):
    return lambda inputs, targets: F.cross_entropy(model(inputs), targets)


def sgd(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} | options))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("kind", [sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("parts", [1, 3, 5])
def test_beta_zero_is_the_wrapped_optimizers_plain_step_to_the_bit(kind, parts):
    plain, wrapped = network(dropout=0.3, norm=True), network(dropout=0.3, norm=True)
    reference, opt = kind(plain), ga.GradAlign(kind(wrapped), beta=0.0)
    for seed in range(4):
        x, y = batch(30, seed)
        torch.manual_seed(seed)
        reference.zero_grad()
        for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (loss_of(plain)(inputs, targets) / parts).backward()
        reference.step()
        torch.manual_seed(seed)
        opt.step(loss_of(wrapped), x, y, parts=parts)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, wrapped.state_dict()[name]), name


def test_parts_of_unequal_length_are_weighted_by_it():
    """β = 0: the mean over 10 = 4 + 3 + 3 examples is the whole batch's gradient."""
    model = network()
    x, y = batch(10)
    opt = ga.GradAlign(sgd(model), beta=0.0)
    loss = opt.align(loss_of(model), x, y, parts=3)
    expected = torch.autograd.grad(loss_of(model)(x, y), list(model.parameters()))
    for p, g in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(p.grad, g, atol=1e-7)
    assert float(loss) == pytest.approx(loss_of(model)(x, y).item(), rel=1e-6)


def run_steps(model: nn.Module, opt, steps: int = 5, start: int = 0, parts: int = 4) -> torch.Tensor:
    for seed in range(start, start + steps):
        opt.step(loss_of(model), *batch(32, seed), parts=parts)
    return flat(model)


def test_memory_low_takes_the_same_steps_and_three_vectors():
    ends = {}
    for memory in ("full", "low"):
        torch.manual_seed(0)
        model = network(dropout=0.2, norm=True).double()
        opt = ga.GradAlign(sgd(model), beta=0.3, memory=memory)
        torch.manual_seed(5)
        for seed in range(4):
            x, y = batch(32, seed)
            opt.step(loss_of(model), x.double(), y, parts=4)
        ends[memory] = torch.cat([value.double().reshape(-1) for value in model.state_dict().values()])
    assert torch.allclose(ends["full"], ends["low"], atol=1e-12)


class Heavy(nn.Module):
    """One parameter that dwarfs everything else, so that live memory counts gradient-sized vectors."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        return (self.w * part).sum()


@pytest.mark.parametrize(("memory", "parts", "limit"), [("full", 2, 3), ("full", 4, 5), ("low", 4, 3)])
def test_vectors_held_while_the_closure_runs(memory, parts, limit):
    """Count the tensors of the parameter's size that are alive beside the parameter and the closure's own."""
    size = 100_003
    model = Heavy(size)
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=0.1), beta=0.5, memory=memory)
    held = []

    def closure(part: float) -> torch.Tensor:
        # type() and not isinstance(): the latter wakes up every lazy object there is.
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == size]
        held.append(len({t.untyped_storage().data_ptr() for t in tensors}))
        return (model.w * part).sum()

    opt.step(closure, [float(k) for k in range(parts)])
    # During backward the part's own gradient comes on top, where there is no .grad yet to add it to.
    assert max(held) + (1 if memory == "full" else 0) == limit
    if memory == "low":
        recomputing = held[parts::2]
        assert max(recomputing) + 1 <= limit


def test_batch_norm_statistics_are_updated_once_by_the_first_pass():
    plain = network(norm=True)
    x, y = batch()
    for part in x.chunk(4):
        plain(part)
    for model_given in (True, False):
        for memory in ("full", "low"):
            model = network(norm=True)
            opt = ga.GradAlign(sgd(model), beta=0.5, memory=memory, model=model if model_given else None)
            opt.step(loss_of(model), x, y, parts=4)
            assert int(model[1].num_batches_tracked) == 4
            assert torch.equal(model[1].running_mean, plain[1].running_mean)
            assert torch.equal(model[1].running_var, plain[1].running_var)


def test_batch_norm_statistics_are_updated_once_by_the_two_verbs():
    model, plain = network(norm=True), network(norm=True)
    x, y = batch()
    opt = ga.GradAlign(sgd(model), beta=0.5)
    for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        plain(part)
        loss_of(model)(part, targets).backward()
        opt.collect()
    for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        opt.displace()
        loss_of(model)(part, targets).backward()
    opt.step()
    assert torch.equal(model[1].running_mean, plain[1].running_mean)
    model(x)
    assert int(model[1].num_batches_tracked) == 3, "the hold on the buffers ends with the step"


def masks_of(opt, model: nn.Module, drive) -> list[torch.Tensor]:
    seen = []
    dropout = next(m for m in model if isinstance(m, nn.Dropout))
    hook = dropout.register_forward_hook(lambda module, inputs, output: seen.append((output == 0) & (inputs[0] != 0)))
    drive()
    hook.remove()
    return seen


@pytest.mark.parametrize("memory", ["full", "low"])
def test_dropout_draws_the_same_masks_in_both_passes(memory):
    model = network(dropout=0.5)
    opt = ga.GradAlign(sgd(model), beta=1e-6, memory=memory)
    torch.manual_seed(0)
    seen = masks_of(opt, model, lambda: opt.step(loss_of(model), *batch(), parts=2))
    after = torch.rand(1)
    repeats = [(0, 2), (1, 3)] if memory == "full" else [(0, 2), (0, 3), (1, 4), (1, 5)]
    assert all(torch.equal(seen[a], seen[b]) for a, b in repeats)
    assert not torch.equal(seen[0], seen[1])
    torch.manual_seed(0)
    plain = ga.GradAlign(sgd(model), beta=0.0)
    plain.step(loss_of(model), *batch(), parts=2)
    assert torch.equal(after, torch.rand(1)), "the stream goes on as after one pass"


def test_dropout_masks_of_the_two_verbs_and_the_switch():
    for same in (True, False):
        model = network(dropout=0.5)
        opt = ga.GradAlign(sgd(model), beta=1e-6, same_randomness=same)
        x, y = batch()

        def drive(opt=opt, model=model, x=x, y=y):
            opt.zero_grad()
            for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                loss_of(model)(part, targets).backward()
                opt.collect()
            for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                opt.displace()
                loss_of(model)(part, targets).backward()
            opt.step()

        seen = masks_of(opt, model, drive)
        assert torch.equal(seen[0], seen[2]) is same
        assert torch.equal(seen[1], seen[3]) is same


@pytest.mark.parametrize("reuse", [None, "previous"])
def test_state_dict_round_trip_in_the_middle_continues_to_the_same_bits(reuse):
    def fresh():
        model = network(dropout=0.2, norm=True)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        opt = ga.GradAlign(inner, beta=0.05, every=2, reuse=reuse)
        return model, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)

    def go(model, opt, schedule, first, last):
        for seed in range(first, last):
            torch.manual_seed(seed)
            opt.step(loss_of(model), *batch(32, seed), parts=4)
            schedule.step()

    whole = fresh()
    go(*whole, 0, 7)
    first = fresh()
    go(*first, 0, 3)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = fresh()
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert second[1].steps == 3
    go(*second, 3, 7)
    for name, value in whole[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[name]), name


def test_a_plain_optimizers_state_dict_can_be_continued_with_alignment():
    model = network()
    inner = sgd(model)
    loss_of(model)(*batch()).backward()
    inner.step()
    opt = ga.GradAlign(sgd(model), beta=0.1)
    opt.load_state_dict(inner.state_dict())
    assert torch.equal(opt.state[model[0].weight]["momentum_buffer"], inner.state[model[0].weight]["momentum_buffer"])


def test_it_behaves_like_an_optimizer():
    model = network()
    inner = sgd(model)
    opt = ga.GradAlign(inner, beta=0.1)
    assert isinstance(opt, torch.optim.Optimizer)
    assert isinstance(opt, ga.GradAlign)
    assert opt.param_groups is inner.param_groups
    assert opt.defaults is inner.defaults
    extra = nn.Parameter(torch.zeros(3))
    opt.add_param_group({"params": [extra], "lr": 0.5})
    assert inner.param_groups[-1]["params"] == [extra]
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=10)
    opt.step(loss_of(model), *batch(), parts=2)
    schedule.step()
    assert opt.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    calls = []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    opt.step(loss_of(model), *batch(), parts=2)
    assert calls == [1]
    assert extra.grad is None, "a parameter outside the loss stays without a gradient"
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert "SGD" in repr(opt)


def test_copies_and_pickles():
    model = network()
    opt = ga.GradAlign(sgd(model), beta=0.1)
    opt.step(loss_of(model), *batch(), parts=2)
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert twin.steps == 1
        assert torch.equal(twin.param_groups[0]["params"][0], model[0].weight)


def test_the_old_call_without_an_optimizer_gives_the_round_algorithm_and_says_its_name():
    with pytest.warns(DeprecationWarning, match="LargeBatchGradAlign") as caught:
        made = ga.GradAlign(beta=0.1)
    assert made == LargeBatchGradAlign(beta=0.1)
    assert (made + ga.FedAdam()).label == "gradalign+fedadam"
    assert caught[0].filename == __file__


def test_frozen_and_unused_parameters_stay_as_they_are():
    model = network()
    model[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.ones(2))
    frozen = model[0].weight.clone()
    opt = ga.GradAlign(torch.optim.SGD([*model.parameters(), unused], lr=0.1, weight_decay=0.1), beta=0.5)
    opt.step(loss_of(model), *batch(), parts=4)
    assert torch.equal(model[0].weight, frozen)
    assert torch.equal(unused.detach(), torch.ones(2)), "no gradient, no weight decay: as in torch"


def test_a_parameter_used_by_one_part_only():
    """Two parts, f_1 = ½w² u-free, f_2 uses both: g_1 counts as zero for u, by hand."""
    w, u = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))
    opt = ga.GradAlign(torch.optim.SGD([w, u], lr=0.1), beta=0.2)
    opt.step(lambda part: 0.5 * w**2 if part == 0 else 0.5 * w**2 + 0.5 * u**2, [0, 1])
    # g = (2, 0), (2, 3); ḡ = (2, 1.5); u_1 = 3 − 0.2·1.5, u_2 = 3 − 0.2·(1.5 − 3) = 3.3
    assert w.item() == pytest.approx(2.0 - 0.1 * 2.0)
    assert u.item() == pytest.approx(3.0 - 0.1 * 0.5 * 3.3)


@pytest.mark.parametrize("memory", ["full", "low"])
@pytest.mark.parametrize("fails_at", [0, 3, 5])
def test_parameters_are_at_x_when_the_closure_raises(memory, fails_at):
    model = network(norm=True)
    opt = ga.GradAlign(sgd(model), beta=10.0, memory=memory)
    opt.step(loss_of(model), *batch(), parts=4)
    x, count, calls = flat(model), int(model[1].num_batches_tracked), []

    def closure(inputs, targets):
        calls.append(1)
        if len(calls) == fails_at + 1:
            raise RuntimeError("no more data")
        return loss_of(model)(inputs, targets)

    with pytest.raises(RuntimeError, match="no more data"):
        opt.step(closure, *batch(), parts=4)
    assert torch.equal(flat(model), x)
    assert int(model[1].num_batches_tracked) <= count + 4
    opt.step(loss_of(model), *batch(), parts=4)
    assert not torch.equal(flat(model), x)


@pytest.mark.parametrize("when", ["first", "second"])
@pytest.mark.parametrize("settings", [{}, {"memory": "low"}, {"reuse": "previous"}], ids=["full", "low", "reuse"])
def test_nan_gradients_skip_the_step_and_are_counted(when, settings):
    model = network()
    opt = ga.GradAlign(sgd(model), beta=0.5, **settings)
    opt.step(loss_of(model), *batch(), parts=4)
    x = flat(model)
    state = copy.deepcopy(opt.state_dict()["state"])

    def closure(inputs, targets):
        bad = torch.equal(flat(model), x) if when == "first" else not torch.equal(flat(model), x)
        return loss_of(model)(inputs, targets) * (float("inf") if bad else 1.0)

    opt.step(closure, *batch(), parts=4)
    assert opt.skipped_steps == 1
    assert opt.steps == 2
    assert torch.equal(flat(model), x)
    assert str(opt.state_dict()["state"]) == str(state)
    opt.step(loss_of(model), *batch(), parts=4)
    assert opt.skipped_steps == 1
    assert not torch.equal(flat(model), x)


def test_clipping_acts_on_the_mean_displaced_gradient():
    model, other = network(), network()
    opt, twin = ga.GradAlign(sgd(model), beta=0.5), ga.GradAlign(sgd(other), beta=0.5)
    opt.align(loss_of(model), *batch(), parts=4)
    norm = opt.clip_grad_norm_(0.01)
    opt.step()
    twin.align(loss_of(other), *batch(), parts=4)
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01)
    twin.optimizer.step()
    assert float(norm) == float(expected) > 0.01
    assert torch.equal(flat(model), flat(other))
    clipped = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()
    assert float(clipped) == pytest.approx(0.01, rel=1e-4)


def test_a_part_may_be_accumulated_from_micro_batches():
    """Each part's gradient in two backward calls: the same step as in one."""
    one, many = network().double(), network().double()
    x, y = batch()
    x = x.double()
    ga.GradAlign(sgd(one), beta=0.5).step(loss_of(one), x, y, parts=2)
    opt = ga.GradAlign(sgd(many), beta=0.5)

    def backward(part):
        for micro in (0, 1):
            rows = slice(16 * part + 8 * micro, 16 * part + 8 * micro + 8)
            (loss_of(many)(x[rows], y[rows]) / 2).backward()

    opt.zero_grad()
    for part in (0, 1):
        backward(part)
        opt.collect()
    for part in (0, 1):
        opt.displace()
        backward(part)
    opt.step()
    assert torch.allclose(flat(one), flat(many), atol=1e-14)


def test_every_second_step_is_plain():
    model, by_hand = network(), network()
    opt = ga.GradAlign(sgd(model), beta=0.5, every=2)
    aligned = ga.GradAlign(sgd(by_hand), beta=0.5)
    run_steps(model, opt, 4)
    for seed in range(4):
        aligned.beta = 0.5 if seed % 2 == 0 else 0.0
        aligned.step(loss_of(by_hand), *batch(32, seed), parts=4)
    assert torch.equal(flat(model), flat(by_hand))


def test_reuse_displaces_against_the_gradient_of_the_step_before(quadratics):
    x, lr, beta = quadratics.start, 0.05, 0.3
    model = Point(quadratics)
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=lr), beta=beta, reuse="previous")
    previous = np.mean([quadratics.gradient(i, x) for i in range(PARTS)], axis=0)
    for _ in range(3):
        opt.step(model, range(PARTS))
        displaced = [quadratics.gradient(i, x - beta * (previous - quadratics.gradient(i, x))) for i in range(PARTS)]
        previous = np.mean(displaced, axis=0)
        x = x - lr * previous
    assert np.abs(model.w.detach().numpy() - x).max() < 1e-14


@pytest.mark.parametrize("parts", [1, 4])
def test_the_second_pass_of_a_plain_step_may_be_left_out_or_made(parts):
    ends = []
    for leave_out in (True, False):
        model = network(dropout=0.2, norm=True)
        opt = ga.GradAlign(sgd(model), beta=0.0)
        for seed in range(3):
            pieces = list(zip(*(t.chunk(parts) for t in batch(32, seed)), strict=True))
            opt.zero_grad()
            for piece in pieces:
                loss_of(model)(*piece).backward()
                opt.collect()
            for piece in pieces:
                assert not opt.displace()
                if not leave_out:
                    loss_of(model)(*piece).backward()
            opt.step()
        ends.append(torch.cat([value.double().reshape(-1) for value in model.state_dict().values()]))
    plain = network(dropout=0.2, norm=True)
    reference = sgd(plain)
    for seed in range(3):
        reference.zero_grad()
        for piece in zip(*(t.chunk(parts) for t in batch(32, seed)), strict=True):
            (loss_of(plain)(*piece) / parts).backward()
        reference.step()
    expected = torch.cat([value.double().reshape(-1) for value in plain.state_dict().values()])
    assert torch.equal(ends[0], expected), "dividing by 1 and 4 rounds nothing"
    assert torch.equal(ends[1], expected)


def test_restore_gives_up_a_step_half_way():
    model = network()
    opt = ga.GradAlign(sgd(model), beta=0.5)
    x = flat(model)
    for part, targets in zip(*(t.chunk(2) for t in batch()), strict=True):
        loss_of(model)(part, targets).backward()
        opt.collect()
    assert opt.displace()
    assert not torch.equal(flat(model), x)
    with pytest.raises(ga.GradalignError, match="in the middle of a step"):
        opt.state_dict()
    opt.restore()
    assert torch.equal(flat(model), x)
    opt.state_dict()


def test_bfloat16_autocast_needs_nothing_special():
    model = network()
    opt = ga.GradAlign(sgd(model), beta=0.1)

    def closure(inputs, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model)(inputs, targets)

    before = closure(*batch()).item()
    for _ in range(10):
        opt.step(closure, *batch(), parts=4)
    assert closure(*batch()).item() < before


def test_grad_scaler_scales_both_passes_and_skips_on_overflow():
    """A power of two as the scale changes no bit; reuse gives the single part something to be aligned with."""
    ends = []
    for scale in (1.0, 1024.0):
        model = network()
        opt = ga.GradAlign(sgd(model), beta=0.2, reuse="previous")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        for seed in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)(*batch(32, seed))).backward()
            opt.displace(scaler=scaler)
            scaler.scale(loss_of(model)(*batch(32, seed))).backward()
            if seed % 2:
                scaler.unscale_(opt)
                opt.clip_grad_norm_(1.0)
            scaler.step(opt)
            scaler.update()
        ends.append(flat(model))
    assert torch.equal(ends[0], ends[1])
    x = flat(model)
    opt.zero_grad()
    (scaler.scale(loss_of(model)(*batch())) * float("inf")).backward()
    opt.displace(scaler=scaler)
    (scaler.scale(loss_of(model)(*batch())) * float("inf")).backward()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert opt.skipped_steps == 1
    assert torch.equal(flat(model), x)


def test_what_it_refuses():
    model = network()
    inner = sgd(model)
    with pytest.raises(ga.GradalignError, match=r"wraps a torch\.optim optimizer, got Sequential"):
        ga.GradAlign(model, beta=0.1)
    with pytest.raises(ga.GradalignError, match="cannot wrap LBFGS"):
        ga.GradAlign(torch.optim.LBFGS(model.parameters()), beta=0.1)
    with pytest.raises(ga.GradalignError, match="beta must be at least 0"):
        ga.GradAlign(inner, beta=-1.0)
    with pytest.raises(ga.GradalignError, match="every must be at least 1"):
        ga.GradAlign(inner, beta=0.1, every=0)
    with pytest.raises(ga.GradalignError, match='memory must be "full" or "low"'):
        ga.GradAlign(inner, beta=0.1, memory="none")
    with pytest.raises(ga.GradalignError, match="overlap=True needs model"):
        ga.GradAlign(inner, beta=0.1, overlap=True)
    opt = ga.GradAlign(inner, beta=0.1)
    with pytest.raises(ga.GradalignError, match="a batch of 0 examples"):
        opt.step(loss_of(model), *batch(0), parts=4)
    with pytest.raises(ga.GradalignError, match="parts must be at least 1, got 0"):
        opt.step(loss_of(model), *batch(), parts=0)
    with pytest.raises(ga.GradalignError, match="at least one"):
        opt.step(loss_of(model), [])
    with pytest.raises(ga.GradalignError, match="scalar tensor with a graph, got float"):
        opt.step(lambda part: 1.0, [0, 1])
    with pytest.raises(ga.GradalignError, match="leave backward"):
        opt.step(lambda part: loss_of(model)(*batch()).backward(), [0, 1])
    opt.zero_grad()
    with pytest.raises(ga.GradalignError, match="parts but no closure"):
        opt.step(parts=4)
    for _ in range(2):
        loss_of(model)(*batch()).backward()
        opt.collect()
    opt.displace()
    with pytest.raises(ga.GradalignError, match="without a second backward"):
        opt.step()


def test_sparse_gradients_are_refused_and_x_is_kept():
    table = nn.Embedding(5, 2, sparse=True)
    x = flat(table)
    opt = ga.GradAlign(torch.optim.SGD(table.parameters(), lr=0.1), beta=0.1)
    with pytest.raises(ga.GradalignError, match="make its layer with sparse=False"):
        opt.step(lambda part: table(torch.tensor([part])).sum(), [0, 1])
    assert torch.equal(flat(table), x)


def test_a_single_part_is_a_plain_step_and_says_so():
    model, plain = network(), network()
    opt = ga.GradAlign(sgd(model), beta=0.5)
    with pytest.warns(UserWarning, match="nothing to align"):
        opt.step(lambda: loss_of(model)(*batch()))
    reference = sgd(plain)
    loss_of(plain)(*batch()).backward()
    reference.step()
    assert torch.equal(flat(model), flat(plain))


def test_a_closure_in_torchs_own_style_is_one_part():
    """It zeroes, computes and goes backward itself, as frameworks hand it to step()."""
    model, plain = network(), network()
    opt = ga.GradAlign(sgd(model), beta=0.0)

    def closure():
        opt.zero_grad()
        loss = loss_of(model)(*batch())
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(closure)
    reference = sgd(plain)
    loss_of(plain)(*batch()).backward()
    reference.step()
    assert torch.equal(flat(model), flat(plain))

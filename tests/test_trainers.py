"""GradAlign inside other people's trainers: the steps are Algorithm 1 by hand, on one process and on two ranks."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

import gradalign as ga
from algorithm1 import (
    BETA,
    GAMMA,
    LR,
    MOMENTUM,
    START,
    WINDOWS,
    accumulated,
    algorithm1,
    by_examples,
    cut_batches,
    loss,
)
from gradalign.accelerate import prepare
from gradalign.lightning import Alignment
from sharded_at_work import SETTINGS, spanning_parts
from test_distributed import torchrun
from trainers_at_work import BETAS, CASES, Accelerated, Module, aligned, batches, linear, loss_of

TESTS = Path(__file__).parent
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    done = torchrun(2, str(TESTS / "trainers_at_work.py"), str(folder), seconds=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


def by_hand(name: str, ranks: int, *, betas=BETAS) -> np.ndarray:
    steps = cut_batches(ranks)
    if name in ("Lightning, automatic", "accelerate, verbs"):
        steps = accumulated(ranks)
    elif name in ("transformers", "transformers, without labels"):  # divides by what was accumulated: a last step whole
        steps = [(parts, [1 / len(parts)] * len(parts)) for parts, _ in accumulated(ranks)]
    elif name == "transformers, counted":
        steps = [(parts, by_examples(parts)) for parts, _ in accumulated(ranks)]
    # accelerate steps a scheduler once for every rank
    return algorithm1(steps, betas=betas, steps_of_schedule=ranks if name.startswith("accelerate") else 1)


@pytest.mark.parametrize("name", CASES)
def test_steps_in_one_process_are_algorithm_1_by_hand(tmp_path, name):
    end, seen = CASES[name](tmp_path)
    assert np.abs(end - by_hand(name, 1)).max() < 1e-13
    assert np.abs(end - by_hand(name, 1, betas=(0.0,) * 3)).max() > 1e-3, "alignment matters here"
    check_counts(name, seen)


@pytest.mark.parametrize("name", CASES)
def test_steps_on_two_ranks_are_algorithm_1_by_hand(two_ranks, name):
    for report in two_ranks:
        end, seen = report[name]
        assert np.abs(end - by_hand(name, 2)).max() < 1e-13
        check_counts(name, seen)
    assert np.array_equal(two_ranks[0][name][0], two_ranks[1][name][0])
    assert np.abs(by_hand(name, 2) - by_hand(name, 2, betas=(0.0,) * 3)).max() > 1e-3


def check_counts(name: str, seen: dict) -> None:
    if name.startswith("Lightning"):
        assert seen["counts"] == (2, 3, 3), "global_step counts optimizer steps, and goes on after a restart"
    elif name.startswith("accelerate"):
        assert seen == {"kinds": "AlignedOptimizer", "steps": 3, "beta": 0.25}
    elif name.startswith("transformers"):
        assert (seen["steps of 2"], seen["steps of 3"]) == ((2, 2), (3, 3))


def test_lightning_logs_the_first_pass_alone(tmp_path):
    _, seen = CASES["Lightning, automatic"](tmp_path)
    windows = accumulated(1)
    points = [algorithm1(windows[:count], betas=BETAS[:count]) for count in range(3)]
    losses = [[loss(part, point) for part in parts] for (parts, _), point in zip(windows, points, strict=True)]
    assert seen["logged"] == pytest.approx(losses[2][0], rel=1e-12)
    assert seen["logged over the epoch"] == pytest.approx(np.average(losses[0] + losses[1], weights=(5, 8, 3, 6)))


def test_the_trainers_report_of_losses_is_of_the_first_pass(tmp_path):
    _, seen = CASES["transformers, counted"](tmp_path)
    windows = [(parts, by_examples(parts)) for parts, _ in accumulated(1)]
    points = [algorithm1(windows[:count], betas=BETAS[:count]) for count in range(3)]
    expected = [
        sum(s * loss(p, w) for p, s in zip(*window, strict=True)) for window, w in zip(windows, points, strict=True)
    ]
    assert seen["losses"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_micro_batches_are_the_parts_of_fully_sharded_models(two_ranks, name):
    settings, steps = SETTINGS[name], spanning_parts(equal="verbs" in name)
    betas = [settings.get("beta", BETA) if step % settings.get("every", 1) == 0 else 0.0 for step in range(3)]
    expected = algorithm1(steps, betas=betas)
    losses = []
    for step in range(3) if "closure" in name else ():
        parts, shares = steps[step]
        point = algorithm1(steps[:step], betas=betas[:step])
        losses.append(sum(s * loss(part, point) for part, s in zip(parts, shares, strict=True)))
    for report in two_ranks:
        end, found = report["sharded"]["ends"][name]
        assert np.abs(end - expected).max() < 1e-13
        assert found == pytest.approx(losses, rel=1e-12)


def test_a_sharded_optimizer_is_wrapped_as_any_other(two_ranks):
    for report in two_ranks:
        assert np.abs(report["sharded"]["zero"] - algorithm1(cut_batches(2))).max() < 1e-13


def test_a_shard_that_is_not_finite_is_skipped_by_all_ranks(two_ranks):
    assert [report["sharded"]["lost"] for report in two_ranks] == [(1, True, True)] * 2


def test_what_would_be_wrong_with_shards_is_said(two_ranks):
    for report in two_ranks:
        said = report["sharded"]["mistakes"]
        for which in ("weights", "first weight", "last weight"):
            assert "the same weight on all of them" in said[which]
        assert "all need the same number of parts" in said["counts"]
        assert "several parts, each of which spans all ranks" in said["alone"]
        assert "the optimizer's own clip_grad_norm_()" in said["clipped"]
        assert "got DTensor parameters beside whole ones" in said["half"]


@pytest.mark.parametrize(("beta", "displaced"), [(BETA, True), (0.0, True), (0.0, False)])
@pytest.mark.parametrize("weighted", [False, True])
def test_scaled_losses_make_the_step_that_their_loop_would_have_made(beta, displaced, weighted):
    """With weights in the place of the scales it is the mean by these weights."""
    model = linear()
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), beta=beta)
    schedule = ExponentialLR(opt, GAMMA)
    for window in WINDOWS:
        given = [batches(index, 5)[0] for index in window]
        opt.zero_grad()
        for x, y in given:
            (0.5 * loss_of(model, x, y)).backward()
            opt.collect(len(y) if weighted else None, scale=0.5)
        for x, y in given if displaced else ():
            if opt.displace():
                (0.5 * loss_of(model, x, y)).backward()
        opt.step()
        schedule.step()
    steps = [(parts, by_examples(parts) if weighted else shares) for parts, shares in accumulated(1)]
    expected = algorithm1(steps, betas=(beta,) * 3, limit=None)
    assert np.abs(model.weight.detach().numpy() - expected).max() < 1e-13


def fit(module: pl.LightningModule, **options) -> pl.Trainer:
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, **QUIET, **options)
    trainer.fit(module, DataLoader(batches(0, 5), batch_size=None))
    return trainer


def test_the_one_call_of_lightnings_optimizer_counts_and_returns_the_loss():
    losses = []
    module = Module(lambda module, opt, x, y: losses.append(float(opt.step(module.loss, x, y, parts=8))))
    trainer = fit(module)
    assert trainer.global_step == 5, "the third batch has fewer examples than parts"
    assert losses[0] == pytest.approx(loss(accumulated(1)[0][0][0], START), rel=1e-12)


def test_changes_through_lightnings_wrapper_reach_the_optimizer():
    def work(module, opt, x, y):
        opt.beta = 0.125
        assert opt.optimizer.beta == 0.125
        opt.zero_grad()
        module.manual_backward(module.loss(x[:2], y[:2]))
        opt.collect()
        with pytest.raises(ga.GradalignError, match="no closure"):
            opt.optimizer.step(parts=3)
        opt.restore()
        assert opt.optimizer._passes is None

    fit(Module(work), limit_train_batches=1)


def test_a_stock_loop_in_lightning_is_plain_and_says_so_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Module(None)
        fit(module, accumulate_grad_batches=2)
    assert sum("nothing was aligned" in str(one.message) for one in caught) == 1
    plain = algorithm1(accumulated(1), betas=(0.0,) * 3, limit=None)
    assert np.abs(module.net.weight.detach().numpy() - plain).max() < 1e-13


def test_lightnings_callback_says_where_it_does_not_belong():
    with pytest.raises(ga.GradalignError, match="is for automatic optimization"):
        fit(Module(lambda *_: None), callbacks=[Alignment()])
    module = Module(None)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ga.GradalignError, match="needs configure_optimizers"):
        fit(module, callbacks=[Alignment()])


def test_an_error_in_lightnings_second_pass_leaves_the_parameters_where_they_were():
    module = Module(None)
    calls = []

    def fails_in_the_second_pass(x, y):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("third call")
        return Module.loss(module, x, y)

    module.loss = fails_in_the_second_pass
    with pytest.raises(RuntimeError, match="third call"):
        fit(module, callbacks=[Alignment()], accumulate_grad_batches=2)
    assert np.array_equal(module.net.weight.detach().numpy(), START)


def test_lightnings_second_pass_has_the_random_numbers_of_the_first():
    module, drawn = Module(None), []

    def noisy(x, y):
        drawn.append(float(torch.rand(())))
        return Module.loss(module, x, y)

    module.loss = noisy
    fit(module, callbacks=[Alignment()], accumulate_grad_batches=2, limit_train_batches=4)
    assert drawn[:2] == drawn[2:4]
    assert drawn[4:6] == drawn[6:]
    assert len(set(drawn)) == 4


def test_a_checkpoint_between_micro_batches_leaves_the_step_alone():
    model = linear()
    opt = aligned(model)
    for x, y in batches(0, 5)[:2]:
        loss_of(model, x, y).backward()
        opt.collect()
        assert opt.state_dict()["gradalign"]["steps"] == 0
    for x, y in batches(0, 5)[:2]:
        opt.displace()
        loss_of(model, x, y).backward()
        with pytest.raises(ga.GradalignError, match="in the middle of a step"):
            opt.state_dict()
    opt.step()
    parts = [(parts, [0.5, 0.5]) for parts, _ in accumulated(1)[:1]]
    assert np.abs(model.weight.detach().numpy() - algorithm1(parts, betas=BETAS[:1], limit=None)).max() < 1e-13


def test_accelerates_scheduler_waits_for_a_step_that_was_skipped():
    work = Accelerated(1)
    x, y = batches(0, 3)[0]
    work.opt.step(work.loss, x, y * float("inf"), parts=2)
    work.schedule.step()
    assert (work.opt.step_was_skipped, work.opt.skipped_steps, work.schedule.get_last_lr()) == (True, 1, [0.1])
    work.opt.step(work.loss, x, y, parts=2)
    work.schedule.step()
    assert (work.opt.step_was_skipped, work.schedule.get_last_lr()) == (False, [0.05])
    with pytest.raises(ga.GradalignError, match="no GradAlign optimizer"):
        prepare(work.accelerator, torch.optim.SGD(linear().parameters(), lr=0.1))


def test_steps_wait_within_accelerates_accumulation():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = linear()
    model, opt = prepare(accelerator, model, aligned(model))
    parts = []
    for x, y in batches(0, 5)[:2]:
        with accelerator.accumulate(model):
            accelerator.backward(0.5 * ((model(x) - y) ** 2).sum() / len(x))
            opt.collect()
            parts.append((x, y))
            if accelerator.sync_gradients:
                for a, b in parts:
                    opt.displace()
                    accelerator.backward(0.5 * ((model(a) - b) ** 2).sum() / len(a))
            opt.step()
            opt.zero_grad()
    expected = algorithm1(accumulated(1)[:1], betas=BETAS[:1], limit=None)
    assert opt.steps == 1
    assert np.abs(model.weight.detach().numpy() - expected).max() < 1e-13

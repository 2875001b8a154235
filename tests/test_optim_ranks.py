"""GradAlign on two ranks with unequal batches, against Algorithm 1 worked out in NumPy; and what ranks must not be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn

import gradalign as ga
from test_distributed import torchrun
from unequal_ranks import CASES, by_hand

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unequal")
    done = torchrun(2, str(TESTS / "unequal_ranks.py"), str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_count_by_their_examples_in_both_passes(reports, name):
    expected, losses = by_hand(*CASES[name], clipped="clipped" in name)
    for report in reports:
        end, found, changed, idle = report["ends"][name]
        assert np.abs(end - expected).max() < 1e-13
        assert found == pytest.approx(losses if found else [], rel=1e-13)
        assert (changed, idle) == (0, "verbs, quiet" in name)
    assert np.array_equal(reports[0]["ends"][name][0], reports[1]["ends"][name][0])


def test_the_weights_matter_in_every_case():
    """Parts as equals, which is where leaving out all weights would end, are far away."""
    for settings, parts in CASES.values():
        assert np.abs(by_hand(settings, parts)[0] - by_hand(settings, parts, weighted=False)[0]).max() > 1e-3


def test_clipping_a_ranks_own_gradient_warns_once(reports):
    assert [report["clipped"] for report in reports] == [1, 1]


def test_averaging_by_ddp_where_weights_would_be_lost_is_refused(reports):
    for report in reports:
        for name, (message, untouched, changed) in report["averaged"].items():
            if name == "inner":  # the DDP around the model given is not known: what it does to .grad is noticed
                assert (message, changed) == ("", 1)
                continue
            assert "inside model.no_sync()" in message, name
            assert message.startswith(
                "DistributedDataParallel " + ("averaged" if name == "collect" else "would average")
            )
            assert untouched, name


def test_a_loop_that_never_displaces_is_averaged_with_overlap_inside_no_sync_too(reports):
    expected, _ = by_hand({"beta": 0.0}, 1, weighted=False)
    for report in reports:
        for end in report["never displaced"]:
            assert np.abs(np.array(end) - expected).max() < 1e-13
    assert reports[0]["never displaced"] == reports[1]["never displaced"]


def test_a_gradient_lost_on_one_rank_is_skipped_by_all_before_ddp_averages(reports):
    for way in ("closure", "verbs"):
        assert [report["lost"][way][0] for report in reports] == [1, 1]
        assert reports[0]["lost"][way] == reports[1]["lost"][way]
        assert np.isfinite(reports[0]["lost"][way][1]).all()


def test_sharded_parameters_are_refused_before_anything_is_written(reports):
    for report in reports:
        assert len(report["sharded"]) == 12
        for name, (message, untouched) in report["sharded"].items():
            kind = "FullyShardedDataParallel" if name.startswith("FSDP") else "DTensor"
            assert message.startswith("GradAlign needs whole parameters on every rank, got "), name
            assert kind in message, name
            assert "use DistributedDataParallel" in message
            assert untouched, name


def test_a_process_group_may_begin_after_the_optimizer(reports):
    late = [report["late"] for report in reports]
    expected, _ = by_hand({"momentum": 0.9}, 1)
    for name in ("closure", "verbs", "added"):
        assert late[0][name] == late[1][name]
        assert np.abs(np.array(late[0][name]) - expected).max() < 1e-13
    assert late[0]["after steps"] == late[1]["after steps"], "steps, point and momentum are rank 0's"
    assert late[0]["steps"] == late[1]["steps"] == 2 + 3
    assert late[0]["extra"] == late[1]["extra"] == [0.0, 0.0]
    for one in late:
        assert "call zero_grad() before it, or make the optimizer after init_process_group()" in one["said"]


def test_a_process_group_may_be_started_anew(reports):
    expected, _ = by_hand({}, 1)
    for report in reports:
        assert np.abs(np.array(report["again"]) - expected).max() < 1e-13


def test_one_rank_may_collect_what_ddp_averaged(tmp_path):
    """The mean over one rank is that rank's gradient: a job of one rank needs no no_sync()."""
    parts = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0], [0.5, 1.0]])]
    ends = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", world_size=1, rank=0)
    try:
        for around in (nn.parallel.DistributedDataParallel, lambda model: model):
            model = nn.Linear(2, 1, bias=False)
            nn.init.constant_(model.weight, 0.5)
            model = around(model)
            opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=0.1), beta=0.2, model=model)
            for x in parts:
                model(x).square().mean().backward()
                opt.collect(weight=len(x))
            for x in parts:
                opt.displace()
                model(x).square().mean().backward()
            opt.step()
            ends.append([p.detach().clone() for p in model.parameters()])
    finally:
        dist.destroy_process_group()
    assert torch.equal(ends[0][0], ends[1][0])
    assert not torch.equal(ends[0][0], torch.full((1, 2), 0.5))

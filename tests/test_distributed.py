"""Ranks under torchrun: the same steps as one process, two all-reduces each; and the distributed engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ranks_at_work import SETTINGS, one_process

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(SOURCE), str(TESTS), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def torchrun(ranks: int, *command: str, seconds: float = 120.0, cwd: Path | None = None):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, *command], env=environment(), capture_output=True, text=True, timeout=seconds, cwd=cwd
    )


@pytest.fixture(scope="module", params=[2, 3])
def reports(request, tmp_path_factory):
    ranks = request.param
    folder = tmp_path_factory.mktemp(f"ranks{ranks}")
    done = torchrun(ranks, str(TESTS / "ranks_at_work.py"), str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_take_the_steps_of_one_process_with_as_many_parts(reports, name):
    expected = one_process(name, len(reports))
    found = reports[0]["ends"][name][0]
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    for report in reports[1:]:
        assert torch.equal(report["ends"][name][0], found), "the ranks' parameters stay equal, to the bit"


def test_a_step_costs_two_all_reduces_and_nothing_else(reports):
    counts = {name: calls for name, (_, calls) in reports[0]["ends"].items()}
    for name in ("closure", "verbs", "ddp closure", "ddp verbs", "low", "two parts each", "clipped"):
        assert counts[name] == [2, 2, 2, 2], name
    assert counts["plain"] == [1, 1, 1, 1]
    assert counts["every"] == [2, 1, 2, 1]
    assert counts["reuse"] == counts["reuse verbs"] == [2, 1, 1, 1]
    assert counts["ddp overlap"] == [1, 1, 1, 1], "the second is DDP's own, in buckets"


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(reports):
    assert [report["skips"] for report in reports] == [(1, True)] * len(reports)


def test_parameters_without_gradients(reports):
    assert [report["unused"] for report in reports] == [[True, True, False]] * len(reports)


def test_averaging_by_ddp_before_alignment_is_noticed(reports):
    for report in reports:
        assert "give it as GradAlign(..., model=model)" in report["complaints"]["closure"]
        assert "inside model.no_sync()" in report["complaints"]["verbs"]

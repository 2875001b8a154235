"""A few of the trials of ``python -m tests.faults``, on the law that every command keeps whatever is done to it."""

from __future__ import annotations

import sys

import pytest

import gradalign as ga
from conftest import blobs
from faults.__main__ import KINDS, attempt
from faults.bench import Bench, SkippedError, hear_ctrl_c

FEW = {
    "start": 4,
    "kill": 2,
    "signals": 3,
    "folders": 16,
    "recipes": 10,
    "data": 6,
    "names": 3,
    "traps": 4,
    "streams": 3,
    "disk": 3,
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    hear_ctrl_c()
    bench = Bench(tmp_path_factory.mktemp("faults"))
    yield bench
    bench.close()


@pytest.mark.parametrize("kind", KINDS)
def test_commands_keep_the_law(bench, kind):
    for number in range(FEW[kind]):
        try:
            found = attempt(bench, kind, number, seed=1)
        except SkippedError as why:
            pytest.skip(str(why))
        again = f"python -m tests.faults --seed 1 --only {kind} --trial {number}"
        assert not found, "\n".join([*found, *bench.log, f"again: {again}"])


def test_a_program_of_ones_own_needs_no_standard_streams(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert ga.run(blobs(), ga.FedAvg(), rounds=1, workers=0).summary["rounds"] == 1

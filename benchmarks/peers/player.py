"""A contender in a process of its own: ``python -m benchmarks.peers.player NAME WORKLOAD``, driven by a pipe."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module

import torch

from benchmarks.peers.gate import Gate, Stopped
from benchmarks.workloads import Workload, find_workload

ADAPTERS = {"flower": "flower_sim", "pfl": "pfl_sim", "fedlab": "fedlab_sim"}


def run_here(name: str, workload: Workload, gate: Gate) -> None:
    """Play rounds of a contender that needs no environment of its own."""
    from benchmarks import contenders

    torch.manual_seed(0)
    data = workload.data()
    if name == "gradalign":
        contender = contenders.this_library(workload, data, workers=2)
    else:
        contender = {"plain": contenders.plain_loop, "tuned": contenders.tuned_loop}[name](workload, data)
    with contender as play:
        while True:
            gate.wait(list)
            play()


def main() -> None:
    """Play rounds until the input ends."""
    name, workload = sys.argv[1], find_workload(sys.argv[2])
    gate = Gate.over_standard_streams()
    with suppress(Stopped):
        if name in ADAPTERS:
            import_module(f"benchmarks.peers.{ADAPTERS[name]}").run(workload, gate)
        else:
            run_here(name, workload, gate)


if __name__ == "__main__":
    main()

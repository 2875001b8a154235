"""``python -m benchmarks [--json] [--memory] [W1 W3 …]``: rounds of every contender in turn, medians, ratios."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import gradalign as ga
from benchmarks.contenders import plain_loop, this_library, tuned_loop
from benchmarks.memory import measure_memory, print_memory
from benchmarks.peers.install import DEFAULT_PLACE
from benchmarks.peers.timing import Peers, compare, print_peers
from benchmarks.workloads import USUAL, WORKLOADS, Workload

LONG_ENOUGH = 0.3  # seconds of rounds that give one time


def seconds(action: Callable[[], None]) -> float:
    """Return how long an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def round_seconds(play: Callable[[], None]) -> float:
    """Return how long a round takes; short ones are played on for a while."""
    rounds, spent = 0, 0.0
    while spent < LONG_ENOUGH:
        spent += seconds(play)
        rounds += 1
    return spent / rounds


def machine_peak() -> float:
    """Return the fp32 floating-point operations per second of a large matrix product on all cores."""
    a, b = torch.randn(3000, 3000), torch.randn(3000, 3000)
    best = min(seconds(lambda: torch.mm(a, b)) for _ in range(5))
    return 2 * 3000**3 / best


def flops_per_round(workload: Workload) -> int | None:
    """Return the operations of one round, forward and backward; None for an LSTM, which torch does not count."""
    if workload.letters:
        return None
    model = workload.model()
    inputs = torch.randn(workload.batch, *workload.shape)
    labels = torch.randint(workload.classes, (workload.batch,))
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(inputs), labels).backward()
    return counter.get_total_flops() * workload.sampled * workload.local_steps()


def fedga_factor(workload: Workload) -> float:
    """Return how many more examples a FedGA round computes gradients for than a FedAvg round."""
    return (workload.samples() + workload.sampled * workload.size) / workload.samples()


def measure(workload: Workload, repetitions: int, peak: float, place: Path | None) -> dict[str, Any]:
    """Time all contenders on one workload, peers too unless there is no place for them."""
    data = workload.data()
    with ExitStack() as stack:
        contenders = {
            "plain": stack.enter_context(plain_loop(workload, data)),
            "tuned": stack.enter_context(tuned_loop(workload, data)),
            "gradalign": stack.enter_context(this_library(workload, data)),
            "gradalign FedGA": stack.enter_context(this_library(workload, data, ga.FedGA(beta=0.01))),
        }
        clocks: dict[str, Callable[[], float]] = {
            name: partial(round_seconds, play) for name, play in contenders.items()
        }
        peers = Peers(workload, place, stack)
        times: dict[str, list[float]] = {name: [] for name in (*clocks, *peers.names())}
        for clock in clocks.values():
            clock()  # the first round pays for warming up
        peers.warm_up()
        for _ in range(repetitions):
            for name, clock in clocks.items():
                times[name].append(clock())
            peers.play(times)
    median = {name: statistics.median(values) for name, values in times.items() if values}
    operations = flops_per_round(workload)
    ratios = [plain / ours for plain, ours in zip(times["plain"], times["gradalign"], strict=True)]
    return {
        "workload": workload.name,
        "what": workload.what,
        "seconds": median,
        "speedup": median["plain"] / median["gradalign"],
        "speedup_range": [min(ratios), max(ratios)],
        "speedup_over_tuned": median["tuned"] / median["gradalign"],
        "share_of_peak": None if operations is None else operations / median["gradalign"] / peak,
        "fedga_over_fedavg": median["gradalign FedGA"] / median["gradalign"],
        "fedga_samples": fedga_factor(workload),
        "peers": compare(median, peers.remarks),
    }


def crowd_ratio(repetitions: int) -> float:
    """Return the time of a round with 100,000 clients over one with 100, the sampled clients being alike."""
    from dataclasses import replace

    tiny = replace(WORKLOADS["W3"], size=10, batch=10, sampled=50, epochs=25)  # as many steps as in W3
    crowds = [replace(tiny, clients=clients) for clients in (100, 100_000)]
    with ExitStack() as stack:
        rounds = [stack.enter_context(this_library(crowd, crowd.data())) for crowd in crowds]
        for play in rounds:
            play()
        times = [[round_seconds(play) for play in rounds] for _ in range(3 * repetitions)]
    return statistics.median(t[1] for t in times) / statistics.median(t[0] for t in times)


def measure_apart(name: str, words: argparse.Namespace) -> dict[str, Any]:
    """Time one workload in a fresh process, as it would be used: the next one should not live with its heap."""
    peers = ["--no-peers"] if words.no_peers else ["--peers", str(words.peers)]
    command = [sys.executable, "-m", "benchmarks", name, "--json", "--repetitions", str(words.repetitions), *peers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate()
        finally:
            process.terminate()  # it ends its daemons itself; nothing happens when it is done
    if process.returncode:
        sys.exit(process.returncode)
    found: dict[str, Any] = json.loads(printed)
    return found


def print_table(results: list[dict[str, Any]], peak: float) -> None:
    """Print the results for people."""
    table = Table(title="seconds a round (median); how many times faster than the plain loop")
    for name in (
        "workload",
        "plain",
        "tuned",
        "gradalign",
        "faster than plain",
        "than tuned",
        "of peak",
        "FedGA / FedAvg",
    ):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for row in results:
        low, high = row["speedup_range"]
        table.add_row(
            f"{row['workload']} {row['what']}",
            *(f"{row['seconds'][name]:.3f}" for name in ("plain", "tuned", "gradalign")),
            f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})",
            f"{row['speedup_over_tuned']:.2f}",
            "–" if row["share_of_peak"] is None else f"{row['share_of_peak']:.0%}",
            f"{row['fedga_over_fedavg']:.2f} for {row['fedga_samples']:.2f} times the examples",
        )
    console = Console(width=150)
    console.print(table)
    console.print(f"fp32 peak of this machine by a large matrix product: {peak / 1e9:.0f} GFLOP/s")


def main() -> None:
    """Run the benchmark."""
    # An end by SIGTERM is one in order too: simulators' daemons are ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "workloads", nargs="*", metavar="W", help=f"some of {', '.join(WORKLOADS)} (default: {', '.join(USUAL)})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repetitions", type=int, default=5, help="timed rounds of each contender (default 5)")
    parser.add_argument("--memory", action="store_true", help="measure memory and start instead of time (default: W1)")
    parser.add_argument("--no-peers", action="store_true", help="leave other simulators out")
    parser.add_argument(
        "--peers", type=Path, default=DEFAULT_PLACE, metavar="DIR", help="where their environments are (default .peers)"
    )
    words = parser.parse_args()
    words.workloads = [name.upper() for name in words.workloads]
    unknown = [name for name in words.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {unknown[0]}; there are {', '.join(WORKLOADS)}")
    if words.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    place = None if words.no_peers else words.peers.absolute()
    if words.memory:
        memory = [measure_memory(WORKLOADS[name], place) for name in words.workloads or ["W1"]]
        return print(json.dumps(memory, indent=2)) if words.json else print_memory(memory)
    names, crowd = words.workloads or USUAL, None
    if len(names) == 1:
        peak = machine_peak()
        results = [measure(WORKLOADS[names[0]], words.repetitions, peak, place)]
    else:
        apart = [measure_apart(name, words) for name in names]
        peak = max(one["peak_flops"] for one in apart)
        results = [row for one in apart for row in one["results"]]
    if not words.workloads:
        crowd = crowd_ratio(words.repetitions)
    if words.json:
        print(json.dumps({"peak_flops": peak, "results": results, "crowd_ratio": crowd}, indent=2))
        return None
    print_table(results, peak)
    if place:
        print_peers(results)
    if crowd is not None:
        print(f"a round with 100,000 clients takes {crowd:.3f} times a round with 100")
    return None


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped: the medians of an interrupted run would say nothing", file=sys.stderr)
        sys.exit(130)

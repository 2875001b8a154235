"""Rounds of this checkout and of others, in turn, so that a busy machine disturbs all alike.

    python -m benchmarks.against ../gradalign-before             # W1 to W5, FedAvg and FedGA
    python -m benchmarks.against ../a ../b W1 --rounds 15        # several, one workload
    python -m benchmarks.against ../before W3 --starts 9         # short rounds: a process may be lucky throughout

Prints the median seconds of a round in every checkout, in the order they were named and this one last, and the
median ratio to the first. Every checkout runs in a process of its own, with its own ``benchmarks`` and ``src``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent.parent
ENOUGH = 0.5  # seconds of rounds that give one time
USUAL = ["W1", "W2", "W3", "W4", "W5"]


def play(workload: str, algorithm: str) -> None:
    """Play rounds whenever a line comes in; answer with the seconds that one took."""
    import gradalign as ga
    from benchmarks.contenders import this_library
    from benchmarks.workloads import WORKLOADS

    chosen = WORKLOADS[workload]
    rule = ga.FedGA(beta=0.1) if algorithm == "FedGA" else ga.FedAvg()
    with this_library(chosen, chosen.data(), rule) as one_round:
        for _ in range(2):
            one_round()
        print("ready", flush=True)
        for _ in sys.stdin:
            rounds, start = 0, time.perf_counter()
            while time.perf_counter() - start < ENOUGH:
                one_round()
                rounds += 1
            print((time.perf_counter() - start) / rounds, flush=True)


@contextmanager
def player(checkout: Path, workload: str, algorithm: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that plays rounds of one checkout."""
    start = f"sys.argv[1:] = ['--play', {workload!r}, {algorithm!r}]; runpy.run_path({__file__!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}
    process = subprocess.Popen(
        [sys.executable, "-c", f"import runpy, sys; {start}"],
        cwd=checkout,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            sys.exit(f"{checkout} cannot play {workload}")
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def seconds(process: subprocess.Popen[str]) -> float:
    """Let a process play for a while and return the seconds of one round."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def compare(
    checkouts: list[Path], workload: str, algorithm: str, rounds: int, starts: int
) -> list[tuple[float, float]]:
    """Return each checkout's median seconds and its median ratio to the first."""
    times: list[list[float]] = [[] for _ in checkouts]
    for _ in range(starts):
        with ExitStack() as stack:
            players = [stack.enter_context(player(checkout, workload, algorithm)) for checkout in checkouts]
            for turn in range(rounds):  # forwards and backwards in turn: nobody is always first
                for place in range(len(players)) if turn % 2 == 0 else reversed(range(len(players))):
                    times[place].append(seconds(players[place]))
    return [(median(own), median(a / b for a, b in zip(own, times[0], strict=True))) for own in times]


def main() -> None:
    """Compare, or play for one who compares."""
    if sys.argv[1:2] == ["--play"]:
        return play(*sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    parser.add_argument("given", nargs="+", metavar="CHECKOUT|W", help="folders of other checkouts; workloads")
    parser.add_argument("--rounds", type=int, default=9, help="times of each (default 9)")
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="start new processes so often (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    words = parser.parse_args()
    names = [name for name in words.given if name.upper() in (*USUAL, "W6")]
    checkouts = [Path(name).resolve() for name in words.given if name not in names] + [HERE]
    missing = [str(checkout) for checkout in checkouts if not (checkout / "benchmarks").is_dir()]
    if missing or len(checkouts) < 2:
        parser.error(f"{missing[0]} is no checkout" if missing else "name at least one other checkout")
    found = {}
    for name in [name.upper() for name in names] or USUAL:
        for algorithm in ("FedAvg", "FedGA"):
            rows = compare(checkouts, name, algorithm, words.rounds, words.starts)
            found[f"{name} {algorithm}"] = [{"seconds": own, "ratio": ratio} for own, ratio in rows]
            told = "  ".join(f"{own:.3f} s ({ratio:.3f})" for own, ratio in rows)
            print(f"{name} {algorithm:6}  {told}", file=sys.stderr if words.json else sys.stdout, flush=True)
    if words.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

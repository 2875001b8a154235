"""``python -m tests.faults [--seed S] [--only KIND …] [--trials N]`` prints tried and failed; 1 tells of a failure."""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from . import ends, folders, machine, strangers
from .bench import Bench, SkippedError, hear_ctrl_c

KINDS: dict[str, tuple[Callable[[Bench, Random], list[str]], int]] = {
    "start": (ends.start, 60),
    "kill": (ends.kill, 40),
    "signals": (ends.signals, 60),
    "folders": (folders.folders, 400),
    "recipes": (strangers.recipes, 150),
    "data": (strangers.data_files, 100),
    "names": (strangers.names, 40),
    "traps": (strangers.traps, 40),
    "streams": (machine.streams, 30),
    "disk": (machine.disk, 40),
}
"""The kinds of faults, and how many of each are tried by default."""


def attempt(bench: Bench, kind: str, number: int, seed: int) -> list[str]:
    """Carry one trial out; it depends on its kind, its number and the seed alone, as far as moments can."""
    try:
        return KINDS[kind][0](bench, Random(f"{seed} {kind} {number}"))
    except SkippedError:
        raise
    except Exception:
        return [f"the trial itself failed: {traceback.format_exc()}"]


class Suite:
    """All trials, shared by a few threads with a bench each."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.seed, self.began, self.seconds = seed, time.monotonic(), seconds
        self.tried: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.skipped: dict[str, str] = {}
        self._lock = threading.Lock()

    def work(self, root: Path, todo: queue.SimpleQueue[tuple[str, int]]) -> None:
        bench = Bench(root)
        try:
            while time.monotonic() - self.began < self.seconds:
                kind, number = todo.get_nowait()
                if kind in self.skipped:
                    continue
                try:
                    found = attempt(bench, kind, number, self.seed)
                except SkippedError as why:
                    self.skipped[kind] = str(why)
                    continue
                with self._lock:
                    self.tried[kind] += 1
                    self.failed[kind] += bool(found)
                    if found:
                        self._tell(bench, kind, number, found)
        except queue.Empty:
            pass
        finally:
            bench.close()

    def _tell(self, bench: Bench, kind: str, number: int, found: list[str]) -> None:
        print(f"\n{kind} {number}: {'; '.join(found)}")
        for line in bench.log:
            print(f"    {line}")
        print(f"    again: python -m tests.faults --seed {self.seed} --only {kind} --trial {number}", flush=True)

    def print_table(self) -> None:
        seconds = time.monotonic() - self.began
        print(f"\n{'kind':10} {'tried':>6} {'failed':>7}")
        for kind in KINDS:
            if kind in self.skipped:
                print(f"{kind:10} skipped: {self.skipped[kind]}")
            elif self.tried[kind]:
                print(f"{kind:10} {self.tried[kind]:6} {self.failed[kind]:7}")
        print(f"{'all':10} {self.tried.total():6} {self.failed.total():7}   seed {self.seed}, {seconds:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--trials", type=int, help="how many of each kind")
    parser.add_argument("--trial", type=int, help="this one alone")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no trial after so many seconds")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    hear_ctrl_c()
    numbers = {kind: range(KINDS[kind][1] if given.trials is None else given.trials) for kind in given.only}
    if given.trial is not None:
        numbers = {kind: range(given.trial, given.trial + 1) for kind in given.only}
    todo: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    # All kinds side by side, so that a part of the time tries a part of each.
    for _, kind, number in sorted(
        (place / len(own), kind, own[place]) for kind, own in numbers.items() for place in range(len(own))
    ):
        todo.put((kind, number))
    suite = Suite(given.seed, given.seconds)
    with tempfile.TemporaryDirectory(prefix="gradalign-faults-") as root:
        jobs = [threading.Thread(target=suite.work, args=(Path(root) / str(n), todo)) for n in range(given.jobs)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    suite.print_table()
    return 1 if suite.failed.total() else 0


if __name__ == "__main__":
    sys.exit(main())

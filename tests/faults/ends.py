"""Sudden ends: kill -9, SIGTERM and SIGINT at any moment, then --resume to the bits of an undisturbed run."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from random import Random

from .bench import Bench, Outcome, send, some_algorithm
from .law import broken, differing

CODES = {signal.SIGTERM: (143, -15), signal.SIGINT: (130, -2)}


def _words(bench: Bench, algorithm: str, folder: Path, rng: Random) -> list[object]:
    often = rng.choice([0, 0.05, 10])
    words: list[object] = ["run", bench.recipe(algorithm), "--out", folder, "--resume"]
    return [*words, "--checkpoint-seconds", often, "--workers", rng.choice([0, 1, 2])]


def _usual(bench: Bench, *, fresh: bool) -> float:
    """Return how many seconds a run takes when nobody interferes."""

    def make() -> float:
        words = ("run", bench.recipe("all-kept"), "--out", bench.root / f"timed-{fresh}", "--workers", 2)
        began = time.monotonic()
        (bench.fresh if fresh else bench.run)(*words)
        return time.monotonic() - began

    return float(bench.once(f"usual {fresh}", make))


def _complete(bench: Bench, words: list[object], folder: Path, algorithm: str) -> list[str]:
    outcome = bench.run(*words)
    return broken(outcome, (0,)) or differing(folder, bench.whole(algorithm))


def kill(bench: Bench, rng: Random) -> list[str]:
    """kill -9 up to four times, then let it come to its end."""
    algorithm, folder = some_algorithm(rng), bench.begin() / "run"
    words = _words(bench, algorithm, folder, rng)
    usual = _usual(bench, fresh=False)
    for _ in range(rng.randint(1, 4)):
        moment = rng.uniform(0, usual)

        def interfere(pid: int, moment: float = moment) -> None:
            time.sleep(moment)
            send(pid, signal.SIGKILL)

        outcome = bench.run(*words, interfere=interfere)
        found = broken(outcome, (0, -signal.SIGKILL))
        if found:
            return found
    return _complete(bench, words, folder, algorithm)


def signals(bench: Bench, rng: Random) -> list[str]:
    """A signal while rounds are played, to the process or to its group, once or twice; then --resume."""
    algorithm, folder = some_algorithm(rng), bench.begin() / "run"
    words = _words(bench, algorithm, folder, rng)
    usual = _usual(bench, fresh=False)
    end, moment = rng.choice(list(CODES)), rng.uniform(0, usual)
    to_group, times = rng.random() < 0.5, rng.choice([1, 1, 2])

    def interfere(pid: int) -> None:
        time.sleep(moment)
        for _ in range(times):
            send(pid, end, to_group=to_group)

    outcome = bench.run(*words, interfere=interfere)
    complete = outcome.code == 0 and not {"stopped", "error:"} & set(outcome.err.replace(";", " ").split())
    found = broken(outcome, (*CODES[end], 0) if complete else CODES[end])
    return found or _complete(bench, words, folder, algorithm)


def _commands(bench: Bench) -> dict[str, list[object]]:
    run: list[object] = ["run", bench.recipe("all-kept"), "--out", "OUT", "--resume"]
    compare = ["compare", bench.recipe("fedga"), "--algorithms", "fedga,fedavg", "--seeds", 1, "--out", "OUT"]
    sweep = ["sweep", bench.recipe("fedga"), "--set", "rounds=5", "--grid", "lr=0.1", "--grid", "beta=0.1"]
    return {
        "run, 2 workers": [*run, "--workers", 2],
        "run, no worker": [*run, "--workers", 0],
        "run on Flower": [*run, "--engine", "flower"],
        "compare": [*compare, "--workers", 2],
        "sweep": [*sweep, "--grid", "K=3", "--grid", "batch=4", "--seeds", 1, "--workers", 2, "--out", "OUT"],
        "show": ["show", bench.whole("fedga")],
        "report": ["report", bench.whole("fedga"), "-o", bench.root / "page.html"],
        "diagnose": ["diagnose", "tiny_task:tiny"],
    }


def start(bench: Bench, rng: Random) -> list[str]:
    """A signal to a new interpreter, from its first moment to its last."""
    folder = bench.begin() / "run"
    name, pattern = rng.choice(list(_commands(bench).items()))
    words = [folder if word == "OUT" else word for word in pattern]
    usual = _usual(bench, fresh=True)
    end, moment = rng.choice(list(CODES)), rng.uniform(0, usual) * rng.choice([0.5, 1.0, 1.2])
    to_group = rng.random() < 0.3
    late = False

    def interfere(process: subprocess.Popen[bytes]) -> None:
        nonlocal late
        time.sleep(moment)
        late = process.poll() is not None
        if not late:
            send(process.pid, end, to_group=to_group)
            time.sleep(0.05)
            late = process.poll() == 0  # it was leaving already

    outcome = bench.fresh(*words, interfere=interfere)
    bench.log.append(f"signal {end.name} after {moment:.3f} s of {usual:.1f}{', to the group' if to_group else ''}")
    if late:
        return broken(outcome, (0,))
    if _python_was_starting(outcome, moment):
        return []
    found = broken(outcome, CODES[end])
    if not found and name.startswith("run,") and folder.exists():
        found = _complete(bench, words, folder, "all-kept")
    return found


def _python_was_starting(outcome: Outcome, moment: float) -> bool:
    """Return whether Ctrl-C met the interpreter before it had come to this package: then it is Python that speaks."""
    return moment < 0.5 and "KeyboardInterrupt" in outcome.err and "gradalign/" not in outcome.err

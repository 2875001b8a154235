"""A machine that has run out of things: disk space, standard streams, readers."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from random import Random

from .bench import Bench, SkippedError, some_algorithm
from .law import broken, differing

_REDIRECTS = ("2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1", "| head -c 1")


def streams(bench: Bench, rng: Random) -> list[str]:
    """Standard streams that are closed, full, or left by their reader."""
    folder = bench.begin() / "run"
    redirect = rng.choice(_REDIRECTS)
    name = rng.choice(["run", "run", "run --json", "compare", "show", "report", "watch", "--version", "mistake"])
    whole = bench.whole("fedga")
    run = ("run", bench.recipe("fedga"), "--out", folder, "--workers", rng.choice([0, 2]))
    words: dict[str, tuple[object, ...]] = {
        "run": run,
        "run --json": (*run, "--json"),
        "compare": ("compare", bench.recipe("fedga"), "--algorithms", "fedga", "--seeds", 1, "--out", folder),
        "show": ("show", whole),
        "report": ("report", whole, "-o", bench.root / "page.html"),
        "watch": ("watch", whole, "--once"),
        "--version": ("--version",),
        "mistake": ("run", "no-such-recipe"),
    }
    outcome = bench.fresh(*words[name], redirect=redirect)
    full = redirect.startswith(">/dev/full")
    wanted = 2 if full or name == "mistake" else 0
    found = broken(outcome, (wanted,))
    if "2>" in redirect:  # nobody could have read it
        found = [one for one in found if one != "exit code 2 without a word"]
    if name.startswith("run"):
        found += differing(folder, whole)
    return found


def disk(bench: Bench, rng: Random) -> list[str]:
    """A disk that fills up at some moment of a run; with space again, the run goes on to the same bits."""
    trial = bench.begin()
    mounted = trial / "disk"
    mounted.mkdir()
    size = 4 * rng.randrange(1, 16)  # in pages, so that each file of a run meets the end of the disk now and then
    options = f"size={size}k,mode=777"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mounted], capture_output=True, text=True)
    if made.returncode != 0:
        raise SkippedError(f"a small file system cannot be mounted: {made.stderr.strip()}")
    try:
        algorithm = some_algorithm(rng)
        words = ["run", bench.recipe(algorithm), "--out", mounted / "run", "--resume"]
        words += ["--workers", rng.choice([0, 2]), "--checkpoint-seconds", rng.choice([0, 10])]
        ballast = mounted / "ballast"
        if rng.random() < 0.5:
            free = os.statvfs(mounted)
            with suppress(OSError):
                ballast.write_bytes(b"x" * int(free.f_bavail * free.f_bsize * rng.random()))
        bench.log.append(f"on a tmpfs of {size} KiB")
        outcome = bench.run(*words)
        found = broken(outcome, (0, 2))
        told = [line for line in outcome.err.splitlines() if " rounds) after " not in line]  # progress, in a pipe
        if outcome.code == 2 and len(told) != 1:
            found.append(f"not one line: {outcome.err[:300]!r}")
        if found:
            return found
        ballast.unlink(missing_ok=True)
        subprocess.run(["mount", "-o", "remount,size=4m", mounted], check=True)
        outcome = bench.run(*words)
        return broken(outcome, (0,)) or differing(mounted / "run", bench.whole(algorithm))
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)

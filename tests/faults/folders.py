"""Damaged run folders, against all that reads one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from .bench import Bench
from .law import broken, differing

DEEP = 20_000


def _flip(data: bytes, rng: Random) -> bytes:
    if not data:
        return b"\x00"
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _nested(data: bytes, rng: Random) -> bytes:
    return rng.choice([b"[" * DEEP, b'{"a":' * DEEP, b"a = " + b"[" * DEEP, b"[" * DEEP + b"]" * DEEP])


def _numbers(data: bytes, rng: Random) -> bytes:
    """Replace one number by one that is too large, or none."""
    digits = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if not digits:
        return data + b"9" * 5000
    place = rng.choice(digits)
    new = rng.choice([b"9" * 5000, b"1e308", b"-1", b"1e999", b"NaN", b"0.5", b"true", b"null", b'"x"'])
    return data[:place] + new + data[place + 1 :]


def _escapes(data: bytes, rng: Random) -> bytes:
    """Put the commands of a terminal into the text, as JSON and TOML may carry them."""
    quotes = [place for place, byte in enumerate(data) if byte == 34]
    new = rng.choice([b"\\u001b[2J\\u001b]0;x\\u0007", b"\x1b[31m", "\u202e\u009b".encode(), b"\\u0000"])
    place = rng.choice(quotes) + 1 if quotes else 0
    return data[:place] + new + data[place:]


CHANGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flipped bits": _flip,
    "cut": lambda data, rng: data[: rng.randrange(len(data) + 1)],
    "emptied": lambda data, rng: b"",
    "grown": lambda data, rng: data + rng.randbytes(40),
    "garbage": lambda data, rng: rng.randbytes(rng.randrange(1, 3000)),
    "nested deeply": _nested,
    "strange numbers": _numbers,
    "terminal escapes": _escapes,
    "a line lost": lambda data, rng: b"\n".join(line for line in data.split(b"\n") if rng.random() > 0.2),
}
PLACES = ("removed", "folder", "fifo", "link to nowhere", "link to /dev/zero", "link to a file", "link to itself")


def damage(path: Path, rng: Random, victim: Path) -> str:
    """Do something to a file; return what."""
    kind = rng.choice([*CHANGES, *CHANGES, *PLACES])
    if kind in CHANGES:
        path.write_bytes(CHANGES[kind](path.read_bytes(), rng))
        return kind
    path.unlink()
    if kind == "folder":
        path.mkdir()
        (path / "in it").touch()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind.startswith("link"):
        targets = {"link to nowhere": path.parent / "nowhere", "link to /dev/zero": "/dev/zero", "link to itself": path}
        path.symlink_to(targets.get(kind, victim))
    return kind


def folders(bench: Bench, rng: Random) -> list[str]:
    """Damage one file of a run folder, or two, and look at it, or go on with it."""
    trial = bench.begin()
    algorithm, complete = rng.choice(["fedga", "all-kept"]), rng.random() < 0.35
    source = bench.whole(algorithm) if complete else bench.stopped(algorithm)
    folder, victim = trial / "run", trial / "victim"
    shutil.copytree(source, folder)
    victim.write_bytes(b"precious\n")
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    done = [f"{name} {damage(folder / name, rng, victim)}" for name in rng.sample(files, rng.choice([1, 1, 1, 2]))]
    command = rng.choice(["resume", "resume", "resume", "show", "show --json", "report", "watch"])
    words: dict[str, tuple[object, ...]] = {
        "resume": ("run", bench.recipe(algorithm), "--out", folder, "--resume", "--workers", 0),
        "show": ("show", folder),
        "show --json": ("show", folder, "--json"),
        "report": ("report", folder, "-o", trial / "page.html", "--unfinished"),
        "watch": ("watch", folder, "--once"),
    }
    outcome = bench.run(*words[command])
    bench.log.append(f"{'complete' if complete else 'stopped'} folder of {algorithm}: {'; '.join(done)}")
    found = broken(outcome, (0, 2))
    if outcome.code == 0 and command == "resume":
        found += differing(folder, bench.whole(algorithm), metrics=not complete)
    if victim.read_bytes() != b"precious\n":
        found.append("a file outside the folder was changed through a link")
    return found

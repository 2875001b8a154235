"""A contender's processes, all of them: what they use of the memory together, and how none of them is left behind.

Simulators start daemons and workers (Ray starts half a dozen). A process belongs to a contender's family when it
descends from the contender, is in its session, or carries its token in the environment it was started with: each sign
alone can be lost (orphans get another parent, daemons another session, and a changed process title overwrites the
environment that the kernel shows).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import TracebackType

VARIABLE = "GRADALIGN_BENCHMARK_FAMILY"
PROC = Path("/proc")


def _parents_and_sessions() -> dict[int, tuple[int, int]]:
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                # The name in parentheses may hold anything: the fields are counted behind its end.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # ended meanwhile
                continue
            if fields[0] != "Z":
                found[int(folder.name)] = int(fields[1]), int(fields[3])
    return found


def _carries(pid: int, sign: bytes) -> bool:
    try:
        return sign in (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False


def members(root: int, token: str) -> set[int]:
    """Return the ids of a contender's living processes.

    Args:
        root: The process that was started, leader of its session.
        token: What it was given in the environment variable ``VARIABLE``.
    """
    processes = _parents_and_sessions()
    sign = f"{VARIABLE}={token}".encode()
    family = {pid for pid, (_, session) in processes.items() if pid == root or session == root or _carries(pid, sign)}
    while more := {pid for pid, (parent, _) in processes.items() if parent in family} - family:
        family |= more
    return family


def end(root: int, token: str, patience: float = 10.0) -> None:
    """Kill what still lives of a contender, until nothing does."""
    deadline = time.monotonic() + patience
    while (family := members(root, token)) and time.monotonic() < deadline:
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def memory(pids: set[int]) -> int:
    """Return the bytes that processes use together, pages that they share counted once (the sum of their PSS)."""
    total = 0
    for pid in pids:
        try:
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        except OSError:  # ended meanwhile
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


class PeakMemory:
    """Watches a family's memory from a thread, some times a second, and remembers the most."""

    def __init__(self, root: int, token: str, every: float = 0.1) -> None:
        self.peak = 0
        self._root, self._token, self._every = root, token, every
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(self._every):
            self.peak = max(self.peak, memory(members(self._root, self._token)))

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

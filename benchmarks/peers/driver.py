"""The benchmark's side of the pipe: starts a contender in a process of its own and asks it for rounds, one by one."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from benchmarks.peers import family

ROOT = Path(__file__).parents[2]
# Reports to the makers do not belong into a measurement.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0"}


class PeerError(RuntimeError):
    """A contender did not start, or did not finish a round."""


class Contender:
    """A running contender that plays a round when asked."""

    def __init__(self, process: subprocess.Popen[str], token: str, log: Path) -> None:
        self.memory = family.PeakMemory(process.pid, token)
        self._process, self._log = process, log
        self._given_up = False
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")  # the end

    def answer(self, key: str, patience: float) -> Any:
        """Return the contender's next answer.

        Raises:
            PeerError: None came, or another one than expected.
        """
        line = self._next_line(time.monotonic() + patience)
        if line is None:
            self._given_up = True
            raise PeerError(f"no answer in {patience:.0f} s")
        try:
            said = json.loads(line)
            if "refused" in said:
                raise PeerError(said["refused"])
            return said[key]
        except (ValueError, KeyError, TypeError):
            raise PeerError(f"unexpected answer {line.strip()[:200]!r}" if line else self._last_words()) from None

    def _next_line(self, deadline: float) -> str | None:
        while time.monotonic() < deadline:
            # A contender's daemons may hold its end of the pipe open when it has died: its life is looked at as well.
            dead = self._process.poll() is not None
            try:
                return self._answers.get(timeout=0.2)
            except queue.Empty:
                if dead:
                    return ""
        return None

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "ended without a word"

    def _ask(self, command: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the missing answer says it
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()

    def play(self, patience: float = 600.0) -> float:
        """Play a round and return its seconds, as the contender itself took them."""
        self._ask("round")
        return float(self.answer("seconds", patience))

    def weights(self, patience: float = 60.0) -> list[float]:
        """Return the server's parameters."""
        self._ask("weights")
        return [float(value) for value in self.answer("weights", patience)]

    def leave(self, patience: float) -> None:
        """Let the contender end by itself, which simulators with daemons do better than they die."""
        if self._given_up:
            return
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)


@contextmanager
def contender(command: Sequence[str], *, watched: bool = False, patience: float = 300.0) -> Iterator[Contender]:
    """Start a contender, wait until it is ready, and leave no process of it behind, whatever happens.

    Args:
        command: What to start: a program that talks as ``benchmarks.peers.gate.Gate`` does.
        watched: Whether its memory is watched, from the start on, which costs it some time.
        patience: Seconds to wait until it is ready.
    """
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="gradalign-peer-") as folder:
        log = Path(folder) / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=os.environ | _QUIET | {family.VARIABLE: token},
                start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends it in order
            )
        started = Contender(process, token, log)
        try:
            with started.memory if watched else nullcontext():
                started.answer("ready", patience)
                yield started
            started.leave(patience=15.0)
        finally:
            family.end(process.pid, token)
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    if stream is not None:
                        stream.close()

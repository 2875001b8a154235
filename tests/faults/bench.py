"""Where trials take place: a folder, commands that are run in it, and what they left behind."""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
LIMIT = 120.0
"""Seconds that a command may take; a busy machine is no failure."""
RECIPE = """
name = "tiny"
rounds = 40
task.name = "tiny_task:tiny"
[algorithm]
ALGORITHM
[local]
lr = 0.1
steps = 3
batch_size = 4
[clients]
per_round = 3
weights = "examples"
[measure]
test_every = 2
train_every = 3
"""
ALGORITHMS = {
    "fedavg": 'name = "fedavg"',
    "fedga": 'name = "fedga"\nbeta = 0.1',
    "scaffold": 'name = "scaffold"',
    "scaffold-kept": 'name = "scaffold"\ncontrol = "kept"',
    "all-kept": 'name = "fedga+scaffold+feddyn+fedadam"\ncontrol = "kept"\nbeta = 0.1\nalpha = 0.1',
}


class SkippedError(Exception):
    """This machine cannot make such a fault."""


@dataclass
class Outcome:
    """How a command ended."""

    words: Sequence[str]
    code: int
    out: str
    err: str
    ended: bool = True
    left: list[str] = field(default_factory=list)


def hear_ctrl_c() -> None:
    """Let the commands started from here take SIGINT as in a terminal, also when this one runs in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def send(pid: int, number: signal.Signals, *, to_group: bool = False) -> None:
    """Send a signal to a process that has just been started, if it is still there."""
    with suppress(ProcessLookupError):
        while to_group and os.getpgid(pid) != pid:
            time.sleep(0.001)
        (os.killpg if to_group else os.kill)(pid, number)


def processes_of(session: int) -> list[str]:
    """Return the processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(f"{entry.name} {(entry / 'cmdline').read_text().replace(chr(0), ' ')[:80]}")
            except (OSError, IndexError):
                continue
    return found


def left_by(session: int, patience: float = 5.0) -> list[str]:
    """Return what is left of a session after a while, and end it."""
    until = time.monotonic() + patience
    while (left := processes_of(session)) and time.monotonic() < until:
        time.sleep(0.02)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(int(process.split()[0]), signal.SIGKILL)
    return left


class Bench:
    """A folder with the tiny task's recipes, and an interpreter that stands ready."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.home.mkdir(parents=True)
        self.log: list[str] = []
        self._ready: subprocess.Popen[bytes] | None = None
        self._known: dict[str, Any] = {}
        shutil.copy(HERE / "tiny_task.py", self.home)
        for name, table in ALGORITHMS.items():
            self.recipe(name).write_text(RECIPE.replace("ALGORITHM", table))

    def recipe(self, algorithm: str) -> Path:
        return self.home / f"{algorithm}.toml"

    def begin(self) -> Path:
        """Forget the last trial; return a new empty folder."""
        self.log = []
        folder = self.root / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what trials share, made when it is first needed."""
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]

    def environment(self) -> dict[str, str]:
        source = str(HERE.parents[1] / "src")
        return {
            "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "GRADALIGN_CACHE": str(self.root / "cache"),
            "GRADALIGN_DATA": str(self.root / "data"),
        }

    def fresh(
        self,
        *words: object,
        interfere: Callable[[subprocess.Popen[bytes]], None] | None = None,
        redirect: str = "",
    ) -> Outcome:
        """Run a command in an interpreter of its own, by a shell where streams are redirected."""
        plain = [str(word) for word in words]
        command: list[str] = [sys.executable, "-m", "gradalign", *plain]
        self.log.append(shlex.join(["gradalign", *plain]) + (f" {redirect}" if redirect else ""))
        if redirect:
            command = ["bash", "-o", "pipefail", "-c", f"{shlex.join(command)} {redirect}"]
        out, err = (self.root / "stdout", self.root / "stderr")
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                command,
                cwd=self.home,
                env=dict(os.environ) | self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
            if interfere is not None:
                interfere(process)
            ended = True
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                ended = False
                process.kill()
                process.wait()
        left = left_by(process.pid)
        texts = [file.read_text(encoding="utf-8", errors="surrogateescape") for file in (out, err)]
        return Outcome(plain, process.returncode, *texts, ended=ended, left=left)

    def _standing_ready(self) -> subprocess.Popen[bytes]:
        if self._ready is None:
            self._ready = subprocess.Popen(
                [sys.executable, HERE / "ready.py"],
                env=dict(os.environ) | self.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
            self._line(None)
        return self._ready

    def _line(self, limit: float | None) -> str | None:
        assert self._ready is not None
        assert self._ready.stdout is not None
        found = select.select([self._ready.stdout], [], [], limit)[0]
        if not found:
            return None
        line = self._ready.stdout.readline()
        if not line:
            raise RuntimeError("the interpreter that stood ready has ended")
        return line.decode().strip()

    def run(
        self,
        *words: object,
        interfere: Callable[[int], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Run a command in a copy of the interpreter that stands ready."""
        plain = [str(word) for word in words]
        self.log.append(shlex.join(["gradalign", *plain]))
        ready = self._standing_ready()
        files = [self.root / "stdout", self.root / "stderr"]
        for file in files:
            file.write_bytes(b"")
        request = {
            "words": plain,
            "folder": str(self.home),
            "out": str(files[0]),
            "err": str(files[1]),
            "environment": dict(environment or {}),
        }
        assert ready.stdin is not None
        try:
            ready.stdin.write(json.dumps(request).encode() + b"\n")
            pid = int(self._line(None) or 0)
            assert pid > 1
            if interfere is not None:
                interfere(pid)
            code = self._line(LIMIT)
            ended = code is not None
            if code is None:
                os.kill(pid, signal.SIGKILL)
                code = self._line(None)
        except BaseException:  # what it says next would be taken for the answer to something else
            ready.kill()
            ready.wait()
            self._ready = None
            raise
        left = left_by(pid)
        texts = [file.read_text(encoding="utf-8", errors="surrogateescape") for file in files]
        return Outcome(plain, int(code or 0), *texts, ended=ended, left=left)

    def close(self) -> None:
        if self._ready is not None:
            assert self._ready.stdin is not None
            self._ready.stdin.close()
            self._ready.wait()

    def whole(self, algorithm: str) -> Path:
        """Return the folder of an undisturbed run."""

        def make() -> Path:
            folder = self.root / "whole" / algorithm
            outcome = self.run("run", self.recipe(algorithm), "--out", folder, "--workers", 0)
            if outcome.code != 0:
                raise RuntimeError(f"the undisturbed run failed: {outcome.err}")
            return folder

        return self.once(f"whole {algorithm}", make)

    def stopped(self, algorithm: str) -> Path:
        """Return the folder of a run that was killed on its way, with a checkpoint."""

        def make() -> Path:
            folder = self.root / "stopped" / algorithm
            rows = folder / "metrics.jsonl"

            def interfere(pid: int) -> None:
                until = time.monotonic() + LIMIT
                while not (rows.exists() and rows.read_bytes().count(b"\n") > 12) and time.monotonic() < until:
                    time.sleep(0.001)
                send(pid, signal.SIGKILL)

            for _ in range(20):
                shutil.rmtree(folder, ignore_errors=True)
                words = ("run", self.recipe(algorithm), "--out", folder, "--workers", 0, "--checkpoint-seconds", 0)
                self.run(*words, interfere=interfere)
                if (folder / "checkpoint.safetensors").exists() and not (folder / "summary.json").exists():
                    return folder
            raise RuntimeError("no run could be killed between two rounds")

        return self.once(f"stopped {algorithm}", make)


def some_algorithm(rng: Random) -> str:
    return rng.choice(list(ALGORITHMS))

"""The run folder: spec, metrics, checkpoint, summary and model, each written so that a crash harms nothing.

Files are written beside their place, synced and renamed, so each is whole or it is the one before.
"""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import tomli_w
from safetensors.torch import save_file
from torch import Tensor

from gradalign.errors import (
    ClientError,
    DivergedError,
    FolderInUseError,
    GradalignError,
    LostRankError,
    TooFewClientsError,
)
from gradalign.experiment.checkpoint import load_checkpoint, save_checkpoint
from gradalign.experiment.federation import ServerState
from gradalign.experiment.files import (
    CHECKPOINT,
    FAILURE,
    HOLDINGS,
    LOCK,
    METRICS,
    MODEL,
    SPEC,
    SUMMARY,
    TENSORBOARD,
    WANDB,
    write_atomically,
    write_whole,
)


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically."""
    write_whole(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file that this library wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GradalignError(f"{path} cannot be read: {error}") from None


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of the fields in which two specs differ, with both values."""
    found: list[str] = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differing_fields(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} ({_shown(a)} there, {_shown(b)} now)")
    return found


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


_locks: set[IO[str]] = set()


def _drop_inherited_locks() -> None:
    """Close a forked worker's copies: a lock must end with the process that took it, not with its workers."""
    for lock in _locks:
        lock.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited_locks)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if need be and keep other writers out of it inside the block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise GradalignError(f"cannot use {folder} as a run folder: {error.strerror or error}") from None
    with lock:
        try:
            import fcntl
        except ImportError:  # not a Unix: nothing to lock with
            yield
            return
        for patience in range(8, -1, -1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not patience:
                    raise FolderInUseError(f"another process is writing to {folder}") from None
                time.sleep(0.02)  # a reader that asks whether anyone writes holds the lock for a blink
        _locks.add(lock)
        try:
            yield
        finally:
            _locks.discard(lock)
            fcntl.flock(lock, fcntl.LOCK_UN)  # a worker forked a moment ago may still hold a copy of the file


def refuse_strangers(folder: Path, ours: set[str]) -> None:
    """Raise when the folder holds anything that is not ours."""
    names = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    strangers = sorted(names - ours)
    if strangers:
        raise GradalignError(
            f"{folder} is not a run folder and not empty (it has {strangers[0]}); choose another --out"
        )


class RunFolder:
    """One run's folder, locked against a second writer while it is open."""

    def __init__(self, path: Path, spec: Mapping[str, Any], *, resume: bool) -> None:
        self.path, self.spec = path, spec
        self._metrics: IO[str] | None = None
        self._held = ExitStack()
        self._held.enter_context(locked(path))
        try:
            self._check(resume)
        except BaseException:
            self.close()
            raise

    def _check(self, resume: bool) -> None:
        for left_over in self.path.glob(".*.tmp"):
            left_over.unlink(missing_ok=True)  # of a process that was killed: the lock says that nobody else is here
        if not ((self.path / SPEC).exists() and self._begun()):
            refuse_strangers(self.path, {SPEC, METRICS, HOLDINGS, FAILURE, TENSORBOARD, WANDB})
            (self.path / FAILURE).unlink(missing_ok=True)
            write_toml(self.path / SPEC, self.spec)
            return
        if not resume:
            raise GradalignError(
                f"{self.path} already holds a run; add --resume to continue it, or choose another --out"
            )
        differing = differing_fields(read_spec(self.path), _as_toml(self.spec))
        if differing:
            raise GradalignError(f"{self.path} holds a run with other settings: {'; '.join(differing)}")
        (self.path / FAILURE).unlink(missing_ok=True)

    def _begun(self) -> bool:
        """Return whether there is anything to lose: a run that failed before its first row may start anew."""
        metrics = self.path / METRICS
        files = (self.path / SUMMARY, self.path / CHECKPOINT)
        return any(file.exists() for file in files) or (metrics.exists() and metrics.stat().st_size > 0)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary, when the run is complete."""
        path = self.path / SUMMARY
        return read_json(path) if path.exists() else None

    def restore(self) -> tuple[ServerState, float] | None:
        """Return the checkpoint's state and its elapsed seconds; cut the metrics back to it."""
        path = self.path / CHECKPOINT
        found = load_checkpoint(path) if path.exists() else None
        rows = read_metrics(self.path) if (self.path / METRICS).exists() else []
        last = found[0].round if found else -1
        lines = "".join(_line(row) for row in rows if row["round"] <= last)
        write_whole(self.path / METRICS, lines)
        return found

    def note_holdings(self, held: Mapping[str, Any] | None) -> None:
        """Keep who holds what, for pictures; once, since resuming does not change it."""
        if held is not None and not (self.path / HOLDINGS).exists():
            write_json(self.path / HOLDINGS, held)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row to the metrics, visible to other processes at once."""
        if self._metrics is None:
            self._metrics = (self.path / METRICS).open("a", encoding="utf-8")
        self._metrics.write(_line(row))
        self._metrics.flush()

    def save_checkpoint(self, state: ServerState, seconds: float) -> None:
        """Make this state the one that --resume continues from."""
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())
        save_checkpoint(self.path / CHECKPOINT, state, seconds)

    def fail(self, reason: str, *, diverged: bool) -> None:
        """Write down why the run ended by itself; ``diverged`` says that resuming it would end the same way."""
        write_json(self.path / FAILURE, {"failure": " ".join(reason.split()), "diverged": diverged})

    def finish(self, model: Mapping[str, Tensor], summary: Mapping[str, Any]) -> None:
        """Write the model, then the summary, whose presence says that the run is complete."""
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.items()}
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())
        write_atomically(self.path / MODEL, lambda file: save_file(tensors, file))
        write_json(self.path / SUMMARY, summary)
        (self.path / CHECKPOINT).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files and let go of the lock."""
        if self._metrics is not None:
            self._metrics.close()
        self._metrics = None
        self._held.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, DivergedError | ClientError | LostRankError | TooFewClientsError):
                self.fail(str(error), diverged=isinstance(error, DivergedError))
        finally:
            self.close()


def write_toml(path: Path, data: Mapping[str, Any]) -> None:
    """Write TOML atomically."""
    write_whole(path, tomli_w.dumps(dict(data)))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file that this library wrote."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GradalignError(f"{path} cannot be read: {error}") from None


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _as_toml(spec: Mapping[str, Any]) -> dict[str, Any]:
    return tomllib.loads(tomli_w.dumps(dict(spec)))


def read_spec(folder: Path) -> dict[str, Any]:
    """Read a run folder's spec."""
    if not (folder / SPEC).exists():
        raise GradalignError(f"{folder} is not a run folder: it has no {SPEC}")
    return read_toml(folder / SPEC)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the whole rows of a run's metrics; a last line cut short by a crash is left out."""
    rows: list[dict[str, Any]] = []
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise GradalignError(f"{folder / METRICS} cannot be read: {error}") from None
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            row["round"]
        except (ValueError, KeyError, TypeError):
            raise GradalignError(f"{folder / METRICS}, line {number}, is not a row of metrics") from None
        rows.append(row)
    return rows

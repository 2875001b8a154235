"""The run folder: spec, metrics, checkpoint, summary and model, each written so that a crash harms nothing.

Files are written beside their place, synced and renamed, so each is whole or it is the one before.
"""

from __future__ import annotations

import json
import os
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import tomli_w
from torch import Tensor

from gradalign.errors import (
    ClientError,
    DivergedError,
    FolderInUseError,
    GradalignError,
    LostRankError,
    NotWrittenError,
    TooFewClientsError,
    shown_text,
)
from gradalign.runs.checkpoint import (
    WHAT_TO_DO,
    Checkpoint,
    digest_of,
    digest_of_file,
    digest_of_settings,
    load_checkpoint,
    load_tensors,
    save_checkpoint,
    save_tensors,
)
from gradalign.server.federation import ServerState
from gradalign.runs import (
    CAREFULLY,
    CHECKPOINT,
    FAILURE,
    CLASS_COUNTS,
    LOCK,
    METRICS,
    MODEL,
    SPEC,
    SUMMARY,
    TENSORBOARD,
    WANDB,
    remove,
    write_whole,
)
from gradalign.runs.untrusted import (
    LARGEST_METRICS,
    is_there,
    read_bytes,
    read_spec,
    read_table,
    rows_in,
    why_not,
)
from gradalign.runs.untrusted import read_metrics as read_metrics
from gradalign.runs.metrics import MetricsFile


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically."""
    write_whole(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


DIGESTS = "sha256"
"""Where a summary has the digests of what belongs to it."""
_LONGEST_VALUE, _MOST_TOLD = 80, 8


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of the fields in which two specs differ, with both values."""
    found: list[str] = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differing_fields(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(shown_text(f"{prefix}{key} ({_shown(a)} there, {_shown(b)} now)"))
    return found


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


_locks: set[IO[bytes]] = set()


def _drop_inherited_locks() -> None:
    """Close a forked worker's copies: a lock must end with the process that took it, not with its workers."""
    for lock in _locks:
        lock.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited_locks)


def _open_lock(path: Path) -> IO[bytes]:
    """Open the lock, which nothing is ever written to: it may be anybody's file under another name."""
    try:
        lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | CAREFULLY, 0o666), "rb")
    except OSError as error:
        raise GradalignError(f"{path} {why_not(error)}") from None
    if not stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
        lock.close()
        raise GradalignError(f"{path} is not a file; remove it")
    return lock


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if need be and keep other writers out of it inside the block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _open_lock(folder / LOCK)
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


@contextmanager
def _resumable() -> Iterator[None]:
    """Add to what could not be written that nothing is lost: each file is whole, or the one before."""
    try:
        yield
    except NotWrittenError as error:
        raise NotWrittenError(f"{error}; nothing is lost: put that right and continue with --resume") from None


class RunFolder:
    """One run's folder, locked against a second writer while it is open."""

    def __init__(self, path: Path, spec: Mapping[str, Any], *, resume: bool) -> None:
        self.path, self.spec = path, spec
        self._metrics = MetricsFile(path / METRICS)
        self._held = ExitStack()
        self._held.enter_context(locked(path))
        try:
            self._check(resume)
        except OSError as error:
            self.close()
            raise GradalignError(f"cannot use {path} as a run folder: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise

    def _check(self, resume: bool) -> None:
        for left_over in self.path.glob(".*.tmp"):
            remove(left_over)  # of a process that was killed: the lock says that nobody else is here
        if not (is_there(self.path / SPEC) and self._begun()):
            refuse_strangers(self.path, {SPEC, METRICS, CLASS_COUNTS, FAILURE, TENSORBOARD, WANDB})
            remove(self.path / FAILURE)
            write_toml(self.path / SPEC, self.spec)
            return
        if not resume:
            raise GradalignError(
                f"{self.path} already holds a run; add --resume to continue it, or choose another --out"
            )
        differing = differing_fields(read_spec(self.path), _as_toml(self.spec))
        if differing:
            more = f" (and {len(differing) - _MOST_TOLD} more)" if len(differing) > _MOST_TOLD else ""
            told = "; ".join(differing[:_MOST_TOLD]) + more
            raise GradalignError(f"{self.path} holds a run with other settings: {told}")
        remove(self.path / FAILURE)

    def _begun(self) -> bool:
        """Return whether there is anything to lose: a run that failed before its first row may start anew."""
        metrics = self.path / METRICS
        files = (self.path / SUMMARY, self.path / CHECKPOINT)
        return any(is_there(file) for file in files) or (is_there(metrics) and metrics.lstat().st_size > 0)

    @property
    def _spec_digest(self) -> str:
        return digest_of_settings(_as_toml(self.spec))

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary, when the run is complete."""
        path = self.path / SUMMARY
        return read_table(path) if is_there(path) else None

    def finished(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Return the model and the metrics of a complete run; what is not as its end left it is refused."""
        summary = self.summary or {}
        digests = summary.get(DIGESTS)
        known = isinstance(digests, dict) and {"settings", SUMMARY, METRICS, MODEL} <= digests.keys()
        self._require(SUMMARY, known, "has no digests to check the run by: it is damaged, or of an earlier version")
        digests = dict(summary.pop(DIGESTS))
        as_written = "was changed or cut after the run had ended"
        own = digests.pop(SUMMARY)
        self._require(SUMMARY, digest_of_settings(summary | {DIGESTS: digests}) == own, as_written)
        self._require(SUMMARY, digests["settings"] == self._spec_digest, "belongs to a run with other settings")
        model, _ = load_tensors(self.path / MODEL, "model")
        self._require(MODEL, digest_of_file(self.path / MODEL) == digests[MODEL], as_written)
        metrics = read_bytes(self.path / METRICS, LARGEST_METRICS)
        self._require(METRICS, digest_of(metrics) == digests[METRICS], as_written)
        return model, rows_in(metrics, self.path / METRICS)

    def _require(self, name: str, fits: bool, problem: str) -> None:
        if not fits:
            raise GradalignError(f"{self.path / name} {problem}; {WHAT_TO_DO}")

    def restore(self) -> tuple[ServerState, float] | None:
        """Return the checkpoint's state and its elapsed seconds; cut the metrics back to it."""
        found = load_checkpoint(self.path / CHECKPOINT) if is_there(self.path / CHECKPOINT) else None
        rows = b""
        if found is not None:
            self._require(CHECKPOINT, found.spec == self._spec_digest, "belongs to a run with other settings")
            rows = read_bytes(self.path / METRICS, LARGEST_METRICS)[: found.metrics_bytes]
            problem = "lacks rows from before the checkpoint, or they were changed"
            self._require(METRICS, digest_of(rows) == found.metrics, problem)
        self._metrics.begin(rows, found.state.round if found is not None else None)
        return (found.state, found.seconds) if found is not None else None

    def note_class_counts(self, held: Mapping[str, Any] | None) -> None:
        """Keep who holds what, for pictures; once, since resuming does not change it."""
        if held is not None and not is_there(self.path / CLASS_COUNTS):
            write_json(self.path / CLASS_COUNTS, held)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row to the metrics, visible to other processes at once."""
        with _resumable():
            self._metrics.append(row)

    def save_checkpoint(self, state: ServerState, seconds: float) -> None:
        """Make this state the one that --resume continues from; not when its row is not in the metrics yet."""
        mark = self._metrics.until(state.round)
        if mark is None:
            return
        checkpoint = Checkpoint(
            state=state, seconds=seconds, spec=self._spec_digest, metrics_bytes=mark.length, metrics=mark.digest
        )
        with _resumable():
            self._metrics.sync()
            save_checkpoint(self.path / CHECKPOINT, checkpoint)

    def fail(self, reason: str, *, diverged: bool) -> None:
        """Write down why the run ended by itself; ``diverged`` says that resuming it would end the same way."""
        write_json(self.path / FAILURE, {"failure": " ".join(reason.split()), "diverged": diverged})

    def finish(self, model: Mapping[str, Tensor], summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write the model, then the summary, whose presence says that the run is complete; return the summary.

        It has the digests by which a resumed run knows that settings, metrics, model and summary are as they were.
        """
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.items()}
        with _resumable():
            self._metrics.sync()
            save_tensors(self.path / MODEL, tensors)
            digests = {"settings": self._spec_digest, METRICS: self._metrics.whole.digest}
            digests[MODEL] = digest_of_file(self.path / MODEL)
            as_read = json.loads(json.dumps({**summary, DIGESTS: digests}))  # lists for tuples, words for other keys
            digests[SUMMARY] = digest_of_settings(as_read)
            whole = {**summary, DIGESTS: digests}
            write_json(self.path / SUMMARY, whole)
            remove(self.path / CHECKPOINT)
        return whole

    def close(self) -> None:
        """Close the files and let go of the lock."""
        self._metrics.close()
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
    """Read a TOML file of a folder that is to be gone on with."""
    return read_table(path)


def _as_toml(spec: Mapping[str, Any]) -> dict[str, Any]:
    return tomllib.loads(tomli_w.dumps(dict(spec)))

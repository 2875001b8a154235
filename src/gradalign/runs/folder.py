"""The run folder: spec, metrics, checkpoint, summary and model, each written so that a crash harms nothing.

Files are written beside their place, synced and renamed, so each is whole or it is the one before.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradalign import runs
from gradalign.errors import DivergedError, GradalignError, NotWrittenError, RunEndedError
from gradalign.runs import CHECKPOINT, CLASS_COUNTS, FAILURE, METRICS, MODEL, SPEC, SUMMARY, TENSORBOARD, WANDB
from gradalign.runs import checkpoint as checkpoints
from gradalign.runs.checkpoint import WHAT_TO_DO, Belongs, digest_of, digest_of_file, digest_of_settings
from gradalign.runs.locks import locked, unusable
from gradalign.runs.metrics import LARGEST_METRICS, MetricsFile, rows_in
from gradalign.runs.untrusted import is_there, read_bytes, read_spec, read_table

if TYPE_CHECKING:
    from torch import Tensor

DIGESTS = "sha256"
"""Where a summary has the digests of what belongs to it."""
_MOST_TOLD = 8


def refuse_strangers(folder: Path, ours: set[str]) -> None:
    """Raise when the folder holds anything that is not ours."""
    strangers = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")} - ours
    if strangers:
        raise GradalignError(
            f"{folder} is not a run folder and not empty (it has {min(strangers)}); choose another --out"
        )


def has_begun(folder: Path) -> bool:
    """Return whether a folder has anything to lose: a run that failed before its first row may start anew."""
    metrics = folder / METRICS
    written = any(is_there(folder / name) for name in (SUMMARY, CHECKPOINT))
    return is_there(folder / SPEC) and (written or (is_there(metrics) and metrics.lstat().st_size > 0))


Unlike = Callable[[int], str | None]
"""Says in what the first rounds of a run of so many would have been others, if in anything."""


def refuse_others(folder: Path, spec: Mapping[str, Any], unlike: Unlike) -> dict[str, Any]:
    """Return the spec of the run in a folder; raise when it is neither this one nor one that can go on to it."""
    there = read_spec(folder)
    if not runs.is_shorter(there, spec):
        if differing := runs.differing_fields(there, spec):
            more = f" (and {len(differing) - _MOST_TOLD} more)" if len(differing) > _MOST_TOLD else ""
            told = "; ".join(differing[:_MOST_TOLD]) + more
            raise GradalignError(f"{folder} holds a run with other settings: {told}")
        return there
    known, complete = (is_there(folder / name) for name in (CHECKPOINT, SUMMARY))
    problem = unlike(there["rounds"]) if known or complete else None  # else there is nothing yet to go on from
    if problem is None and complete and (not known or "stopped" in read_table(folder / SUMMARY)):
        problem = "what it carries from round to round was not kept"
    if problem is not None:
        told = f"holds a run of {there['rounds']:,} rounds that cannot go on to {spec['rounds']:,}: {problem}"
        raise GradalignError(f"{folder} {told}; remove it, or choose another --out")
    return there


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a complete run left: its last model, its rows, and where it has them the best one and clients' results."""

    model: dict[str, Tensor]
    rows: list[dict[str, Any]]
    best: dict[str, Tensor] | None = None
    clients: dict[str, Any] | None = None


def _whole(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state as a file can hold it."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.items()}


@contextmanager
def _resumable() -> Iterator[None]:
    """Add to what could not be written that nothing is lost: each file is whole, or the one before."""
    try:
        yield
    except NotWrittenError as error:
        raise NotWrittenError(f"{error}; nothing is lost: put that right and continue with --resume") from None


class RunFolder:
    """One run's folder, locked against a second writer while it is open.

    A run that is the same but for fewer rounds goes on to these, unless ``unlike`` says in what its rounds so far would
    have been others.
    """

    def __init__(
        self,
        path: Path,
        spec: Mapping[str, Any],
        *,
        resume: bool,
        unlike: Unlike = lambda rounds: None,
    ) -> None:
        self.path, self._unlike = path, unlike
        self._text = runs.as_toml(spec)
        self._spec = tomllib.loads(self._text)
        self._spec_digest = digest_of_settings(self._spec)
        self._metrics = MetricsFile(path / METRICS)
        self._growing = False
        self._held = ExitStack()
        self._held.enter_context(locked(path))
        try:
            self._check(resume)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise unusable(path, error) from None
            raise

    def _check(self, resume: bool) -> None:
        for left_over in self.path.glob(".*.tmp"):
            runs.remove(left_over)  # of a process that was killed: the lock says that nobody else is here
        if not has_begun(self.path):
            refuse_strangers(self.path, {SPEC, METRICS, CLASS_COUNTS, FAILURE, TENSORBOARD, WANDB})
            runs.remove(self.path / FAILURE)
            runs.write_whole(self.path / SPEC, self._text)
            return
        if not resume:
            problem = "already holds a run; add --resume to continue it, or choose another --out"
            raise GradalignError(f"{self.path} {problem}")
        there = refuse_others(self.path, self._spec, self._unlike)
        self._growing = runs.is_shorter(there, self._spec)
        self._spec = {**there, "rounds": self._spec["rounds"]}  # what a paper says may have been corrected since
        self._spec_digest = digest_of_settings(self._spec)
        if not self._growing:
            runs.remove(self.path / FAILURE)

    def _grow(self) -> None:
        """Make a shorter run the longer one, as soon as that has something to write: until then it is as it was.

        In between it is one that has not finished, at its last round.
        """
        if self._growing:
            runs.remove(self.path / SUMMARY)
            runs.write_whole(self.path / SPEC, runs.as_toml(self._spec))
            runs.remove(self.path / FAILURE)
            self._growing = False

    def _is_ours(self, checkpoint: Belongs, round_index: int) -> bool:
        """Return whether a checkpoint is this run's, perhaps from when it was to have fewer rounds."""
        if checkpoint.spec == self._spec_digest:
            return True
        shorter = range(max(1, round_index), self._spec["rounds"])
        digests = ((n, digest_of_settings({**self._spec, "rounds": n})) for n in shorter)
        length = next((n for n, digest in digests if digest == checkpoint.spec), None)
        return length is not None and self._unlike(length) is None

    def _require(self, name: str, fits: bool, problem: str) -> None:
        if not fits:
            raise GradalignError(f"{self.path / name} {problem}; {WHAT_TO_DO}")

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary, when the run is complete."""
        path = self.path / SUMMARY
        return read_table(path) if is_there(path) and not self._growing else None

    def finished(self) -> Finished:
        """Return what a complete run left; what is not as its end left it is refused."""
        summary = self.summary or {}
        digests = summary.get(DIGESTS)
        known = isinstance(digests, dict) and {"settings", SUMMARY, METRICS, MODEL} <= digests.keys()
        self._require(SUMMARY, known, "has no digests to check the run by: it is damaged, or of an earlier version")
        digests = dict(summary.pop(DIGESTS))
        as_written = "was changed or cut after the run had ended"
        own = digests.pop(SUMMARY)
        self._require(SUMMARY, digest_of_settings(summary | {DIGESTS: digests}) == own, as_written)
        self._require(SUMMARY, digests["settings"] == self._spec_digest, "belongs to a run with other settings")
        model, _ = checkpoints.load_tensors(self.path / MODEL, "model")
        self._require(MODEL, digest_of_file(self.path / MODEL) == digests[MODEL], as_written)
        metrics = read_bytes(self.path / METRICS, LARGEST_METRICS)
        self._require(METRICS, digest_of(metrics) == digests[METRICS], as_written)
        best = clients = None
        if runs.BEST in digests:
            best, _ = checkpoints.load_tensors(self.path / runs.BEST, "model")
            self._require(runs.BEST, digest_of_file(self.path / runs.BEST) == digests[runs.BEST], as_written)
        if runs.CLIENTS in digests:
            clients = read_table(self.path / runs.CLIENTS)
            self._require(runs.CLIENTS, digest_of_settings(clients) == digests[runs.CLIENTS], as_written)
        return Finished(model=model, rows=rows_in(metrics, self.path / METRICS), best=best, clients=clients)

    def restore(self, make: Callable[..., Any] = lambda tensors, counters: counters) -> tuple[Any, float] | None:
        """Return the checkpoint's state and its elapsed seconds; cut the metrics back to it.

        ``make`` makes the state of tensors and counters, and raises KeyError, TypeError or ValueError if it cannot:
        then nothing is cut.
        """
        path = self.path / CHECKPOINT
        if not is_there(path):
            self._metrics.begin(b"", None)
            return None
        (state, round_index), belongs = checkpoints.load_checkpoint(
            path, lambda tensors, counters: (make(tensors, counters), int(counters["round"]))
        )
        self._require(CHECKPOINT, self._is_ours(belongs, round_index), "belongs to a run with other settings")
        rows = read_bytes(self.path / METRICS, LARGEST_METRICS)[: belongs.metrics_bytes]
        problem = "lacks rows from before the checkpoint, or they were changed"
        self._require(METRICS, digest_of(rows) == belongs.metrics, problem)
        if self._growing and is_there(self.path / SUMMARY):  # nothing of a finished run is cut
            last = dict(read_table(self.path / SUMMARY).get(DIGESTS, {})).get(METRICS)
            self._require(CHECKPOINT, belongs.metrics == last, "is not of the round that the run ended with")
        self._metrics.begin(rows, round_index)
        return state, belongs.seconds

    def note_class_counts(self, held: Mapping[str, Any] | None) -> None:
        """Write down the class counts, for pictures; once, since resuming does not change them."""
        if held is not None and not is_there(self.path / CLASS_COUNTS):
            runs.write_json(self.path / CLASS_COUNTS, held)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row to the metrics, visible to other processes at once."""
        with _resumable():
            self._grow()
            self._metrics.append(row)

    def save_checkpoint(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any], seconds: float) -> None:
        """Make this state the one that --resume continues from; not when its round's row is not in the metrics yet."""
        mark = self._metrics.until(counters["round"])
        if mark is None or self._growing:  # what is there is this state
            return
        belongs = Belongs(seconds=seconds, spec=self._spec_digest, metrics_bytes=mark.length, metrics=mark.digest)
        with _resumable():
            self._metrics.sync()
            checkpoints.save_noted(self.path / CHECKPOINT, tensors, {**counters, **asdict(belongs)})

    def fail(self, reason: str, *, diverged: bool) -> None:
        """Write down why the run ended by itself; ``diverged`` says that resuming it would end the same way."""
        if diverged:
            self._grow()
        if not self._growing:
            runs.write_json(self.path / FAILURE, {"failure": " ".join(reason.split()), "diverged": diverged})

    def save_best(self, model: Mapping[str, Tensor], round_index: int) -> None:
        """Keep the model of the best round so far, in the place of the one before."""
        with _resumable():
            checkpoints.save_noted(self.path / runs.BEST, _whole(model), {"round": round_index})

    def finish(
        self,
        model: Mapping[str, Tensor],
        summary: Mapping[str, Any],
        clients: Mapping[str, Any] | None = None,
        *,
        keep_state: bool = False,
    ) -> dict[str, Any]:
        """Write the model, then the summary, whose presence says that the run is complete; return the summary.

        It has the digests by which a resumed run knows that the settings and all files are as they were. With
        ``keep_state`` the checkpoint stays, and the run may be given more rounds later.
        """
        with _resumable():
            self._grow()
            self._metrics.sync()
            checkpoints.save_tensors(self.path / MODEL, _whole(model))
            digests = {"settings": self._spec_digest, METRICS: self._metrics.whole.digest}
            models = [name for name in (MODEL, runs.BEST) if is_there(self.path / name)]
            digests |= {name: digest_of_file(self.path / name) for name in models}
            runs.remove(self.path / runs.CLIENTS)  # perhaps of fewer rounds
            if clients is not None:
                runs.write_whole(self.path / runs.CLIENTS, json.dumps(clients, allow_nan=False) + "\n")
                digests[runs.CLIENTS] = digest_of_settings(clients)
            as_read = json.loads(json.dumps({**summary, DIGESTS: digests}))  # lists for tuples, words for other keys
            digests[SUMMARY] = digest_of_settings(as_read)
            whole = {**summary, DIGESTS: digests}
            runs.write_json(self.path / SUMMARY, whole)
            if not keep_state:
                runs.remove(self.path / CHECKPOINT)
        return whole

    def close(self) -> None:
        self._metrics.close()
        self._held.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, RunEndedError):
                self.fail(str(error), diverged=isinstance(error, DivergedError))
        finally:
            self.close()

"""All rounds of a run: play, measure, write down, keep a checkpoint; with its folder, engine, trackers and bar."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradalign import errors, stopping
from gradalign.algorithms.rules import ClientReport
from gradalign.client.flat import FlatModel, Point
from gradalign.client.trainer import check_device, named_failure
from gradalign.engines import Engine
from gradalign.engines.distributed import DistributedEngine
from gradalign.errors import DivergedError, GradalignError, LostRankError, TooFewClientsError
from gradalign.runs import MODEL
from gradalign.runs.checkpoint import require_writable
from gradalign.runs.folder import RunFolder
from gradalign.runs.metrics import read_metrics
from gradalign.server.federation import Federation, ServerState
from gradalign.server.measure import Measure, Row, columns, measured_at, row_of, settle, summarise
from gradalign.server.rounds import RoundFacts, play_round
from gradalign.tasks.divide import class_counts_note
from gradalign.tracking import RunInfo, Trackers

CHECKPOINT_SECONDS = 10.0
_MOST_WORKERS = 1000
Tell = Callable[[Row], None]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """On what machine and in what folder a run happens: all that cannot change its result. See ``gradalign.run``."""

    engine: str = "local"
    workers: int | None = None
    device: torch.device | str = "cpu"
    out: str | Path | None = None
    resume: bool = False
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    progress: bool | None = None
    trackers: Trackers = field(default_factory=Trackers)
    name: str | None = None
    """What trackers call the run; made from the spec when not given."""

    def __post_init__(self) -> None:
        check_device(self.device)
        errors.flag("resume", self.resume)
        errors.real("checkpoint_seconds", self.checkpoint_seconds, 0.0)
        if self.progress is not None:
            errors.flag("progress", self.progress)
        if self.workers is not None:
            object.__setattr__(self, "workers", errors.whole("workers", self.workers, 0, _MOST_WORKERS))
        if self.out is not None:
            if not isinstance(self.out, str | os.PathLike):
                raise GradalignError(f"out must be the name of a folder, got {self.out!r}")
            errors.need("tomli_w", "runs")
            errors.need("safetensors", "runs")

    @contextmanager
    def bar(self, label: str, rounds: int) -> Iterator[Tell]:
        """Show the rounds' progress where that is asked for, or there is a terminal to show it in."""
        show = self.progress
        if show is None:  # a program may have no standard error at all
            show = sys.stderr is not None and sys.stderr.isatty() and find_spec("rich") is not None
        if not show:
            yield lambda row: None
            return
        errors.need("rich", "cli")
        from gradalign.tracking.progress import rounds_bar

        with rounds_bar(rounds, label) as tick:
            yield lambda row: tick(label, row)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run gives back.

    Attributes:
        history: The metrics as columns, one entry per round from 0; None where a round was not measured.
        summary: The numbers of the end, the same as in summary.json.
        model: The final model, in evaluation mode.
        folder: The run folder, when there is one.
    """

    history: dict[str, list[Any]]
    summary: dict[str, Any]
    model: nn.Module
    folder: Path | None


def conduct(
    federation: Federation,
    engine_maker: Callable[[], Engine],
    spec: Mapping[str, Any],
    rounds: int,
    measure: Measure,
    options: RunOptions,
    on_row: Tell | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Result:
    """Open the run folder, start the engine, show progress, and run what is left to do.

    ``spec`` is what the folder's spec.toml will say; ``notes`` go into the summary as they are.
    """
    seed, trackers = federation.seed, options.trackers
    name = options.name or f"{spec.get('name', federation.task.name)}-{federation.algorithm.label}-seed{seed}"
    info = RunInfo(name=name, folder=Path(options.out) if options.out else None, settings=spec, rounds=rounds)
    with ExitStack() as stack:
        stack.enter_context(errors.no_exit(f"the code of the task {federation.task.name}"))
        # The engine first: when the folder is refused, the ranks are there to be told.
        engine = stack.enter_context(engine_maker())
        if isinstance(engine, DistributedEngine) and engine.rank != 0:
            (history, summary), point = engine.follow()
            return Result(history=history, summary=summary, model=_model(federation, point), folder=None)
        folder = None
        if info.folder is not None:
            require_writable(federation.task.make_model(seed))
            folder = stack.enter_context(RunFolder(info.folder, spec, resume=options.resume))

        def begin(rows: list[Row]) -> Tell:
            trackers.start(replace(info, earlier=rows))
            stack.callback(trackers.end, None)  # for a run that does not come to its end
            # Trackers may ask for a password, so the bar comes after them.
            tick = stack.enter_context(options.bar(federation.algorithm.label, rounds))

            def tell(row: Row) -> None:
                for listener in (trackers.log, tick, on_row):
                    if listener is not None:
                        listener(row)

            return tell

        done = folder if folder is not None and folder.summary is not None else None
        if folder is not None and done is None:
            folder.note_class_counts(class_counts_note(federation.task))
        stack.enter_context(stopping.at_stake())
        if done is not None:
            result = _finished(federation, done)
        else:
            result = _play_all(
                federation, engine, rounds, measure, folder, options.checkpoint_seconds, begin, notes or {}
            )
        if isinstance(engine, DistributedEngine):
            engine.finish([result.history, result.summary], FlatModel(result.model).read())
        if done is not None:
            trackers.catch_up(replace(info, earlier=read_metrics(done.path)), result.summary)
        else:
            trackers.end(result.summary)
        return result


def _model(federation: Federation, point: Point) -> nn.Module:
    model = federation.task.make_model(federation.seed)
    FlatModel(model).load(point)
    return model.eval()


def _finished(federation: Federation, folder: RunFolder) -> Result:
    """Return the result of a run that is complete already."""
    model = federation.task.make_model(federation.seed)
    tensors, rows = folder.finished()
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise GradalignError(f"{folder.path / MODEL} does not fit the task's model: {first}") from None
    return Result(history=columns(rows), summary=folder.summary or {}, model=model.eval(), folder=folder.path)


def _play_all(
    federation: Federation,
    engine: Engine,
    rounds: int,
    measure: Measure,
    folder: RunFolder | None,
    checkpoint_seconds: float,
    begin: Callable[[list[Row]], Tell],
    notes: Mapping[str, Any],
) -> Result:
    """Play all rounds, or those that the folder's checkpoint leaves to do.

    ``begin`` is told the rows that are there already, and returns whom to tell of each new one.
    """
    measure = settle(measure, federation, rounds)
    restored = folder.restore(ServerState.from_tensors) if folder is not None else None
    initial = ServerState(point=FlatModel(federation.task.make_model(federation.seed)).read())
    state, spent = restored or (initial, 0.0)
    _check_state(state, initial, federation, rounds)
    # A vector from a file may begin anywhere in memory, and products with it may then round differently.
    state = replace(state, point=state.point.clone())
    rows: list[Row] = read_metrics(folder.path) if folder is not None else []
    tell = begin(list(rows))
    began, saved = time.monotonic() - spent, time.monotonic()

    def note(state: ServerState, facts: RoundFacts | None) -> None:
        measured = measured_at(state, federation, measure, rounds, engine)
        rows.append(row_of(state, facts, measured, time.monotonic() - began))
        if folder is not None:
            folder.append(rows[-1])
        tell(rows[-1])

    def save(state: ServerState) -> None:
        if folder is not None:
            folder.save_checkpoint(*state.to_tensors(), seconds=time.monotonic() - began)

    try:
        if restored is None:
            note(state, None)
        while state.round < rounds:
            after, facts = _play_patiently(federation, engine, state)
            stopping.stop_if_asked()  # a round in which somebody swallowed the interrupt may be anything: not taken
            note(after, facts)
            state = after
            if time.monotonic() - saved >= checkpoint_seconds:
                save(state)
                saved = time.monotonic()
    except (DivergedError, LostRankError, TooFewClientsError, KeyboardInterrupt):
        stopping.answer()
        if rows:
            save(state)
        raise
    summary = summarise(rows, federation, measure) | dict(notes)
    model = _model(federation, state.point)
    if folder is not None:
        with stopping.held():
            summary = folder.finish(model.state_dict(), summary)
    return Result(history=columns(rows), summary=summary, model=model, folder=folder.path if folder else None)


def _play_patiently(federation: Federation, engine: Engine, state: ServerState) -> tuple[ServerState, RoundFacts]:
    """Play a round, again when too few clients answered, as often as the engine has patience."""
    for _ in range(engine.attempts - 1):
        try:
            return play_round(federation, engine, state)
        except TooFewClientsError as error:
            logger.warning("%s; the round is played again", error)
    return play_round(federation, engine, state)


def _check_state(state: ServerState, initial: ServerState, federation: Federation, rounds: int) -> None:
    """Refuse a checkpoint of another model, or one that lacks what the algorithm or the server's rule goes on with."""
    for name, what in (("x", "parameters"), ("floats", "float buffers"), ("ints", "integer buffers")):
        stored, wanted = getattr(state.point, name), getattr(initial.point, name)
        if stored.shape != wanted.shape or stored.dtype != wanted.dtype:
            raise GradalignError(
                f"the checkpoint holds a model with {stored.numel()} {what} ({stored.dtype}), "
                f"the task's has {wanted.numel()} ({wanted.dtype})"
            )
    if not 0 <= state.round <= rounds:
        raise GradalignError(f"the checkpoint is of round {state.round}, the run has {rounds}")
    if state.totals.local_updates == 0:  # nobody has reported yet, so nothing is remembered
        return
    nothing, rule = torch.zeros(1, dtype=torch.float64), federation.algorithm.server
    one = ClientReport(client=0, weight=1.0, steps=1, total_step_size=1.0, norm=1.0)
    with named_failure(f"the server rule {rule.label}"):
        remembered = set(rule.step(nothing, nothing, {}, *([[one]] if rule.sees_each else []))[1])
    keepers = {part.label for part in federation.algorithm.keepers}
    missing = (remembered - set(state.memory)) | (keepers - set(state.shared)) | (keepers - set(state.kept))
    if missing:
        raise GradalignError(f"the checkpoint lacks what {federation.algorithm.label} remembers: {min(missing)}")

"""A run with all that is around its rounds: its folder, engine, trackers and bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gradalign import errors, stopping
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import check_device
from gradalign.engines import Engine
from gradalign.engines.distributed import DistributedEngine
from gradalign.errors import GradalignError
from gradalign.runs import BEST, MODEL
from gradalign.runs.checkpoint import require_writable
from gradalign.runs.folder import RunFolder
from gradalign.runs.metrics import read_metrics
from gradalign.server.all_rounds import AllRounds, Tell, columns, model_at
from gradalign.server.clients import ClientResults
from gradalign.server.federation import Federation, unlike, without_effect
from gradalign.server.measure import Measure, Row, require_measurable
from gradalign.server.monitor import OnRound
from gradalign.server.result import Result
from gradalign.tasks.divide import class_counts_note
from gradalign.tracking import RunInfo, Trackers, in_notebook, rounds_line

CHECKPOINT_SECONDS = 10.0
_MOST_WORKERS = 1000


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
    keep_state: bool = True
    """Whether the checkpoint stays when the run has finished, so that it can be given more rounds."""

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
        show, notebook = self.progress, in_notebook()
        if show is None:  # a program may have no standard error at all
            show = notebook or (sys.stderr is not None and sys.stderr.isatty())
        if not show:
            yield lambda row: None
        elif notebook or find_spec("rich") is None:
            with rounds_line(rounds, label, sys.stdout if notebook else sys.stderr) as write:
                yield write
        else:
            from gradalign.tracking.progress import rounds_bar

            with rounds_bar(rounds, label) as tick:
                yield lambda row: tick(label, row)


def conduct(
    federation: Federation,
    engine_maker: Callable[[], Engine],
    spec: Mapping[str, Any],
    rounds: int,
    measure: Measure,
    options: RunOptions,
    on_row: Tell | None = None,
    notes: Mapping[str, Any] | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """Open the run folder, start the engine, show progress, and run what is left to do.

    ``spec`` is what the folder's spec.toml will say; ``notes`` go into the summary as they are.
    """
    seed, trackers = federation.seed, options.trackers
    name = options.name or f"{spec.get('name', federation.task.name)}-{federation.algorithm.label}-seed{seed}"
    info = RunInfo(name=name, folder=Path(options.out) if options.out else None, settings=spec, rounds=rounds)
    with ExitStack() as stack:
        stack.enter_context(errors.no_exit(f"the code of the task {federation.task.name}"))
        require_measurable(measure, federation)
        # The engine first: when the folder is refused, the ranks are there to be told.
        engine = stack.enter_context(engine_maker())
        if isinstance(engine, DistributedEngine) and engine.rank != 0:
            (history, summary, table), point = engine.follow()
            model, clients = model_at(federation, point), None if table is None else ClientResults.from_table(table)
            return Result(history=history, summary=summary, model=model, folder=None, client_results=clients)
        if (idle := without_effect(federation)) is not None:
            errors.warn(idle)
        folder = None
        if info.folder is not None:
            require_writable(federation.task.make_model(seed))
            length_matters = partial(unlike, federation.algorithm, federation.local, measure, rounds)
            opened = RunFolder(info.folder, spec, resume=options.resume, unlike=length_matters)
            folder = stack.enter_context(opened)

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
            keep = options.keep_state
            all_rounds = AllRounds(federation, engine, rounds, measure, folder, on_round, keep_state=keep)
            result = all_rounds.play(options.checkpoint_seconds, begin, notes or {})
        if isinstance(engine, DistributedEngine):
            table = None if result.client_results is None else result.client_results.to_table()
            engine.finish([result.history, result.summary, table], FlatModel(result.model).read())
        if done is not None:
            trackers.catch_up(replace(info, earlier=read_metrics(done.path)), result.summary)
        else:
            trackers.end(result.summary)
        return result


def _finished(federation: Federation, folder: RunFolder) -> Result:
    """Return the result of a run that is complete already."""
    left = folder.finished()
    models = []
    for name, tensors in ((MODEL, left.model), (BEST, left.best)):
        model = federation.task.make_model(federation.seed).eval()
        try:
            model.load_state_dict(tensors or model.state_dict())
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise GradalignError(f"{folder.path / name} does not fit the task's model: {first}") from None
        models.append(model)
    return Result(
        history=columns(left.rows),
        summary=folder.summary or {},
        model=models[0],
        folder=folder.path,
        best=None if left.best is None else models[1],
        client_results=None if left.clients is None else ClientResults.from_table(left.clients),
    )

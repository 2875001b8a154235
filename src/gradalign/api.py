"""``gradalign.run``: an experiment from Python objects, with the same power as a recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from gradalign.algorithms.plan import Algorithm, Combination, combine
from gradalign.algorithms.rules import ServerRule
from gradalign.checks import flag, real, whole
from gradalign.client import LocalTraining
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup
from gradalign.devices import check_device
from gradalign.engines import Engine
from gradalign.engines.distributed import DistributedEngine
from gradalign.engines.launch import under_torchrun
from gradalign.engines.local import local_engine
from gradalign.errors import GradalignError, no_exit
from gradalign.recipes.build import build_federation, make_federation
from gradalign.recipes.scale import describe_scale
from gradalign.recipes.spec import Spec
from gradalign.runs.folder import RunFolder, read_metrics
from gradalign.runs.writable import require_writable
from gradalign.server.describe import describe
from gradalign.server.federation import Federation
from gradalign.server.measure import Measure, Row
from gradalign.server.runner import CHECKPOINT_SECONDS, Result, execute
from gradalign.stopping import at_stake
from gradalign.tasks.class_counts import class_counts_note
from gradalign.tasks.task import Task
from gradalign.tracking import RunInfo, Tracker, Trackers
from gradalign.tracking.progress import round_bar

ENGINES = ("local", "flower", "distributed")
_MOST_WORKERS = 1000


def run(
    task: Task,
    algorithm: Algorithm | ServerRule | Combination,
    *,
    rounds: int = 50,
    clients_per_round: int | None = None,
    local: LocalTraining | None = None,
    weights: str = "uniform",
    dropout: float = 0.0,
    min_fraction: float = 0.0,
    measure: Measure | None = None,
    seed: int = 0,
    fast: bool = True,
    engine: str | None = None,
    workers: int | None = None,
    device: torch.device | str = "cpu",
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: bool | None = None,
    trackers: Sequence[Tracker] = (),
) -> Result:
    """Train a task with an algorithm and return the history and the final model.

    Args:
        task: What is trained and on whose data.
        algorithm: For example ``FedGA(beta=0.1)``, or a combination ``FedGA(beta=0.1) + FedAdam(lr=0.03)``.
        rounds: The number of rounds.
        clients_per_round: How many clients are sampled each round; None takes all.
        local: How a client trains; one epoch with lr 0.1 on the whole client when not given.
        weights: "uniform", or "examples" to weight clients by their number of examples.
        dropout: The chance that a sampled client falls silent between the two phases of a round.
        min_fraction: The share of the sampled clients that must answer each phase for a round to count.
        measure: What is measured and how often.
        seed: The seed of everything random.
        fast: Use ways of computing that are faster and the same up to rounding; False for the plain per-client loop.
        engine: "local", "flower" for Flower's apps in this process, or "distributed" for the ranks of a torchrun job;
            None takes the one that fits. Under torchrun every rank calls this function and gets the result; rank 0
            alone writes and shows progress.
        workers: Worker processes; 0 works in this process, None takes one per core. Never changes the result.
        device: Where the model runs.
        out: A folder to write the run to; nothing is written when None.
        resume: Continue the run that ``out`` holds, if it holds one.
        checkpoint_seconds: How much work a crash may cost: a checkpoint at most this often, 0 for every round.
        progress: Show a progress bar; None shows one in a terminal.
        trackers: Who else is told each row, e.g. ``TensorBoard()`` or an object of your own; see ``Tracker``.
    """
    rounds, seed = whole("rounds", rounds, 1), whole("seed", seed, 0)
    local = LocalTraining() if local is None else local
    measure = Measure() if measure is None else measure
    for name, given, kind in (("task", task, Task), ("local", local, LocalTraining), ("measure", measure, Measure)):
        if not isinstance(given, kind):
            raise GradalignError(f"{name} must be a gradalign.{kind.__name__}, got {type(given).__name__}")
    federation = make_federation(
        task,
        combine(algorithm),
        local,
        per_round=clients_per_round,
        weights=weights,
        dropout=dropout,
        min_fraction=min_fraction,
        seed=seed,
        fast=fast,
        rounds=rounds,
    )
    spec = {"rounds": rounds, **describe(federation, measure)}
    if resume is True and out is None:
        raise GradalignError("resume=True needs out=, the folder of the run to go on with")
    where = RunOptions(
        engine=engine or default_engine(),
        workers=workers,
        device=device,
        out=out,
        resume=resume,
        checkpoint_seconds=checkpoint_seconds,
        progress=progress,
        trackers=Trackers(trackers),
    )
    return _run(federation, spec, rounds, measure, where)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """On what machine and in what folder a run happens: all that cannot change its result. See ``run``."""

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
        flag("resume", self.resume)
        real("checkpoint_seconds", self.checkpoint_seconds, 0.0)
        if self.progress is not None:
            flag("progress", self.progress)
        if self.workers is not None:
            object.__setattr__(self, "workers", whole("workers", self.workers, 0, _MOST_WORKERS))
        if self.out is not None and not isinstance(self.out, str | os.PathLike):
            raise GradalignError(f"out must be the name of a folder, got {self.out!r}")


def run_spec(
    spec: Spec, where: RunOptions, *, task: Task | None = None, on_row: Callable[[Row], None] | None = None
) -> Result:
    """Run what a validated recipe describes; a task made already may be given."""
    measure = Measure(**spec.measure.model_dump())
    federation = build_federation(spec, task)
    return _run(federation, spec.to_dict(), spec.rounds, measure, where, on_row, notes=summary_notes(spec))


def summary_notes(spec: Spec) -> dict[str, Any]:
    """Return what a recipe adds to the summary: the scale it ran at, and the paper's number for its algorithm."""
    notes: dict[str, Any] = {}
    if spec.full_size is not None:
        notes["scale"] = describe_scale(spec.full_size, spec)
    if spec.paper is not None:
        notes["paper"] = {
            "source": spec.paper.source,
            "claim": spec.paper.claim,
            "test_accuracy": spec.paper.test_accuracy.get(spec.algorithm.name),
        }
    return notes


def check_engine(name: str) -> None:
    """Refuse an engine that is not known or not installed, before anything is written."""
    if name not in ENGINES:
        raise GradalignError(f'the engine must be {" or ".join(ENGINES)}, got "{name}"')
    if name == "flower":
        import_module("gradalign.flower")  # says what to install when Flower is missing


def make_engine(federation: Federation, where: RunOptions) -> Engine:
    """Return the engine that ``where`` names, ready for this federation."""
    if where.engine == "distributed":
        return _distributed_engine(federation, where)
    if under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        raise GradalignError('under torchrun every rank would run the whole experiment; use the engine "distributed"')
    if where.engine == "flower":
        from gradalign.flower.engine import in_process_engine

        return in_process_engine(federation, where.device)
    return local_engine(
        federation.task,
        federation.local,
        seed=federation.seed,
        workers=where.workers,
        device=where.device,
        fast=federation.fast,
        clients_per_round=federation.per_round,
        algorithm=federation.algorithm,
    )


def default_engine() -> str:
    """Return the engine that fits how this process was started."""
    return "distributed" if under_torchrun() else "local"


def _distributed_engine(federation: Federation, where: RunOptions) -> DistributedEngine:
    if where.workers is not None:
        raise GradalignError("workers belong to the local engine; the distributed one has its ranks")
    device = where.device
    if torch.device(device).type == "cuda" and torch.device(device).index is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    setup = Setup(
        task=federation.task,
        local=federation.local,
        seed=federation.seed,
        device=device,
        fast=federation.fast,
        algorithm=federation.algorithm,
    )
    return DistributedEngine(setup)


def _follow(federation: Federation, engine: DistributedEngine) -> Result:
    """Work for rank 0 and return its result."""
    (history, summary), point = engine.follow()
    model = federation.task.make_model(federation.seed)
    FlatModel(model).load(point)
    return Result(history=history, summary=summary, model=model.eval(), folder=None)


def _run(
    federation: Federation,
    spec: Mapping[str, Any],
    rounds: int,
    measure: Measure,
    where: RunOptions,
    on_row: Callable[[Row], None] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Result:
    check_engine(where.engine)
    return conduct(federation, lambda: make_engine(federation, where), spec, rounds, measure, where, on_row, notes)


def conduct(
    federation: Federation,
    engine_maker: Callable[[], Engine],
    spec: Mapping[str, Any],
    rounds: int,
    measure: Measure,
    where: RunOptions,
    on_row: Callable[[Row], None] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Result:
    """Open the run folder, start the engine, show progress, and run what is left to do."""
    show = where.progress
    if show is None:
        show = sys.stderr is not None and sys.stderr.isatty()  # a program may have no standard error at all
    with ExitStack() as stack:
        stack.enter_context(no_exit(f"the code of the task {federation.task.name}"))
        # The engine first: when the folder is refused, the ranks are there to be told.
        engine = stack.enter_context(engine_maker())
        if isinstance(engine, DistributedEngine) and engine.rank != 0:
            return _follow(federation, engine)
        folder = None
        if where.out is not None:
            require_writable(federation)
            folder = stack.enter_context(RunFolder(Path(where.out), spec, resume=where.resume))
            if folder.summary is None:
                folder.note_class_counts(class_counts_note(federation.task))
        stack.enter_context(at_stake())
        began: list[Callable[[Row], None]] = []

        def begin(rows: list[Row]) -> None:
            where.trackers.start(_run_info(federation, spec, rounds, where, rows))
            stack.callback(where.trackers.end, None)  # for a run that does not come to its end
            # Trackers may ask for a password, so the bar comes after them.
            tick = stack.enter_context(round_bar(federation.algorithm.label, rounds, show=show))
            began.extend((where.trackers.log, tick, *([on_row] if on_row else ())))

        def note(row: Row) -> None:
            for tell in began:
                tell(row)

        result = execute(
            federation,
            engine,
            rounds=rounds,
            measure=measure,
            folder=folder,
            checkpoint_seconds=where.checkpoint_seconds,
            on_row=note,
            on_begin=begin,
            notes=notes,
        )
        if isinstance(engine, DistributedEngine):
            engine.finish([result.history, result.summary], FlatModel(result.model).read())
        if began:
            where.trackers.end(result.summary)
        elif folder is not None:
            info = _run_info(federation, spec, rounds, where, read_metrics(folder.path))
            where.trackers.catch_up(info, result.summary)
        return result


def _run_info(
    federation: Federation, spec: Mapping[str, Any], rounds: int, where: RunOptions, earlier: Sequence[Row]
) -> RunInfo:
    name = where.name or f"{spec.get('name', federation.task.name)}-{federation.algorithm.label}-seed{federation.seed}"
    folder = None if where.out is None else Path(where.out)
    return RunInfo(name=name, folder=folder, settings=spec, rounds=rounds, earlier=earlier)

"""``gradalign.run`` and ``compare``: experiments from Python objects, with the same power as a recipe."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradalign.algorithms.plan import Algorithm, Combination, combine
from gradalign.algorithms.rules import ServerRule
from gradalign.client import LocalTraining
from gradalign.engines import Engine, under_torchrun
from gradalign.engines.distributed import DistributedEngine
from gradalign.engines.local import local_engine
from gradalign.errors import DivergedError, GradalignError, whole
from gradalign.runs import SPEC, safe_name
from gradalign.runs.compared import comparison_folder
from gradalign.runs.folder import has_begun
from gradalign.runs.untrusted import read_optional
from gradalign.server.all_rounds import Tell
from gradalign.server.federation import Federation, describe, make_federation
from gradalign.server.measure import Measure
from gradalign.server.monitor import EarlyStopping, OnRound
from gradalign.server.result import Result, draw_histories, frame_of
from gradalign.server.runner import CHECKPOINT_SECONDS, RunOptions, conduct
from gradalign.tasks.task import Task, with_metrics
from gradalign.tracking import Tracker, Trackers

if TYPE_CHECKING:
    from gradalign.recipes.spec import Spec

ENGINES = ("local", "flower", "distributed")
ROUNDS = 50


def run(
    task: Task,
    algorithm: Algorithm | ServerRule | Combination,
    *,
    rounds: int = ROUNDS,
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
    on_round: OnRound | None = None,
    early_stopping: EarlyStopping | Mapping[str, float] | None = None,
    keep_best: bool | None = None,
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
        out: A folder to write the run to; nothing is written when None. Needs the extra ``gradalign[runs]``.
        resume: Continue the run that ``out`` holds, if it holds one; one that has finished, where it has fewer rounds.
        checkpoint_seconds: How much work a crash may cost: a checkpoint at most this often, 0 for every round.
        progress: Show a progress bar; None shows one in a terminal.
        trackers: Who else is told each row, e.g. ``TensorBoard()`` or an object of your own; see ``Tracker``.
        on_round: Called after every round with its row, a mapping like one of metrics.jsonl, before that is written.
            Returns ``gradalign.STOP`` (True) or raises ``StopTraining`` to end the run there, as if it were the last
            round. Under torchrun rank 0 alone calls it.
        early_stopping: A short form of ``Measure(early_stopping=...)``.
        keep_best: A short form of ``Measure(keep_best=...)``.
    """
    rounds, seed = whole("rounds", rounds, 1), whole("seed", seed, 0)
    local = LocalTraining() if local is None else local
    measure = Measure() if measure is None else measure
    if on_round is not None and not callable(on_round):
        raise GradalignError(f"on_round must be a function of a row, got {on_round!r}")
    for name, given, kind in (("task", task, Task), ("local", local, LocalTraining), ("measure", measure, Measure)):
        if not isinstance(given, kind):
            raise GradalignError(f"{name} must be a gradalign.{kind.__name__}, got {type(given).__name__}")
    short: dict[str, Any] = {"early_stopping": early_stopping, "keep_best": keep_best}
    measure = replace(measure, **{name: value for name, value in short.items() if value is not None})
    federation = make_federation(
        with_metrics(task, measure.metrics),
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
    options = RunOptions(
        engine=engine or default_engine(),
        workers=workers,
        device=device,
        out=out,
        resume=resume,
        checkpoint_seconds=checkpoint_seconds,
        progress=progress,
        trackers=Trackers(trackers),
    )
    return conduct(federation, _engine(federation, options), spec, rounds, measure, options, on_round=on_round)


def run_spec(spec: Spec, options: RunOptions, *, task: Task | None = None, on_row: Tell | None = None) -> Result:
    """Run what a validated recipe describes; a task made already may be given."""
    from gradalign.recipes.build import build_federation

    measure = Measure(**spec.measure.model_dump())
    federation = build_federation(spec, task)
    engine, notes = _engine(federation, options), _summary_notes(spec)
    return conduct(federation, engine, spec.to_dict(), spec.rounds, measure, options, on_row, notes)


def _summary_notes(spec: Spec) -> dict[str, Any]:
    """Return what a recipe adds to the summary: the scale it ran at, and the paper's number for its algorithm."""
    from gradalign.recipes.papers import paper_note, papers_accuracy
    from gradalign.recipes.scale import describe_scale

    notes: dict[str, Any] = {}
    if (scale := describe_scale(spec)) is not None:
        notes["scale"] = scale
    if (paper := paper_note(spec)) is not None:
        notes["paper"] = paper | {"test_accuracy": papers_accuracy(spec.to_dict(), spec.algorithm.name)}
    return notes


def default_engine() -> str:
    """Return the engine that fits how this process was started."""
    return "distributed" if under_torchrun() else "local"


def _engine(federation: Federation, options: RunOptions) -> Callable[[], Engine]:
    """Return what makes the engine; one that is not known or not installed is refused before anything is written."""
    if options.engine not in ENGINES:
        raise GradalignError(f'the engine must be {" or ".join(ENGINES)}, got "{options.engine}"')
    if options.engine == "flower":
        import_module("gradalign.flower")  # says what to install when Flower is missing
    return lambda: _make_engine(federation, options)


def _make_engine(federation: Federation, options: RunOptions) -> Engine:
    device = options.device
    if options.engine == "distributed":
        if options.workers is not None:
            raise GradalignError("workers belong to the local engine; the distributed one has its ranks")
        if torch.device(device).type == "cuda" and torch.device(device).index is None:
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        return DistributedEngine(federation.setup(device))
    if under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        raise GradalignError('under torchrun every rank would run the whole experiment; use the engine "distributed"')
    if options.engine == "flower":
        from gradalign.flower.engine import in_process_engine

        return in_process_engine(federation, device)
    return local_engine(federation.setup(device), options.workers)


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """What ``compare`` gives back.

    Attributes:
        results: The results of every algorithm by its name, one for each seed that came to its end.
        failures: Why others did not, by the algorithm's name and the seed.
    """

    results: dict[str, list[Result]]
    failures: dict[tuple[str, int], str]

    def to_frame(self, what: str = "history") -> Any:
        """Return a data frame of all runs, with columns "algorithm" and "seed" before those of ``Result.to_frame``.

        Args:
            what: "history", "clients", or "summary" with a row for each run.
        """
        rows = [(name, result) for name, results in self.results.items() for result in results]
        tables = [result.columns_of(what) for _, result in rows]
        columns: dict[str, list[Any]] = {name: [] for name in ("algorithm", "seed")}
        columns |= {name: [] for table in tables for name in table if name not in columns}
        for (name, result), table in zip(rows, tables, strict=True):
            length = len(next(iter(table.values()), ()))
            own = {**table, "algorithm": [name] * length, "seed": [result.summary["seed"]] * length}
            for column, values in columns.items():
                values += own.get(column, [None] * length)
        return frame_of(columns)

    def plot(self, *columns: str, over: str = "communication_rounds") -> Any:
        """Draw columns of all histories, as ``Result.plot`` does: a colour for each algorithm, a line for each seed."""
        histories = {name: [result.history for result in results] for name, results in self.results.items()}
        return draw_histories(histories, columns, over)

    def __repr__(self) -> str:
        lines = [f"{name}: {'; '.join(map(repr, results))}" for name, results in self.results.items()]
        lines += [f"{name}, seed {seed}: {why}" for (name, seed), why in self.failures.items()]
        return "\n".join(["<Comparison>", *lines])


def compare(
    task: Task | Callable[..., Task],
    algorithms: Mapping[str, Algorithm | ServerRule | Combination] | Sequence[Algorithm | ServerRule | Combination],
    *,
    seeds: int | Sequence[int] = 3,
    out: str | Path | None = None,
    **options: Any,
) -> Comparison:
    """Run every algorithm with every seed and return all results; a run that diverges is noted and the others go on.

    Args:
        task: What is trained, or a function that makes it, called with ``seed=`` where it has such an argument.
        algorithms: The algorithms, with names of your own in a dictionary.
        seeds: How many seeds, from 0 on, or which.
        out: A folder for all runs, ALGORITHM/seedN, which ``gradalign report`` and ``watch`` understand.
        options: All further arguments of ``run``, the same for every algorithm. So are ``rounds``: this compares at
            equal updates, and a round of FedGA with fresh gradients communicates twice. ``Comparison.plot`` draws over
            communication, and ``gradalign compare`` gives each algorithm the rounds that make it equal.
    """
    if "seed" in options:
        raise GradalignError(f"compare takes seeds, not seed; seeds=[{options['seed']!r}] is that one alone")
    given = [algorithms] if isinstance(algorithms, Algorithm | ServerRule | Combination) else algorithms
    named = dict(given) if isinstance(given, Mapping) else {combine(one).label: one for one in given}
    if not named or len(named) < len(given):
        raise GradalignError("compare needs algorithms with names that differ; give them in a dictionary by name")
    numbers = list(range(whole("seeds", seeds, 1))) if not isinstance(seeds, Sequence) else list(seeds)
    results: dict[str, list[Result]] = {name: [] for name in named}
    failures: dict[tuple[str, int], str] = {}
    with ExitStack() as stack:
        if out is not None:
            described = {"name": "comparison", "algorithms": list(named), "seeds": numbers}
            stack.enter_context(comparison_folder(Path(out), described, resume=bool(options.get("resume"))))
            places = [Path(out) / safe_name(name) / f"seed{seed}" for name in named for seed in numbers]
            _require_length([place for place in places if has_begun(place)], options.get("rounds", ROUNDS))
        for seed in numbers:
            made = task if isinstance(task, Task) else _made(task, seed)
            for name, algorithm in named.items():
                place = None if out is None else Path(out) / safe_name(name) / f"seed{seed}"
                try:
                    results[name].append(run(made, algorithm, seed=seed, out=place, **options))
                except DivergedError as error:
                    failures[name, seed] = str(error)
    return Comparison(results=results, failures=failures)


def _require_length(places: Sequence[Path], rounds: int) -> None:
    """Refuse runs of another length: some of them may be able to go on and others not."""
    for place in places:
        there = read_optional(place / SPEC).get("rounds")
        if there not in (None, rounds):
            hint = "choose another out, or go on with each run by run(..., out=..., resume=True)"
            raise GradalignError(f"{place} holds a run of {there} rounds, not {rounds}; {hint}")


def _made(make: Callable[..., Task], seed: int) -> Task:
    seeded = "seed" in inspect.signature(make).parameters
    return make(seed=seed) if seeded else make()

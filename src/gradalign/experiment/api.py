"""``gradalign.run``: an experiment from Python objects, with the same power as a recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from gradalign.engines import Engine
from gradalign.engines.local import local_engine
from gradalign.errors import GradalignError
from gradalign.experiment.build import build_federation, make_federation
from gradalign.experiment.progress import round_bar
from gradalign.experiment.rounds import Federation
from gradalign.experiment.runner import CHECKPOINT_SECONDS, Measure, Result, Row, execute
from gradalign.experiment.scale import describe_scale
from gradalign.experiment.spec import Spec
from gradalign.experiment.store import RunFolder
from gradalign.local import LocalTraining
from gradalign.plan import Algorithm, Combination, combine
from gradalign.server import ServerRule
from gradalign.tasks.task import Task


def run(
    task: Task,
    algorithm: Algorithm | ServerRule | Combination,
    *,
    rounds: int = 50,
    clients_per_round: int | None = None,
    local: LocalTraining | None = None,
    weights: str = "uniform",
    dropout: float = 0.0,
    measure: Measure | None = None,
    seed: int = 0,
    workers: int | None = None,
    device: torch.device | str = "cpu",
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: bool | None = None,
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
        measure: What is measured and how often.
        seed: The seed of everything random.
        workers: Worker processes; 0 works in this process, None takes one per core. Never changes the result.
        device: Where the model runs.
        out: A folder to write the run to; nothing is written when None.
        resume: Continue the run that ``out`` holds, if it holds one.
        checkpoint_seconds: How much work a crash may cost: a checkpoint at most this often, 0 for every round.
        progress: Show a progress bar; None shows one in a terminal.
    """
    if rounds < 1:
        raise GradalignError(f"rounds must be at least 1, got {rounds}")
    local, measure = local or LocalTraining(), measure or Measure()
    federation = make_federation(
        task, combine(algorithm), local, per_round=clients_per_round, weights=weights, dropout=dropout, seed=seed
    )
    spec = {"rounds": rounds, **describe(federation, measure)}
    where = Where(
        workers=workers, device=device, out=out, resume=resume, checkpoint_seconds=checkpoint_seconds, progress=progress
    )
    return _run(federation, spec, rounds, measure, where)


@dataclass(frozen=True, kw_only=True)
class Where:
    """On what machine and in what folder a run happens: all that cannot change its result. See ``run``."""

    engine: str = "local"
    workers: int | None = None
    device: torch.device | str = "cpu"
    out: str | Path | None = None
    resume: bool = False
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    progress: bool | None = None


def run_spec(
    spec: Spec, where: Where, *, task: Task | None = None, on_row: Callable[[Row], None] | None = None
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


def make_engine(federation: Federation, where: Where) -> Engine:
    """Return the engine that ``where`` names, ready for this federation."""
    if where.engine != "local":
        raise GradalignError(f'the engine must be "local", got "{where.engine}"')
    return local_engine(
        federation.task, federation.local, seed=federation.seed, workers=where.workers, device=where.device
    )


def _run(
    federation: Federation,
    spec: Mapping[str, Any],
    rounds: int,
    measure: Measure,
    where: Where,
    on_row: Callable[[Row], None] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Result:
    show = sys.stderr.isatty() if where.progress is None else where.progress
    with ExitStack() as stack:
        folder = None
        if where.out is not None:
            folder = stack.enter_context(RunFolder(Path(where.out), spec, resume=where.resume))
        engine = stack.enter_context(make_engine(federation, where))
        tick = stack.enter_context(round_bar(federation.algorithm.label, rounds, show=show))

        def note(row: Row) -> None:
            tick(row)
            if on_row is not None:
                on_row(row)

        return execute(
            federation,
            engine,
            rounds=rounds,
            measure=measure,
            folder=folder,
            checkpoint_seconds=where.checkpoint_seconds,
            on_row=note,
            notes=notes,
        )


def describe(federation: Federation, measure: Measure) -> dict[str, Any]:
    """Return a federation made from objects as plain TOML values, for the run folder."""
    algorithm: dict[str, Any] = {"name": federation.algorithm.label}
    for part in federation.algorithm.parts:
        algorithm |= _plain(part)
    facts = federation.task.describe()
    return {
        "seed": federation.seed,
        "task": _toml({key: value for key, value in facts.items() if value is not None}),
        "algorithm": algorithm,
        "server": _plain(federation.algorithm.server),
        "local": _plain(federation.local),
        "clients": {
            "per_round": federation.per_round,
            "weights": "examples" if federation.by_examples else "uniform",
            "dropout": federation.dropout,
        },
        "measure": _plain(measure),
    }


def _plain(thing: Any) -> dict[str, Any]:
    """Return a dataclass's fields as TOML values; unset ones are left out."""
    values = {field.name: getattr(thing, field.name) for field in fields(thing)}
    return {name: _toml(value) for name, value in values.items() if value is not None}


def _toml(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__.lower()} | _plain(value)
    if isinstance(value, Mapping):
        return {str(key): _toml(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_toml(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str) else str(value)

"""The round loop: play, measure, write down, keep a checkpoint."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradalign import stopping
from gradalign._version import __version__
from gradalign.client.exchange import ClientGradient
from gradalign.client.flat import FlatModel
from gradalign.engines import Engine, RemoteEngine, SummingEngine
from gradalign.errors import DivergedError, GradalignError, LostRankError, TooFewClientsError
from gradalign.runs import MODEL
from gradalign.runs.folder import RunFolder, read_metrics
from gradalign.server.cadence import settle
from gradalign.server.federation import Federation, ServerState
from gradalign.server.measure import Measure, Row, measured_at
from gradalign.server.rounds import RoundFacts, play_round

CHECKPOINT_SECONDS = 10.0
logger = logging.getLogger(__name__)


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


def _row(state: ServerState, facts: RoundFacts | None, measured: Row, seconds: float) -> Row:
    row: Row = {"round": state.round, **asdict(state.totals), **measured}
    names = [field.name for field in fields(RoundFacts)]
    row |= {name: getattr(facts, name) if facts else None for name in names}
    return row | {"seconds": round(seconds, 3)}


def _columns(rows: list[Row]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def summarise(rows: list[Row], federation: Federation, measure: Measure) -> dict[str, Any]:
    """Return the numbers of a finished run."""
    tested = [row for row in rows if row["test_accuracy"] is not None]
    aligned = [row for row in rows if row["r"] is not None]
    best = max(tested, key=lambda row: row["test_accuracy"], default=None)
    last = rows[-1]
    summary: dict[str, Any] = {
        "algorithm": federation.algorithm.label,
        "seed": federation.seed,
        "rounds": last["round"],
        "final_test_accuracy": tested[-1]["test_accuracy"] if tested else None,
        "best_test_accuracy": best["test_accuracy"] if best else None,
        "best_round": best["round"] if best else None,
        "final_test_loss": next((row["test_loss"] for row in reversed(rows) if row["test_loss"] is not None), None),
        "final_train_loss": next((row["train_loss"] for row in reversed(rows) if row["train_loss"] is not None), None),
        "final_r": aligned[-1]["r"] if aligned else None,
        "target_accuracy": measure.target_accuracy,
        "communication_rounds_to_target": rounds_to(rows, measure.target_accuracy),
    }
    if federation.task.scored_on == "validation":
        summary |= _validation_summary(rows)
    totals = ("communication_rounds", "local_updates", "examples", "bytes_up", "bytes_down", "seconds")
    summary |= {name: last[name] for name in totals}
    return summary | {"task": federation.task.describe(), "versions": versions()}


def _validation_summary(rows: list[Row]) -> dict[str, Any]:
    accuracies = [row["validation_accuracy"] for row in rows if row["validation_accuracy"] is not None]
    losses = [row["validation_loss"] for row in rows if row["validation_loss"] is not None]
    return {
        "final_validation_accuracy": accuracies[-1] if accuracies else None,
        "best_validation_accuracy": max(accuracies, default=None),
        "final_validation_loss": losses[-1] if losses else None,
    }


def rounds_to(rows: list[Row], target: float | None) -> int | None:
    """Return the communication rounds after which the accuracy, on whatever is scored, first reached the target."""
    if target is None:
        return None
    for row in rows:
        accuracies = (row["test_accuracy"], row.get("validation_accuracy"))
        if any(accuracy is not None and accuracy >= target for accuracy in accuracies):
            return int(row["communication_rounds"])
    return None


def versions() -> dict[str, str]:
    """Return the versions that made a result."""
    return {"gradalign": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _initial(federation: Federation) -> ServerState:
    return ServerState(point=FlatModel(federation.task.make_model(federation.seed)).read())


def _play_patiently(
    federation: Federation, engine: Engine, state: ServerState, known: dict[int, ClientGradient]
) -> tuple[ServerState, RoundFacts]:
    """Play a round, again when too few clients answered, as often as the engine has patience."""
    attempts = engine.attempts if isinstance(engine, RemoteEngine) else 1
    while True:
        attempts -= 1
        try:
            return play_round(federation, engine, state, known)
        except TooFewClientsError as error:
            if attempts < 1:
                raise
            logger.warning("%s; the round is played again", error)


def execute(
    federation: Federation,
    engine: Engine,
    *,
    rounds: int,
    measure: Measure,
    folder: RunFolder | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    on_row: Callable[[Row], None] | None = None,
    on_begin: Callable[[list[Row]], None] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Result:
    """Run all rounds, or the ones a folder's checkpoint leaves to do; ``notes`` go into the summary as they are.

    ``on_begin`` is called with the rows that are there already, before any new one; not when nothing is left to do.
    """
    if folder is not None and folder.summary is not None:
        return _finished(federation, folder)
    measure = settle(measure, federation, rounds)
    restored = folder.restore() if folder is not None else None
    initial = _initial(federation)
    state, spent = restored or (initial, 0.0)
    _check_state(state, initial, federation, rounds)
    # A vector from a file may begin anywhere in memory, and products with it may then round differently.
    state = replace(state, point=state.point.clone())
    rows: list[Row] = read_metrics(folder.path) if folder is not None else []
    if on_begin is not None:
        on_begin(list(rows))
    began = time.monotonic() - spent
    saved = time.monotonic()
    known: dict[int, ClientGradient] = {}

    def note(state: ServerState, facts: RoundFacts | None) -> None:
        nonlocal known
        measured, known = measured_at(state, federation, measure, rounds, engine)
        rows.append(_row(state, facts, measured, time.monotonic() - began))
        if folder is not None:
            folder.append(rows[-1])
        if on_row is not None:
            on_row(rows[-1])

    try:
        if restored is None:
            note(state, None)
        while state.round < rounds:
            after, facts = _play_patiently(
                federation, engine, state, known if _may_stand_in(federation, engine) else {}
            )
            stopping.stop_if_asked()  # a round in which somebody swallowed the interrupt may be anything: not taken
            note(after, facts)
            state = after
            if folder is not None and time.monotonic() - saved >= checkpoint_seconds:
                folder.save_checkpoint(state, time.monotonic() - began)
                saved = time.monotonic()
    except (DivergedError, LostRankError, TooFewClientsError, KeyboardInterrupt):
        stopping.answer()
        if folder is not None and rows:
            folder.save_checkpoint(state, time.monotonic() - began)
        raise
    summary = summarise(rows, federation, measure) | dict(notes or {})
    model = _model(federation, state)
    if folder is not None:
        with stopping.held():
            summary = folder.finish(model.state_dict(), summary)
    return Result(history=_columns(rows), summary=summary, model=model, folder=folder.path if folder else None)


def _may_stand_in(federation: Federation, engine: Engine) -> bool:
    """Return whether gradients that were measured at a point are, to the bit, those that the next round would take.

    The measuring pass sees whole clients, so the gradient phase must do so too. And where clients' gradients are taken
    together, the bits of one depend on who is beside it: a round would depend on whether the point before it was
    measured in the same process, which no checkpoint tells.
    """
    together = isinstance(engine, SummingEngine) and engine.sums(shifted=False)
    return federation.local.gradient_examples is None and not together


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
    nothing = torch.zeros(1, dtype=torch.float64)
    remembered = set(federation.algorithm.server.step(nothing, nothing, {})[1])
    keepers = {part.label for part in federation.algorithm.keepers}
    missing = (remembered - set(state.memory)) | (keepers - set(state.shared)) | (keepers - set(state.kept))
    if missing:
        raise GradalignError(f"the checkpoint lacks what {federation.algorithm.label} remembers: {min(missing)}")


def _model(federation: Federation, state: ServerState) -> nn.Module:
    model = federation.task.make_model(federation.seed)
    FlatModel(model).load(state.point)
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
    return Result(history=_columns(rows), summary=folder.summary or {}, model=model.eval(), folder=folder.path)

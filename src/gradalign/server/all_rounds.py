"""All rounds of a run: play, measure, write down, keep a checkpoint, and stop when it is time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import nn

from gradalign import stopping
from gradalign.algorithms.plan import Algorithm
from gradalign.algorithms.rules import ClientReport
from gradalign.client.flat import FlatModel, Point
from gradalign.engines import Engine
from gradalign.errors import GradalignError, RunEndedError, TooFewClientsError, named_failure
from gradalign.runs.folder import RunFolder
from gradalign.runs.metrics import read_metrics
from gradalign.server.clients import ClientResults, client_columns
from gradalign.server.federation import Federation
from gradalign.server.measure import Measure, Row, measured_at, rounds_to, row_columns, settle, versions
from gradalign.server.monitor import Monitor, OnRound, ask
from gradalign.server.result import Result
from gradalign.server.rounds import RoundFacts, play_round
from gradalign.server.state import ServerState

Tell = Callable[[Row], None]
logger = logging.getLogger(__name__)
_MOST_NAMES = 500  # of clients; the report shows no more


def model_at(federation: Federation, point: Point) -> nn.Module:
    """Return the task's model at this point, in evaluation mode."""
    model = federation.task.make_model(federation.seed)
    FlatModel(model).load(point)
    return model.eval()


class AllRounds:
    """All rounds of a run, or those that its folder's checkpoint leaves to do."""

    def __init__(
        self,
        federation: Federation,
        engine: Engine,
        rounds: int,
        measure: Measure,
        folder: RunFolder | None,
        on_round: OnRound | None,
        *,
        keep_state: bool = True,
    ) -> None:
        self.federation, self.engine, self.rounds, self.folder = federation, engine, rounds, folder
        self.measure = settle(measure, federation, rounds)
        self.columns = row_columns(self.measure, federation)
        self.monitor = Monitor(self.measure, federation.task)
        self.on_round, self.keep_state = on_round, keep_state
        self.rows: list[Row] = []
        self.clients: ClientResults | None = None
        self.stopped: str | None = None
        self.asked = False
        self._began = time.monotonic()
        self._best_saved: int | None = None

    def play(self, checkpoint_seconds: float, begin: Callable[[list[Row]], Tell], notes: Mapping[str, Any]) -> Result:
        """Play the rounds; ``begin`` is told the rows that are there already and returns whom to tell of new ones."""
        state, restored = self._start()
        tell = begin(list(self.rows))
        saved = time.monotonic()
        try:
            if not restored:
                state = self._note(state, None, tell)
            elif state.round < self.rounds:
                self.stopped = self.monitor.why_stop
            while state.round < self.rounds and self.stopped is None:
                after, facts = _play_patiently(self.federation, self.engine, state)
                stopping.stop_if_asked()  # a round in which somebody swallowed the interrupt may be anything: not taken
                state = self._note(after, facts, tell)
                if time.monotonic() - saved >= checkpoint_seconds and self.stopped is None and not self.asked:
                    self._save(state)
                    saved = time.monotonic()
        except (RunEndedError, KeyboardInterrupt):
            stopping.answer()
            if self.rows:
                self._save(state)
            raise
        return self._end(state, notes)

    def _start(self) -> tuple[ServerState, bool]:
        """Return the state to go on from, and whether it is a checkpoint's."""
        restored = self.folder.restore(ServerState.from_tensors) if self.folder is not None else None
        initial = ServerState(point=FlatModel(self.federation.task.make_model(self.federation.seed)).read())
        state, spent = restored or (initial, 0.0)
        _check_state(state, initial, self.federation, self.rounds)
        self._began = time.monotonic() - spent
        self.rows = read_metrics(self.folder.path) if self.folder is not None else []
        for row in self.rows:
            self.monitor.take(row)
        # A vector from a file may begin anywhere in memory, and products with it may then round differently.
        return replace(state, point=state.point.clone()), restored is not None

    def _note(self, state: ServerState, facts: RoundFacts | None, tell: Tell) -> ServerState:
        """Measure what is due, write it down, and find out whether this was the best round, or the last one."""
        last = state.round == self.rounds
        due = self.measure.due(state.round, last=last)
        measured = self._measured(state, due)
        seconds = time.monotonic() - self._began
        row = row_of(state, facts, self.columns, measured, seconds)
        asked = ask(self.on_round, row) if facts is not None else None
        self.asked = asked is not None  # in the last round, too, though it makes no difference there
        asked = None if last else asked
        if asked is not None:  # the last round is measured in full, whichever it is, and may be the best
            row |= self._measured(state, self.measure.due(state.round, last=True) - due)
        if self.monitor.take(row) and self.measure.keep_best:
            state = replace(state, best=(state.round, state.point))
        if facts is not None and not last:
            self.stopped = asked or self.monitor.why_stop
        if self.stopped is not None and asked is None:
            row |= self._measured(state, self.measure.due(state.round, last=True) - due)
        self.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)
        tell(row)
        return state

    def _measured(self, state: ServerState, due: set[str]) -> Row:
        row, clients = measured_at(state, self.federation, self.measure, self.engine, due)
        self.clients = clients or self.clients
        return row

    def _save(self, state: ServerState) -> None:
        if self.folder is not None:
            self._save_best(state)
            self.folder.save_checkpoint(*state.to_tensors(), seconds=time.monotonic() - self._began)

    def _save_best(self, state: ServerState) -> nn.Module | None:
        """Keep the best round's model in the folder, if it is not there yet, and return it."""
        if state.best is None:
            return None
        round_index, point = state.best
        model = model_at(self.federation, point)
        if self.folder is not None and round_index != self._best_saved:
            self.folder.save_best(model.state_dict(), round_index)
            self._best_saved = round_index
        return model

    def _end(self, state: ServerState, notes: Mapping[str, Any]) -> Result:
        if "clients" in self.measure.due(state.round, last=True) and (
            self.clients is None or self.clients.round != state.round
        ):
            self._measured(state, {"clients"})  # of a run that was cut off after its last row
        summary = summarise(self.rows, self.federation, self.measure, self.monitor, self.stopped) | dict(notes)
        model, best = model_at(self.federation, state.point), self._save_best(state)
        clients = self.clients if self.clients is not None and self.clients.clients else None
        if self.folder is not None:
            with stopping.held():
                table = None if clients is None else clients.to_table()
                # Not where somebody else ended it, who cannot be asked again, and not a vector for every client.
                keep = self.keep_state and self.stopped is None and not self.asked and not state.kept
                if keep:
                    self._save(state)
                summary = self.folder.finish(model.state_dict(), summary, table, keep_state=keep)
        return Result(
            history=columns(self.rows),
            summary=summary,
            model=model,
            folder=self.folder.path if self.folder else None,
            best=best,
            client_results=clients,
        )


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
    kinds = ("parameters", "float buffers", "integer buffers")
    for what, stored, wanted in zip(kinds, state.point, initial.point, strict=True):
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
    keepers = federation.algorithm.keepers
    lawful = {part.label for part in keepers if type(part).next_shared is Algorithm.next_shared}  # others may have no s
    missing = (remembered - set(state.memory)) | (lawful - set(state.shared))
    missing |= {part.label for part in keepers} - set(state.kept)
    if missing:
        raise GradalignError(f"the checkpoint lacks what {federation.algorithm.label} remembers: {min(missing)}")


def row_of(state: ServerState, facts: RoundFacts | None, names: list[str], measured: Row, seconds: float) -> Row:
    """Return a round's row: what was spent, the columns with these names as far as they were measured, the facts."""
    row: Row = {"round": state.round, **asdict(state.totals), **dict.fromkeys(names), **measured}
    row |= {one.name: getattr(facts, one.name) if facts else None for one in fields(RoundFacts)}
    return row | {"seconds": round(seconds, 3)}


def columns(rows: list[Row]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def summarise(
    rows: list[Row], federation: Federation, measure: Measure, monitor: Monitor, stopped: str | None
) -> dict[str, Any]:
    """Return the numbers of a finished run; ``stopped`` says why it ended before its last round, if it did."""
    task = federation.task

    def final(name: str) -> Any:
        return next((row[name] for row in reversed(rows) if row[name] is not None), None)

    def best(name: str) -> Row:
        """Return the first row with the highest number, or one without any."""
        tested = [row for row in rows if row[name] is not None]
        return max(tested, key=lambda row: row[name], default={name: None, "round": None})

    summary: dict[str, Any] = {
        "algorithm": federation.algorithm.label,
        "seed": federation.seed,
        "rounds": rows[-1]["round"],
        "final_test_accuracy": final("test_accuracy"),
        "best_test_accuracy": best("test_accuracy")["test_accuracy"],
        "best_round": best("test_accuracy")["round"],
        "final_test_loss": final("test_loss"),
        "final_train_loss": final("train_loss"),
        "final_r": final("r"),
        "target_accuracy": measure.target_accuracy,
        "communication_rounds_to_target": rounds_to(rows, measure.target_accuracy),
    }
    if task.scored_on == "validation":
        summary |= {
            "final_validation_accuracy": final("validation_accuracy"),
            "best_validation_accuracy": best("validation_accuracy")["validation_accuracy"],
            "final_validation_loss": final("validation_loss"),
        }
    further = [f"{task.scored_on}_{name}" for name in task.metrics]
    further += client_columns(measure, task) if measure.clients_every != 0 else []
    summary |= {f"final_{name}": value for name in further if (value := final(name)) is not None}
    if measure.monitor is not None or measure.early_stopping is not None or measure.keep_best:
        summary["monitor"] = monitor.facts(next((row for row in rows if row["round"] == monitor.best_round), {}))
    if stopped is not None:
        summary["stopped"] = stopped
    totals = ("communication_rounds", "local_updates", "examples", "bytes_up", "bytes_down", "seconds")
    summary |= {name: rows[-1][name] for name in totals}
    if task.client_names is not None:
        summary["client_names"] = [str(name) for name in task.client_names[:_MOST_NAMES]]
    return summary | {"task": task.describe(), "versions": versions()}

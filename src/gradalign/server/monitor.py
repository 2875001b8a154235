"""Following one metric over a run: when it was best, when to stop, and what a function of the user's own says to that.

All of it is worked out from the rows, one after the other, so a resumed run comes to the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from gradalign.errors import GradalignError, flag, named_failure, real, whole
from gradalign.tasks.metrics import larger_is_better
from gradalign.tasks.task import Task

if TYPE_CHECKING:
    from gradalign.server.measure import Measure

STOP: Final = True
"""What an ``on_round`` returns to end the run after this round."""
OnRound = Callable[[Mapping[str, Any]], bool | None]


class StopTraining(Exception):
    """Raised by an ``on_round`` to end the run after this round, its text being the reason."""


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """When to stop: the monitored metric has not got better in the last ``patience`` measurements of it.

    Attributes:
        patience: How many measurements in a row may be no better than the best before them.
        min_delta: By how much a measurement must beat that best to count as better.
    """

    patience: int
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "patience", whole("early_stopping.patience", self.patience, 1))
        object.__setattr__(self, "min_delta", real("early_stopping.min_delta", self.min_delta, 0.0))

    @classmethod
    def of(cls, given: Any) -> EarlyStopping | None:
        """Return what was given, which may be a table of its fields."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping) or "patience" not in given or set(given) - {"patience", "min_delta"}:
            raise GradalignError(f"early_stopping is a table of patience and min_delta, got {given!r}")
        return cls(**given)


class Monitor:
    """The monitored metric of a run: its best so far, and how long that has been."""

    def __init__(self, measure: Measure, task: Task) -> None:
        scored, name = task.scored_on, measure.monitor
        # Where training examples are held out, as in a sweep, the same metric is the one on those.
        bare = (name or "").removeprefix("test_").removeprefix("validation_")
        scores = bare in ("accuracy", "loss", *task.metrics)
        name = bare if scores else name
        self._scores = f"{scored}_accuracy", f"{scored}_loss"
        self._column = f"{scored}_{bare}" if scores else name
        self._rule, self._follows = measure.early_stopping, measure.early_stopping is not None or measure.keep_best
        metric = task.metrics.get(name or "")
        self.larger = larger_is_better(name or "", metric) if measure.mode is None else measure.mode == "max"
        self.name = self._column or self._scores[0]
        self.best: float | None = None
        self.best_round: int | None = None
        self._beat, self._waited = -math.inf, 0

    def check(self, measure: Measure, task: Task, columns: Sequence[str], *, score: bool = False) -> None:
        """Refuse to follow what a run with these columns does not measure, or not before its end.

        Where the metric is the run's ``score``, it is needed at the end at least.
        """
        if self._column is not None and self._column not in (*columns, "local_loss"):
            known = ", ".join([*self._scores, *task.metrics])
            problem = f'"{self._column}" is not measured in this run; give one of {known}'
            raise GradalignError(f"measure.monitor: {problem}")
        kind = self.name.partition("_")[0]
        clients = measure.clients_every or 0  # None is at the end alone
        spacings = {task.scored_on: ("test", measure.test_every), "local": ("", None)}
        spacings |= dict.fromkeys(("clients", "personalized"), ("clients", clients))
        what, every = spacings.get(kind, ("train", measure.train_every))
        if self._follows and every == 0:
            raise GradalignError(f"measure.monitor: {self.name} is not measured on the way; set measure.{what}_every")
        if score and every == 0 and what != "clients":  # of those, what is never measured is no column
            raise GradalignError(
                f"measure.monitor: {self.name} is the score and never measured; set measure.{what}_every"
            )
        if self._follows and kind == task.scored_on and task.test_examples is None:
            raise GradalignError(
                f"early stopping and keep_best follow a metric, and the task {task.name} has no test examples; give "
                'Task(test=...), or hold some out, or set measure.monitor to another column such as "train_loss"'
            )

    def value(self, row: Mapping[str, Any]) -> float | None:
        """Return the metric as it is maximised: the accuracy, or minus the loss where there is none, by default."""
        if self._column is not None:
            value = row.get(self._column)
            return None if value is None else float(value if self.larger else -value)
        accuracy, loss = (row.get(column) for column in self._scores)
        return float(accuracy) if accuracy is not None else None if loss is None else -float(loss)

    def take(self, row: Mapping[str, Any]) -> bool:
        """Take the next row; return whether it is the best so far."""
        value = self.value(row)
        if value is None:
            return False
        if self._column is None and row.get(self._scores[0]) is None:
            self.name = self._scores[1]
        if value > self._beat + (self._rule.min_delta if self._rule else 0.0):
            self._beat, self._waited = value, 0
        else:
            self._waited += 1
        if self.best is not None and value <= self.best:
            return False
        self.best, self.best_round = value, int(row["round"])
        return True

    @property
    def why_stop(self) -> str | None:
        """Why the run has come to its end, None if it has not."""
        if self._rule is None or self._waited < self._rule.patience:
            return None
        times = "measurement" if self._waited == 1 else f"{self._waited} measurements"
        by = f" by more than {self._rule.min_delta:g}" if self._rule.min_delta else ""
        return f"{self.name.replace('_', ' ')} did not get better{by} in the last {times}"

    def facts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a summary says of it, given the best row."""
        return {"name": self.name, "best": row.get(self.name), "round": self.best_round}


def ask(on_round: OnRound | None, row: Mapping[str, Any]) -> str | None:
    """Tell a user's function of a round; return why it ends the run, None if it does not."""
    if on_round is None:
        return None
    try:
        with named_failure("on_round"):
            answer = on_round(MappingProxyType(dict(row)))
    except GradalignError as error:
        if isinstance(error.__cause__, StopTraining):
            return str(error.__cause__) or "on_round raised StopTraining"
        raise
    if answer is None or not flag("what on_round returns", answer):
        return None
    return "on_round asked for it"

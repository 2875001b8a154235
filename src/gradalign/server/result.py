"""What a run gives back: numbers, models, every client's results; as a picture and as a table, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from gradalign.client.exchange import ClientScore
from gradalign.errors import GradalignError, need
from gradalign.server.clients import ClientResults

History = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """What a run gives back.

    Attributes:
        history: The metrics as columns, one entry per round from 0; None where a round was not measured.
        summary: The numbers of the end, the same as in summary.json.
        model: The final model, in evaluation mode.
        folder: The run folder, when there is one.
        best: The model of the best round, in evaluation mode, where ``keep_best`` asked for it.
        client_results: Every client's results at the end, where clients have test examples of their own.
    """

    history: dict[str, list[Any]]
    summary: dict[str, Any]
    model: nn.Module
    folder: Path | None
    best: nn.Module | None = None
    client_results: ClientResults | None = None

    @property
    def clients(self) -> tuple[ClientScore, ...]:
        """Loss, accuracy, metrics and examples of each client at the end, on test examples of its own."""
        return () if self.client_results is None else self.client_results.clients

    @property
    def personalized(self) -> tuple[ClientScore, ...]:
        """The same after each client has trained the final model at home, where ``Measure.personalized`` asked."""
        return () if self.client_results is None else self.client_results.personalized

    def to_frame(self, what: str = "history") -> Any:
        """Return a data frame of pandas, or of polars where pandas is not installed.

        Args:
            what: "history", a row for each round, "clients", a row for each client, or "summary", one row.
        """
        return frame_of(self.columns_of(what))

    def columns_of(self, what: str) -> dict[str, list[Any]]:
        """Return what ``to_frame`` makes a data frame of."""
        if what == "history":
            return self.history
        if what == "summary":
            numbers = {name: value for name, value in self.summary.items() if not isinstance(value, dict | list)}
            return {name: [value] for name, value in numbers.items()}
        if what != "clients":
            raise GradalignError(f'there are frames of "history", "clients" and "summary", and none of {what!r}')
        table = {} if self.client_results is None else self.client_results.to_table()
        columns = dict(table.get("clients", {}))
        tuned = table.get("personalized", {})
        own = ("client", "examples")
        return columns | {f"personalized_{name}": values for name, values in tuned.items() if name not in own}

    def plot(self, *columns: str, over: str = "communication_rounds") -> Any:
        """Draw columns of the history, the score and r(x) by default; return matplotlib's figure.

        Args:
            columns: Names of columns, each drawn on axes of its own.
            over: The column along the horizontal axes.
        """
        return draw_histories({self._name: [self.history]}, columns, over)

    @property
    def _name(self) -> str:
        return str(self.summary.get("algorithm", "run"))

    def __repr__(self) -> str:
        words: list[str] = [self._name, f"{self.summary.get('rounds')} rounds"]
        words += score_words(self.summary)
        if self.clients:
            words.append(f"{len(self.clients)} clients")
        where = "" if self.folder is None else f", in {self.folder}"
        return f"<Result: {', '.join(words)}{where}>"


def score_words(summary: Mapping[str, Any]) -> list[str]:
    """Return the last score in words: the accuracy, or the loss where there is none; none where nothing was scored."""
    for scored in ("validation", "test"):
        if (accuracy := summary.get(f"final_{scored}_accuracy")) is not None:
            return [f"{scored} accuracy {100 * accuracy:.2f} %"]
        if (loss := summary.get(f"final_{scored}_loss")) is not None:
            return [f"{scored} loss {loss:.4g}"]
    return []


def frame_of(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return a data frame of pandas, or of polars where that is what is installed."""
    if find_spec("pandas") is None and find_spec("polars") is not None:
        return need("polars", "frames").DataFrame(dict(columns), strict=False)
    return need("pandas", "frames").DataFrame(dict(columns))


def draw_histories(groups: Mapping[str, Sequence[History]], columns: Sequence[str], over: str) -> Any:
    """Draw the histories of every group's runs, a line for each run and a colour for each group; return the figure."""
    pyplot = need("matplotlib.pyplot", "plots")
    known = list(dict.fromkeys(name for runs in groups.values() for history in runs for name in history))
    for name in (*columns, over):
        if name not in known:
            raise GradalignError(f'there is no column "{name}" to draw; there are {", ".join(known)}')
    shown = list(columns) or _worth_drawing([history for runs in groups.values() for history in runs])
    figure, axes = pyplot.subplots(1, len(shown), figsize=(4.6 * len(shown), 3.4), squeeze=False, layout="constrained")
    for name, place in zip(shown, axes[0], strict=True):
        for number, (label, runs) in enumerate(groups.items()):
            for first, history in enumerate(runs):
                points = [pair for pair in zip(history[over], history[name], strict=True) if None not in pair]
                place.plot(*zip(*points, strict=True), color=f"C{number % 10}", label=None if first else label)
        place.set_xlabel(over.replace("_", " "))
        place.set_ylabel(name.replace("_", " "))
        place.grid(visible=True, alpha=0.25)
    axes[0][0].legend()
    pyplot.close(figure)  # a notebook shows what a cell returns, and would show an open figure once more
    return figure


def _worth_drawing(histories: Sequence[History]) -> list[str]:
    """Return the scores and r(x), as far as anything of them was measured."""
    measured = {
        name for history in histories for name, values in history.items() if any(one is not None for one in values)
    }
    order = ("test_accuracy", "validation_accuracy", "test_loss", "validation_loss", "train_loss", "local_loss")
    return [name for name in order if name in measured][:1] + [name for name in ("r",) if name in measured]

"""What a run gives back: numbers, models, every client's results; as a picture and as a table, too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gradalign.client.exchange import ClientScore
from gradalign.server.clients import ClientResults
from gradalign.server.shown import draw_histories, frame_of, score_words


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
            what: "history", a row for each round, or "clients", a row for each client.
        """
        if what == "history":
            return frame_of(self.history)
        table = {} if self.client_results is None else self.client_results.to_table()
        columns = dict(table.get("clients", {}))
        tuned = table.get("personalized", {})
        own = ("client", "examples")
        columns |= {f"personalized_{name}": values for name, values in tuned.items() if name not in own}
        return frame_of(columns)

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

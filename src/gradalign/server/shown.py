"""Results for people who work in Python: short words, data frames, pictures. Nothing here needs more than is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from gradalign.errors import GradalignError, need

History = Mapping[str, Sequence[Any]]


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

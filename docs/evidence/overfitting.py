"""Does alignment overfit less? Test loss at equal training loss, from the kept runs.

    python docs/evidence/overfitting.py    # draw the picture of docs/results.md and print its numbers

Less overfitting is a lower test loss for the same training loss, which does not ask who is faster. Training loss is
measured seldom; the test loss of those rounds is read off the line between its own measurements.
"""

from __future__ import annotations

import math
import tarfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from gradalign.report.statistics import Difference, difference
from gradalign.runs.read import Run, gather

HERE = Path(__file__).resolve().parent
RUNS = HERE / "runs"
TITLES = {
    "emnist-one-class": "EMNIST, one class each, K = 1",
    "emnist-one-class-k10": "EMNIST, one class each, K = 10",
    "cifar100": "CIFAR-100, two classes each, K = 2",
}
DRAWN = {"fedavg": "FedAvg", "fedga": "FedGA", "scaffold": "SCAFFOLD"}
TIMES = (1.0, 1.1, 1.25)
"""Where it is read: at so many times the training loss at which the slower side ends."""


def kept_runs(name: str, entries: Iterable[str] = DRAWN) -> dict[str, list[Run]]:
    """Return an experiment's kept runs by algorithm, those that there are."""
    with TemporaryDirectory() as place, tarfile.open(RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(place, filter="data")
        runs = [run for run in gather([Path(place) / name / "runs"]).runs if run.state == "complete"]
    by_name = {entry: [run for run in runs if run.entry == entry] for entry in entries}
    return {entry: own for entry, own in by_name.items() if own}


def losses(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return the training loss where it was measured, and the test loss there."""
    train, test = (
        np.array([(row["round"], row[key]) for row in run.rows if row.get(key) is not None]).T
        for key in ("train_loss", "test_loss")
    )
    return train[1], np.interp(train[0], *test)


def at_equal_training(first: list[Run], second: list[Run], times: float) -> Difference:
    """Return how far the first's test loss is above the second's at a training loss that both sides pass.

    It is so many times the one at which the slower side ends, the mean over its last tenth. A run's number is that of
    the straight line through its points within a quarter of that loss, where there are the most of both sides.
    """
    ways = [[losses(run) for run in side] for side in (first, second)]
    where = times * max(
        float(np.mean([train[-math.ceil(len(train) / 10) :].mean() for train, _ in side])) for side in ways
    )
    scores = []
    for side in ways:
        near = [abs(np.log(train / where)) <= np.log(1.25) for train, _ in side]
        assert min(here.sum() for here in near) > 2, "too few measurements near there for a line"
        lines = [np.polyfit(train[here], test[here], 1) for here, (train, test) in zip(near, side, strict=True)]
        scores.append([float(np.polyval(line, where)) for line in lines])
    apart = difference(*scores)
    assert apart is not None
    return apart


def draw(found: dict[str, dict[str, list[Run]]]) -> None:
    """Draw every measurement of all seeds, test loss over training loss, a panel for each experiment."""
    import matplotlib.figure

    from gradalign.report.figures import COLOURS, STYLE, save, tidy

    with matplotlib.rc_context(STYLE | {"font.size": 8}):
        figure = matplotlib.figure.Figure(figsize=(9, 3.2), layout="constrained")
        for axes, (name, runs) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
            for colour, entry in zip((COLOURS[0], COLOURS[1], COLOURS[3]), DRAWN, strict=True):
                train, test = np.concatenate(
                    [np.array(losses(run)) for run in runs.get(entry, [])] or [[[], []]], axis=1
                )
                axes.loglog(train, test, "o", color=colour, ms=3, alpha=0.7, mec="none", label=DRAWN[entry])
            ends = [losses(run) for own in runs.values() for run in own]
            low, end = min(train.min() for train, _ in ends), max(train[-1] for train, _ in ends)
            high = min(1.6 * end, max(train.max() for train, _ in ends))
            axes.plot([low, high], [low, high], ":", color="grey", lw=1, label="test = training")
            tidy(axes, "training loss", "test loss" if name == next(iter(found)) else "")
            axes.set(title=TITLES[name], xlim=(low / 1.05, high), ylim=(low / 1.05, high * 1.15))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_formatter("{x:g}")
                axis.set_major_formatter("{x:g}")
        lines, labels = axes.get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=4, frameon=False)
        save(figure, HERE.parent / "images" / "overfitting.png", dpi=110)


def compared(found: dict[str, dict[str, list[Run]]]) -> dict[tuple[str, str], list[Difference]]:
    """Return how far the others' test loss is above FedAvg's at equal training losses, in each experiment."""
    return {
        (name, entry): [at_equal_training(runs[entry], runs["fedavg"], times) for times in TIMES]
        for name, runs in found.items()
        for entry in runs
        if entry != "fedavg"
    }


if __name__ == "__main__":
    known = {name: kept_runs(name) for name in TITLES}
    draw(known)
    print(f"| test loss above FedAvg's | {' | '.join(f'at {times} times' for times in TIMES)} |")
    for (name, entry), apart in compared(known).items():
        cells = [f"{one.value:+.3f} ± {one.margin:.3f}".replace("-", "−") for one in apart]
        print(f"| {TITLES[name]}: {DRAWN[entry]} | {' | '.join(cells)} |")

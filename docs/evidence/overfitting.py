"""Does alignment overfit less? Test loss at equal training loss, from the kept runs.

    python docs/evidence/overfitting.py    # draw the picture of docs/results.md and print its numbers

Less overfitting is a lower test loss for the same training loss, which does not ask who is faster. Training loss is
measured seldom; the test loss of those rounds is read off the line between its own measurements.
"""

from __future__ import annotations

import tarfile
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


def kept_runs(name: str) -> dict[str, list[Run]]:
    """Return an experiment's kept runs by algorithm, those that there are."""
    with TemporaryDirectory() as place, tarfile.open(RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(place, filter="data")
        runs = gather([Path(place) / name / "runs"]).runs
    by_name = {entry: [run for run in runs if run.entry == entry] for entry in DRAWN}
    return {entry: own for entry, own in by_name.items() if own}


def losses(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return the training loss where it was measured, and the test loss there."""
    train, test = (
        np.array([(row["round"], row[key]) for row in run.rows if row.get(key) is not None]).T
        for key in ("train_loss", "test_loss")
    )
    return train[1], np.interp(train[0], *test)


def at_equal_training(first: list[Run], second: list[Run]) -> Difference:
    """Return how far the first's test loss is above the second's at a training loss that both sides pass.

    It is a tenth above the one at which the slower side ends. A run's number is that of the straight line through its
    points, from the slower side's end to 1.6 times that.
    """
    ways = [[losses(run) for run in side] for side in (first, second)]
    end = max(float(np.mean([train[-1] for train, _ in side])) for side in ways)
    scores = []
    for side in ways:
        near = [(train >= 0.98 * end) & (train <= 1.6 * end) for train, _ in side]
        lines = [np.polyfit(train[here], test[here], 1) for here, (train, test) in zip(near, side, strict=True)]
        scores.append([float(np.polyval(line, 1.1 * end)) for line in lines])
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


def compared() -> dict[tuple[str, str], Difference]:
    """Return how far the others' test loss is above FedAvg's at equal training loss, in each kept experiment."""
    found = {name: kept_runs(name) for name in TITLES if (RUNS / f"{name}.tar.xz").exists()}
    return {
        (name, entry): at_equal_training(runs[entry], runs["fedavg"])
        for name, runs in found.items()
        for entry in runs
        if entry != "fedavg"
    }


if __name__ == "__main__":
    draw({name: kept_runs(name) for name in TITLES if (RUNS / f"{name}.tar.xz").exists()})
    for (name, entry), apart in compared().items():
        print(f"{name}, {entry} − fedavg, test loss: {apart.value:+.4f} ± {apart.margin:.4f}")

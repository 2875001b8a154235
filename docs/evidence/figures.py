"""The paper's other figures, drawn from the kept runs: accuracy over β and over K, test loss, drift.

    python docs/evidence/figures.py    # write docs/images/figures.png

Lines are means over the seeds, shaded is the seeds' range. Nothing is smoothed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from overfitting import DRAWN, TITLES, kept_runs  # beside this script

from gradalign.report.figures import COLOURS, STYLE, save, tidy
from gradalign.runs.read import Run

PICTURE = Path(__file__).resolve().parent.parent / "images" / "figures.png"
LABELS = {"drift": "drift of a client's gradient", "test_loss": "test loss", "test_accuracy": "test accuracy, %"}
BETAS = (0.01, 0.1, 0.5, 1.5, 2.5, 5.0)
STEPS = (1, 10, 20, 40)
PAINTED = dict(zip(DRAWN, (COLOURS[0], COLOURS[1], COLOURS[3]), strict=True))


def over(runs: list[Run], cost: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return where a metric was measured in all runs, and a row of its values for each of them."""
    rows = [[row for row in run.rows if row.get(metric) is not None] for run in runs]
    points = min(map(len, rows))
    x = np.mean([[row[cost] for row in own[:points]] for own in rows], axis=0)
    return x, np.array([[row[metric] for row in own[:points]] for own in rows])


def last_tenth(run: Run) -> float:
    """Return a run's number: the mean test accuracy over the last tenth of its communications, in %."""
    whole = run.rows[-1]["communication_rounds"]
    late = [row for row in run.rows if row["communication_rounds"] > 0.9 * whole]
    return 100 * float(np.mean([row["test_accuracy"] for row in late if row.get("test_accuracy") is not None]))


def line(axes: Any, runs: list[Run], cost: str, metric: str, **style: Any) -> None:
    """Draw the mean of some runs and their range."""
    x, values = over(runs, cost, metric)
    unit = 100 if metric.endswith("accuracy") else 1
    axes.plot(x, unit * values.mean(axis=0), lw=1.4, **style)
    axes.fill_between(x, unit * values.min(axis=0), unit * values.max(axis=0), alpha=0.15, lw=0, color=style["color"])


def draw_beta(axes: Any) -> None:
    """Draw where runs end over β: every seed, and their mean."""
    found = kept_runs("emnist-beta", [f"beta {beta}" for beta in BETAS])
    ends = {beta: [last_tenth(run) for run in found[f"beta {beta}"]] for beta in BETAS}
    axes.semilogx(BETAS, [np.mean(ends[beta]) for beta in BETAS], "-o", color=COLOURS[1], lw=1.4, ms=4)
    for beta, values in ends.items():
        axes.plot([beta] * len(values), values, "o", color=COLOURS[1], ms=3, alpha=0.4, mec="none")
    told = [beta for beta in BETAS if beta != 2.5]  # there is no room for its number beside 1.5
    axes.set(title="EMNIST IID: accuracy over β", xticks=told, xticklabels=[f"{beta:g}" for beta in told])
    axes.minorticks_off()
    tidy(axes, "β", LABELS["test_accuracy"])


def draw_steps(axes: Any) -> None:
    """Draw test accuracy over the steps of a client, a line for each K."""
    found = kept_runs("emnist-local-steps", [f"K={steps}" for steps in STEPS])
    for colour, (name, runs) in zip(COLOURS, found.items(), strict=False):
        line(axes, runs, "local_updates", "test_accuracy", color=colour, label=name.replace("=", " = "))
    axes.set(title="EMNIST IID: local steps", ylim=(70, 88))
    axes.legend(frameon=False, loc="lower right")
    tidy(axes, "local updates", LABELS["test_accuracy"])


def draw_algorithms(axes: Any, name: str, metric: str) -> None:
    """Draw a metric over communications, a line for each algorithm."""
    for entry, runs in kept_runs(name).items():
        line(axes, runs, "communication_rounds", metric, color=PAINTED[entry], label=DRAWN[entry])
    axes.set(title=TITLES[name], ylim=(0, 2 if metric == "test_loss" else None))
    tidy(axes, "communications", LABELS[metric])


def main() -> None:
    """Draw the six panels."""
    import matplotlib.figure

    with matplotlib.rc_context(STYLE | {"font.size": 8}):
        figure = matplotlib.figure.Figure(figsize=(9, 5.2), layout="constrained")
        above, below = figure.subplots(2, 3)
        draw_beta(above[0])
        draw_steps(above[1])
        draw_algorithms(above[2], "emnist-one-class", "test_loss")
        for axes, name in zip(below, TITLES, strict=True):
            draw_algorithms(axes, name, "drift")
        figure.legend(*below[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        save(figure, PICTURE, dpi=110)


if __name__ == "__main__":
    main()

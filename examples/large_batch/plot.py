"""Draw what measure.py wrote, and print its table.

    python examples/large_batch/plot.py results.json curves.png

Several result files (one per seed, say) may be given before the picture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LOWEST = 40.0
STYLES = {
    "small-batch SGD": ("0.35", ":"),
    "linear scaling": ("tab:red", "-."),
    "large-batch SGD": ("tab:orange", "--"),
}


def label(run: dict) -> str:
    """Return a run's name in the legend."""
    return f"{run['method']['name']}, lr {run['method']['lr']:g}"


def main(files: list[str], picture: str) -> None:
    """Draw means over seeds with the range between them shaded."""
    groups: dict[str, list[dict]] = {}
    for file in files:
        for run in json.loads(Path(file).read_text())["runs"]:
            groups.setdefault(label(run), []).append(run)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    shades = iter(plt.get_cmap("viridis")([0.75, 0.45, 0.15, 0.9]))
    print("| method | test accuracy at the end, % (each seed) | best on the way | training accuracy, % |")
    print("|---|---|---|---|")
    for name, runs in groups.items():
        colour, line = STYLES.get(runs[0]["method"]["name"], (None, "-"))
        colour = next(shades) if colour is None else colour
        updates = [point["update"] for point in runs[0]["curve"]]
        curves = [[100 * point["test_accuracy"] for point in run["curve"]] for run in runs]
        middle = [mean(values) for values in zip(*curves, strict=True)]
        width = 1.2 if "lr 0.4" in name and "large-batch" in name else 2.0
        shown = name if max(middle) > LOWEST else f"{name} (below the picture)"
        axes.plot(updates, middle, line, color=colour, label=shown, linewidth=width)
        low, high = ([pick(values) for values in zip(*curves, strict=True)] for pick in (min, max))
        axes.fill_between(updates, low, high, color=colour, alpha=0.15, linewidth=0)
        last = ", ".join(f"{curve[-1]:.1f}" for curve in curves)
        best = mean(max(curve) for curve in curves)
        train = 100 * mean(run["train_accuracy"] for run in runs)
        print(f"| {name} | {middle[-1]:.1f} ({last}) | {best:.1f} | {train:.1f} |")
    axes.set(xlabel="updates with the large batch", ylabel="test accuracy, %", ylim=(LOWEST, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:-1], sys.argv[-1])

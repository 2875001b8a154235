"""What docs/communication.md shows of five settings, made from the runs of ``gradalign reproduce``.

    python docs/evidence/forms.py reproduction

writes docs/evidence/forms.json and docs/images/forms.png, and prints the tables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import numpy as np

from gradalign.report.figures import COLOURS, DASHES, STYLE, save, tidy
from gradalign.report.statistics import difference
from gradalign.runs.read import Run, gather

matplotlib.use("Agg")
HERE = Path(__file__).resolve().parent
TITLES = {
    "forms-emnist-one-class": "EMNIST, one class each",
    "forms-cifar100": "CIFAR-100, two classes each",
    "forms-emnist-iid": "EMNIST IID",
    "forms-cifar10": "CIFAR-10 IID",
    "forms-shakespeare": "Shakespeare's roles",
}
NAMES = {
    "fedavg": "FedAvg",
    "fedga-auto": '**FedGA()**: running, β "auto"',
    "fedga-running": "FedGA, running, tuned β",
    "fedga-kept-auto": 'FedGA, kept, β "auto"',
    "fedga-kept": "FedGA, kept, tuned β",
    "fedga-fresh-auto": 'FedGA, fresh, β "auto"',
    "fedga": "FedGA, fresh (the paper's), tuned β",
    "scaffold": "SCAFFOLD, fresh",
    "scaffold-kept": "SCAFFOLD, kept",
    "fedinit": "FedInit",
    "fedsam": "FedSAM",
    "fedlesam": "FedLESAM",
}
IN_FRONT = ("fedavg", "fedga-auto", "fedga-running", "fedga")
DRAWN = (
    *IN_FRONT,
    "scaffold-kept",
    "fedsam",
    "fedinit",
    "fedlesam",
    "scaffold",
    "fedga-fresh-auto",
    "fedga-kept",
    "fedga-kept-auto",
)
LOOKED_AT = {0, 1}  # seeds whose test images were seen while beta's rule was looked for
COSTS = ("communication", "bytes", "computation")
AXES = {
    "communication_rounds": ("communications", 1.0),
    "bytes": ("gigabytes sent", 1e9),
    "examples": ("examples computed, millions", 1e6),
}


def signed(value: float, margin: float | None) -> str:
    """Return a difference and its margin, with a minus that is one."""
    return (f"{value:+.2f}" + ("" if margin is None else f" ± {margin:.2f}")).replace("-", "−")


def told(chosen: dict[str, Any], lr: float) -> str:
    """Return the chosen settings of one algorithm that FedAvg does not have."""
    shown = {key: value for key, value in chosen.items() if key in ("beta", "rho") or (key == "lr" and value != lr)}
    return ", ".join(f"{key} {value:g}" for key, value in shown.items())


def table(one: dict[str, Any]) -> list[str]:
    """Return one setting's table as lines of Markdown."""
    rows = {row["name"]: row for row in one["beside_baseline"]}
    chosen = {entry["name"]: (entry["chosen"] or {}).get("values", {}) for entry in one["algorithms"]}
    length, lr = one["algorithms"][0]["communication_rounds"], chosen["fedavg"]["lr"]
    lines = [
        f"### {TITLES[one['name']]} ({length:,} communications, lr {lr})",
        "",
        "| | test accuracy | against FedAvg | at equal bytes | at equal computation | bytes, examples | chosen |",
        "|---|---|---|---|---|---|---|",
    ]
    lost = {entry["name"]: len(entry["diverged"]) for entry in one["algorithms"]}
    for name in NAMES:
        found = rows.get(name, {"scores": ()})["scores"]
        if lost.get(name) and not found:
            lines.append(f"| {NAMES[name]} | diverged ({lost[name]}) | | | | | {told(chosen[name], lr)} |")
        if len(found) < 3:
            continue
        row = rows[name]
        spread = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
        pairs = [signed(**row["difference"][at]) if at in row["difference"] else "" for at in COSTS]
        costs = f"{row['spent']['bytes']:.2f}, {row['spent']['computation']:.2f}"
        cells = [NAMES[name], f"{fmean(found):.2f}{spread} ({len(found)})", *pairs, costs, told(chosen[name], lr)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary(one: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of one setting: the seeds' numbers and the choices, not the runs."""
    chosen = {entry["name"]: (entry["chosen"] or {}).get("values", {}) for entry in one["algorithms"]}
    seeds = {entry["name"]: entry["seeds"] for entry in one["algorithms"]}
    rows = [
        {**row, "seeds": seeds[row["name"]], "scores": [round(score, 3) for score in row["scores"]]}
        for row in one["beside_baseline"]
    ]
    return {"name": one["name"], "algorithms": [{**row, "chosen": chosen[row["name"]]} for row in rows]}


def by_seed(one: dict[str, Any], name: str) -> dict[int, float]:
    """Return one algorithm's accuracies by seed."""
    seeds = {entry["name"]: entry["seeds"] for entry in one["algorithms"]}
    rows = {row["name"]: row["scores"] for row in one["beside_baseline"]}
    return dict(zip(seeds.get(name, []), rows.get(name, []), strict=True))


def asides(one: dict[str, Any]) -> list[str]:
    """Return what the text says beside the tables: seeds not looked at, and what "auto" has of its constant's gain."""
    plain, auto, constant = (by_seed(one, name) for name in ("fedavg", "fedga-auto", "fedga-running"))
    unseen = [[score for seed, score in own.items() if seed not in LOOKED_AT] for own in (auto, plain)]
    found, common = difference(*unseen), sorted(plain.keys() & auto.keys() & constant.keys())
    lines = [f"{one['name']}: seeds not looked at {'–' if found is None else signed(found.value, found.margin)}"]
    if common:
        gains = [fmean(own[seed] - plain[seed] for seed in common) for own in (auto, constant)]
        lines.append(f"seeds {common}: auto {gains[0]:+.2f}, constant {gains[1]:+.2f}, share {gains[0] / gains[1]:.0%}")
    return lines


def draw(folder: Path, names: list[str]) -> None:
    """Draw accuracy over three costs, a row for each setting: means over the seeds, smoothed over a fifteenth."""
    with matplotlib.rc_context(STYLE | {"font.size": 8}):
        figure = matplotlib.figure.Figure(figsize=(10.5, 2.35 * len(names)), layout="constrained")
        grid = figure.subplots(len(names), len(AXES), squeeze=False)
        for line, name in zip(grid, names, strict=True):
            runs = [run for run in gather([folder / name / "runs"]).runs if run.state == "complete"]
            for place, (axes, (key, (label, unit))) in enumerate(zip(line, AXES.items(), strict=True)):
                for number, entry in enumerate(DRAWN):
                    own = [run for run in runs if run.entry == entry]
                    line_of = {"color": COLOURS[number % len(COLOURS)], "ls": DASHES[number // len(COLOURS)]}
                    if own:
                        line_of |= {"lw": 1.7, "zorder": 3} if entry in IN_FRONT else {"lw": 0.9}
                        axes.plot(*curve(own, key, unit), **line_of, label=NAMES[entry].replace("**", ""))
                tidy(axes, label, f"{TITLES[name]}\ntest accuracy, %" if place == 0 else "")
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        save(figure, HERE.parent / "images" / "forms.png", dpi=110)


def curve(runs: list[Run], key: str, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean curve of an algorithm's seeds over one cost; the mean of some points stands in their middle."""
    rows = [[row for row in run.rows if row.get("test_accuracy") is not None] for run in runs]
    points = min(map(len, rows))
    x = np.mean([[row[key] / unit for row in own[:points]] for own in rows], axis=0)
    y = np.mean([[100 * row["test_accuracy"] for row in own[:points]] for own in rows], axis=0)
    window = np.ones(width := max(1, points // 15)) / width
    return np.convolve(x, window, "valid"), np.convolve(y, window, "valid")


def main(folder: Path) -> None:
    """Write the numbers and the picture; print the tables."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found = {one["name"]: one for one in results["experiments"]}
    names = [name for name in TITLES if name in found]
    kept = {"scale": results["scale"], "experiments": [summary(found[name]) for name in names]}
    (HERE / "forms.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n\n".join("\n".join(table(found[name])) for name in names))
    print("\n".join(line for name in names for line in asides(found[name])), file=sys.stderr)
    draw(folder, names)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The verdicts on the paper's claims that docs/results.md shows, made from the runs of ``gradalign reproduce``.

    python docs/evidence/verdicts.py reproduction   # keep the experiments of a folder, draw them, write the page
    python docs/evidence/verdicts.py                # the page alone, from what is kept

Kept are the seeds' numbers, from which all that the page shows is worked out (verdicts.json), and in runs/ each
experiment's settings and run folders with what was measured, without models. An archive unpacked into a folder is what
``gradalign reproduce --out`` of that folder left: runs in it count as done, others can join them on another machine.

    tar -xJf docs/evidence/runs/cifar100.tar.xz -C reproduction && gradalign reproduce --report --scale medium
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any, get_args

import numpy as np

from gradalign.report.statistics import difference, mean_and_std
from gradalign.reproduce.outcome import HOLDS, SETTINGS, verdict_words
from gradalign.reproduce.plan import Experiment, read_plan
from gradalign.reproduce.verdicts import Verdict
from gradalign.runs import COMPARISON, FAILURE, METRICS, SPEC, SUMMARY
from gradalign.runs.read import has_ended

HERE = Path(__file__).resolve().parent
KEPT, PAGE, RUNS = HERE / "verdicts.json", HERE.parent / "results.md", HERE / "runs"
GLANCE = ("<!-- verdicts.py writes the table from here -->", "<!-- the table ends here -->")
CLAIMS = ("<!-- verdicts.py writes from here -->", "<!-- to here -->")
ELSEWHERE = ("forms-", "digits-")  # docs/communication.md
SAID = ("text", "papers", "at", "metric", "first", "second", "first_scores", "second_scores", "rises", "verdict", "why")
NAMES = {"fedga": "FedGA", "fedavg": "FedAvg", "scaffold": "SCAFFOLD", "fedprox": "FedProx", "feddyn": "FedDyn"}
NAMES |= {"gradalign": "GradAlign", "largebatchsgd": "large-batch SGD", "sam": "SAM", "small-batch": "small-batch SGD"}
NAMES |= {"fedga-auto": '`FedGA()`, running mean, β "auto"', "fedga-K=2": "`FedGA()`, K=2"}
DRAWN = ("fedavg", "fedga", "fedga-auto", "scaffold", "fedprox")
DRAWN_OF_BATCHES = ("largebatchsgd", "gradalign", "sam", "small-batch")
DASHES = {"fedprox": "--", "small-batch": ":"}  # FedProx may lie on FedAvg's curve
AXES = {"communication_rounds": ("communications", 1.0), "local_updates": ("local updates, thousands", 1e3)}
AXES_OF_BATCHES = {"round": ("updates", 1.0), "examples": ("gradients of images, millions", 1e6)}
PICTURES = {
    "one-class": {
        "emnist-one-class": "one class each, K = 1",
        "emnist-one-class-k10": "one class each, K = 10",
    },
    "at-random": {"emnist-iid": "EMNIST IID"},
    "cifar10": {"cifar10-iid": "CIFAR-10"},
    "equal-computation": {"large-batch-emnist": "EMNIST, batches of 1,000"},
    "appendix": {"cifar100": "CIFAR-100, two classes each", "shakespeare": "Shakespeare's roles"},
}
"""Drawn anew when a folder has all of a picture's experiments."""
SHORT = {name: title for titles in PICTURES.values() for name, title in titles.items()}
SHORT |= {
    "emnist-one-class": "EMNIST, one class each",
    "emnist-one-class-k10": "EMNIST, one class each, K = 10 for all",
    "flat-digits": "digits, one class each, flat curves",
}
KINDS = (
    "FedGA ends above another algorithm at equal communication",
    "FedGA equals FedAvg at equal updates, on Shakespeare",
    "FedGA's drift is below FedAvg's",
    "FedGA overfits less: its test loss, its training accuracy is lower",
    "SCAFFOLD's accuracy, drift, overfitting",
    "GradAlign for large batches, on CIFAR-10",
    "who is faster; the curves over K and β; drift on IID data, on Shakespeare",
)
TABLE1 = ("fedga", "fedavg", "scaffold", "fedprox")
VIEWS = ("communication", "updates")
SYMBOLS = {"beta": "β", "rho": "ρ", "mu": "μ"}
WORDS = SYMBOLS | {"beta_schedule": "β"}


def kept(results: dict[str, Any]) -> dict[str, Any]:
    """Return the seeds' numbers, the choices and the verdicts of all experiments but those of another page."""
    experiments = []
    for one in results["experiments"]:
        if not one["name"].startswith(ELSEWHERE):
            beside = {row["name"]: row for row in one["beside_baseline"]}  # of those that have finished runs
            nothing: dict[str, Any] = {"scores": [], "spent": {}, "difference": {}}
            algorithms = [
                {
                    "name": entry["name"],
                    **{key: rounded(beside.get(entry["name"], nothing)[key]) for key in nothing},
                    "seeds": entry["seeds"],
                    "diverged": len(entry["diverged"]),
                    "communications": entry["communication_rounds"],
                    "chosen": entry["chosen"],
                }
                for entry in one["algorithms"]
            ]
            verdicts = [{key: rounded(row[key]) for key in SAID if key in row} for row in one["verdicts"]]
            same = {key: one[key] for key in ("name", "title", "provenance", "baseline")}
            experiments.append({**same, "algorithms": algorithms, "verdicts": verdicts})
    return {"scale": results["scale"], "versions": results["versions"], "experiments": experiments}


def joined(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept with these experiments in the place of theirs, in the list's order; nothing may be lost."""
    if before["scale"] != found["scale"]:
        raise SystemExit(f"the page is about the scale {before['scale']}, these runs are of {found['scale']}")
    known = {one["name"]: one for one in before["experiments"]}
    for one in found["experiments"]:
        if poorer := lost(known.get(one["name"]), one):
            raise SystemExit(f"{one['name']}: the folder has less than is kept: {poorer}; unpack its archive first")
        known[one["name"]] = one
    return found | {"experiments": [known[one.name] for one in own_plan() if one.name in known]}


def lost(before: dict[str, Any] | None, after: dict[str, Any]) -> str:
    """Say what of an experiment would be lost with another in its place: an entry's seeds, or a judged claim.

    Where the list has become longer, entries with shorter runs wait for theirs: two runs or more of another say so.
    """
    if before is None:
        return ""
    runs, had = ({e["name"]: len(e["scores"]) + e["diverged"] for e in one["algorithms"]} for one in (after, before))
    new, old = ({e["name"]: e["communications"] for e in one["algorithms"]} for one in (after, before))
    judged = [entry["name"] for entry in after["algorithms"] if len(entry["scores"]) > 1]
    longest = max((new[name] for name in judged if 0 < old.get(name, 0) < new[name]), default=0)
    waiting = {name for name, length in old.items() if 0 < length < longest and new.get(name) != length}
    fewer = [name for name, many in had.items() if name not in waiting and many > runs.get(name, 0)]
    pending = {row["text"] for row in after["verdicts"] if row["verdict"] == "pending"}
    gone = [row for row in before["verdicts"] if row["verdict"] != "pending" and row["text"] in pending]
    unjudged = [row["text"] for row in gone if not waiting & {row.get("first"), row.get("second")}]
    return ", ".join([*(f"seeds of {name}" for name in fewer), *unjudged])


def keep_runs(folder: Path, name: str) -> None:
    """Write an experiment's settings and the runs that have ended as an archive, the same bytes for the same runs."""
    place = folder / name
    files = {path: path.read_bytes() for path in (place / SETTINGS, place / "runs" / COMPARISON) if path.exists()}
    for run in sorted(spec.parent for spec in (place / "runs").rglob(SPEC)):
        if not has_ended(run):
            continue
        files |= {path: path.read_bytes() for path in (run / SPEC, run / FAILURE) if path.exists()}
        files[run / METRICS] = measured((run / METRICS).read_bytes())
        if (run / SUMMARY).exists():
            summary = json.loads((run / SUMMARY).read_bytes())
            summary.pop("sha256", None)  # of the whole folder
            files[run / SUMMARY] = json.dumps(summary, indent=1).encode()
    RUNS.mkdir(exist_ok=True)
    with tarfile.open(RUNS / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(files):
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = len(files[path])
            archive.addfile(entry, io.BytesIO(files[path]))


def measured(metrics: bytes) -> bytes:
    """Return the rows in which something was measured, without the columns in which nothing was."""
    rows = [json.loads(line) for line in metrics.splitlines()]
    told = [row for row in rows if {row.get("test_accuracy"), row.get("train_accuracy")} != {None}]
    return b"".join(json.dumps({k: v for k, v in row.items() if v is not None}).encode() + b"\n" for row in told)


def rounded(value: Any) -> Any:
    """Return numbers to the fourth place, anything else as it is."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def row(*cells: str) -> str:
    """Return a table's row as a line of Markdown."""
    return f"| {' | '.join(cells)} |"


def apart(verdict: dict[str, Any]) -> str:
    """Return the difference of the two sides with Welch's margin."""
    second = verdict["second"]
    unit = 100 if verdict["metric"].endswith("accuracy") else 1
    level = [] if isinstance(second, str) else [second * unit] * 2  # a level is a side without spread
    found = difference(verdict["first_scores"], verdict["second_scores"] or level)
    if found is None or found.margin is None:
        return "–"
    return f"{found.value:+.3g} ± {found.margin:.2g}".replace("-", "−")


def by_seed(verdict: dict[str, Any], seeds: dict[str, list[int]]) -> str:
    """Return Student's margin of the seeds' own differences, where both sides have the same five seeds or more."""
    first, second = verdict["first_scores"], verdict["second_scores"]
    own, others = (seeds.get(verdict[side], []) for side in ("first", "second"))
    if own != others or not 5 <= len(own) == len(first) == len(second):
        return ""
    found = difference([one - other for one, other in zip(first, second, strict=True)], [0.0, 0.0])
    return "" if found is None or found.margin is None else f" (by seed ± {found.margin:.2g})"


def judged(verdict: dict[str, Any]) -> str:
    """Return the verdict in words, with what else decided it."""
    said = verdict["verdict"]
    words = HOLDS.get(said, said) if not verdict["papers"] else f"**{said}**" if said in HOLDS else said
    rule, *more = verdict["why"].split("; ")
    left_out = [rule[rule.index("leaves out the paper's") :]] if "leaves out the paper's" in rule else []
    return ", ".join([words, *left_out, *more])


def settings(chosen: dict[str, Any] | None) -> str:
    """Return the chosen settings; of those at the end of what was tried it is said: a better one may lie beyond."""
    if chosen is None:
        return ""
    ends = dict(re.findall(r"(\w+) \S+ is the (largest|smallest) tried", chosen["source"]))
    shown = [key for key in ("lr", "K", *SYMBOLS, "beta_schedule") if key in chosen["values"]]
    tried = {key: f" ({ends[key]} tried)" for key in ends}
    return ", ".join(f"{WORDS.get(key, key)} {chosen['values'][key]}{tried.get(key, '')}" for key in shown)


def section(one: dict[str, Any]) -> list[str]:
    """Return what came out of one experiment: its accuracies, and its claims, the paper's own first."""
    lines = [f"### {one['title']}", ""]
    lines += [row("", "test accuracy, %", "seeds", "communications", "settings"), row(*["---"] * 5)]
    for entry in one["algorithms"]:
        reached = mean_and_std(entry["scores"], ".2f") if entry["scores"] else "–"
        seeds = str(len(entry["scores"])) + (f", {entry['diverged']} diverged" if entry["diverged"] else "")
        name, length = NAMES.get(entry["name"], entry["name"]), f"{entry['communications']:,}"
        lines.append(row(name, reached, seeds, length, settings(entry["chosen"])))
    decided = [verdict for verdict in one["verdicts"] if verdict["verdict"] != "pending"]
    if decided:
        lines += ["", row("claim", "difference", "verdict"), row(*["---"] * 3)]
    seeds = {entry["name"]: entry.get("seeds", []) for entry in one["algorithms"]}
    for verdict in sorted(decided, key=lambda found: not found["papers"]):
        lines.append(row(verdict["text"], apart(verdict) + by_seed(verdict, seeds), judged(verdict)))
    left = [verdict["papers"] for verdict in one["verdicts"] if verdict["verdict"] == "pending"]
    not_run = f"Not judged: {len(left)} of {len(one['verdicts'])} claims, {sum(left)} of them counted as the paper's."
    return [*lines, "", *([not_run, ""] if left else [])]


def at_a_glance(found: dict[str, Any]) -> list[str]:
    """Return a table of FedGA − FedAvg, the paper's question, in every experiment with two finished runs of both.

    An end is a mean of two seeds or more, too.
    """
    known = {one.name: one for one in own_plan()}
    lines = [
        row(
            "FedGA − FedAvg, in points",
            "the paper",
            *(f"at equal {at}" for at in VIEWS),
            f"{', '.join(NAMES[name] for name in TABLE1)} end at, %",
            "runs",
        )
    ]
    lines.append(row(*["---"] * (4 + len(VIEWS))))
    for one in found["experiments"]:
        entries = {entry["name"]: entry for entry in one["algorithms"] if len(entry["scores"]) > 1}
        if not {"fedga", "fedavg"} <= set(entries):
            continue
        pair = entries["fedga"], entries["fedavg"]
        told = [claim for claim in known[one["name"]].claims if claim.papers and asks(claim.model_dump())]
        papers = known[one["name"]].papers_setting
        paper = [f"+{claim.claimed}{ends_of(claim.text)}" if papers else "a gain" for claim in told if claim.claimed]
        paper += [f"0 at equal {claim.at}" for claim in told if claim.expect == "equal"]
        verdicts = {said["at"]: said for said in reversed(one["verdicts"]) if asks(said)}  # the first: of the ends
        sides = [said for said in one["verdicts"] if {said["first"], said["second"]} == {"fedga", "fedavg"}]
        rising = {said["at"] for said in sides if "still rising" in said["why"]}
        apart = [beside(pair[0]["difference"][at], verdicts.get(at), at in rising) for at in VIEWS]
        seeds, lengths = min(len(entry["scores"]) for entry in pair), [entry["communications"] for entry in pair]
        reached = ", ".join(end_of(entries.get(name), seeds, lengths) for name in TABLE1)
        runs = f"{' and '.join(f'{many:,}' for many in dict.fromkeys(lengths))} communications, {seeds} seeds"
        lines.append(row(SHORT[one["name"]], ", ".join(paper) or "–", *apart, reached, runs))
    return lines


def end_of(entry: dict[str, Any] | None, seeds: int, lengths: list[int]) -> str:
    """Return where an entry's runs end, with its seeds where they are others than the row's; nothing of other runs."""
    if entry is None or entry["communications"] not in lengths:
        return "–"
    many = len(entry["scores"])
    return f"{sum(entry['scores']) / many:.1f}" + (f" ({many} seeds)" if many < seeds else "")


def ends_of(text: str) -> str:
    """Return the two accuracies of the paper that a claim names, in brackets."""
    found = re.search(r"\(([\d.]+) against ([\d.]+)\)", text)
    return f" ({found[1]}, {found[2]})" if found else ""


def kind_of(claim: dict[str, Any]) -> str:
    """Return which kind of the paper's claims one is of: a row of the table of counts."""
    who, metric, at = (claim[key] for key in ("first", "metric", "at"))
    if who != "fedga":
        return {"scaffold": KINDS[4], "gradalign": KINDS[5]}.get(who, KINDS[6])
    if metric == "test_accuracy":
        return KINDS[6] if claim.get("window", 0.0) == 1.0 else KINDS[0] if at == "communication" else KINDS[1]
    return KINDS[2] if metric == "drift" else KINDS[3]


def counts(found: dict[str, Any]) -> list[str]:
    """Return a table of what came out of each kind of the paper's claims; what has not run is pending."""
    said = {(one["name"], claim["text"]): claim["verdict"] for one in found["experiments"] for claim in one["verdicts"]}
    own = [(one.name, claim.model_dump()) for one in own_plan() for claim in one.claims if claim.papers]
    kinds = [(kind_of(claim), said.get((name, claim["text"]), "pending")) for name, claim in own]
    lines = [row("the paper's claims", "in all", *get_args(Verdict)), row(*["---"] * (2 + len(get_args(Verdict))))]
    for kind in KINDS:
        came_out = [verdict for one, verdict in kinds if one == kind]
        lines.append(row(kind, str(len(came_out)), *(str(came_out.count(word)) for word in get_args(Verdict))))
    return lines


def asks(claim: dict[str, Any]) -> bool:
    """Return whether a claim or a verdict is about FedGA's test accuracy beside FedAvg's."""
    return [claim[key] for key in ("first", "second", "metric")] == ["fedga", "fedavg", "test_accuracy"]


def beside(apart: dict[str, float | None], verdict: dict[str, Any] | None, rising: bool) -> str:
    """Return a difference with its margin, what was said of it, and whether a side still rises."""
    number = f"{apart['value']:+.2f} ± {apart['margin']:.2f}".replace("-", "−")
    said = [judged(verdict).split(", ")[0]] if verdict else []
    return ", ".join([number, *said, *(["still rising"] if rising else [])])


def own_plan() -> list[Experiment]:
    """Return the list without the experiments of another page."""
    return [one for one in read_plan() if not one.name.startswith(ELSEWHERE)]


def plain(experiments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return kept experiments in the form that the count of verdicts reads: it asks how many seeds there are."""
    return [
        one | {"algorithms": [entry | {"seeds": entry["scores"]} for entry in one["algorithms"]]} for one in experiments
    ]


def filled(page: str, found: dict[str, Any]) -> str:
    """Return the page with its two parts made anew."""
    claims = [verdict_words(found["scale"], plain(found["experiments"]), own_plan()), ""]
    claims += [line for one in found["experiments"] for line in section(one)]
    for (begin, end), lines in ((GLANCE, [*at_a_glance(found), "", *counts(found), ""]), (CLAIMS, claims)):
        before, rest = page.split(begin)
        page = before + "\n".join([begin, "", *lines, end]) + rest.split(end)[1]
    return page


def draw(folder: Path, picture: str, titles: dict[str, str]) -> None:
    """Draw test accuracy over two costs, a row for each experiment."""
    import matplotlib.figure
    from forms import curve  # beside this script

    from gradalign.report.figures import COLOURS, STYLE, save, tidy
    from gradalign.runs.read import gather

    axes_of, drawn_of = (AXES_OF_BATCHES, DRAWN_OF_BATCHES) if picture == "equal-computation" else (AXES, DRAWN)
    with matplotlib.rc_context(STYLE | {"font.size": 8}):
        figure = matplotlib.figure.Figure(figsize=(9, 2.5 * len(titles)), layout="constrained")
        grid = figure.subplots(len(titles), len(axes_of), squeeze=False)
        for line, (name, title) in zip(grid, titles.items(), strict=True):
            runs = [run for run in gather([folder / name / "runs"]).runs if run.state == "complete"]
            for place, (axes, (key, (label, unit))) in enumerate(zip(line, axes_of.items(), strict=True)):
                for colour, entry in zip(COLOURS, drawn_of, strict=False):
                    own = [run for run in runs if run.entry == entry]
                    if own:
                        style = {"color": colour, "lw": 1.4, "label": NAMES[entry].replace("`", "")}
                        axes.plot(*curve(own, key, unit), DASHES.get(entry, "-"), **style)
                        seeds = [curve([run], key, unit) for run in own]
                        points = min(len(x) for x, _ in seeds)
                        low, high = (side([y[:points] for _, y in seeds], axis=0) for side in (np.min, np.max))
                        axes.fill_between(seeds[0][0][:points], low, high, color=colour, alpha=0.15, lw=0)
                tidy(axes, label, f"{title}\ntest accuracy, %" if place == 0 else "")
                ends = [drawn.get_ydata()[len(drawn.get_ydata()) // 8 :] for drawn in axes.lines]
                low, high = min(map(min, ends)), max(map(max, ends))  # where they end, not how they begin
                axes.set_ylim(low, high + 0.05 * (high - low))
        known = {
            label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=5, frameon=False)
        save(figure, HERE.parent / "images" / f"{picture}.png", dpi=110)


def main(folder: Path | None) -> None:
    """Keep a reproduction's numbers and runs, where one is given, and write them into the page."""
    found = json.loads(KEPT.read_text(encoding="utf-8"))
    if folder is not None:
        if not (folder / "results.json").exists():
            raise SystemExit(f"{folder} has no results.json: gradalign reproduce --report --out {folder} writes it")
        new = kept(json.loads((folder / "results.json").read_text(encoding="utf-8")))
        found = joined(found, new)
        names = [one["name"] for one in new["experiments"]]
        for name in names:
            keep_runs(folder, name)
        KEPT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        whole = {one["name"] for one in new["experiments"] if any(entry["scores"] for entry in one["algorithms"])}
        for picture, titles in PICTURES.items():
            if set(titles) <= whole:
                draw(folder, picture, titles)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)

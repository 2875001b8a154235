"""What lies in the folders: the runs of the plan and what is left of them; what they say, as values and in words."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

from gradalign.comparison import Planned, refuse_other_runs
from gradalign.errors import GradalignError, shown_text
from gradalign.recipes.spec import Spec, checked
from gradalign.report.statistics import mean_and_std, spread_of
from gradalign.reproduce.plan import Chosen, Experiment
from gradalign.reproduce.verdicts import COSTS, Verdict, beside_baseline, verdict_row
from gradalign.runs import METRICS, SPEC, SUMMARY, as_toml, differing_fields, safe_name
from gradalign.runs.metrics import read_metrics
from gradalign.runs.read import Gathered, Run, Skipped, gather, has_ended
from gradalign.runs.untrusted import is_there, number_of, read_spec, read_table

SETTINGS = "settings.toml"
ANEW = "chosen_anew"
"""In a folder's settings: the plan's own choices do not count there, whatever is chosen by now."""
OTHER = "not a run of this plan"
UNSEEN = "not trained on"
_MOST_TOLD = 3
HOLDS = {"reproduced": "holds", "not reproduced": "does not hold"}  # of claims that are not the paper's
_COUNTED = ("communication_rounds", "seconds")
_LENGTHS = ("K", "epochs", "batch", "weight_decay")  # the same for all entries of most experiments


def read_settings(folder: Path) -> tuple[dict[str, Chosen], bool]:
    """Return the settings that are written down in an experiment's folder, and whether the plan's do not count."""
    table = read_table(file) if is_there(file := folder / SETTINGS) else {}
    anew = table.pop(ANEW, False) is True
    return {name: checked(Chosen, one, str(file)) for name, one in table.items()}, anew


def differing(folder: Path, spec: Spec) -> list[str]:
    """Return in what the run that lies in a folder is another than this one; nothing where there is none."""
    wanted = tomllib.loads(as_toml(spec.to_dict()))
    return differing_fields(read_spec(folder), wanted) if is_there(folder / SPEC) else []


def _is_other(one: Planned) -> bool:
    """Return whether another run lies in its folder, and not one that goes on to its length."""
    try:
        refuse_other_runs([one])
    except GradalignError:
        return True
    return False


def refuse_others(planned: Iterable[Planned]) -> None:
    """Refuse folders whose runs are not what is planned now: the list or the chosen settings have changed since."""
    try:
        refuse_other_runs(planned)
    except GradalignError as error:
        hint = "; remove it, or choose another --out"
        raise GradalignError(str(error).removesuffix(hint) + hint) from None


def runs_left(planned: Sequence[Planned]) -> list[Planned]:
    """Return the runs that have not ended, those in whose place another lies among them."""
    return [one for one in planned if not has_ended(one.folder) or differing(one.folder, one.spec)]


def time_left(planned: Sequence[Planned], asked: Sequence[Planned] = ()) -> str:
    """Say how long what is left of the runs asked for takes, by the seconds a round that all rounds so far have taken.

    A run of an entry without a round of its own counts like the slowest of the others: all have the same to spend, and
    a round with a gradient phase costs two. Without ``asked`` all runs are.
    """
    others = {one.folder for one in planned if _is_other(one)}
    begun = [one for one in planned if is_there(one.folder / METRICS) and one.folder not in others]
    rows_of = {one.folder: rows for one in begun if (rows := read_metrics(one.folder)) and rows[-1]["round"]}
    last = {folder: rows[-1] for folder, rows in rows_of.items()}
    done = [(one.entry, _since_the_first(rows_of[one.folder])) for one in begun if one.folder in last]
    sums = {e: [sum(row[key] for own, row in done if own == e) for key in ("seconds", "round")] for e, _ in done}
    speeds = {entry: seconds / rounds for entry, (seconds, rounds) in sums.items()}
    todo = runs_left(asked := asked or planned)
    taken = sum(one.folder in others for one in asked)
    words = f"{len(todo)} of {len(asked)} runs left"
    words += f" ({taken} in whose place there is one with other settings)" if taken else ""
    if not todo or not speeds:
        return words + ("; how long a round takes is not known yet" if todo else "")
    slowest = max(speeds[one.entry] * one.spec.rounds for one in planned if one.entry in speeds)
    left = [(one.entry, one.spec.rounds - last.get(one.folder, {"round": 0})["round"]) for one in todo]
    seconds = sum(rounds * speeds[entry] if entry in speeds else slowest for entry, rounds in left)
    guessed = sorted({one.entry for one in todo} - set(speeds))
    hint = f" ({', '.join(guessed)} counted like the slowest measured)" if guessed else ""
    return f"{words}, about {timedelta(seconds=round(seconds))} at the speed so far{hint}"


def _since_the_first(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return rounds and their seconds after the first measurement, which is also of how a run starts."""
    whole = len(rows) < 2 or rows[0]["round"] == rows[-1]["round"]
    return {key: rows[-1][key] - (0.0 if whole else rows[0][key]) for key in ("seconds", "round")}


def runs_of_plan(folder: Path, specs: Mapping[str, Spec]) -> Gathered:
    """Return the runs below a folder that are what the entries' specs say, whatever their seeds; others are named.

    What stands beside them of the paper is what the plan has now, whatever was there when they ran.
    """
    found, of_folder = gather([folder]), {safe_name(entry): entry for entry in specs}
    every, found.runs = found.runs, []
    for run in every:
        entry = run.entry or of_folder.get(run.folder.parent.name, "")  # the file that names entries may be lost
        spec = specs.get(entry)
        why = ["no such entry"] if spec is None else differing(run.folder, spec.model_copy(update={"seed": run.seed}))
        lost = [key for key in _COUNTED if run.state == "complete" and number_of(run.summary.get(key)) is None]
        if spec is not None and not why and not lost:
            paper = {key: value for key, value in spec.to_dict().items() if key == "paper"}
            own = {key: value for key, value in run.spec.items() if key != "paper"}
            found.runs.append(replace(run, entry=entry, spec=own | paper))
        else:
            reason = f"{OTHER}: {'; '.join(why[:_MOST_TOLD])}" if why else f"its {SUMMARY} lacks {lost[0]}"
            found.skipped.append(Skipped(folder=shown_text(run.folder), reason=reason, damaged=not why))
    return found


def experiment_result(
    experiment: Experiment, folder: Path, every: Mapping[str, list[Run]], chosen: Mapping[str, Chosen]
) -> dict[str, Any]:
    """Return what an experiment's runs say; ``every`` has those of all experiments, by EXPERIMENT/ENTRY."""
    runs = {one: every[key] for one in experiment.entry_names() if (key := f"{experiment.name}/{one}") in every}
    known = {**every, **runs}
    rows = {entry: [run.rows for run in own if run.state == "complete"] for entry, own in known.items()}
    diverged = {entry: sum(run.state == "diverged" for run in own) for entry, own in known.items()}
    settled = {name: one.model_dump() for name, one in chosen.items()}
    return {
        "name": experiment.name,
        "title": experiment.title,
        "folder": folder.name,
        "provenance": experiment.provenance,
        "algorithms": [_entry_result(entry, own, settled.get(entry)) for entry, own in runs.items()],
        "baseline": experiment.baseline,
        "beside_baseline": beside_baseline({entry: rows[entry] for entry in runs}, experiment.baseline),
        "verdicts": [verdict_row(claim, rows, diverged) for claim in experiment.claims],
    }


def verdict_table(experiments: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the verdicts as a table: its heads, and a row for each claim, the paper's own first."""
    rows = [(one["name"], row) for one in experiments for row in one["verdicts"]]
    table = [["experiment", "claim", "at equal", "first − second", "verdict", "why"]]
    for name, row in sorted(rows, key=lambda pair: not pair[1]["papers"]):
        found, margin = row["difference"], row["margin"]
        words = "–" if found is None else f"{found:+.3g}" + ("" if margin is None else f" ± {margin:.2g}")
        sides = [row["first_scores"], *([row["second_scores"]] if isinstance(row["second"], str) else [])]
        words += f" ({' and '.join(str(len(side)) for side in sides)} runs)"
        verdict = row["verdict"] if row["papers"] else HOLDS.get(row["verdict"], row["verdict"])
        table.append([name, row["text"], row["at"], words, verdict, row["why"]])
    return table


def source_table(experiments: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return where the settings come from: heads, and a row for what the plan fixes and for every entry's choices."""
    table = [["experiment", "what", "where it comes from"]]
    for one in experiments:
        table += [[one["name"], what, source] for what, source in one["provenance"].items()]
        searched = any(entry["chosen"] for entry in one["algorithms"] if entry["name"] == one["baseline"])
        for entry in one["algorithms"]:
            chosen = entry["chosen"] or {"values": {}, "source": f"as {one['baseline']}, where nothing else is said"}
            values = ", ".join(f"{key} {value}" for key, value in chosen["values"].items())
            if values or searched:
                table.append([one["name"], f"{entry['name']}: {values or 'what was searched'}", chosen["source"]])
    return table


def verdict_words(scale: str, results: Sequence[Mapping[str, Any]], experiments: Sequence[Experiment]) -> str:
    """Say what came out of the paper's claims, at what scale, and how far that can be trusted."""
    rows = [row for one in results for row in one["verdicts"]]
    judged = sum(row["verdict"] != "pending" for row in rows)
    own = sum(claim.papers for one in experiments for claim in one.claims)
    counts = {word: sum(row["papers"] and row["verdict"] == word for row in rows) for word in get_args(Verdict)[:-1]}
    counts["pending"] = own - sum(counts.values())  # with those of experiments that have not begun
    seeds = max((len(entry["seeds"]) for one in results for entry in one["algorithms"]), default=0)
    sources = [[(entry.get("chosen") or {}).get("source", "") for entry in one["algorithms"]] for one in results]
    searched = sum(any(UNSEEN in source for source in every) for every in sources)
    return (
        f"Scale {scale}; experiments: {len(results)}, with up to {seeds} seeds; in {searched} of them settings were "
        f"chosen on validation examples, not on the test images that decide here. Of {own} claims of the paper: "
        f"{', '.join(f'{count} {word}' for word, count in counts.items())}. Of the {judged} claims judged at 95 %, "
        f"the paper's and others, about {judged / 20:.0f} would come out by chance."
    )


def _entry_result(entry: str, runs: Sequence[Run], settled: Mapping[str, Any] | None) -> dict[str, Any]:
    complete = [run for run in runs if run.state == "complete"]
    names = ("final_test_accuracy", "best_test_accuracy", "final_test_loss", "final_train_loss", "final_r")
    told = {name: [number_of(run.summary.get(name)) for run in complete] for name in names}
    finals = {name: [number for number in told[name] if number is not None] for name in names}
    return {
        "name": entry,
        "seeds": sorted(run.seed for run in complete),
        "diverged": sorted(run.seed for run in runs if run.state == "diverged"),
        **{name: found | {"values": finals[name]} if (found := spread_of(finals[name])) else None for name in names},
        "communication_rounds": max((run.summary["communication_rounds"] for run in complete), default=0),
        "seconds": sum(run.summary["seconds"] for run in complete),
        "chosen": settled,
    }


def markdown(experiments: Sequence[Mapping[str, Any]]) -> str:
    """Return results as Markdown, a table for each experiment."""
    return "\n".join(line for one in experiments for line in _section(one))


def _section(experiment: Mapping[str, Any]) -> list[str]:
    chosen = {one["name"]: (one["chosen"] or {}).get("values", {}) for one in experiment["algorithms"]}
    heads = ["", "test accuracy, %", *(f"− {experiment['baseline']}, equal {at}" for at in COSTS), "costs", "chosen"]
    lines = [f"## {experiment['name']}", "", experiment["title"], "", _line(heads), _line(["---"] * len(heads))]
    for row in experiment["beside_baseline"]:
        name = row["name"]
        reached = f"{mean_and_std(row['scores'], '.2f')} ({len(row['scores'])})"
        pairs = [_pair(row["difference"].get(at)) for at in COSTS]
        costs = ", ".join(f"{row['spent'][at]:.2f}" if at in row["spent"] else "–" for at in COSTS)
        values = ", ".join(f"{key} {value}" for key, value in chosen.get(name, {}).items() if key not in _LENGTHS)
        lines.append(_line([name, reached, *pairs, costs, values]))
    return [*lines, ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _pair(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    margin = "" if found["margin"] is None else f" ± {found['margin']:.2f}"
    return f"{found['value']:+.2f}{margin}".replace("-", "−")

"""What the command line prints: summaries, comparisons, tasks, what a folder holds."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from gradalign.cli.common import plain, print_line, print_table
from gradalign.errors import GradalignError
from gradalign.recipes.build import TASKS
from gradalign.recipes.papers import NUMBERS_LEFT_OUT
from gradalign.report.statistics import spread_words
from gradalign.runs import CHECKPOINT, CURVES, METRICS, REPORT, SPEC, SUMMARY, SWEEP, as_toml
from gradalign.runs.metrics import read_metrics
from gradalign.runs.untrusted import is_there, number_of, read_spec, read_table

_STATISTICS = ("mean", "worst", "worst_tenth", "spread")
_NAMES = {"clients": "clients", "personalized": "tuned at home"}


def seeds_words(summary: Mapping[str, Any]) -> str:
    return f"{len(summary['seeds'])} seed" + ("s" if len(summary["seeds"]) > 1 else "")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _data_line(task: Mapping[str, Any] | None) -> str:
    if not task:
        return ""
    words = [f"{task['clients']} clients"]
    if "train_examples" in task:
        words.append(f"{task['train_examples']:,} training examples")
    if "validation_examples" in task:
        words.append(f"{task['validation_examples']:,} validation examples held out from training")
    else:
        words.append(f"{task['test_examples']:,} test examples")
    known = ("name", "clients", "train_examples", "test_examples", "validation_examples", "examples_per_client")
    words += [str(value) for key, value in task.items() if key not in known]
    return f"{task['name']}: " + ", ".join(words)


def _paper_number(number: float | Sequence[float] | None) -> str:
    """Return the paper's accuracy as it prints it: a mean, with a deviation where it gives one."""
    if isinstance(number, Sequence):
        return f"{number[0]:.4g} ± {number[1]:.4g}"
    return _number(number)


def _paper_line(paper: Mapping[str, Any]) -> str:
    left_out = f"; {NUMBERS_LEFT_OUT}" if paper.get("applies") is False else ""
    return str(paper["source"]) + (f": {paper['claim']}" if paper["claim"] else "") + left_out


def print_summary(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    final, best = summary["final_test_accuracy"], summary["best_test_accuracy"]
    accuracy = "–" if final is None else f"{final:.2%} (best {best:.2%}, round {summary['best_round']})"
    scores = [("test accuracy", accuracy), ("test loss", _number(summary["final_test_loss"]))]
    if summary.get("final_validation_accuracy") is not None:
        final, best = summary["final_validation_accuracy"], summary["best_validation_accuracy"]
        scores[0] = ("validation accuracy", f"{final:.2%} (best {best:.2%})")
    if summary.get("final_validation_loss") is not None:
        scores[1] = ("validation loss", _number(summary["final_validation_loss"]))
    communication, updates = summary["communication_rounds"], summary["local_updates"]
    down, up = (decimal(summary[f"bytes_{way}"], precision=2) for way in ("down", "up"))
    rows = [
        ("algorithm", f"{summary['algorithm']}, seed {summary['seed']}"),
        ("data", _data_line(summary["task"])),
        ("scale", summary.get("scale")),
        *scores,
        *_further_rows(summary),
        ("training loss", _number(summary["final_train_loss"])),
        ("r(x)", _number(summary["final_r"])),
        ("rounds", f"{summary['rounds']} ({communication} of communication, {updates:,} local updates)"),
        ("sent", f"{down} down, {up} up"),
        ("paper", _paper_words(summary.get("paper"))),
        ("time", f"{summary['seconds']:.1f} s"),
        ("folder", folder),
    ]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, text in rows:
        if text or name == "data":
            table.add_row(f"[bold]{name}[/bold]", plain(text))
    print_table(console, table)


def _further_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the lines that only some runs have: further metrics, their clients, an early end."""
    for key, value in summary.items():
        on, _, name = key.removeprefix("final_").partition("_")
        known = number_of(value)
        further = on in ("test", "validation") and name not in ("accuracy", "loss")
        if key.startswith("final_") and further and known is not None:
            yield f"{on} {name}", f"{known:.4g}"
    for prefix, name in _NAMES.items():
        words = _client_words(summary, prefix)
        if words:
            yield name, words
    followed = summary.get("monitor")
    best = number_of(followed.get("best")) if isinstance(followed, Mapping) else None
    if isinstance(followed, Mapping) and best is not None:
        yield "best round", f"{followed.get('round')}, {str(followed.get('name')).replace('_', ' ')} {best:.4g}"
    if summary.get("stopped"):
        yield "stopped early", str(summary["stopped"])


def _client_words(summary: Mapping[str, Any], prefix: str) -> str:
    """Say how the clients fared one by one: by accuracy, or by loss where there is none."""
    for metric, form in (("accuracy", "{:.2%}"), ("loss", "{:.4g}")):
        found = {what: number_of(summary.get(f"final_{prefix}_{what}_{metric}")) for what in _STATISTICS}
        if None not in found.values():
            words = (f"{what.replace('_', ' ')} {form.format(value)}" for what, value in found.items())
            return f"{metric}: {', '.join(words)}"
    return ""


def _paper_words(paper: Mapping[str, Any] | None) -> str | None:
    if not paper or paper["test_accuracy"] is None:
        return _paper_line(paper) if paper else None
    return f"test accuracy {_paper_number(paper['test_accuracy'])} % ({_paper_line(paper)})"


def _target_cell(entry: Mapping[str, Any]) -> str:
    spread, runs = entry["communication_rounds_to_target"], len(entry["runs"])
    if spread is None:
        return "not reached"
    partly = f" ({entry['reached_target']} of {runs})" if entry["reached_target"] < runs else ""
    return spread_words(spread, ".1f") + partly


def print_comparison(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    entries, paper, target = summary["algorithms"], summary.get("paper"), summary["target_accuracy"]
    terms = summary.get("terms") or f"{summary['rounds']} rounds"
    on = plain(summary.get("scored_on", "test"))
    scored = any(entry[f"best_{on}_accuracy"] for entry in entries)
    columns = ["best, %", "final, %"] if scored else ["final"]
    columns += [f"rounds to {100 * target:.4g} %" if target else "rounds to target", "final r(x)"]
    what = f"{on} {'accuracy' if scored else 'loss'}"
    scale = f", scaled to {summary['scale']}" if summary.get("scale") else ""
    title = plain(f"{summary['name']}: {what}, {seeds_words(summary)}, {terms}{scale}")
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("algorithm", style="bold")
    known = bool(paper) and any(entry.get("paper_test_accuracy") is not None for entry in entries)
    for name in [*columns, "paper, %"] if known else columns:
        table.add_column(name, justify="right")
    for entry in entries:
        failed = sum(run["failure"] is not None for run in entry["runs"])
        name = plain(entry["name"]) + (f" ({failed} of {len(entry['runs'])} diverged)" if failed else "")
        cells = [spread_words(entry[f"final_{on}_loss"], ".4g")]
        if scored:
            cells = [spread_words(entry[f"{which}_{on}_accuracy"], ".2f", 100.0) for which in ("best", "final")]
        cells += [_target_cell(entry), spread_words(entry["final_r"], ".2g")]
        table.add_row(name, *cells, *([_paper_number(entry.get("paper_test_accuracy"))] if known else []))
    print_table(console, table)
    for table in _clients_tables(entries):
        print_table(console, table)
    lines = [
        _data_line(summary["task"]),
        f"paper: {_paper_line(paper)}" if paper else "",
        "mean ± standard deviation over the seeds; rounds are of communication: one with a gradient phase is two",
        f"curves: {folder / CURVES}" if (folder / CURVES).exists() else "",
        f"summary: {folder / SUMMARY}",
        f"report: {folder / REPORT}" if (folder / REPORT).exists() else "",
    ]
    for line in filter(None, lines):
        print_line(console, line)


def _clients_tables(entries: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Yield a comparison's tables of the clients' own results, as far as there are any."""
    for prefix in _NAMES:
        for metric, unit, form, scale in (("accuracy", ", %", ".2f", 100.0), ("loss", "", ".4g", 1.0)):
            if not any(entry.get(f"final_{prefix}_worst_{metric}") for entry in entries):
                continue
            tuned = ", tuned at home" if prefix == "personalized" else ""
            table = Table(title=f"{metric}{unit} of each client on its own test examples{tuned}")
            table.add_column("algorithm", style="bold")
            for what in _STATISTICS:
                table.add_column(what.replace("_", " "), justify="right")
            for entry in entries:
                found = (entry.get(f"final_{prefix}_{what}_{metric}") for what in _STATISTICS)
                table.add_row(plain(entry["name"]), *(spread_words(spread, form, scale) for spread in found))
            yield table
            break


def describe_tasks() -> list[dict[str, Any]]:
    """Return what can be trained: name, description, settings with their defaults."""
    found = []
    for name, make in TASKS.items():
        parameters = inspect.signature(make).parameters
        settings = {key: p.default for key, p in parameters.items() if key != "seed"}
        lines = (make.__doc__ or "").strip().splitlines()
        found.append({"name": name, "description": lines[0] if lines else "", "settings": settings})
    return found


def print_tasks(console: Console, tasks: list[dict[str, Any]], recipes: list[str]) -> None:
    table = Table("task", "what it is", "settings of \\[task] and their defaults")
    for task in tasks:
        settings = "\n".join(plain(f"{key} = {value!r}") for key, value in task["settings"].items())
        table.add_row(f"[bold]{task['name']}[/bold]", plain(task["description"]), settings)
    print_table(console, table)
    print_line(console, 'your own: task.name = "package.module:function", a function that returns a gradalign.Task')
    print_line(console, f"recipes: {', '.join(recipes)}")


def load_shown(folder: Path) -> dict[str, Any]:
    """Read what ``gradalign show`` shows of a folder."""
    if not folder.is_dir():
        raise GradalignError(f"there is no folder {folder}")
    summary = read_table(folder / SUMMARY) if is_there(folder / SUMMARY) else None
    known = {"complete": summary is not None, "summary": summary}
    if is_there(folder / SPEC):
        rows = read_metrics(folder) if is_there(folder / METRICS) else []
        return {
            "kind": "run",
            "spec": read_spec(folder),
            "checkpoint": is_there(folder / CHECKPOINT),
            "last_row": rows[-1] if rows else None,
            **known,
        }
    if is_there(folder / SWEEP):
        return {"kind": "sweep", **known}
    if summary is not None:
        return {"kind": "comparison", **known}
    raise GradalignError(
        f"{folder} is neither a run folder nor a finished comparison or sweep: it has no {SPEC} and no {SUMMARY}"
    )


def print_shown(console: Console, shown: Mapping[str, Any], folder: Path) -> None:
    from gradalign.cli.sweep_tables import print_sweep

    printers = {"run": print_summary, "comparison": print_comparison, "sweep": print_sweep}
    try:
        for line in as_toml(shown["spec"]).splitlines() if "spec" in shown else ():
            console.print(plain(line), soft_wrap=True)
        if shown["complete"]:
            printers[shown["kind"]](console, shown["summary"], folder)
            return
    except GradalignError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # Anything in a file may be missing, or another thing than it should be.
        problem = f"{error} is missing" if isinstance(error, KeyError) else error
        raise GradalignError(f"{folder / SUMMARY} is not a summary of this library: {problem}") from None
    todo = "continue it with the command that began it"
    if shown["kind"] == "run":
        done, rounds = (shown["last_row"] or {}).get("round", 0), shown["spec"].get("rounds", "?")
        todo = f"{done} of {rounds} rounds written; continue it with --resume"
    print_line(console, f"not complete: {todo}")

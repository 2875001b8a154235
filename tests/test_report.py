"""The report: which runs are in it, what it says of them, and what it does with folders that are not runs."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gradalign as ga
from gradalign import report
from gradalign.cli.app import app
from gradalign.recipes import load_recipe
from gradalign.report import Judged, how_to_repeat, report_gathered, write_report
from gradalign.report.budgets import equal_views, to_target
from gradalign.report.experiments import arrange
from gradalign.report.figures import curve_figure
from gradalign.report.series import BETA, CHOICES, curve_of, curves_of, measured, thinned
from gradalign.report.statistics import comparison_table, difference, overall, paper_pairs, verdict
from gradalign.runs.read import gather
from gradalign.tasks.digits import digits
from run_folders import PAPER, rows_of, spec_of, write_comparison, write_run

EVIL = "</script><img src=x onerror=alert(1)>\u2028<b>bold</b>"


def call(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + result.stderr
    assert "Traceback" not in result.stderr
    return result


def experiment_of(*folders: Path):
    (experiment,) = arrange(gather(folders).runs)
    return experiment


def data_of(page: Path) -> dict:
    (code,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), flags=re.DOTALL)
    return json.loads(code)


# The order of a pair, with arithmetic done by hand.


def test_a_difference_beyond_the_spread_is_decided():
    # means 2 and 6, variances 1 and 1: standard error √(1/3 + 1/3) = 0.81650, 4 degrees of freedom, t = 2.7764451
    found = difference([5.0, 6.0, 7.0], [1.0, 2.0, 3.0])
    assert found.value == pytest.approx(4.0)
    assert found.margin == pytest.approx(2.7764451 * math.sqrt(2 / 3))
    assert found.decided
    assert verdict(found, 1.0) == "agrees"
    assert verdict(found, -1.0) == "disagrees"
    assert verdict(found, 0.0) == "equal in the paper"


def test_a_difference_within_the_spread_is_undecided_whatever_the_means_say():
    # means 2 and 4, variances 1 and 4: s² = 1/3 + 4/3 = 5/3; freedom (5/3)² / ((1/3)²/2 + (4/3)²/2) = 50/17 = 2.94
    found = difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert 3.182 * math.sqrt(5 / 3) < found.margin < 4.303 * math.sqrt(5 / 3), "between 3 and 2 degrees"
    assert verdict(found, 1.0) == verdict(found, -1.0) == "undecided"


def test_two_seeds_need_a_far_larger_difference_than_many():
    # variance 2, n = 2 each: standard error √2, 2 degrees of freedom, t = 4.3026527
    assert difference([5.0, 7.0], [0.0, 2.0]).margin == pytest.approx(4.3026527 * math.sqrt(2))
    assert not difference([5.0, 7.0], [0.0, 2.0]).decided
    assert difference([5.0, 7.0] * 4, [0.0, 2.0] * 4).decided


def test_one_seed_cannot_tell_and_none_neither():
    assert difference([9.0], [1.0, 1.1]).margin is None
    assert verdict(difference([9.0], [1.0, 1.1]), 1.0) == "cannot tell"
    assert difference([], [1.0]) is None
    assert verdict(None, 1.0) == "cannot tell"


def test_seeds_without_any_spread():
    assert verdict(difference([2.0, 2.0], [1.0, 1.0]), 1.0) == "agrees"
    assert verdict(difference([2.0, 2.0], [2.0, 2.0]), 1.0) == "undecided"


@pytest.mark.parametrize(("seeds", "tabulated"), [(2, 4.303), (6, 2.228), (16, 2.042), (31, 2.000)])
def test_the_margin_is_the_tables_quantile_times_the_standard_error(seeds, tabulated):
    # equal variances v and n seeds each: standard error √(2v/n), 2n − 2 degrees of freedom
    values = [float(i % 2) for i in range(seeds)]
    mean = sum(values) / seeds
    variance = sum((value - mean) ** 2 for value in values) / (seeds - 1)
    found = difference(values, values)
    assert found.margin / math.sqrt(2 * variance / seeds) == pytest.approx(tabulated, abs=0.001)


def test_all_pairs_together():
    assert "all 3 pairs" in overall(["agrees"] * 3)
    assert overall(["agrees", "disagrees", "undecided"]).startswith("The order does not agree")
    assert overall(["agrees", "undecided"]).startswith("Nothing contradicts")
    assert overall(["undecided", "undecided"]).startswith("It cannot be told")
    assert "two finished seeds" in overall(["cannot tell", "cannot tell"])


# What is said of runs.


def test_the_table_has_means_deviations_and_the_papers_numbers(tmp_path):
    folder = write_comparison(tmp_path / "c", {"fedga": [0.80, 0.82, 0.84], "fedavg": [0.70, 0.71, 0.72]}, paper=PAPER)
    experiment = experiment_of(folder)
    heads, rows = comparison_table(experiment)
    cells = {row.label: dict(zip(heads, row.cells, strict=True)) for row in rows}
    assert list(cells) == ["fedga", "fedavg"], "the comparison's own order"
    assert cells["fedga"]["final test accuracy, %"] == "82.00 ± 2.00"
    assert cells["fedavg"]["final test accuracy, %"] == "71.00 ± 1.00"
    assert cells["fedga"]["paper, %"] == "85.00 ± 0.50"
    assert cells["fedga"]["ours − paper"] == "-3.00"
    assert cells["fedga"]["communication rounds"] == "8"
    assert cells["fedavg"]["communication rounds"] == "4"
    (pair,) = paper_pairs(experiment)
    assert (pair.first.label, pair.second.label, pair.verdict) == ("fedga", "fedavg", "agrees")
    assert pair.ours.value == pytest.approx(11.0)
    assert pair.paper == 5.0


def test_curves_are_the_mean_the_lowest_and_the_highest_of_the_seeds(tmp_path):
    experiment = experiment_of(write_comparison(tmp_path / "c", {"fedga": [0.4, 0.8]}))
    curve = curve_of(experiment.groups[0], CHOICES[0])
    assert curve.rounds == [0, 1, 2, 3, 4]
    assert curve.mean == pytest.approx([0, 0.15, 0.3, 0.45, 0.6])
    assert curve.low == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert curve.high == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert curve.x["communication_rounds"] == [0, 2, 4, 6, 8]
    assert curve.x["local_updates"] == [0, 100, 200, 300, 400]
    assert curve.x["examples"] == [0, 120, 240, 360, 480]
    assert curve.x["bytes"] == [0, 20, 40, 60, 80]
    assert curve.x["seconds"] == [0, 0.5, 1, 1.5, 2]
    assert [line.seed for line in curve.lines] == [0, 1]


def test_thinning_keeps_ends_peaks_and_dips():
    values = [math.sin(i / 500) for i in range(10_000)]
    values[1234], values[7777] = 5.0, -5.0
    kept = thinned(values, 400)
    assert len(kept) <= 400
    assert {0, 1234, 7777, 9_999} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(values[:300], 400) == list(range(300))


def test_a_step_is_drawn_from_its_corners():
    assert thinned([0.1] * 50 + [0.2] * 50, 400, flat=True) == [0, 49, 50, 99]


def test_variants_of_one_algorithm_are_told_by_their_settings(tmp_path):
    for beta in (0.1, 0.2):
        spec = spec_of() | {"algorithm": {"name": "fedga", "beta": beta}}
        for seed in (0, 1):
            write_run(tmp_path / f"sweep/{beta}/{seed}", spec | {"seed": seed})
    experiment = experiment_of(tmp_path / "sweep")
    assert [group.label for group in experiment.groups] == ["fedga (β=0.1)", "fedga (β=0.2)"]
    assert [group.short for group in experiment.groups] == ["β=0.1", "β=0.2"], "a legend by what differs"
    assert [len(group.runs) for group in experiment.groups] == [2, 2]


def test_at_equal_cost_a_group_counts_with_what_it_had_spent_by_then(tmp_path):
    # fedga spends 2 communications and 120 examples a round, fedavg 1 and 60; both 100 updates; 4 rounds each.
    results = {"fedga": [0.80, 0.82, 0.84], "fedavg": [0.70, 0.71, 0.72]}
    experiment = experiment_of(write_comparison(tmp_path / "c", results))
    views = equal_views(experiment)
    assert views["heads"] == ["at 4 communication rounds", "at 400 local updates", "at 240 examples"]
    cells = {row.label: row.cells for row in views["rows"]}
    assert cells["fedga"] == ("41.00 ± 1.00", "82.00 ± 2.00", "41.00 ± 1.00"), "half way, the end, half way"
    assert cells["fedavg"] == ("71.00 ± 1.00",) * 3
    # Means 41 and 71, variances 1 and 1: 4 degrees of freedom; then 82 and 71, variances 4 and 1, s² = 5/3.
    ((names, (communication, first, updates, second)),) = views["pairs"]
    assert (names, first, second) == ("fedga − fedavg", "yes", "yes")
    assert communication == f"-30.00 ± {2.7764451 * math.sqrt(2 / 3):.2f}"
    assert updates.startswith("+11.00 ± ")
    assert views["answer"].startswith("At 4 communication rounds each, the seeds tell 1 of 1 pair apart. At 400 local")
    page = write_report([tmp_path / "c"], tmp_path / "r.html").read_text()
    assert "at 4 communication rounds" in page
    assert "test accuracy, %, as last measured within the budget: what every run has spent" in page
    assert "half the variance" in page


def test_a_page_with_verdicts_scores_runs_over_the_window_that_they_were_judged_by(tmp_path):
    # Accuracy rises by quarters: over the last half of four rounds fedga has (0.6 + 0.8)/2, fedavg (0.525 + 0.7)/2.
    write_comparison(tmp_path / "c", {"fedga": [0.8, 0.8], "fedavg": [0.7, 0.7]})
    (experiment,) = arrange(gather([tmp_path / "c"]).runs, window=0.5)
    assert [group.scores() for group in experiment.groups] == [pytest.approx([0.7] * 2), pytest.approx([0.6125] * 2)]
    cells = {row.label: row.cells for row in equal_views(experiment)["rows"]}
    assert cells["fedga"] == ("40.00 ± 0.00", "70.00 ± 0.00", "40.00 ± 0.00"), "of 4 communications, its second round"
    assert cells["fedavg"][0] == "61.25 ± 0.00"
    heads, _ = comparison_table(experiment)
    assert heads[0] == "test accuracy over the last 50 % of the run, %"
    judged = Judged(
        words="One claim.", claims=[["a"], ["b"]], sources=[["what", "where"], ["K = 2", "ours"]], window=0.5
    )
    page = report_gathered(gather([tmp_path / "c"]), tmp_path / "r.html", judged=judged).read_text()
    assert page.index("One claim.") < page.index("K = 2") < page.index("ours") < page.index("Comparison</h3>")
    assert "mean over the last 50 % of the budget: what every run has spent" in page
    assert (
        "mean over the last"
        not in write_report([tmp_path / "c"], tmp_path / "plain.html").read_text().partition("<main")[2]
    )


def test_a_pair_that_one_view_does_not_know_keeps_its_place_in_the_other(tmp_path):
    """Of three communications the last fifth has no measurement of fedga, which is seen after two and four."""
    for name, final, rounds in (("fedga", 0.8, 4), ("fedavg", 0.7, 3), ("fedprox", 0.5, 3)):
        for seed in (0, 1):
            phases = 2 if name == "fedga" else 1
            write_run(tmp_path / f"c/{name}/seed{seed}", spec_of(name, seed), final, rounds=rounds, phases=phases)
    (tmp_path / "c/compare.toml").write_text(
        'name = "e"\nalgorithms = ["fedga", "fedavg", "fedprox"]\nseeds = [0, 1]\n'
    )
    (experiment,) = arrange(gather([tmp_path / "c"]).runs, window=0.2)
    views = equal_views(experiment)
    assert views["heads"][:2] == ["at 3 communication rounds", "at 300 local updates"]
    pairs = dict(views["pairs"])
    # fedga has had three of its four rounds after 300 updates: 0.6, where fedavg has 0.7 and fedprox 0.5.
    assert pairs["fedga − fedavg"] == ["–", "cannot tell", "-10.00 ± 0.00", "yes"]
    assert pairs["fedavg − fedprox"] == ["+20.00 ± 0.00", "yes"] * 2
    first, second = views["answer"].split(" At 300 ")
    told = "the seeds tell 1 of 3 pairs apart (2 of them cannot be, because one side has a single seed or was not"
    assert first.endswith(f"{told} measured there).")
    assert "tell 3 of 3 pairs apart." in second
    assert views["caption"].endswith("–: not measured there")


def test_what_a_target_cost_and_who_did_not_reach_it(tmp_path):
    results = {"fedga": [0.80, 0.40], "fedavg": [0.64, 0.60], "fedprox": [0.2, 0.2]}
    experiment = experiment_of(write_comparison(tmp_path / "c", results, measure={"target_accuracy": 0.6}))
    target = to_target(experiment)
    assert (target["accuracy"], target["heads"]) == (0.6, ["communication rounds", "local updates", "MB sent"])
    cells = {row.label: row.cells for row in target["rows"]}
    assert cells["fedga"] == ("6 (1 of 2 seeds)", "300 (1 of 2 seeds)", "6e-05 (1 of 2 seeds)"), "its third round"
    assert cells["fedavg"][:2] == ("4", "400")
    assert cells["fedprox"] == ("not reached",) * 3
    # Without a target of the recipe's: 95 % of the lowest best, which is 0.2.
    assert to_target(experiment_of(write_comparison(tmp_path / "d", results)))["accuracy"] == 0.19


def test_seeds_of_unequal_number(tmp_path):
    experiment = experiment_of(
        write_comparison(tmp_path / "c", {"fedga": [0.8, 0.9], "fedavg": [0.7], "x": [0.1, 0.2]})
    )
    views = equal_views(experiment)
    assert [row.seeds for row in views["rows"]] == ["2", "1", "2"]
    assert "apart (2 of them cannot be, because one side has a single seed)." in views["answer"]
    alone = equal_views(experiment_of(write_comparison(tmp_path / "d", {"fedga": [0.8], "fedavg": [0.7, 0.6]})))
    assert "no difference can be told from chance: that takes at least two finished seeds of both." in alone["answer"]


@pytest.mark.parametrize(
    ("betas", "drawn"), [((0.5, 0.5, 0.5, 0.5), False), ((0, 0.5, 0.5, 0.5), False), ((0.5, 0.5, 0.2, 0.2), True)]
)
def test_beta_is_drawn_only_where_it_changes(tmp_path, betas, drawn):
    rows = [row | {"beta": beta} for row, beta in zip(rows_of(0.5), (None, *betas), strict=True)]
    write_run(tmp_path / "r", metrics="".join(json.dumps(row) + "\n" for row in rows))
    experiment = experiment_of(tmp_path / "r")
    assert measured(curves_of(experiment, BETA)) is drawn
    assert ('data-figure="beta"' in write_report([tmp_path / "r"], tmp_path / "r.html").read_text()) is drawn


def test_a_legend_of_long_names_is_inside_the_picture(tmp_path):
    for number in range(5):
        local = {"lr": 0.1 * (number + 1), "steps": 2, "batch_size": 10 + number, "weight_decay": 0.001 * number}
        clients = {"per_round": 5 + number, "dropout": 0.1 * number}
        write_run(tmp_path / f"c/{number}", spec_of(local=local, clients=clients, rounds=4 + number))
    experiment = experiment_of(tmp_path / "c")
    assert min(len(group.short) for group in experiment.groups) > 60
    figure = curve_figure(experiment, CHOICES[0], curves_of(experiment, CHOICES[0]), "bytes")
    figure.draw_without_rendering()
    frame, texts = figure.bbox, [*figure.legends[0].get_texts(), figure.axes[0].xaxis.label, figure.axes[0].yaxis.label]
    for box in (text.get_window_extent() for text in texts):
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1
    assert figure.axes[0].bbox.height > 0.5 * frame.height - 100, "and the curves have room"


def test_a_run_given_twice_counts_once(tmp_path):
    write_run(tmp_path / "a/run")
    write_run(tmp_path / "b/copy")
    gathered = gather([tmp_path / "a", tmp_path / "a/run", tmp_path])
    assert [run.folder for run in gathered.runs] == [tmp_path / "a/run"]
    (copy,) = gathered.skipped
    assert str(copy).startswith(f"skipped {tmp_path / 'b/copy'}: the same settings and seed as")


def test_several_experiments_on_one_page(tmp_path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", spec_of(name="other"))
    page = write_report([tmp_path], tmp_path / "out/report.html").read_text()
    assert page.count("<section id=") == 2
    assert 'href="#experiment-1"' in page


def test_diverged_runs_are_shown_as_such_and_in_no_mean(tmp_path):
    folder = write_comparison(tmp_path / "c", {"fedga": [0.8, 0.6]})
    (folder / "fedga/seed1/summary.json").unlink()
    (folder / "fedga/seed1/failure.json").write_text('{"failure": "the test loss became NaN", "diverged": true}')
    experiment = experiment_of(folder)
    (row,) = comparison_table(experiment)[1]
    assert row.seeds == "1 + 1 diverged"
    assert row.cells[0] == "80.00"
    page = write_report([folder], tmp_path / "r.html")
    assert "seed 1: diverged: the test loss became NaN" in page.read_text()
    lines = data_of(page)["experiments"][0]["curves"]["test_accuracy"][0]["lines"]
    assert [line["state"] for line in lines] == ["diverged"]


def test_a_comparisons_old_summary_does_not_speak_for_a_run_that_goes_on(tmp_path):
    folder = write_comparison(tmp_path / "c", {"fedga": [0.8, 0.6]})
    (folder / "fedga/seed1/summary.json").unlink()  # it had diverged, was resumed and killed: no failure.json
    before = [{"folder": "fedga/seed1", "failure": "the test loss became NaN"}]
    (folder / "summary.json").write_text(json.dumps({"algorithms": [{"runs": before}]}))
    (run,) = (one for one in gather([folder], unfinished=True).runs if one.seed == 1)
    assert (run.state, run.failure) == ("unfinished", None)


def test_a_run_that_can_go_on_is_unfinished_and_says_what_stopped_it(tmp_path):
    folder = write_comparison(tmp_path / "c", {"fedga": [0.8, 0.6]})
    (folder / "fedga/seed1/summary.json").unlink()
    (folder / "fedga/seed1/failure.json").write_text('{"failure": "2 of 4 clients answered", "diverged": false}')
    (skipped,) = gather([folder]).skipped
    assert "rounds are written): 2 of 4 clients answered; continue it with --resume" in str(skipped)
    page = write_report([folder], tmp_path / "r.html", unfinished=True).read_text()
    assert "seed 1: unfinished: 2 of 4 clients answered" in page


def validated(accuracy: float) -> dict[str, str]:
    """The files of a run that was scored on held-out training data."""
    rows = [row | {"test_accuracy": None, "test_loss": None} for row in rows_of(accuracy)]
    rows = [row | {"validation_accuracy": accuracy * row["round"] / 4, "validation_loss": 1.0} for row in rows]
    summary = {"final_validation_accuracy": accuracy, "best_validation_accuracy": accuracy, "final_validation_loss": 1}
    return {"metrics": "".join(json.dumps(row) + "\n" for row in rows), "summary": json.dumps(summary)}


def test_a_sweeps_search_stands_by_itself_on_validation_data(tmp_path):
    search, test = tmp_path / "s/trials/beta-coarse", tmp_path / "s/trials/test"
    for number, (beta, accuracy) in enumerate(((0.1, 0.5), (1.0, 0.75))):
        spec = spec_of(paper=PAPER, clients={"holdout": 0.1}) | {"algorithm": {"name": "fedga", "beta": beta}}
        write_run(search / f"{number:03d}", spec, **validated(accuracy))
    for number in (2, 3):
        spec = spec_of(clients={"holdout": 0.1}) | {"algorithm": {"name": "fedga", "beta": float(number)}}
        write_run(search / f"{number:03d}", spec, **validated(0.1) | {"summary": None})
    write_run(test / "000", spec_of(paper=PAPER), final=0.7)
    (tmp_path / "s/sweep.toml").touch()
    gathered = gather([tmp_path / "s"])
    (cut_short,) = gathered.skipped
    assert str(cut_short).startswith(f"skipped {tmp_path}/s/trials: 2 trials not finished: ended early, or the sweep")
    (tmp_path / "s/summary.json").write_text('{"kind": "sweep"}')
    (cut_short,) = gather([tmp_path / "s"]).skipped
    assert cut_short.reason == "2 trials that the sweep ended early; --unfinished shows them"

    tested, validation = arrange(gathered.runs)
    assert (tested.name, validation.name) == ("example", "example (validation data)")
    heads, (row,) = comparison_table(tested)
    assert dict(zip(heads, row.cells, strict=True))["paper, %"] == "85.00 ± 0.50"
    heads, rows = comparison_table(validation)
    assert heads[:3] == ("final validation accuracy, %", "best validation accuracy, %", "final validation loss")
    assert [row.cells[0] for row in rows] == ["50.00", "75.00"]
    assert [row.label for row in rows] == ["fedga (β=0.1)", "fedga (β=1)"]
    page = data_of(write_report([tmp_path / "s"], tmp_path / "r.html"))
    assert page["experiments"][0]["choices"] == ["test_accuracy", "test_loss", "train_accuracy"]
    assert page["experiments"][1]["choices"] == ["validation_accuracy", "validation_loss", "train_accuracy"]
    assert page["experiments"][1]["curves"]["validation_accuracy"][1]["mean"] == [0, 0.1875, 0.375, 0.5625, 0.75]


def test_entries_that_divide_the_data_differently_are_both_shown(tmp_path):
    folder = write_comparison(tmp_path / "c", {"fedga": [0.8], "fedavg": [0.7]})
    for entry, counts in (("fedga", [[20, 0], [0, 20]]), ("fedavg", [[10, 10], [10, 10]])):
        held = {"names": ["a", "b"], "counts": counts, "clients": 2}
        (folder / entry / "seed0/holdings.json").write_text(json.dumps(held))
    page = write_report([folder], tmp_path / "r.html")
    assert [one["counts"][0] for one in data_of(page)["experiments"][0]["class_counts"]] == [[20, 0], [10, 10]]
    assert page.read_text().count('data-state="division"') == 2
    assert all(f">seed 0 ({entry})</label>" in page.read_text() for entry in ("fedga", "fedavg"))


@pytest.mark.parametrize("lr", [0.1, {"kind": "cosine", "value": 0.1, "rounds": 4}])
def test_the_recipe_on_the_page_gives_the_same_settings_again(tmp_path, lr):
    folder = tmp_path / "c"
    for name, algorithm, rounds in (
        ("fedga", {"name": "fedga", "beta": 0.5}, 4),
        ("weak", {"name": "fedga", "beta": 0.1}, 4),
        ("fedprox", {"name": "fedprox", "mu": 0.01}, 8),
    ):
        for seed in (3, 4):
            spec = spec_of(seed=seed, paper=PAPER, local={"lr": lr, "steps": 2})
            spec |= {"algorithm": algorithm, "rounds": rounds}
            write_run(folder / name / f"seed{seed}", spec)
    (folder / "compare.toml").write_text(
        'name = "example"\nalgorithms = ["fedga", "weak", "fedprox"]\nseeds = [3, 4]\n'
    )
    experiment = experiment_of(folder)
    repeat = how_to_repeat(experiment)
    assert repeat.commands == ("gradalign compare example.toml --seed 3 --seeds 2",)
    (tmp_path / repeat.file_name).write_text(repeat.recipe)
    recipe = load_recipe(str(tmp_path / repeat.file_name))
    assert recipe.compare.algorithms == ["fedga", "weak", "fedprox"]
    for group in experiment.groups:
        again = recipe.spec_for(group.name, 3).to_dict()
        for key, value in tomllib.loads((group.runs[0].folder / "spec.toml").read_text()).items():
            if isinstance(value, dict) and key != "paper":
                assert {name: again[key][name] for name in value} == value
            else:
                assert again[key] == value


# A page that anybody may have written the names of.


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def evil_folder(tmp_path: Path) -> Path:
    spec = spec_of(name=f"<svg onload=alert(2)>{EVIL}")
    spec["algorithm"]["name"] = EVIL
    spec["task"]["name"] = f"task{EVIL}"
    spec["local"][f"lr{EVIL}"] = EVIL
    spec["paper"] = {"source": EVIL, "claim": EVIL, "test_accuracy": {}}
    folder = tmp_path / "evil" / "<img src=x onerror=alert(3)>"
    held = json.dumps({"names": [EVIL, "b"], "counts": [[1, 2]], "clients": 1})
    summary = {"final_test_accuracy": 0.5, "scale": EVIL, "task": {EVIL: EVIL}, "versions": {EVIL: EVIL}}
    write_run(folder, spec, holdings=held, summary=json.dumps(summary))
    write_run(
        tmp_path / "evil" / "seed1",
        spec | {"seed": 1},
        summary=None,
        failure=json.dumps({"failure": EVIL, "diverged": True}),
    )
    (tmp_path / "evil" / "<b>no run").mkdir()
    return tmp_path / "evil"


def test_hostile_names_stay_letters(tmp_path):
    page = write_report([evil_folder(tmp_path)], tmp_path / "r.html")
    text = page.read_text()
    parser = Elements()
    parser.feed(text)
    tags = [tag for tag, _ in parser.tags]
    assert not {"img", "svg", "b", "iframe"} & set(tags)
    assert tags.count("script") == 3
    assert not any(name.startswith("on") for _, attributes in parser.tags for name in attributes)
    assert "\u2028" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    data = data_of(page)
    assert data["experiments"][0]["groups"][0]["label"].startswith("</script><img")


def test_the_template_trusts_four_texts_of_our_own():
    template = Path(report.__file__).with_name("page.html.j2").read_text()
    assert re.findall(r"\{\{ (\w+)\|safe \}\}", template) == ["style", "data", "library", "script"]
    assert len(re.findall(r"\|\s*safe", template)) == 4
    assert "autoescape" not in template


def test_the_page_asks_the_network_for_nothing(tmp_path):
    parser = Elements()
    parser.feed(write_report([write_run(tmp_path / "r")], tmp_path / "r.html").read_text())
    for tag, attributes in parser.tags:
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:")), (tag, attributes)
    (policy,) = [a["content"] for t, a in parser.tags if t == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


# Folders that are not runs.


def spoilt(folder: Path) -> dict[str, Path]:
    """Write every kind of folder that is no run; return them by what must be said of them."""
    metrics = "".join(json.dumps(row) + "\n" for row in rows_of(0.5))
    kinds = {
        "has no spec.toml": {"spec": None},
        "has no metrics.jsonl": {"metrics": None},
        "is not valid TOML": {"spec": "name = [["},
        "spec.toml is not valid": {"spec": b"\xff\xfe\x00\x80garbage"},
        "names no algorithm": {"spec": 'algorithm = "fedga"'},
        "the seed": {"spec": 'seed = "x"\n[algorithm]\nname = "a"'},
        "the task": {"spec": 'task = 3\n[algorithm]\nname = "a"'},
        "no whole row": {"metrics": ""},
        "line 1 of": {"metrics": b"\x80\x81\x82\n" + metrics.encode()},
        "line 2 of": {"metrics": metrics.replace("\n", "\n[1, 2]\n", 1)},
        "line 3 of": {"metrics": metrics.replace('"round": 2', '"round": "two"')},
        "line 4 of": {"metrics": metrics.replace('"round": 3', '"round": NaN')},
        "summary.json is not valid": {"summary": "{"},
        "summary.json is not a table": {"summary": "[1]"},
        "line 1 of its": {"metrics": "[" * 100_000 + "\n"},
        "its metrics.jsonl ends after 4 rounds of communication, summary.json after 8: files of two runs": {
            "metrics": "".join(line + "\n" for line in metrics.splitlines()[:3])
        },
        "not finished (4 of 4": {"summary": None},
    }
    return {words: write_run(folder / f"bad{place}", **files) for place, (words, files) in enumerate(kinds.items())}


def test_spoilt_folders_are_named_and_skipped_with_one_line_each(tmp_path):
    write_run(tmp_path / "runs/good", spec_of(seed=7))
    expected = spoilt(tmp_path / "runs")
    (tmp_path / "runs/notes").mkdir()
    (tmp_path / "runs/notes/photo.png").write_bytes(b"\x89PNG")
    result = call("report", tmp_path / "runs", tmp_path / "nowhere", __file__, "-o", tmp_path / "r.html")
    lines = result.stderr.splitlines()
    assert all(line.startswith("skipped ") for line in lines)
    for words, folder in expected.items():
        (line,) = [line for line in lines if f"{folder}:" in line]
        assert words in line
    assert any(f"{tmp_path / 'runs/notes'}: there is no run in it" in line for line in lines)
    assert any("nowhere: there is no such folder" in line for line in lines)
    assert any("test_report.py: it is a file, not a folder" in line for line in lines)
    assert len(lines) == len(expected) + 3
    page = (tmp_path / "r.html").read_text()
    assert "Not in this report" in page
    assert len(data_of(tmp_path / "r.html")["experiments"]) == 1


def test_what_a_crash_leaves_of_the_metrics_is_still_read(tmp_path):
    metrics = "".join(json.dumps(row) + "\n" for row in rows_of(0.8))
    write_run(tmp_path / "r", metrics=metrics + '{"round": 5, "test_acc')
    (run,) = gather([tmp_path]).runs
    assert len(run.rows) == 5


def test_numbers_that_are_none_are_left_out(tmp_path):
    rows = rows_of(0.8)
    rows[1] |= {"test_accuracy": math.nan, "test_loss": math.inf, "seconds": "soon", "r": 10**400, "drift": True}
    metrics = "".join(json.dumps(row) + "\n" for row in rows).replace('"beta": 0.5', '"beta": 1e999')
    write_run(tmp_path / "r", metrics=metrics)
    (run,) = gather([tmp_path]).runs
    assert not {"test_accuracy", "test_loss", "seconds", "r", "drift", "beta"} & set(run.rows[1])
    write_report([tmp_path], tmp_path / "r.html")


def test_summaries_with_wrong_types_do_no_harm(tmp_path):
    summary = {
        "final_test_accuracy": "high",
        "task": 5,
        "versions": [1],
        "scale": {},
        "final_r": None,
        "seconds": 1e999,
    }
    spec = spec_of() | {"paper": {"source": 3, "test_accuracy": {"fedga": ["x", 1]}}, "rounds": "many"}
    write_run(
        tmp_path / "r", spec, summary=json.dumps(summary), holdings='{"names": ["a"], "counts": [["x"]], "clients": 1}'
    )
    page = write_report([tmp_path], tmp_path / "r.html").read_text()
    assert "made from Python" in page, "such settings are no recipe"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_links_in_a_circle_and_closed_folders(tmp_path):
    write_run(tmp_path / "runs/good")
    write_run(tmp_path / "runs/pipe", metrics=None)
    os.mkfifo(tmp_path / "runs/pipe/metrics.jsonl")
    (tmp_path / "runs/round").symlink_to(tmp_path / "runs")
    (tmp_path / "runs/self").symlink_to(tmp_path / "runs/self")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    result = call("report", tmp_path / "runs", tmp_path / "loop", "-o", tmp_path / "r.html")
    assert "metrics.jsonl is not a file" in result.stderr
    assert f"skipped {tmp_path / 'loop'}: " in result.stderr
    assert len(result.stderr.splitlines()) == 2


def test_a_report_of_nothing_says_so(tmp_path):
    (tmp_path / "empty").mkdir()
    old = tmp_path / "r.html"
    old.write_text("an older report")
    result = call("report", tmp_path / "empty", "-o", old, code=2)
    assert "there is no run in it" in result.stderr
    assert "error: there is no finished run to report" in result.stderr
    assert old.read_text() == "an older report"


def test_unfinished_runs_are_drawn_when_asked_for(tmp_path):
    write_run(tmp_path / "half", summary=None)
    call("report", tmp_path, "-o", tmp_path / "r.html", code=2)
    assert call("report", tmp_path, "-o", tmp_path / "r.html", "--unfinished").stderr == ""
    assert "0 + 1 unfinished" in (tmp_path / "r.html").read_text()


def test_where_the_page_goes(tmp_path):
    write_run(tmp_path / "run")
    made = call("report", tmp_path / "run", "-o", tmp_path / "new/folder/page.html", "--title", "A & B", "--json")
    assert json.loads(made.stdout)["runs"] == 1
    assert "<h1>A &amp; B</h1>" in (tmp_path / "new/folder/page.html").read_text()
    file = tmp_path / "run/spec.toml"
    assert (
        "need a folder" in call("report", tmp_path / "run", "-o", tmp_path / "x.html", "--figures", file, code=2).stderr
    )
    assert not (tmp_path / "x.html").exists()
    assert "is a folder; name the page" in call("report", tmp_path / "run", "-o", tmp_path, code=2).stderr
    assert call("report", tmp_path / "run", "-o", tmp_path / "run/spec.toml/x.html", code=2).stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_figures_for_a_paper(tmp_path):
    settings = spec_of(name="a $x_1$ <b>")
    settings["algorithm"]["name"] = "_$\\frac{"
    held = json.dumps({"names": ["$0$", "1"], "counts": [[3, 0], [0, 500], [1, 1]], "clients": 3})
    rows = [{key: row[key] for key in ("round", "communication_rounds", "test_loss")} for row in rows_of(0.5)]
    write_run(tmp_path / "run", settings, metrics="".join(json.dumps(row) + "\n" for row in rows), holdings=held)
    call("report", tmp_path / "run", "-o", tmp_path / "r.html", "--figures", tmp_path / "figures")
    written = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    names = ["a-x_1-b-test_loss-over-communication_rounds", "a-x_1-b-classes-per-client"]  # the rows have no other axis
    assert set(written) == {f"{name}.{suffix}" for name in names for suffix in ("pdf", "png")}
    for name, content in written.items():
        assert content.startswith(b"%PDF" if name.endswith("pdf") else b"\x89PNG")


def test_figures_are_drawn_from_the_pages_numbers(tmp_path):
    experiment = experiment_of(write_comparison(tmp_path / "c", {"fedga": [0.4, 0.8], "fedavg": [0.3, 0.5]}))
    quantity = CHOICES[1]
    curves = curves_of(experiment, quantity)
    figure = curve_figure(experiment, quantity, curves, "bytes")
    (axes,) = figure.axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 20, 40, 60, 80]] * 2
    assert list(axes.lines[0].get_ydata()) == curves[0].mean == pytest.approx([2, 1, 2 / 3, 0.5, 0.4], rel=1e-5)
    assert axes.get_yscale() == "log"
    figure.canvas.draw()
    labels = [label.get_text() for label in (*axes.get_yticklabels(), *axes.get_yticklabels(minor=True))]
    assert "1" in labels
    assert not any("$" in label for label in labels)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedga", "fedavg"]


# Real runs.


def test_compare_ends_with_its_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("compare", "--set", "rounds=2", "--set", "task.clients=5", "--set", "clients.per_round=3", "--workers", 0)
    words += ("--seeds", 2, "--algorithms", "fedga,fedavg", "--out", "c")
    assert "report: c/report.html" in call(*words).stdout
    found = data_of(tmp_path / "c/report.html")["experiments"][0]
    assert [group["label"] for group in found["groups"]] == ["fedga", "fedavg"]
    assert len(found["class_counts"]) == 2, "two seeds divide the digits differently"
    assert sum(map(sum, found["class_counts"][0]["counts"])) == 1348
    (tmp_path / "c/report.html").unlink()
    again = json.loads(call(*words, "--resume", "--json").stdout)
    assert again["report"] == "c/report.html"
    assert (tmp_path / "c/report.html").exists()
    assert "report: c/report.html" in call("show", "c").stdout


def test_a_run_that_diverged_says_so_in_its_folder(tmp_path):
    task = digits(clients=5)
    local = ga.LocalTraining(lr=1e30, steps=3)
    options = {"rounds": 3, "local": local, "workers": 0, "out": tmp_path / "r"}
    with pytest.raises(ga.errors.DivergedError):
        ga.run(task, ga.FedAvg(), **options)
    (run,) = gather([tmp_path]).runs
    assert run.state == "diverged"
    assert "became NaN or infinite" in run.failure

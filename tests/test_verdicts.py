"""The rules that judge the paper's claims, on made-up numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from gradalign.report.statistics import Difference, difference
from gradalign.reproduce.verdicts import Claim, judge, score, scores, verdict_row


def claim(**changes) -> Claim:
    return Claim(
        **{"text": "FedGA ends above FedAvg", "first": "fedga", "second": "fedavg", "at": "communication"} | changes
    )


def run_of(*accuracies: float | None, phases: int = 1) -> list[dict[str, float]]:
    """A run measured after every round, 100 updates and 50 examples each; a round costs so many communications."""
    rows = []
    for t, accuracy in enumerate(accuracies):
        row = {"round": t, "communication_rounds": phases * t, "local_updates": 100 * t, "examples": 50 * phases * t}
        rows.append(row if accuracy is None else row | {"test_accuracy": accuracy})
    return rows


# By hand: three seeds each with variance 1 have a standard error of √(2/3) and four degrees of freedom: the margin is
# 2.776 · 0.8165 = 2.267.
@pytest.mark.parametrize(
    ("first", "second", "changes", "expected"),
    [
        ((86.0, 87.0, 88.0), (83.0, 84.0, 85.0), {}, "reproduced"),  # 3 ± 2.27
        ((83.0, 84.0, 85.0), (86.0, 87.0, 88.0), {}, "not reproduced"),
        ((83.0, 84.0, 85.0), (86.0, 87.0, 88.0), {"expect": "lower"}, "reproduced"),
        ((86.0, 87.0, 88.0), (83.0, 84.0, 85.0), {"expect": "lower"}, "not reproduced"),
        ((84.0, 85.0, 86.0), (83.0, 84.0, 85.0), {}, "undecidable"),  # 1 ± 2.27, and nothing to hold against it
        ((84.0, 85.0, 86.0), (83.0, 84.0, 85.0), {"claimed": 3.05}, "undecidable"),  # up to 3.27: it may be the paper's
        (
            (84.0, 85.0, 86.0),
            (83.0, 84.0, 85.0),
            {"claimed": 3.4},
            "not reproduced",
        ),  # smaller than the paper's for sure
        ((83.0, 84.0, 85.0), (84.0, 85.0, 86.0), {"claimed": 3.4, "expect": "lower"}, "not reproduced"),
        ((84.0, 85.0, 86.0), (83.0, 84.0, 85.0), {"expect": "equal", "tolerance": 3.5}, "reproduced"),
        ((84.0, 85.0, 86.0), (83.0, 84.0, 85.0), {"expect": "equal", "tolerance": 3.0}, "undecidable"),
        ((83.0, 84.0, 85.0), (84.0, 85.0, 86.0), {"expect": "equal", "tolerance": 3.0}, "undecidable"),
        ((83.0, 84.0, 85.0), (89.0, 90.0, 91.0), {"expect": "equal", "tolerance": 3.0}, "not reproduced"),
        ((83.0, 84.0, 85.0), (84.0, 85.0, 86.0), {"tolerance": 3.5}, "reproduced"),  # −1 ± 2.27: not worse by 3.5
        ((83.0, 84.0, 85.0), (84.0, 85.0, 86.0), {"tolerance": 3.0}, "undecidable"),
        ((84.0, 85.0, 86.0), (83.0, 84.0, 85.0), {"tolerance": 3.5, "expect": "lower"}, "reproduced"),
        ((83.0, 84.0, 85.0), (89.0, 90.0, 91.0), {"tolerance": 3.5}, "not reproduced"),  # −6 ± 2.27
        ((89.0, 90.0, 91.0), (83.0, 84.0, 85.0), {"expect": "equal", "tolerance": 3.0}, "not reproduced"),  # 6 ± 2.27
        # Unequal seeds: se² = 2/2 + (5/3)/4, 1.90 degrees of freedom, margin 5.4; pooled over 4 it would be 3.
        ((86.0, 88.0), (82.0, 83.0, 84.0, 85.0), {}, "undecidable"),  # 3.5 ± 5.4
        ((90.0, 92.0), (82.0, 83.0, 84.0, 85.0), {}, "reproduced"),  # 7.5 ± 5.4
        ((90.0,), (82.0, 83.0, 84.0), {}, "pending"),  # one seed has no spread
        ((), (82.0, 83.0, 84.0), {}, "pending"),
    ],
)
def test_the_rules(first, second, changes, expected):
    assert judge(claim(**changes), difference(first, second))[0] == expected


def test_the_rule_tells_the_numbers_that_decided():
    found = judge(claim(claimed=3.4), Difference(value=1.0, margin=2.0))
    assert found == ("not reproduced", "95 % interval from -1 to +3 has 0 in it and leaves out the paper's 3.4")
    # For a claim that something is lower the interval is still that of first − second.
    assert judge(claim(expect="lower"), Difference(value=-3.0, margin=2.0))[1].startswith("95 % interval from -5 to -1")


@pytest.mark.parametrize(
    ("value", "changes"),
    [(2.0, {}), (-2.0, {}), (1.0, {"claimed": 3.0}), (1.0, {"expect": "equal", "tolerance": 3.0})]
    + [(sign * 5.0, {"expect": "equal", "tolerance": 3.0}) for sign in (1, -1)],
)
def test_an_interval_that_ends_at_the_bound_decides_nothing(value, changes):
    assert judge(claim(**changes), Difference(value=value, margin=2.0))[0] == "undecidable"


def test_a_level_is_judged_by_the_first_side_alone():
    # Student: mean 1.1 points, s = 0.1, n = 3, t = 4.303: 0.1 ± 0.2484 around the level of 1 point.
    own = claim(first="scaffold", second=0.01, expect="equal", tolerance=0.4)
    row = verdict_row(own, {"scaffold": [run_of(0.0, 0.010), run_of(0.0, 0.011), run_of(0.0, 0.012)]})
    assert row["difference"] == pytest.approx(0.1)
    assert row["margin"] == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert (row["verdict"], row["second_scores"]) == ("reproduced", [])


GOOD = [run_of(0.0, 0.50), run_of(0.0, 0.51)]
LOW = [run_of(0.0, 0.10), run_of(0.0, 0.11)]
NO_WIN = "1 diverged of fedga, which cannot win by the others"


@pytest.mark.parametrize(
    ("runs", "changes", "diverged", "verdict", "told"),
    [
        ((GOOD, LOW), {}, (1, 0), "undecidable", NO_WIN),  # the survivors alone would be "reproduced"
        ((GOOD, LOW), {}, (0, 2), "reproduced", "2 diverged of fedavg"),  # it loses with them, too
        ((LOW, GOOD), {}, (1, 0), "not reproduced", "1 diverged of fedga"),
        ((LOW, GOOD), {}, (0, 1), "undecidable", NO_WIN.replace("fedga", "fedavg")),
        ((GOOD, LOW), {"expect": "lower"}, (1, 0), "undecidable", NO_WIN),  # an accuracy that should be the lower one
        ((LOW, GOOD), {"expect": "lower"}, (1, 0), "reproduced", "1 diverged of fedga"),
        ((LOW, GOOD), {"expect": "lower", "metric": "drift"}, (1, 0), "undecidable", NO_WIN),  # a lower drift wins
        ((GOOD, LOW), {"expect": "lower", "metric": "drift"}, (1, 0), "not reproduced", "1 diverged of fedga"),
        ((LOW, GOOD), {"expect": "lower", "metric": "train_accuracy"}, (1, 0), "undecidable", NO_WIN),  # overfits less
        ((LOW, GOOD), {"expect": "lower", "metric": "train_accuracy"}, (0, 1), "reproduced", "1 diverged of fedavg"),
        ((GOOD, GOOD), {"expect": "equal", "tolerance": 5.0}, (1, 0), "undecidable", NO_WIN),
        ((GOOD[:1], LOW), {}, (2, 1), "undecidable", "2 diverged of fedga; 1 diverged of fedavg"),  # all have ended
        ((GOOD[:1], LOW), {}, (0, 1), "pending", "1 diverged of fedavg"),
        (([], LOW), {"second": 0.01}, (2, 0), "undecidable", "2 diverged of fedga"),
    ],
)
def test_a_side_of_which_a_run_diverged_cannot_win(runs, changes, diverged, verdict, told):
    others = ("drift", "train_accuracy")
    sides = [[[row | dict.fromkeys(others, row["test_accuracy"]) for row in run] for run in side] for side in runs]
    names = ("fedga", "fedavg")
    row = verdict_row(
        claim(**changes),
        dict(zip(names, sides, strict=True)),
        {**dict(zip(names, diverged, strict=True)), "scaffold": 3},
    )
    assert (row["verdict"], row["why"].partition("; ")[2]) == (verdict, told)


def test_a_claim_about_the_end_waits_until_the_curves_are_flat():
    # Ten rounds: the last tenth is the tenth, the one before it the ninth. Steps of 1.2 and 0.8, of 0.9 and 0.7 points.
    rising = {
        "fedga": [run_of(*[0.0] * 9, 0.500, 0.512), run_of(*[0.0] * 9, 0.520, 0.528)],
        "fedavg": [run_of(*[0.0] * 9, 0.300, 0.309), run_of(*[0.0] * 9, 0.310, 0.317)],
    }
    row = verdict_row(claim(), rising)
    assert row["rises"] == pytest.approx([1.0, 0.8])
    assert row["why"].endswith("; still rising by 1.0 and 0.8 points over the last tenth")
    assert row["verdict"] == "reproduced"  # 20.7 ± 5.6; but the claim is not said to be about the end
    assert verdict_row(claim(settled=True), rising)["verdict"] == "undecidable"
    flat = {
        "fedga": [[*run[:-2], run[-1] | {"round": 9, "communication_rounds": 9}, run[-1]] for run in rising["fedga"]]
    }
    flat["fedavg"] = [run_of(*[0.0] * 9, 0.305, 0.309), run_of(*[0.0] * 9, 0.313, 0.317)]
    row = verdict_row(claim(settled=True), flat)
    assert row["rises"] == pytest.approx([0.0, 0.4])
    assert row["verdict"] == "reproduced"  # under half a point
    assert "rising" not in row["why"]
    assert verdict_row(claim(settled=True), rising | {"fedavg": flat["fedavg"]})["verdict"] == "undecidable"
    assert verdict_row(claim(settled=True), {"fedga": rising["fedga"]})["verdict"] == "pending"
    assert verdict_row(claim(metric="drift"), rising)["rises"] == []
    # A test loss is of the same runs at the same moment: 100 − accuracy in %, in its own unit.
    lossy = {
        name: [[row | {"test_loss": 1 - row["test_accuracy"]} for row in run] for run in rising[name]]
        for name in rising
    }
    for settled, verdict, risen in ((False, "reproduced", []), (True, "undecidable", [1.0, 0.8])):
        row = verdict_row(claim(metric="test_loss", expect="lower", settled=settled), lossy)
        assert (row["verdict"], row["rises"]) == (verdict, pytest.approx(risen))
        assert row["difference"] == pytest.approx(-0.207)
    assert verdict_row(claim(second=0.5), rising)["rises"] == pytest.approx([1.0])


def test_the_gap_is_training_accuracy_above_test_accuracy_in_the_same_window():
    rows = run_of(*[0.0] * 16, None, 0.50, None, 0.60, None)  # 20 rounds; test images at 17 and 19 of the last five
    rows[16] |= {"train_accuracy": 0.80}
    rows[20] |= {"train_accuracy": 0.90}
    assert score(rows, claim(metric="gap", window=0.25), 20) == pytest.approx(85.0 - 55.0)
    assert score(rows, claim(metric="gap", window=0.1), 20) == pytest.approx(90.0 - 60.0)
    assert score(rows, claim(metric="gap", window=0.05), 20) is None  # no test image was looked at


def test_both_sides_are_compared_where_they_have_spent_alike():
    runs = {"fedga": [run_of(0.0, 0.2, 0.5, phases=2)], "fedavg": [run_of(0.0, 0.1, 0.3, 0.6, 0.7)]}
    assert scores(runs, claim()) == ([50.0], [70.0])  # 4 communications
    assert scores(runs, claim(at="updates")) == ([50.0], [30.0])  # 200 updates
    assert scores(runs, claim(at="computation", window=0.5)) == ([50.0], [65.0])  # 200 examples, the mean above 100
    assert scores(runs | {"fedavg": [*runs["fedavg"], run_of(0.0, 0.1)]}, claim())[0] == []  # at 1 nobody measured


def test_scores_leave_out_what_was_not_measured():
    assert score(run_of(0.0, 0.2, None, 0.4), claim(window=1.0), 3) == pytest.approx(30.0)  # not the start
    assert score(run_of(0.0, None, None), claim(), 2) is None
    assert score(run_of(0.0, 0.5, math.nan), claim(window=1.0), 2) is None
    good, bad = [run_of(0.0, 0.5), run_of(0.0, 0.6)], run_of(0.0, math.nan)
    row = verdict_row(claim(), {"fedga": [*good, bad], "fedavg": good})
    assert row["first_scores"] == [50.0, 60.0]
    row = verdict_row(claim(), {"fedga": good})
    assert (row["verdict"], row["difference"]) == ("pending", None)


def test_losses_and_drift_are_in_their_own_units():
    rows = [{"communication_rounds": 1.0, "drift": 0.5, "test_accuracy": 0.5}]
    assert score(rows, claim(metric="drift"), 1) == 0.5
    assert score(rows, claim(), 1) == 50.0

"""The sweep's logic without training: lists, stages, early termination, who does which trial."""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
import sqlite3
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
import sqlalchemy
from optuna.pruners import NopPruner
from optuna.trial import TrialState, create_trial

from gradalign.errors import FolderInUseError, GradalignError, NotWrittenError
from gradalign.recipes import load_recipe, shipped_recipes
from gradalign.recipes.spec import Spec, SweepSpec
from gradalign.runs.locks import locked
from gradalign.server.measure import Measure
from gradalign.server.monitor import Monitor
from gradalign.sweep.grid import apply_point, choose_lists, fine_values, parse_grid, scheduled
from gradalign.sweep.plan import SweepPlan, _report
from gradalign.sweep.protocol import (
    BEGUN,
    BelowBestPruner,
    Outcome,
    Search,
    Stage,
    at_ends,
    baseline_of,
    clearly_below,
    finalists_of,
    tune,
)
from gradalign.sweep.storage import JOURNAL, _Journal, open_journal, opened, opened_database
from gradalign.sweep.study import Job, StageStudy, working_in


def analytic(point: dict, entry: str) -> float | None:
    """A score with one known maximum: lr 0.2, K 10, and for FedGA beta 0.05; lr 0.4 diverges."""
    if point["lr"] == 0.4:
        return None
    score = 0.9 - abs(math.log(point["lr"] / 0.2)) / 10 - abs(math.log(point["K"] / 10)) / 20
    liked = 0.01 * (point.get("beta_schedule") == "cosine")
    return score if entry == "fedavg" else score + 0.05 - abs(math.log(point["beta"] / 0.05)) / 50 + liked


class Script:
    """Carries out stages by formula and remembers them."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.tried: list[tuple] = []

    def __call__(self, stage: Stage, known) -> list[Outcome]:
        self.stages.append(stage)
        outcomes = []
        for slot, point in enumerate(stage.points()):
            if point in [one.point for one in known]:
                continue
            score = analytic(point, stage.entry)
            self.tried.append((stage.entry, tuple(point.items())))
            state = "diverged" if score is None else "complete"
            outcomes.append(
                Outcome(stage=stage.name, slot=slot, entry=stage.entry, seed=0, point=point, state=state, score=score)
            )
        return outcomes


LISTS = {"lr": [0.05, 0.1, 0.2, 0.4], "K": [1, 10, 20], "beta": [0.01, 0.1, 1.0, 5.0]}


def test_the_papers_stages_find_a_known_maximum():
    script = Script()
    tuned, before = tune(Search(entry="fedga", baseline="fedavg", lists=LISTS), script)
    assert [stage.name for stage in script.stages] == ["baseline", "beta-coarse", "beta-fine", "others"]
    baseline, coarse, fine, others = script.stages
    assert len(before) == 4 * 3, "an exhaustive grid"
    assert "beta" not in baseline.lists
    assert coarse.fixed == {"lr": 0.2, "K": 10}, "transferred from FedAvg"
    assert coarse.lists == {"beta": [0.01, 0.1, 1.0, 5.0]}
    # 0.1 is the best coarse value: |log(0.1/0.05)| = 0.69 against |log(0.01/0.05)| = 1.61.
    assert fine.lists == {"beta": [0.022, 0.046, 0.22, 0.46]}
    assert fine.fixed == coarse.fixed
    assert others.fixed == {"beta": 0.046}
    assert finalists_of(tuned, 1)[0].point == {"lr": 0.2, "K": 10, "beta": 0.046}
    assert len(script.tried) == len(set(script.tried)), "nothing is tried twice, not even between stages"
    assert len(script.tried) == 12 + 4 + 4 + (12 - 1)


def test_betas_schedule_is_searched_with_the_best_beta_and_kept_for_the_rest():
    schedules = ["constant", "off-until 0.1", "cosine"]
    script = Script()
    search = Search(entry="fedga", baseline="fedavg", lists={**LISTS, "beta_schedule": schedules})
    tuned, before = tune(search, script)
    assert not any("beta_schedule" in one.point for one in before)
    assert [(stage.name, len(stage.points())) for stage in script.stages] == [
        ("baseline", 12),
        ("beta-coarse", 4),
        ("beta-fine", 4),
        ("beta-schedule", 2),
        ("others", 12),
    ]
    baseline, coarse, fine, schedule, others = script.stages
    assert "beta_schedule" not in {**baseline.lists, **baseline.fixed}, "FedAvg has no β"
    assert coarse.fixed["beta_schedule"] == fine.fixed["beta_schedule"] == "constant"
    assert schedule.fixed == {"lr": 0.2, "K": 10, "beta_schedule": "constant", "beta": 0.046}
    assert schedule.points()[0]["beta_schedule"] == "off-until 0.1"
    assert others.fixed == {"beta": 0.046, "beta_schedule": "cosine"}, "the script likes it best"
    assert finalists_of(tuned, 1)[0].point == {"lr": 0.2, "K": 10, "beta": 0.046, "beta_schedule": "cosine"}
    assert len(script.tried) == len(set(script.tried)) == 12 + 4 + 4 + 2 + 11
    assert [size for _, _, size in search.sizes()] == [12, 4, 4, 2, 11]


def test_a_beta_that_sets_itself_is_not_searched():
    script = Script()
    search = Search(entry="fedavg", baseline="fedavg", lists={"lr": [0.1, 0.2], "K": [1, 10]})
    tuned, before = tune(search, script)
    assert [(stage.name, stage.fixed) for stage in script.stages] == [("baseline", {}), ("others", {})]
    assert len(before) == len(tuned) == 4
    assert search.sizes() == [("baseline", "fedavg", 4), ("others", "fedavg", 4)]


def test_a_single_stage_without_beta():
    script = Script()
    tuned, before = tune(Search(entry="fedavg", baseline=None, lists={"lr": [0.1, 0.2], "K": [1, 10]}), script)
    assert [stage.name for stage in script.stages] == ["grid"]
    assert before == []
    assert [one.point for one in finalists_of(tuned, 3)] == [
        {"lr": 0.2, "K": 10},
        {"lr": 0.1, "K": 10},
        {"lr": 0.2, "K": 1},
    ]


def test_equal_accuracies_are_told_apart_by_the_loss():
    def one(slot: int, loss: float) -> Outcome:
        facts = {"validation_loss": loss}
        return Outcome(
            stage="s", slot=slot, entry="e", seed=0, point={"lr": slot}, state="complete", score=0.9, facts=facts
        )

    assert [found.slot for found in finalists_of([one(0, 0.3), one(1, 0.2), one(2, 0.2)], 3)] == [1, 2, 0]


def test_a_choice_at_the_end_of_its_list_is_told():
    """Of numbers alone, and of those with several values tried; below 0, and below K = 1, lies nothing."""
    points = [
        {"lr": lr, "beta": beta, "K": steps, "weight_decay": 0.1, "batch": batch}
        for lr, beta, steps, batch in ((0.1, 0.0, 1, 32), (0.2, 0.03, 2, "whole"), (0.4, 0.3, 2, "whole"))
    ]
    tried = [
        Outcome(stage="grid", slot=slot, entry="fedga", seed=0, point=point, state="complete")
        for slot, point in enumerate(points)
    ]
    largest = ["lr 0.4 is the largest tried", "beta 0.3 is the largest tried", "K 2 is the largest tried"]
    assert at_ends(tried, points[2]) == largest
    assert at_ends(tried, points[0]) == ["lr 0.1 is the smallest tried"]
    assert at_ends(tried, points[1]) == largest[2:]
    assert at_ends(tried[1:], points[1]) == ["lr 0.2 is the smallest tried", "beta 0.03 is the smallest tried"]
    assert at_ends(tried[:1], points[0]) == [], "one value is no list"


def test_when_everything_diverges_it_is_said():
    with pytest.raises(GradalignError, match="no trial of the baseline fedavg came to an end"):
        tune(Search(entry="fedga", baseline="fedavg", lists={"lr": [0.4], "K": [1], "beta": [0.1]}), Script())


def test_the_sizes_foretold_are_the_sizes_met():
    search = Search(entry="fedga", baseline="fedavg", lists=LISTS)
    assert [size for _, _, size in search.sizes()] == [12, 4, 4, 11]
    assert [size for _, _, size in Search(entry="x", baseline=None, lists={"lr": [1.0]}, trials=7).sizes()] == [7]


@pytest.mark.parametrize(
    ("best", "coarse", "fine"),
    [
        (0.1, (0.01, 0.1, 1.0, 5.0), [0.022, 0.046, 0.22, 0.46]),  # powers of 10^(1/3) = 2.154
        (1.0, (0.01, 0.1, 1.0, 5.0), [0.22, 0.46, 1.7, 2.9]),  # upwards powers of 5^(1/3) = 1.710
        (5.0, (0.01, 0.1, 1.0, 5.0), [1.7, 2.9, 8.5, 15.0]),  # above the end by as much again: 25
        (0.01, (0.01, 0.1, 1.0, 5.0), [0.0022, 0.0046, 0.022, 0.046]),
        (0.5, (0.5,), [0.11, 0.23, 1.1, 2.3]),  # alone: a factor of ten on both sides
        (0.0, (0.0, 1.0), [0.1, 0.22, 0.46]),
        (1.0, (0.0, 1.0), [0.22, 0.46, 2.2, 4.6]),
    ],
)
def test_fine_values_by_hand(best, coarse, fine):
    assert fine_values(best, coarse) == fine


def test_baselines():
    assert baseline_of("fedga") == "fedavg"
    assert baseline_of("gradalign") == "largebatchsgd"
    assert baseline_of("fedga+fedprox") == "fedprox"
    assert baseline_of("fedga+fedadam") == "fedadam"
    assert baseline_of("scaffold") is None


def lists_of(recipe: str, algorithm: str, *words: str) -> dict:
    loaded = load_recipe(recipe)
    return choose_lists(loaded.spec_for(algorithm, 0), loaded.sweep, parse_grid(words))


def test_the_papers_lists_are_the_defaults_of_its_recipes():
    assert lists_of("emnist-iid", "fedga") == {
        "lr": [0.05, 0.1, 0.2, 0.4],
        "batch": [240, "whole"],
        "weight_decay": [0.001, 0.0001],
        "K": [1, 10, 20, 40],
        "beta": [0.01, 0.1, 1.0, 5.0],
    }
    cifar = lists_of("cifar10", "fedga")
    assert (cifar["batch"], cifar["K"]) == ([125], [10, 20])
    updates = lists_of("cifar10-updates", "gradalign")
    assert (updates["batch"], updates["K"]) == ([1000], [1])


def test_every_recipe_has_lists_with_and_without_a_section(tmp_path):
    for name, path in shipped_recipes().items():
        loaded = load_recipe(name)
        assert set(lists_of(name, loaded.spec().algorithm.name)) >= {"lr", "batch", "weight_decay", "K"}
        bare = tmp_path / f"{name}.toml"
        bare.write_text(path.read_text().split("[sweep]")[0])
        assert set(lists_of(str(bare), loaded.spec().algorithm.name)) >= {"lr", "batch", "weight_decay", "K"}


def test_lists_of_other_algorithms_and_of_the_command_line():
    assert lists_of("digits", "fedprox", "lr=.3")["mu"] == [0.001, 0.01, 0.1, 1.0]
    assert lists_of("digits", "fedprox", "lr=.3,1")["lr"] == [0.3, 1.0]
    assert "beta" not in lists_of("digits", "scaffold")
    epochs = lists_of("digits", "fedga", "epochs=1,2")
    assert epochs["epochs"] == [1, 2]
    assert "K" not in epochs
    assert parse_grid(["wd=0,.1", "local_steps=3", "batch=whole,8"]) == {
        "weight_decay": [0.0, 0.1],
        "K": [3],
        "batch": ["whole", 8],
    }


def test_beta_stays_auto_unless_values_are_asked_for():
    """The lists of a recipe are for its own number of β, not for the entry that has none to choose."""
    assert "beta" in lists_of("digits", "fedga")
    assert not [name for name in lists_of("digits", "fedga-auto", "lr=.1,.2") if name.startswith("beta")]
    asked = lists_of("digits", "fedga-auto", "beta=.1,1", "beta_schedule=constant,cosine")
    assert (asked["beta"], asked["beta_schedule"]) == ([0.1, 1.0], ["constant", "cosine"])


@pytest.mark.parametrize("algorithm", ["fedinit", "fedga+fedinit", "scaffold"])
def test_a_beta_that_must_be_a_number_has_no_schedule(algorithm):
    spec = Spec.model_validate({"algorithm": {"name": algorithm}})
    assert "beta_schedule" not in choose_lists(spec, SweepSpec(beta_schedule=["constant", "cosine"]), {})
    with pytest.raises(GradalignError, match="has no such parameter"):
        choose_lists(spec, SweepSpec(), {"beta_schedule": ["constant", "cosine"]})


def test_the_test_set_stops_no_run_and_keeps_no_model():
    given = ["measure.early_stopping.patience=2", "measure.keep_best=true", "clients.holdout=0.3"]
    recipe = load_recipe("digits", given)
    decided = {"seed": 0, "holdout": 0.1, "stop_after": 0.2, "margin": 0.2, "finalists": 1, "seeds": 1}
    plan = SweepPlan(recipe=recipe, search=Search(entry="fedga", baseline=None, lists={}), **decided)
    searched, tested = (plan.spec("fedga", {}, test=test) for test in (False, True))
    assert (searched.clients.holdout, searched.measure.early_stopping.patience) == (0.1, 2)
    assert searched.measure.keep_best
    assert (tested.clients.holdout, tested.measure.early_stopping, tested.measure.keep_best) == (None, None, False)


def test_a_point_takes_its_places():
    tables = {
        "local": {"lr": {"kind": "cosine", "value": 0.1, "end": 0.0}, "epochs": 2},
        "algorithm": {"name": "fedga"},
    }
    changed = apply_point(tables, {"lr": 0.3, "K": 4, "beta": 0.5, "batch": "whole"})
    assert changed["local"] == {"lr": {"kind": "cosine", "value": 0.3, "end": 0.0}, "steps": 4, "batch_size": "whole"}
    assert changed["algorithm"] == {"name": "fedga", "beta": 0.5}
    assert tables["local"]["epochs"] == 2, "the tables themselves stay"


@pytest.mark.parametrize(
    ("words", "beta"),
    [
        ("constant", 0.5),
        ("cosine", {"kind": "cosine", "value": 0.5}),
        ("cosine .5", {"kind": "cosine", "value": 0.5, "share": 0.5}),
        ("warmup 0.1", {"kind": "warmup", "value": 0.5, "share": 0.1}),
        ("off-until 0.25", {"kind": "off-until", "value": 0.5, "share": 0.25}),
    ],
)
def test_a_schedule_in_words_takes_betas_place(words, beta):
    assert parse_grid([f"beta_schedule={words}"]) == {"beta_schedule": [words]}
    for before in ({}, {"beta": 0.1}, {"beta": {"kind": "warmup", "value": 0.1, "rounds": 7}}):
        tables = {"algorithm": {"name": "fedga", **before}}
        assert apply_point(tables, {"beta_schedule": words, "beta": 0.5})["algorithm"] == {
            "name": "fedga",
            "beta": beta,
        }


@pytest.mark.parametrize(
    "words", ["warmup", "off-until", "warmup 0", "cosine 2", "constant 0.1", "steps 0.1", "off-until x"]
)
def test_what_is_no_schedule_is_told(words):
    with pytest.raises(GradalignError, match=r'beta_schedule.*"warmup 0.1"'):
        scheduled(words, 0.1)


def test_clearly_below_by_hand():
    assert not clearly_below(0.64, [0.8], 0.2), "exactly 20 % below 0.8 is not more than 20 %"
    assert clearly_below(0.6399, [0.8, 0.5], 0.2)
    assert not clearly_below(0.1, [], 0.2), "alone, nobody is below"
    assert not clearly_below(0.9, [0.8], 0.0)
    assert clearly_below(0.79, [0.8], 0.0)
    assert not clearly_below(-1.19, [-1.0], 0.2), "scores that are minus a loss"
    assert clearly_below(-1.21, [-1.0], 0.2)


def test_nobody_is_ended_while_the_best_is_near_chance():
    """One class each, 47 classes: 4.3 % after ten of fifty rounds says nothing about the end, nor does 2.1 %."""
    assert clearly_below(0.021, [0.043], 0.2), "that is what a single look at the scores says"
    assert not clearly_below(0.021, [0.043], 0.2, 0.119)
    assert clearly_below(0.021, [0.119], 0.2, 0.119)
    assert not clearly_below(0.118, [0.119], 0.2, 0.119), "and close to the best nobody ever is"


@pytest.mark.parametrize(
    ("columns", "measure", "begun"),
    [
        ({"validation_accuracy": 0.02, "validation_loss": 4.0}, {}, 0.118),  # a tenth of the way from 2 to 100 %
        ({"validation_loss": 4.0}, {}, -3.6),  # no accuracy: minus the loss, down to none
        ({"validation_loss": 4.0}, {"monitor": "loss"}, -3.6),
        ({"validation_kappa": -0.01}, {"monitor": "kappa"}, 0.091),  # larger is better, and chance is 0
        ({"validation_error": 0.5}, {"monitor": "error", "mode": "min"}, -0.45),
        ({}, {}, None),  # not measured before the first round: by the margin alone
    ],
)
def test_trials_have_begun_a_tenth_of_the_way_from_the_untrained_model(columns, measure, begun):
    metrics = dict.fromkeys(("kappa", "error"), lambda outputs, targets: 0.0)
    task = SimpleNamespace(scored_on="validation", metrics=metrics)
    monitor = Monitor(Measure(**measure), task)
    told = {"validation_accuracy": 0.3, "validation_loss": 3.0, "validation_kappa": 0.2, "validation_error": 0.4}
    rows = [{"round": 0, **columns}, {"round": 2, **{name: told[name] for name in columns or told}}]
    trial = optuna.create_study(direction="maximize").ask()
    assert _report(trial, rows, 2, 10, monitor)
    assert trial.user_attrs.get(BEGUN) == (None if begun is None else pytest.approx(begun))


def test_the_pruner_compares_at_the_same_round_only():
    study = optuna.create_study(direction="maximize")
    for round_index, score in ((4, 0.5), (8, 0.9)):
        study.add_trial(create_trial(state=TrialState.PRUNED, intermediate_values={round_index: score}))
    late = create_trial(state=TrialState.RUNNING, intermediate_values={4: 0.41})
    late.number = 9
    assert not BelowBestPruner(0.2).prune(study, late), "0.41 > 0.8 · 0.5"
    assert BelowBestPruner(0.1).prune(study, late), "0.41 < 0.9 · 0.5"
    assert BelowBestPruner(0.2, [(4, 0.6)]).prune(study, late), "0.41 < 0.8 · 0.6, of an earlier stage"
    assert not BelowBestPruner(0.2, [(8, 0.9)]).prune(study, late)
    late = create_trial(state=TrialState.RUNNING, intermediate_values={4: 0.41}, user_attrs={BEGUN: 0.505})
    assert not BelowBestPruner(0.1).prune(study, late), "0.5 is near chance still"
    late = create_trial(state=TrialState.RUNNING, intermediate_values={4: 0.41}, user_attrs={BEGUN: 0.496})
    assert BelowBestPruner(0.1).prune(study, late)
    assert not BelowBestPruner(0.2).prune(study, create_trial(state=TrialState.RUNNING))


def stage(storage, worker, *, lists=None, name: str = "x/s") -> StageStudy:
    lists = lists or {"lr": [0.1, 0.2]}
    return StageStudy(storage, name, worker, Stage(name="s", entry="e", lists=lists, fixed={"K": 3}), NopPruner(), 5)


def book(folder: Path, worker, **options) -> StageStudy:
    return stage(open_journal(folder), worker, **options)


JOBS = [Job(slot=i, seed=0, point={"lr": lr, "K": 3}) for i, lr in enumerate((0.1, 0.2))]


def test_jobs_are_divided_settled_and_given_back(tmp_path):
    with working_in(tmp_path) as one, working_in(tmp_path) as two:
        mine, other = book(tmp_path, one), book(tmp_path, two)
        first, second = mine.claim(JOBS), other.claim(JOBS)
        assert (first.job.slot, second.job.slot) == (0, 1)
        assert mine.claim(JOBS) is None
        mine.release(first)
        again = other.claim(JOBS)
        assert again.job.slot == 0
        other.settle(again, "diverged", None, {})
        other.settle(second, "complete", 0.75, {"seconds": 1.5})
        assert mine.claim(JOBS) is None, "what diverged is not tried again"
        outcomes = mine.outcomes(JOBS)
        assert [(o.state, o.score) for o in outcomes] == [("diverged", None), ("complete", 0.75)]
        assert outcomes[1].facts["seconds"] == 1.5


def _do_all(folder: Path, jobs, start, done) -> None:
    """One process at work: claim and settle until everything is done, and tell what was its own."""
    mine = []
    with working_in(folder) as worker:
        one = book(folder, worker)
        start.wait()
        while sum(outcome.state == "complete" for outcome in one.outcomes(jobs)) < len(jobs):
            if (claim := one.claim(jobs)) is not None:
                mine.append(claim.job.slot)
                one.settle(claim, "complete", 0.5, {})
    done.put(mine)


def test_processes_that_share_a_folder_do_each_trial_once(tmp_path):
    jobs = [Job(slot=slot, seed=slot, point={"lr": 0.1, "K": 3}) for slot in range(40)]
    fork = multiprocessing.get_context("fork")
    start, done = fork.Barrier(3), fork.Queue()
    processes = [fork.Process(target=_do_all, args=(tmp_path, jobs, start, done)) for _ in range(3)]
    for process in processes:
        process.start()
    shares = [done.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(slot for share in shares for slot in share) == list(range(40))
    assert sum(bool(share) for share in shares) > 1, "more than one had a part in it"


def test_of_a_job_written_down_twice_one_trial_counts(tmp_path):
    with working_in(tmp_path) as one, working_in(tmp_path) as two:
        mine, other = book(tmp_path, one), book(tmp_path, two)
        for study in (mine, other):  # both saw that it was missing
            study._storage.create_new_trial(study._id, study._waiting(JOBS[0]))
        claim = mine.claim(JOBS[:1])
        assert claim.trial.number == 0
        assert other.claim(JOBS[:1]) is None
        mine.release(claim)
        assert other.claim(JOBS[:1]).trial.number == 1, "the other one takes its place"


def test_trials_of_a_dead_process_are_done_again(tmp_path):
    with working_in(tmp_path) as alive:
        with suppress(KeyboardInterrupt), working_in(tmp_path) as dead:
            assert book(tmp_path, dead).claim(JOBS).job.slot == 0
            assert book(tmp_path, alive).claim(JOBS[:1]) is None, "it is alive: its lock is held"
            raise KeyboardInterrupt  # at a moment when nothing is given back
        assert book(tmp_path, alive).claim(JOBS[:1]).job.slot == 0


def test_a_process_that_died_before_it_signed_is_noticed(tmp_path, monkeypatch):
    with working_in(tmp_path) as worker:
        one = book(tmp_path, worker)
        number = one._storage.create_new_trial(one._id, one._waiting(JOBS[0]))
        one._storage.set_trial_state_values(number, TrialState.RUNNING)
        assert one.claim(JOBS[:1]) is None, "it may be signed the next moment"
        monkeypatch.setattr("gradalign.sweep.study._SIGNING_SECONDS", 0.0)
        assert one.claim(JOBS[:1]).job.slot == 0
        assert not one._take(number), "too late"


def test_a_folder_copied_without_its_locks_goes_on(tmp_path):
    with suppress(KeyboardInterrupt), working_in(tmp_path / "a") as dead:
        book(tmp_path / "a", dead).claim(JOBS)
        raise KeyboardInterrupt
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / JOURNAL, tmp_path / "b")
    with working_in(tmp_path / "b") as worker:
        assert book(tmp_path / "b", worker).claim(JOBS).job.slot == 0


def test_a_heartbeat_that_stands_still_is_noticed_from_another_machine(tmp_path):
    with (
        working_in(tmp_path / "here") as mine,
        working_in(tmp_path / "there") as other,
        opened_database(f"sqlite:///{tmp_path / 'study.db'}") as storage,
    ):
        far, near = stage(storage, other), stage(storage, mine)
        claim = far.claim(JOBS)
        assert near.claim(JOBS[:1]) is None, "its heart has just beaten"
        with sqlite3.connect(tmp_path / "study.db") as database:
            database.execute("update trial_heartbeats set heartbeat = datetime('now', '-119 seconds')")
        assert near.claim(JOBS[:1]) is None
        with sqlite3.connect(tmp_path / "study.db") as database:
            database.execute("update trial_heartbeats set heartbeat = datetime('now', '-130 seconds')")
        assert near.claim(JOBS[:1]).job.slot == 0
        far.settle(claim, "complete", 1.0, {})  # not dead after all: what it brings comes too late
        assert near.outcomes(JOBS)[0].state == "running"


def test_a_trial_at_work_shows_its_heartbeat(tmp_path, monkeypatch):
    with working_in(tmp_path) as worker, opened_database(f"sqlite:///{tmp_path / 'study.db'}") as storage:
        beats = []
        monkeypatch.setattr(storage, "record_heartbeat", beats.append)
        monkeypatch.setattr(storage, "get_heartbeat_interval", lambda: 0.01)
        one = stage(storage, worker)
        claim = one.claim(JOBS)
        assert beats == [claim.trial._trial_id], "before it is signed"
        with one.beating(claim):
            until = time.monotonic() + 30
            while len(beats) < 3:
                assert time.monotonic() < until
                time.sleep(0.01)


def tpe_draws(folder: Path, name: str, score) -> list[dict]:
    lists = {"lr": [0.01, 1.0], "weight_decay": [0.0, 0.1], "batch": [8, "whole"]}
    jobs = [Job(slot=slot, seed=0, point=None) for slot in range(14)]
    with working_in(folder) as worker:
        one = book(folder, worker, lists=lists, name=name)
        while (claim := one.claim(jobs)) is not None:
            one.settle(claim, "complete", score(claim.point["lr"]), {})
        return [outcome.point for outcome in one.outcomes(jobs)]


def test_tpe_draws_between_the_ends_from_its_seed_and_learns(tmp_path):
    def score(lr: float) -> float:
        return -((math.log(lr) + 2.3) ** 2)

    drawn = tpe_draws(tmp_path, "a/s", score)
    assert drawn == tpe_draws(tmp_path, "b/s", score), "one seed, one sequence"
    other = tpe_draws(tmp_path, "c/s", lambda lr: lr)
    assert drawn[:10] == other[:10], "at first by chance"
    assert drawn[10:] != other[10:], "then by what was found"
    assert len({point["lr"] for point in drawn}) == 14
    for point in drawn:
        assert 0.01 <= point["lr"] <= 1.0
        assert point["weight_decay"] in (0.0, 0.1)
        assert point["batch"] in (8, "whole")
        assert point["K"] == 3


# Storages


def test_a_storage_remembers_whose_it_is(tmp_path):
    url = f"sqlite:///{tmp_path / 's.db'}"
    mine = {"grid": {"lr": [0.1]}, "seed": 0}
    for _ in range(2):
        with opened(tmp_path / "a", url, "mine", mine):
            pass
    with (
        pytest.raises(GradalignError, match=r"another sweep under the name \"mine\": seed \(0 there, 1 now\)"),
        opened(tmp_path / "b", url, "mine", mine | {"seed": 1}),
    ):
        pass
    assert not (tmp_path / "b").exists()
    with opened(tmp_path / "b", url, "unknown", {}):
        pass
    assert json.dumps(optuna.load_study(study_name="mine", storage=url).user_attrs)


def test_an_sqlite_file_serves_one_process_at_a_time(tmp_path):
    url = f"sqlite:///{tmp_path / 's.db'}"
    with (
        opened_database(url),
        pytest.raises(GradalignError, match="an SQLite file serves one at a time"),
        opened_database(url),
    ):
        pass
    with opened_database(url):
        pass


def test_a_line_that_was_cut_off_is_dropped_and_a_damaged_journal_refused(tmp_path):
    with working_in(tmp_path) as worker:
        book(tmp_path, worker).settle(book(tmp_path, worker).claim(JOBS), "complete", 0.5, {})
        whole = (tmp_path / JOURNAL).read_bytes()
        with (tmp_path / JOURNAL).open("ab") as file:
            file.write(b'{"op_code":4,"worker_i')  # the disk was full
        one = book(tmp_path, worker)
        assert one.claim(JOBS).job.slot == 1
        assert (tmp_path / JOURNAL).read_bytes().startswith(whole + b'{"op_code"')
        assert book(tmp_path, worker).claim(JOBS) is None
    (tmp_path / JOURNAL).write_bytes(b"nonsense\n" + whole)
    with pytest.raises(GradalignError, match="is damaged"):
        open_journal(tmp_path)
    (tmp_path / JOURNAL).unlink()
    (tmp_path / JOURNAL).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GradalignError, match="is not a file"):
        open_journal(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_is_told_in_one_sentence():
    with pytest.raises(NotWrittenError, match="cannot write /dev/full: No space left on device"):
        _Journal(Path("/dev/full")).append_logs([{"op_code": 0}])


# Other processes


def test_only_a_folder_in_use_is_waited_for(tmp_path):
    held = ExitStack()
    held.enter_context(locked(tmp_path))
    with pytest.raises(FolderInUseError), locked(tmp_path, retries=0):
        pass
    threading.Timer(0.1, held.close).start()
    with locked(tmp_path, retries=10**9):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(GradalignError, match="cannot use") as refused, locked(tmp_path / "file", retries=10**9):
        pass
    assert not isinstance(refused.value, FolderInUseError)


def test_a_database_is_tried_again_only_where_another_process_was_faster(monkeypatch):
    """Two machines that make the tables of a new database at once."""
    met = [sqlalchemy.exc.ProgrammingError("create table", {}, Exception("studies exists"))]

    def collide(url, **options):
        if met:
            raise met.pop()
        return url

    monkeypatch.setattr("gradalign.sweep.storage.RDBStorage", collide)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with opened_database("postgresql://tuner:secret@db/optuna") as storage:
        assert storage == "postgresql://tuner:secret@db/optuna"
    for error, tries in ((ModuleNotFoundError("no driver"), 1), (sqlalchemy.exc.OperationalError("", {}, "no"), 3)):
        met += [error] * 5
        with (
            pytest.raises(GradalignError, match="cannot use the storage postgresql://tuner@db/optuna"),
            opened_database("postgresql://tuner:secret@db/optuna"),
        ):
            pass
        assert len(met) == 5 - tries
        met.clear()

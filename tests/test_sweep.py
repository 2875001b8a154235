"""The sweep's logic without training: lists, stages, early termination, who does which trial."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import optuna
import pytest
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.pruners import NopPruner
from optuna.trial import TrialState, create_trial

from gradalign.errors import FolderInUseError, GradalignError
from gradalign.recipes.recipe import load_recipe, shipped_recipes
from gradalign.sweep.grid import apply_point, choose_lists, fine_values, parse_grid
from gradalign.sweep.plan import locked_in_turn
from gradalign.sweep.protocol import Outcome, Search, Stage, baseline_of, finalists_of, tune
from gradalign.sweep.pruner import BelowBestPruner, clearly_below
from gradalign.sweep.storage import _collided, check_sweep, open_storage, register_sweep
from gradalign.sweep.study import Job, StageStudy
from gradalign.sweep.workers import working_in


def analytic(point: dict, entry: str) -> float | None:
    """A score with one known maximum: lr 0.2, K 10, and for FedGA beta 0.05; lr 0.4 diverges."""
    if point["lr"] == 0.4:
        return None
    score = 0.9 - abs(math.log(point["lr"] / 0.2)) / 10 - abs(math.log(point["K"] / 10)) / 20
    return score if entry == "fedavg" else score + 0.05 - abs(math.log(point["beta"] / 0.05)) / 50


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


def test_a_point_takes_its_places():
    tables = {
        "local": {"lr": {"kind": "cosine", "value": 0.1, "end": 0.0}, "epochs": 2},
        "algorithm": {"name": "fedga"},
    }
    changed = apply_point(tables, {"lr": 0.3, "K": 4, "beta": 0.5, "batch": "whole"})
    assert changed["local"] == {"lr": {"kind": "cosine", "value": 0.3, "end": 0.0}, "steps": 4, "batch_size": "whole"}
    assert changed["algorithm"] == {"name": "fedga", "beta": 0.5}
    assert tables["local"]["epochs"] == 2, "the tables themselves stay"


def test_clearly_below_by_hand():
    assert not clearly_below(0.64, [0.8], 0.2), "exactly 20 % below 0.8 is not more than 20 %"
    assert clearly_below(0.6399, [0.8, 0.5], 0.2)
    assert not clearly_below(0.1, [], 0.2), "alone, nobody is below"
    assert not clearly_below(0.9, [0.8], 0.0)
    assert clearly_below(0.79, [0.8], 0.0)
    assert not clearly_below(-1.19, [-1.0], 0.2), "scores that are minus a loss"
    assert clearly_below(-1.21, [-1.0], 0.2)


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
    assert not BelowBestPruner(0.2).prune(study, create_trial(state=TrialState.RUNNING))


def book(tmp_path: Path, worker, *, lists=None, grace: float = 120.0, name: str = "x/s") -> StageStudy:
    storage = open_storage(f"sqlite:///{tmp_path / 'study.db'}")
    return StageStudy(
        storage,
        name,
        worker,
        lists=lists or {"lr": [0.1, 0.2]},
        fixed={"K": 3},
        pruner=NopPruner(),
        seed=5,
        grace=grace,
    )


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
        outcomes = mine.outcomes(JOBS, "s", "fedavg")
        assert [(o.state, o.score) for o in outcomes] == [("diverged", None), ("complete", 0.75)]
        assert outcomes[1].facts["seconds"] == 1.5


def test_of_two_claims_at_once_the_lower_number_owns(tmp_path, monkeypatch):
    """Both see the job free and create a trial; the second then finds the first and steps back to the other job."""
    with working_in(tmp_path) as one, working_in(tmp_path) as two:
        mine, other = book(tmp_path, one), book(tmp_path, two)
        template, raced = mine._template, []

        def race(job):
            if not raced:
                raced.append(other.claim(JOBS))
            return template(job)

        monkeypatch.setattr(mine, "_template", race)
        claim = mine.claim(JOBS)
        assert raced[0].job.slot == 0
        assert claim.job.slot == 1


def test_trials_of_a_dead_process_are_done_again(tmp_path):
    with working_in(tmp_path) as alive:
        with suppress(KeyboardInterrupt), working_in(tmp_path) as dead:
            assert book(tmp_path, dead).claim(JOBS).job.slot == 0
            assert book(tmp_path, alive).claim(JOBS[:1]) is None, "it is alive: its lock is held"
            raise KeyboardInterrupt  # at a moment when nothing is given back
        assert book(tmp_path, alive).claim(JOBS[:1]).job.slot == 0


def test_a_heartbeat_that_stands_still_is_noticed_from_another_machine(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    with working_in(here) as mine, working_in(there) as other:
        far = book(tmp_path, other)
        claim = far.claim(JOBS)
        near = book(tmp_path, mine, grace=0.2)
        assert near.claim(JOBS[:1]) is None, "seen for the first time"
        time.sleep(0.25)
        claim.trial.set_user_attr("beat", 1)
        assert near.claim(JOBS[:1]) is None, "it has moved"
        time.sleep(0.25)
        assert near.claim(JOBS[:1]).job.slot == 0
        far.settle(claim, "complete", 1.0, {})  # not dead after all: what it brings comes too late
        assert near.outcomes(JOBS, "s", "e")[0].state == "running"


def test_tpe_draws_between_the_ends_and_from_its_seed(tmp_path):
    lists = {"lr": [0.01, 1.0], "weight_decay": [0.0, 0.1], "batch": [8, "whole"]}
    jobs = [Job(slot=slot, seed=0, point=None) for slot in range(14)]
    drawn = []
    with working_in(tmp_path) as worker:
        for name in ("a/s", "b/s"):
            one = book(tmp_path, worker, lists=lists, name=name)
            while (claim := one.claim(jobs)) is not None:
                one.settle(claim, "complete", -((math.log(claim.point["lr"]) + 2.3) ** 2), {})
            drawn.append([outcome.point for outcome in one.outcomes(jobs, "s", "e")])
    assert drawn[0] == drawn[1], "one seed, one sequence"
    assert len({point["lr"] for point in drawn[0]}) == 14
    for point in drawn[0]:
        assert 0.01 <= point["lr"] <= 1.0
        assert point["weight_decay"] in (0.0, 0.1)
        assert point["batch"] in (8, "whole")
        assert point["K"] == 3


def test_a_storage_remembers_whose_it_is(tmp_path):
    url = f"sqlite:///{tmp_path / 's.db'}"
    register_sweep(open_storage(url), "mine", {"grid": {"lr": [0.1]}, "seed": 0})
    register_sweep(open_storage(url), "mine", {"grid": {"lr": [0.1]}, "seed": 0})
    with pytest.raises(GradalignError, match=r"another sweep under the name \"mine\": seed \(0 there, 1 now\)"):
        check_sweep(open_storage(url), "mine", {"grid": {"lr": [0.1]}, "seed": 1})
    check_sweep(open_storage(url), "unknown", {})
    assert json.dumps(optuna.load_study(study_name="mine", storage=url).user_attrs)


# Other processes


def test_only_a_folder_in_use_is_waited_for(tmp_path, monkeypatch):
    """The kind of an error decides, not its words."""
    met = [FolderInUseError("words that nobody reads"), FolderInUseError("and others")]

    @contextmanager
    def busy(folder):
        if met:
            raise met.pop()
        yield

    monkeypatch.setattr("gradalign.sweep.plan.locked", busy)
    with locked_in_turn(tmp_path, 10.0):
        assert met == []
    met += [FolderInUseError("still in use")]
    with pytest.raises(FolderInUseError), locked_in_turn(tmp_path, -1.0):
        pass
    met += [GradalignError("another process is writing to the disk's last sector"), FolderInUseError("busy")]
    with pytest.raises(GradalignError, match="last sector"), locked_in_turn(tmp_path, 10.0):
        pass


def test_a_database_is_tried_again_only_where_another_process_was_faster(tmp_path):
    first = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    first.execute("create table t (x integer unique)")
    first.execute("insert into t values (1)")
    (tmp_path / "text.db").write_text("this is not a database, and will not become one by waiting" * 20)

    def failing(file, statement):
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / file}", connect_args={"timeout": 0})
        with pytest.raises(sqlalchemy.exc.DatabaseError) as caught, engine.begin() as connection:
            connection.execute(sqlalchemy.text(statement))
        return caught.value

    assert _collided(failing("a.db", "create table t (x integer)"))
    assert _collided(failing("a.db", "insert into t values (1)"))
    wrapped = StorageInternalError("locked, or not")
    wrapped.__cause__ = failing("text.db", "select 1 from t")
    assert not _collided(wrapped)
    assert not _collided(failing("no/such/folder/a.db", "create table t (x integer)"))
    first.execute("begin exclusive")
    wrapped.__cause__ = failing("a.db", "insert into t values (2)")
    assert _collided(wrapped)
    first.close()

"""Algorithms and server rules of a user's own: the how-to's code, against numbers worked by hand, on every engine."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import gradalign as ga
from conftest import Quadratics, vector
from gradalign.algorithms.plan import combine
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.engines.pool import PoolEngine
from gradalign.recipes.build import build_algorithm
from gradalign.recipes.names import rule_of
from gradalign.recipes.spec import validate
from gradalign.server.federation import describe, make_federation
from gradalign.server.rounds import _Round, play_round
from gradalign.server.state import ServerState
from test_cli import call

PAGE = (Path(__file__).parent.parent / "docs/own-algorithm.md").read_text(encoding="utf-8")
CODE = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
SMALL = ("--set", "rounds=2", "--set", "task.clients=5", "--set", "clients.per_round=3")


@pytest.fixture(autouse=True)
def rules(tmp_path, monkeypatch):
    """The how-to's module, in the folder where commands are given."""
    monkeypatch.chdir(tmp_path)
    Path("my_rules.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    import my_rules

    return my_rules


def pulled(*clients: tuple[int, float]) -> ga.Task:
    """A client (n, c) has n examples of (w − c)²: with lr ¼ a step halves w − c, and from 0 n steps go c(1 − 2⁻ⁿ)."""

    def model() -> nn.Module:
        one = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(one.weight)
        return one

    data = [(torch.ones(n, 1).double(), torch.full((n, 1), c).double()) for n, c in clients]
    return ga.Task(model=model, clients=data, loss=nn.functional.mse_loss, accuracy=lambda outputs, targets: None)


def trained(task: ga.Task, rule: ga.ServerRule, **more) -> float:
    local = ga.LocalTraining(lr=0.25, epochs=1, batch_size=1)
    return float(vector(ga.run(task, rule, rounds=1, local=local, weights="examples", workers=0, **more)))


@pytest.mark.parametrize("engine", ["local", "flower"])
def test_fednova_by_hand(rules, engine):
    """Δ = 4(1 − ½) = 2 in one step and 8(1 − ⅛) = 7 in three, p = ¼ and ¾: u = ½ + 7/4, times τ = ¼ + 9/4."""
    pytest.importorskip("flwr" if engine == "flower" else "torch")
    task = pulled((1, 4.0), (3, 8.0))
    assert trained(task, rules.FedNova(), engine=engine) == pytest.approx(2.25 * 2.5)
    assert trained(task, ga.ServerRule(), engine=engine) == pytest.approx(0.5 + 0.75 * 7)
    assert trained(task, rules.FedNova(lr=0.5), engine=engine) == pytest.approx(2.25 * 2.5 / 2)


def test_fedexp_by_hand(rules):
    """Δ = 6 and −1, p = ¼ and ¾: u = ¾, Σ p‖Δ‖² = 39/4. Where updates agree the step is FedAvg's."""
    task = pulled((1, 12.0), (3, -8.0 / 7.0))
    assert trained(task, rules.FedExP(epsilon=0.1)) == pytest.approx(0.75 * 9.75 / (2 * (0.5625 + 0.1)))
    assert trained(pulled((1, 4.0), (3, 8.0)), rules.FedExP()) == pytest.approx(5.75)


def test_dropout_and_other_parts_leave_shares_that_add_up(rules):
    """A rule is told of those who answered alone; corrections of the update come after its factors."""
    told = []

    @dataclass(frozen=True, kw_only=True)
    class Listening(ga.ServerRule):
        sees_each = True

        def factor(self, one):
            return 10.0 + one.client

        def step(self, x, update, memory, clients=()):
            told.append((update.clone(), clients))
            return x, {}

    problem = Quadratics.make(4, examples=(3, 1, 4, 2))
    local = ga.LocalTraining(lr=0.1, steps=1, batch_size=2)
    options = {"per_round": 4, "weights": "examples", "dropout": 0.5, "seed": 3}
    federation = make_federation(problem.task(), ga.LinearScaling(aligned=False) + Listening(), local, **options)
    state = ServerState(point=_point(problem.task()))
    with InProcessEngine(Setup(task=problem.task(), local=federation.local, seed=3)) as engine:
        play_round(federation, engine, state)
    ((update, clients),) = told
    answered = [client for client in range(4) if not federation.silent(0, client)]
    assert 0 < len(answered) < 4
    assert [one.client for one in clients] == answered
    sizes = {client: len(problem.centres[client]) for client in answered}
    assert [one.weight for one in clients] == pytest.approx([sizes[c] / sum(sizes.values()) for c in answered])
    assert [one.steps for one in clients] == [1] * len(answered)
    assert [one.total_step_size for one in clients] == pytest.approx([0.1] * len(answered))
    # One step on a batch of one or two: the update is −0.1 times the gradient over that batch.
    with InProcessEngine(Setup(task=problem.task(), local=federation.local, seed=3)) as engine:
        plain = make_federation(problem.task(), combine(ga.FedAvg()), local, **options | {"dropout": 0.0})
        play = _Round(plain, state)
        seen = {r.clients[0]: r.vector.clone() for r in engine.train(play.told, list(play.participants()))}
    assert [one.norm for one in clients] == pytest.approx([float(seen[c].norm()) for c in answered])
    wanted = sum(sizes[c] * (10.0 + c) * seen[c] for c in answered) / sum(sizes.values()) * len(answered)
    assert torch.allclose(update, wanted)


def _point(task: ga.Task):
    return FlatModel(task.make_model(0)).read()


def test_the_same_bits_on_every_engine(rules):
    pytest.importorskip("flwr")
    local = ga.LocalTraining(lr=0.05, epochs=1, batch_size=2)
    problem, algorithm = Quadratics.make(4, examples=(3, 1, 4, 2)), rules.HalfStep(share=0.3) + rules.FedNova()
    options = {"rounds": 3, "local": local, "weights": "examples", "fast": False}
    alone = ga.run(problem.task(), algorithm, workers=0, **options)
    for more in ({"workers": 2}, {"engine": "flower"}):
        assert torch.equal(vector(ga.run(problem.task(), algorithm, **more, **options)), vector(alone)), more


def test_spawned_workers_import_it(rules):
    """Where workers are not forked they know of the class only by its name."""
    clients = [(torch.ones(n, 1), torch.zeros(n, dtype=torch.int64)) for n in (2, 3)]
    task = ga.Task(model=_two_classes, clients=clients)
    algorithm = rules.HalfStep(share=0.3) + rules.FedExP()
    options = {"per_round": 2, "weights": "uniform", "dropout": 0.0, "seed": 0}
    federation = make_federation(task, algorithm, ga.LocalTraining(lr=0.1, steps=2), **options)
    setup = Setup(task=task, local=federation.local, algorithm=algorithm, clients_per_round=2)
    found = []
    for make in (lambda: PoolEngine(setup, 1, method="spawn"), lambda: InProcessEngine(setup)):
        with make() as engine:
            state, _ = play_round(federation, engine, ServerState(point=_point(task)))
            found.append(state.point.x)
    assert torch.equal(*found)


def _two_classes() -> nn.Module:
    return nn.Linear(1, 2)


def test_recipes_commands_folders_and_reports_name_it(rules):
    """The how-to's commands, small; a sweep; resuming; and the page, which imports nothing."""
    assert "FedExP(lr=1.0, epsilon=0.001)" in call("algorithms", "my_rules:FedNova", "my_rules:FedExP").stdout
    command = re.search(r"^gradalign (compare .*)$", PAGE, flags=re.MULTILINE)[1].split()
    call(*command, *SMALL, "--seeds", 1, "--workers", 0, "--out", "compared")
    specs = {path.parent.parent.name.split("-")[0]: path.read_text() for path in Path("compared").glob("*/*/spec.toml")}
    assert specs.keys() == {"fedavg", "my_rules", "fedga+my_rules"}
    assert "epsilon = 0.01" in specs["my_rules"]
    assert "epsilon" not in specs["fedavg"] + specs["fedga+my_rules"]
    page = Path("compared/report.html").read_text()
    assert "names code that does not come with gradalign: <code>my_rules:FedExP</code>" in page
    chosen = ("--set", "algorithm.name=fedprox+my_rules:FedExP", "--set", "server.epsilon=0.5")
    for more in (("--engine", "flower"), ("--engine", "flower", "--resume"), ("--workers", 2, "--resume")):
        call("run", "digits", *SMALL, *chosen, *more, "--out", "ran")
    told = call("run", "ran/spec.toml", "--out", "again", code=2).stderr
    assert 'its algorithm "fedprox+my_rules:FedExP" is code from outside gradalign' in told
    call("run", "ran/spec.toml", "--out", "again", "--workers", 0, "--trust-task")
    assert Path("again/model.safetensors").read_bytes() == Path("ran/model.safetensors").read_bytes()
    grid = [word for one in ("lr=.1", "batch=8", "epochs=1", "weight_decay=0") for word in ("--grid", one)]
    call(
        "sweep", "digits", *SMALL, *grid, "--algorithm", "my_rules:HalfStep", "--seeds", 1, "--workers", 0, "--out", "s"
    )
    assert 'name = "my_rules:HalfStep"' in Path("s/best.toml").read_text()


@pytest.mark.parametrize("place", ["compare", "entries", "own"])
def test_a_strangers_algorithm_is_not_imported_unasked(place):
    Path("theirs.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    Path("given").mkdir()
    texts = {
        "own": '[algorithm]\nname = "fedprox+theirs:X"\n',
        "entries": '[compare]\nalgorithms = ["fedavg", "theirs:X"]\n',
        "compare": '[compare.settings.fedavg]\nalgorithm.name = "theirs:X"\n',
    }
    Path("given/spec.toml").write_text('[task]\nname = "digits"\n' + texts[place])
    for words in ((), ("--algorithms", "fedavg"), ("--set", "task.name=digits"), ("--set", "algorithm.name=fedavg")):
        told = call("compare", "given/spec.toml", *words, "--out", "out", code=2).stderr
        assert "is code from outside gradalign" in told
        assert told.count("\n") == 1
    assert not Path("imported").exists()
    assert not Path("out").exists()


def test_what_ga_run_writes_can_be_run_as_a_recipe(rules):
    algorithm = rules.HalfStep(share=0.3) + rules.FedExP(epsilon=0.5)
    options = {"per_round": 2, "weights": "uniform", "dropout": 0.0, "seed": 0}
    federation = make_federation(Quadratics.make(2).task(), algorithm, ga.LocalTraining(), **options)
    spec = validate(describe(federation, ga.Measure()), "spec.toml")
    assert spec.algorithm.name == "my_rules:HalfStep+my_rules:FedExP"
    assert build_algorithm(spec.algorithm, spec.server) == algorithm
    assert rule_of("my_rules:FedExP") is rules.FedExP


BROKEN = """
from dataclasses import dataclass
import gradalign as ga

class Plans(ga.Algorithm):
    def plan(self, view):
        return view.nothing

class Steps(ga.ServerRule):
    def step(self, x, update, memory, clients=()):
        return x / {}

@dataclass(frozen=True, kw_only=True)
class Refuses(ga.Algorithm):
    share: float = 0.5
    def __post_init__(self):
        raise KeyError(self.share)

number = 3
"""
MISTAKES = {
    "broken:Plans": r"client \d failed: AttributeError: .*broken.py, line 7\)",
    "broken:Steps": r"the server's part of steps failed: TypeError: .*broken.py, line 11\)",
    "broken:Refuses": r"Refuses could not be made: KeyError: 0.5 .*broken.py, line 17\)",
    "broken:number": "broken:number is not a subclass of gradalign.Algorithm or gradalign.ServerRule",
    "broken:Absent": 'the module broken has no "Absent"',
    "absent:Plans": "cannot import \"absent\": ModuleNotFoundError: No module named 'absent'",
    "broken:": '"broken:" is not package.module:Class',
    "worse:Plans": r"importing worse failed: ZeroDivisionError: division by zero .*worse.py, line 1\)",
    "my_rules:FedExP+fedadam": "names more than one server rule",
    "my_rules:HalfStep+my_rules:HalfSteps": 'the module my_rules has no "HalfSteps"',
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_sentence_with_file_and_line(name):
    Path("broken.py").write_text(BROKEN)
    Path("worse.py").write_text("1 / 0")
    for module in ("broken", "worse"):
        sys.modules.pop(module, None)
    told = call(
        "run", "digits", *SMALL, "--set", f"algorithm.name={name}", "--workers", 0, "--out", "out", code=2
    ).stderr
    assert re.search(MISTAKES[name], told), told
    assert told.count("\n") == 1


def test_a_flower_client_imports_only_what_it_allows(rules):
    pytest.importorskip("flwr")
    from gradalign.flower import messages

    order = messages.Order(
        client=0, round=0, seed=0, local=ga.LocalTraining(), parts=({"name": "halfstep", "share": 0.3},)
    )
    found = messages.algorithm_of(order, messages.own_classes(["my_rules:HalfStep"]))
    assert found.parts == (rules.HalfStep(share=0.3),)
    for allowed in ([], ["my_rules:FedNova"], ["fedprox"]):
        with pytest.raises(ga.GradalignError, match='does not know the algorithm "halfstep"'):
            messages.algorithm_of(order, messages.own_classes(allowed))
    with pytest.raises(ga.GradalignError, match="has no"):
        messages.own_classes(["my_rules:Absent"])

"""The diagnosis on data whose answer is known: random clients, one class per client, clients that agree."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from gradalign.alignment import Probe
from gradalign.diagnose import beta_range, diagnose, random_split, verdict_of
from gradalign.errors import GradalignError
from gradalign.tasks.digits import digits
from gradalign.tasks.task import Task


@pytest.fixture(scope="module")
def iid():
    return diagnose(digits(partition="iid", clients=10), lr=0.1, steps=10)


@pytest.fixture(scope="module")
def one_class():
    return diagnose(digits(partition="classes", classes_per_client=1, clients=10), lr=0.05, steps=10)


def test_random_clients_look_like_random_clients(iid):
    assert iid.verdict == "iid-like"
    assert iid.excess == pytest.approx(1.0, abs=0.35)
    assert iid.chance == pytest.approx(1.0, abs=0.35)  # the disagreement is all sampling noise
    assert iid.between == pytest.approx(iid.between_random, abs=0.1)


def test_one_class_per_client_is_misaligned(one_class):
    assert one_class.verdict == "misaligned"
    assert one_class.excess > 10.0
    assert one_class.chance < 0.1
    assert one_class.between < 0.1 < 0.9 < one_class.within


def test_beta_has_the_paper_s_orders_of_magnitude(iid, one_class):
    # EMNIST: 1.5 to 2.5 for IID clients, 0.025 to 0.05 for one class per client at α = 0.05.
    assert iid.beta_low < 2.0 < 2.0 * iid.beta_high
    assert one_class.beta_low < 0.05
    assert one_class.beta_high > 0.025
    assert one_class.beta_high < 0.15
    assert math.sqrt(iid.beta_low * iid.beta_high) > 10 * math.sqrt(one_class.beta_low * one_class.beta_high)


def test_numbers_are_consistent(one_class):
    assert one_class.relative == pytest.approx(math.sqrt(2 * one_class.r) / one_class.mean_norm)
    assert one_class.relative_min <= one_class.relative_median <= one_class.relative_max
    assert one_class.relative_min <= one_class.relative <= one_class.relative_max
    assert one_class.beta_scaffold == pytest.approx(0.05 * 9 / 2)
    assert f"{one_class.relative:.2g} times" in one_class.sentence


def test_beta_range_by_hand():
    assert beta_range(relative=2.0, lr=0.1, steps=10) == pytest.approx((0.125, 0.5))
    assert beta_range(relative=0.0, lr=0.1, steps=10) == (math.inf, math.inf)


def test_verdicts():
    assert verdict_of(0.1, 50.0) == "aligned"
    assert verdict_of(1.0, 1.1) == "iid-like"
    assert verdict_of(1.0, 3.0) == "misaligned"
    assert verdict_of(1.0, None) == "misaligned"


def test_equal_clients_are_aligned():
    task = digits(partition="iid", clients=4)
    batch = task.client(0).batch(torch.arange(50))
    found = diagnose(Task(model=task.model, clients=[batch, batch, batch]))
    assert found.verdict == "aligned"
    assert found.relative == pytest.approx(0.0, abs=1e-6)
    assert found.between == pytest.approx(1.0)


def test_the_random_split_keeps_sizes_and_deals_every_example_once():
    labels = torch.arange(12)
    inputs = labels.float()[:, None].repeat(1, 3)
    parts = [slice(0, 2), slice(2, 7), slice(7, 12)]
    model = torch.nn.Linear(3, 12)
    probe = Probe(Task(model=model, clients=[(inputs[part], labels[part]) for part in parts]))
    split = random_split(probe)
    assert [len(examples) for examples in split] == [2, 5, 5]
    batches = [examples.batch(torch.arange(len(examples))) for examples in split]
    assert sorted(int(label) for _, dealt in batches for label in dealt) == list(range(12))
    for dealt_inputs, dealt_labels in batches:
        assert torch.equal(dealt_inputs[:, 0].long(), dealt_labels)  # inputs stay with their labels


def test_examples_that_cannot_be_mixed_leave_the_null_out():
    clients = [(torch.randn(4, 3), torch.zeros(4)), (torch.randn(4, 5), torch.zeros(4))]
    task = Task(
        model=torch.nn.Linear(1, 1),
        clients=clients,
        predict=lambda model, batch: (model(batch[0].square().mean(dim=1, keepdim=True)), batch[1]),
        loss=lambda outputs, targets: (outputs[:, 0] - targets).square().mean(),
    )
    found = diagnose(task)
    assert found.r_random is None
    assert found.excess is None
    assert "random split" not in found.sentence


@pytest.mark.parametrize(
    "options", [{"lr": 0.0}, {"lr": math.nan}, {"steps": 0}, {"clients": 1}, {"examples": 0}], ids=str
)
def test_bad_settings_are_refused(options):
    with pytest.raises(GradalignError, match=next(iter(options))):
        diagnose(digits(clients=10), **options)


def test_one_client_is_refused():
    task = digits(clients=10)
    with pytest.raises(GradalignError, match="one client"):
        diagnose(Task(model=task.model, clients=[task.clients[0]]))


def run_cli(*arguments):
    import typer

    from gradalign.theory_cli import register

    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_the_sentence_and_json():
    text = run_cli("diagnose", "digits", "--clients", "5", "--examples", "20", "--lr", "0.2", "--steps", "5")
    assert text.exit_code == 0
    assert "search β from" in " ".join(text.stdout.split())
    data = json.loads(run_cli("diagnose", "digits", "--clients", "5", "--json").stdout)
    assert data["clients"] == 5
    assert data["verdict"] == "misaligned"


def test_an_unknown_task_is_one_line_and_exit_code_2():
    result = run_cli("diagnose", "nosuchtask")
    assert result.exit_code == 2
    assert "nosuchtask" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1

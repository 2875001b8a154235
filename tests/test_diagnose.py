"""The diagnosis on data whose answer is known: random clients, one class per client, clients that agree."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gradalign.errors import GradalignError
from gradalign.tasks.digits import digits
from gradalign.tasks.task import Task
from gradalign.theory.diagnose import beta_range, diagnose, form_to_try, verdict_of
from gradalign.theory.probe import Probe, spread
from gradalign.theory.random_splits import distinct_splits, pieces_of, r_and_cosine, random_split


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
    assert beta_range(relative=0.0, lr=0.1, steps=10) is None
    assert beta_range(relative=0.009, lr=0.1, steps=10) is None
    assert beta_range(relative=1e9, lr=0.1, steps=10) is None  # the mean is rounding


def test_verdicts():
    assert verdict_of(0.1, 50.0, 0.05) == "aligned"
    assert verdict_of(1.0, 1.1, 0.05) == "iid-like"  # sure, but hardly more than chance
    assert verdict_of(1.0, 3.0, 0.1) == "iid-like"  # much, but chance does that too
    assert verdict_of(1.0, 3.0, 0.05) == "misaligned"
    assert verdict_of(1.0, None, None) == "unknown"


def test_equal_clients_are_aligned():
    task = digits(partition="iid", clients=4)
    batch = task.client(0).batch(torch.arange(50))
    found = diagnose(Task(model=task.model, clients=[batch, batch, batch]))
    assert found.verdict == "aligned"
    assert found.relative == pytest.approx(0.0, abs=1e-6)
    assert found.between == pytest.approx(1.0)
    assert found.beta_low is found.beta_high is None
    assert "search" not in found.sentence


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
    clients = [(torch.ones(4, 3), torch.full((4,), 10.0)), (torch.ones(4, 5), torch.full((4,), -10.0))]
    task = Task(
        model=torch.nn.Linear(1, 1),
        clients=clients,
        predict=lambda model, batch: (model(batch[0].square().mean(dim=1, keepdim=True)), batch[1]),
        loss=lambda outputs, targets: (outputs[:, 0] - targets).square().mean(),
    )
    found = diagnose(task)
    assert found.r_random is None
    assert found.excess is None
    assert found.verdict == "unknown"
    assert "cannot be told" in found.sentence
    assert "differ in shape" in found.sentence


@pytest.mark.parametrize(
    "options", [{"lr": 0.0}, {"lr": math.nan}, {"steps": 0}, {"clients": 1}, {"examples": 0}, {"splits": 18}], ids=str
)
def test_bad_settings_are_refused(options):
    with pytest.raises(GradalignError, match=next(iter(options))):
        diagnose(digits(clients=10), **options)


def test_one_client_is_refused():
    task = digits(clients=10)
    with pytest.raises(GradalignError, match="one client"):
        diagnose(Task(model=task.model, clients=[task.clients[0]]))


def run_cli(*arguments):
    from gradalign.cli.app import app

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


def trial(seed: int, *, clients: int, examples: int, shift: float = 0.0, as_dataset: bool = False) -> Task:
    """Clients drawn from one population; ``shift`` moves each one's labels its own way."""
    rng = np.random.default_rng(seed)
    truth, made = rng.normal(size=4), []
    for _ in range(clients):
        inputs = rng.normal(size=(examples, 4))
        labels = (inputs @ (truth + shift * rng.normal(size=4)) + rng.normal(size=examples) > 0).astype(np.int64)
        pair = torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(labels)
        made.append([(x, int(y)) for x, y in zip(*pair, strict=True)] if as_dataset else pair)
    return Task(model=lambda: torch.nn.Linear(4, 2), clients=made)


@pytest.fixture(scope="module")
def random_trials():
    """Few random clients with few examples, where one random split is no measure."""
    shapes = [(3, 8), (4, 5)]
    return [diagnose(trial(s, clients=shapes[s % 2][0], examples=shapes[s % 2][1]), seed=s) for s in range(36)]


def test_random_clients_are_called_misaligned_at_most_at_the_level(random_trials):
    """5 % of 36 trials are 1.8; more than 6 have a chance of 0.2 %."""
    assert sum(found.verdict == "misaligned" for found in random_trials) <= 6


def test_p_values_of_random_clients_are_not_too_small(random_trials):
    """The law of a permutation test: P(p ≤ ½) ≤ ½. Of 36 trials, 28 or more below have a chance of 0.06 %."""
    found = [each.p_value for each in random_trials]
    assert sum(p <= 0.5 for p in found) < 28
    assert all(p * 20 == pytest.approx(round(p * 20)) for p in found)
    assert min(found) >= 0.05


def test_clients_of_their_own_are_found():
    found = [diagnose(trial(seed, clients=5, examples=40, shift=3.0), seed=seed) for seed in range(6)]
    assert [each.verdict for each in found].count("misaligned") >= 5


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_a_dataset_is_told_like_its_tensors(shift):
    one, other = (
        diagnose(trial(7, clients=5, examples=20, shift=shift, as_dataset=kind), seed=7) for kind in (False, True)
    )
    assert one.verdict == other.verdict == ("misaligned" if shift else "iid-like")
    assert one.p_value == other.p_value
    assert one.r_random == pytest.approx(other.r_random, rel=1e-5)


def test_too_few_examples_to_tell():
    found = diagnose(trial(0, clients=5, examples=1))
    assert found.verdict in ("unknown", "aligned")
    assert found.p_value is None
    # 4 examples: {ab|cd}, {ac|bd}, {ad|bc}. Sizes 1 and 3: 4 ways. Four single ones: 1.
    assert distinct_splits([2, 2]) == pytest.approx(3.0)
    assert distinct_splits([1, 3]) == pytest.approx(4.0)
    assert distinct_splits([1, 1, 1, 1]) == pytest.approx(1.0)


def test_a_mixture_that_the_model_refuses_is_unknown_not_misaligned():
    def predict(model, batch):
        if len({float(value) for value in batch[0][:, 0].round()}) > 1:
            raise KeyError("one client at a time")
        return model(batch[0]), batch[1]

    clients = [(torch.full((6, 2), float(n)) + 0.1 * torch.randn(6, 2), torch.full((6,), n % 2)) for n in range(4)]
    found = diagnose(Task(model=torch.nn.Linear(2, 2), clients=clients, predict=predict))
    assert found.verdict == "unknown"
    assert "one client at a time" in found.sentence


def test_r_of_a_split_is_that_of_two_passes():
    probe = Probe(trial(3, clients=4, examples=9))
    point, parts = probe.start(), random_split(probe, 5)
    expected = spread(Probe(Task(model=probe.task.model, clients=parts)), point)
    assert r_and_cosine(probe, point, parts) == pytest.approx((expected.r, expected.pairwise))


def test_overlapping_examples_are_dealt_in_pieces():
    """Every example ten times over: dealt one by one, random clients would look far more alike than they are."""
    plain = trial(11, clients=4, examples=8)
    copies = [(x.repeat_interleave(10, 0), y.repeat_interleave(10)) for x, y in plain.clients]
    groups = [np.arange(8).repeat(10) + 8 * client for client in range(4)]
    blind = diagnose(Task(model=plain.model, clients=copies), seed=11)
    told = diagnose(Task(model=plain.model, clients=copies, groups=groups), seed=11)
    alone = diagnose(plain, seed=11)
    assert blind.excess > 3.0
    assert told.excess == pytest.approx(alone.excess, rel=0.5)
    assert told.verdict == "iid-like"
    assert [
        len(piece) for own in pieces_of(Probe(Task(model=plain.model, clients=copies, groups=groups))) for piece in own
    ] == [10] * 32


def shown(*words: object, code: int = 0):
    result = run_cli("diagnose", *(str(word) for word in words))
    assert result.exit_code == code, result.output + result.stderr
    return result


def test_a_recipe_brings_its_task_its_lr_and_its_steps(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        """
        name = "mine"
        seed = 3
        [task]
        name = "digits"
        clients = 6
        partition = "iid"
        [algorithm]
        name = "fedavg"
        [local]
        lr = {kind = "cosine", value = 0.3, rounds = 50}
        epochs = 2
        batch_size = 32
        gradient_examples = 100
        """
    )
    found = json.loads(shown(recipe, "--json").stdout)
    # 1,348 training digits: 4 clients have 225, 8 batches of 32 an epoch, and 2 have 224, 7 batches.
    assert (found["clients"], found["lr"], found["steps"]) == (6, 0.3, 16)
    assert found["trained"] == pytest.approx((4 * 16 * 32 + 2 * 14 * 32) / 6)
    assert found["gradient_examples"] == 100
    assert "100 examples a client beside the 491 of its steps (+20%)" in found["form"]
    other = json.loads(shown(recipe, "--json", "--lr", 0.1, "--steps", 3, "--set", "clients=4", "--seed", 1).stdout)
    assert (other["clients"], other["lr"], other["steps"], other["trained"]) == (4, 0.1, 3, 96)
    # 100 examples are more than the 96 of three batches; a batch is a third of those.
    assert "Try FedGA() with local.gradient_examples = 32 (+33%)" in other["form"]
    assert "there is no recipe file" in shown(tmp_path / "none.toml", code=2).stderr
    text = recipe.read_text().replace(", rounds = 50", "").replace('"cosine"', '"warmup", share = 0.5')
    recipe.write_text(text)
    assert json.loads(shown(recipe, "--json", "--set", "rounds=8", "--trust-task").stdout)["lr"] == 0.3


@pytest.mark.parametrize("verdict", ["iid-like", "misaligned", "unknown"])
def test_the_form_to_try_is_the_cheapest_that_can_help(verdict):
    """64 examples beside 320 are a fifth, 640 beside 160 four times as many; a batch of 40 is a quarter of 160."""
    cheap, dear = form_to_try(verdict, 320.0, 64.0, 32.0), form_to_try(verdict, 160.0, 640.0, 40.0)
    assert "64 examples a client beside the 320 of its steps (+20%)" in cheap
    assert "Try FedGA(): its beta sets itself; a sweep over beta is an option." in cheap
    assert "640 examples a client beside the 160 of its steps (+400%)" in dear
    assert "Try FedGA() with local.gradient_examples = 40 (+25%)" in dear
    for words in (cheap, dear):
        assert "FedGA() costs 1 trip a round as FedAvg does, a vector more down (about half again FedAvg's" in words
        assert "kept" not in words


@pytest.mark.parametrize("verdict", ["iid-like", "misaligned", "unknown"])
def test_with_one_local_step_there_is_nothing_to_try(verdict):
    words = form_to_try(verdict, 32.0, 64.0, 32.0)
    assert words.endswith("Stay with FedAvg: with one local step FedGA()'s beta is 0, there is nothing to take back.")
    assert "Try" not in words
    assert ("First try fewer local steps" in form_to_try(verdict, 64.0, 64.0, 32.0)) == (verdict == "misaligned")


@pytest.mark.parametrize("gradient", [64.0, 640.0])
def test_where_gradients_agree_nothing_is_advised(gradient):
    words = form_to_try("aligned", 320.0, gradient, 32.0)
    assert words.endswith("Stay with FedAvg: there is no alignment to gain.")
    assert "Try" not in words

"""The fast ways give the plain loop's numbers up to rounding, for any number of workers the same bits."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import gradalign as ga
from conftest import vector
from exchanges import group_of, told, trainer_of, who
from gradalign.client.flat import FlatModel, all_finite
from gradalign.fast.eligible import cohort_layers
from gradalign.fast.linear import ProductLinear
from gradalign.fast.stacks import FasterStack, filled_channels, pooled_first, run_stacks_faster
from gradalign.recipes import load_recipe
from gradalign.recipes.build import build_federation
from gradalign.tasks.digits import digits


def images(model, clients: int = 4, size: int = 12) -> ga.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients * size, 3, 14, 14, generator=generator)
    labels = torch.randint(5, (clients * size,), generator=generator)
    parts = torch.arange(clients * size).view(clients, size)
    return ga.Task(model=model, clients=ga.PartitionedClients((inputs, labels), parts), test=(inputs, labels))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(24, 5),
    )  # fmt: skip


class Viewing(nn.Module):
    """A model that depends on the memory layout of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 144, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolution(inputs).view(len(inputs), -1))


def small(clients: int, sizes: list[int]) -> ga.Task:
    """Unequal clients of a network that trains in cohorts."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for client in range(clients):
        n = sizes[client % len(sizes)]
        data.append((torch.randn(n, 2, 3, generator=generator), torch.randint(3, (n,), generator=generator)))
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, bias=False))  # noqa: E731
    return ga.Task(model=model, clients=data, test=data[0])


def has_faster_stacks(task: ga.Task) -> bool:
    model = trainer_of(task, ga.LocalTraining()).flat.module
    return any(isinstance(part.forward, FasterStack) for part in model.modules())


def both(task: ga.Task, algorithm, local: ga.LocalTraining, **options):
    return [ga.run(task, algorithm, rounds=2, local=local, workers=0, fast=fast, **options) for fast in (True, False)]


def close(runs) -> None:
    fast, plain = vector(runs[0]), vector(runs[1])
    assert fast.shape == plain.shape
    assert float((fast - plain).norm()) < 1e-5 * float(plain.norm())
    for name in ("local_updates", "examples", "bytes_up", "communication_rounds"):
        assert runs[0].history[name] == runs[1].history[name]
    for name in ("train_loss", "train_accuracy", "r", "local_loss", "test_loss"):
        expected = [value for value in runs[1].history[name] if value is not None]
        assert [value for value in runs[0].history[name] if value is not None] == pytest.approx(expected, rel=1e-4)


COMBINATIONS = [
    ga.FedAvg(),
    ga.FedGA(beta=0.2),
    ga.FedGA(beta=0.2, mean="kept", form="step"),
    ga.FedGA(beta=0.2, form="step") + ga.FedProx(mu=0.3),
    ga.Scaffold() + ga.FedProx(mu=0.3),
    ga.Scaffold(control="kept") + ga.FedDyn(alpha=0.1) + ga.FedAdam(lr=0.05),
]
LOCALS = [
    ga.LocalTraining(lr=0.1, steps=4, batch_size=4),
    ga.LocalTraining(lr=0.1, steps=5, batch_size=4, weight_decay=0.01),
    ga.LocalTraining(lr=0.1, epochs=2, batch_size=4, momentum=0.5),
    ga.LocalTraining(lr=0.1, steps=3, clip_norm=0.1),
]


@pytest.mark.parametrize("local", LOCALS, ids=["plain", "steps", "epochs", "clipped"])
@pytest.mark.parametrize("algorithm", COMBINATIONS, ids=lambda a: a.label)
def test_cohorts_agree_with_the_per_client_loop(algorithm, local):
    task = small(30, [7, 7, 4, 12])
    many, few = (group_of(task, local, clients_per_round=n) for n in (28, 5))
    said = told(many.one.flat.read(), algorithm)
    assert many.width(said) > 1, "this task should train in cohorts"
    assert few.width(said) == 1, "a few clients train one by one"
    close(both(task, algorithm, local, clients_per_round=28))


@pytest.mark.parametrize("local", LOCALS, ids=["plain", "steps", "epochs", "clipped"])
def test_images_agree_with_the_plain_layout(local):
    task = images(convolutional)
    assert has_faster_stacks(task)
    close(both(task, ga.FedGA(beta=0.1) + ga.Scaffold(), local))


@pytest.mark.parametrize("task", [images(convolutional), small(60, [7, 9])], ids=["images", "cohorts"])
def test_bits_do_not_depend_on_the_number_of_workers(task):
    local = ga.LocalTraining(lr=0.1, epochs=1, batch_size=5)
    runs = [ga.run(task, ga.FedGA(beta=0.1), rounds=2, local=local, workers=workers) for workers in (0, 1, 2, 3)]
    assert all(torch.equal(vector(run), vector(runs[0])) for run in runs[1:])


def test_models_that_depend_on_the_layout_keep_the_plain_one():
    task = images(Viewing)
    assert not has_faster_stacks(task)
    close(both(task, ga.FedAvg(), ga.LocalTraining(lr=0.1, steps=2)))


def test_pooling_first_is_exact_in_value_and_gradient():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    swapped = nn.Sequential(*pooled_first(list(plain)))
    assert [type(layer) for layer in swapped] == [nn.Conv2d, nn.MaxPool2d, nn.Threshold]
    inputs = torch.randn(3, 1, 8, 8, requires_grad=True)
    inputs.data[0] = 0.0  # windows that are all alike, and exactly at ReLU's bend
    plain[0].bias.data[:2] = 0.0
    upstream = torch.randn(3, 4, 3, 3)
    gradients = [torch.autograd.grad((model(inputs) * upstream).sum(), inputs)[0] for model in (plain, swapped)]
    assert torch.equal(plain(inputs), swapped(inputs))
    assert torch.equal(*gradients)


def test_a_flat_model_is_its_parameters_one_after_the_other():
    torch.manual_seed(0)
    model = convolutional().to(memory_format=torch.channels_last)
    expected = nn.utils.parameters_to_vector([p.detach().contiguous() for p in model.parameters()]).clone()
    flat = FlatModel(model)
    assert torch.equal(flat.read().x, expected)
    assert torch.equal(flat.vector, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"loss": nn.MultiMarginLoss()},
        {"predict": lambda model, batch: (model(batch[0]), batch[1])},
        {"accuracy": lambda outputs, targets: None},
        {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))},
        {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))},
    ],
)
def test_what_cohorts_cannot_do_takes_the_per_client_path(change):
    from dataclasses import replace

    task = replace(small(4, [6]), **change)
    assert cohort_layers(task, task.make_model(0)) is None


def test_the_digits_task_trains_in_cohorts_and_says_so_in_its_spec(tmp_path):
    task = digits(clients=6, classes_per_client=3)
    assert cohort_layers(task, task.make_model(0)) is not None
    ga.run(task, ga.FedAvg(), rounds=1, workers=0, fast=False, out=tmp_path / "r")
    assert "fast = false" in (tmp_path / "r/spec.toml").read_text()
    with pytest.raises(ga.GradalignError, match=r"fast \(False there, True now\)"):
        ga.run(task, ga.FedAvg(), rounds=1, workers=0, out=tmp_path / "r", resume=True)


def few_channels() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Conv2d(5, 9, 2, bias=False),
        nn.Flatten(), nn.Linear(81, 5),
    )  # fmt: skip


def test_filled_channels_give_the_same_function_and_the_same_gradients():
    torch.manual_seed(0)
    plain = few_channels()
    filled = copy.deepcopy(plain)
    assert filled_channels(list(filled)) == [0, 2, 2, 2, 3, 3, 0, 0, 0], "six become eight, and five"
    run_stacks_faster(filled)
    inputs = torch.randn(4, 3, 14, 14)
    for model in (plain, filled):
        model(inputs).square().sum().backward()
    assert torch.allclose(filled(inputs), plain(inputs), rtol=1e-5, atol=1e-6)
    assert list(filled.state_dict()) == list(plain.state_dict())
    for own, other in zip(filled.parameters(), plain.parameters(), strict=True):
        assert own.shape == other.shape
        assert torch.allclose(own.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_channels_are_filled_only_where_nothing_else_can_see_them():
    first, second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
    assert filled_channels([first, second]) == [0, 2, 0]
    for between in (nn.Dropout2d(), nn.Sigmoid(), nn.BatchNorm2d(6)):
        assert not any(filled_channels([first, between, second]))
    assert not any(filled_channels([first, nn.Conv2d(6, 6, 3, groups=2)]))
    assert not any(filled_channels([first]))


class Peeking(nn.Module):
    """A model that uses a part of its Sequential on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = few_channels()[:6], nn.Linear(6 * 144 + 81, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        seen = self.body[0](inputs)
        return self.head(torch.cat([seen.flatten(1), self.body(inputs).flatten(1)], dim=1))


@pytest.mark.parametrize("model", [few_channels, Peeking])
def test_few_channels_agree_with_the_plain_loop(model):
    task = images(model)
    assert has_faster_stacks(task)
    close(both(task, ga.FedGA(beta=0.1) + ga.Scaffold(), LOCALS[0]))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU])
def test_activations_in_place_agree_in_cohorts(activation):
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 8), activation(inplace=True), nn.Linear(8, 3))  # noqa: E731
    plain = small(26, [9])
    task = ga.Task(model=model, clients=plain.clients, test=plain.client(0))
    assert group_of(task, LOCALS[0], clients_per_round=26).cohort is not None
    close(both(task, ga.FedGA(beta=0.1), LOCALS[0]))


def test_a_watched_weight_of_a_convolution_keeps_its_watcher():
    def model() -> nn.Module:
        made = convolutional()
        made[0].weight.register_hook(lambda gradient: 0.5 * gradient)
        return made

    close(both(images(model), ga.FedAvg(), LOCALS[0]))


def test_parameters_that_a_step_does_not_use_only_decay():
    """y ← y − α·wd·y for a parameter without a gradient, K times."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Parameter(torch.ones(2))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.used(inputs.flatten(1))

    task = ga.Task(model=Unused, clients=small(2, [5]).clients)
    result = ga.run(task, ga.FedAvg(), rounds=1, workers=0, local=ga.LocalTraining(lr=0.5, steps=3, weight_decay=0.2))
    assert torch.allclose(result.model.unused, torch.full((2,), 0.9**3))


def test_not_finite_numbers_are_found_and_large_ones_are_not_mistaken():
    huge = torch.full((5,), 3e38)
    assert all_finite(huge), "its sum overflows"
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert not all_finite(torch.tensor([1.0, bad, 2.0]))
    assert not all_finite(torch.tensor([float("inf"), float("-inf")]))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 450), nn.Tanh(), nn.Linear(450, 3))


def wide_task(model=wide, **more) -> ga.Task:
    generator = torch.Generator().manual_seed(2)
    data = [(torch.randn(9, 300, generator=generator), torch.randint(3, (9,), generator=generator)) for _ in range(3)]
    return ga.Task(model=model, clients=data, test=data[0], **more)


def leaves_factors(task: ga.Task) -> bool:
    return any(isinstance(part, ProductLinear) for part in trainer_of(task, LOCALS[0]).flat.module.modules())


@pytest.mark.parametrize("local", LOCALS, ids=["plain", "steps", "epochs", "clipped"])
@pytest.mark.parametrize("algorithm", COMBINATIONS, ids=lambda a: a.label)
def test_products_of_large_layers_agree_with_written_out_gradients(algorithm, local):
    assert leaves_factors(wide_task())
    close(both(wide_task(), algorithm, local))


def test_a_product_is_the_gradient():
    torch.manual_seed(3)
    layer = ProductLinear(4, 5)
    layer.recorded = []
    inputs = torch.randn(2, 3, 4, requires_grad=True)
    layer(inputs).square().sum().backward()
    (grad_output, rows), *others = layer.recorded
    assert not others
    assert layer.weight.grad is None
    outputs = inputs @ layer.weight.T + layer.bias
    by_hand = 2 * outputs  # of the sum of squares
    assert torch.allclose(grad_output.T @ rows, torch.einsum("abo,abi->oi", by_hand, inputs), atol=1e-5)
    assert torch.allclose(inputs.grad, by_hand @ layer.weight, atol=1e-5)
    assert torch.allclose(layer.bias.grad, by_hand.sum((0, 1)), atol=1e-5)


class Penalised(nn.Module):
    """A model that differentiates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = wide()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def hooked_wide() -> nn.Module:
    model = wide()
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    return model


def tied_wide() -> nn.Module:
    model = nn.Sequential(nn.Linear(300, 450), nn.Tanh(), nn.Linear(450, 450), nn.Linear(450, 450), nn.Linear(450, 3))
    model[3].weight = model[2].weight
    return model


def test_products_are_kept_only_where_nobody_else_asks_for_the_gradient():
    assert not leaves_factors(wide_task(Penalised))
    assert not leaves_factors(wide_task(hooked_wide))
    assert not leaves_factors(wide_task(predict=lambda model, batch: (model(batch[0]), batch[1])))
    assert not leaves_factors(wide_task(lambda: nn.Sequential(nn.Linear(300, 100), nn.Linear(100, 3))))
    trainer = trainer_of(wide_task(tied_wide), LOCALS[0])
    kinds = [isinstance(layer, ProductLinear) for layer in trainer.flat.module]
    assert kinds == [True, False, False, False, False], "the shared weight is not taken"
    close(both(wide_task(tied_wide), ga.FedGA(beta=0.1), LOCALS[0]))


def test_bfloat16_is_close_on_request_and_never_exact():
    task = images(convolutional)
    exact = ga.LocalTraining(lr=0.1, steps=3, batch_size=6)
    rough = dataclasses.replace(exact, precision="bf16")
    runs = [ga.run(task, ga.FedGA(beta=0.1), rounds=2, local=local, workers=0) for local in (exact, rough)]
    assert all(p.dtype == torch.float32 for p in runs[1].model.parameters())
    found = []
    for local in (exact, rough):
        trainer = trainer_of(task, local)
        found.append(trainer.gradient(told(trainer.flat.read()), *who([0]), task.client(0)).vector)
    error = float((found[1] - found[0]).norm() / found[0].norm())
    assert 1e-4 < error < 0.1, "bfloat16 keeps eight bits of a number"
    assert runs[1].history["test_loss"][0] == runs[0].history["test_loss"][0], "evaluation stays exact"
    again = ga.run(task, ga.FedGA(beta=0.1), rounds=2, local=rough, workers=2)
    assert torch.equal(vector(again), vector(runs[1]))


def test_bfloat16_is_for_every_kind_of_model():
    for task in (wide_task(), small(30, [7, 4])):
        local = ga.LocalTraining(lr=0.1, steps=2, precision="bf16")
        trained = ga.run(task, ga.Scaffold(), rounds=1, local=local, workers=0)
        assert torch.isfinite(vector(trained)).all()
    with pytest.raises(ga.GradalignError, match='precision must be "bf16"'):
        ga.LocalTraining(precision="fp16")


def test_a_recipe_asks_for_bfloat16_with_one_word():
    asked = load_recipe("digits", ["precision=bf16"]).spec()
    assert build_federation(asked).local.precision == "bf16"
    with pytest.raises(ga.GradalignError, match="precision: must be 'bf16'"):
        load_recipe("digits", ["precision=fp16"]).spec()

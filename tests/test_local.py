"""The inner loop: steps, batches, decay, momentum, clipping, buffers, randomness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import gradalign as ga
from conftest import PointModel, Quadratics, blobs, final_point, quadratic_value, vector
from exchanges import told, trainer_of, who
from gradalign.algorithms import LargeBatchGradAlign
from gradalign.algorithms.view import Plan
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import shuffled_batches
from gradalign.seeding import Purpose, torch_stream


def one_client(local: ga.LocalTraining, problem: Quadratics, **options: object) -> np.ndarray:
    return final_point(ga.run(problem.task(), ga.FedAvg(), rounds=1, local=local, workers=0, **options))


def test_weight_decay_momentum_and_clipping_by_hand():
    problem = Quadratics.make(1)
    lr, wd, momentum, clip = 0.1, 0.05, 0.9, 0.2
    y, velocity = problem.start, np.zeros(3)
    clipped = 0
    for _ in range(4):
        g = problem.gradient(0, y)
        norm = np.linalg.norm(g)
        clipped += norm > clip
        g = g * min(1.0, clip / norm) + wd * y
        velocity = momentum * velocity + g
        y = y - lr * velocity
    assert clipped, "the example should be clipped somewhere"
    local = ga.LocalTraining(lr=lr, steps=4, weight_decay=wd, momentum=momentum, clip_norm=clip)
    assert np.abs(one_client(local, problem) - y).max() < 1e-12


def test_momentum_agrees_with_torch_sgd():
    problem = Quadratics.make(1)
    model = PointModel(problem.start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, weight_decay=0.03)
    batch = tuple(torch.as_tensor(part[0]) for part in (problem.matrices, problem.centres))
    for _ in range(6):
        optimizer.zero_grad()
        quadratic_value(model, batch)[0].mean().backward()
        optimizer.step()
    local = ga.LocalTraining(lr=0.1, steps=6, momentum=0.8, weight_decay=0.03)
    assert np.abs(one_client(local, problem) - model.w.detach().numpy()).max() < 1e-12


def test_the_total_step_size_is_the_weight_of_all_gradients():
    """With momentum m and K = 3 the gradients act with 1 + m + m², 1 + m and 1."""
    local = ga.LocalTraining(lr=0.5, steps=3, momentum=0.4)
    assert local.total_step_size(0.5, 3) == pytest.approx(0.5 * ((1 + 0.4 + 0.16) + (1 + 0.4) + 1))
    assert ga.LocalTraining(steps=3).total_step_size(0.1, 3) == pytest.approx(0.3)


def test_lr_schedule_is_over_rounds():
    problem = Quadratics.make(1)
    y = problem.start
    for lr in (0.2, 0.2, 0.02):
        y = y - lr * problem.gradient(0, y)
    local = ga.LocalTraining(lr=ga.Steps(value=0.2, at_rounds={2: 0.02}), steps=1)
    found = final_point(ga.run(problem.task(), ga.FedAvg(), rounds=3, local=local, workers=0))
    assert np.abs(found - y).max() < 1e-12


@pytest.mark.parametrize(("examples", "size"), [(10, 3), (9, 3), (5, 5), (1, 1)])
def test_batches_without_replacement(examples, size):
    batches = shuffled_batches(examples, size, torch_stream(0, Purpose.SHUFFLE, 0, 0))
    for _ in range(3):
        seen: list[int] = []
        while len(seen) < examples:
            seen += next(batches).tolist()
        assert sorted(seen) == list(range(examples))


def test_epochs_count_steps_like_a_data_loader():
    assert ga.LocalTraining(epochs=2, batch_size=3).steps_for(10) == 8
    assert ga.LocalTraining(batch_size=30).steps_for(10) == 1
    assert ga.LocalTraining(epochs=4).steps_for(10) == 4
    assert ga.LocalTraining(steps=7, batch_size=3).steps_for(10) == 7


def test_shuffling_depends_on_seed_round_and_client_only():
    def first(*keys: int) -> list[int]:
        return next(shuffled_batches(50, 50, torch_stream(keys[0], Purpose.SHUFFLE, *keys[1:]))).tolist()

    assert first(0, 1, 2) == first(0, 1, 2)
    assert len({tuple(first(*keys)) for keys in [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 2, 1)]}) == 5


class Items(Dataset):
    """A map-style dataset over two tensors, one item at a time."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def as_numpy(pair):
    return pair[0].double().numpy(), pair[1].numpy()


def as_list(pair):
    return list(zip(*pair, strict=True))


@pytest.mark.parametrize("wrap", [lambda p: Items(*p), lambda p: TensorDataset(*p), as_numpy, as_list])
def test_tensors_arrays_and_datasets_give_the_same_bits(wrap):
    task = blobs()
    other = ga.Task(
        model=task.model, clients=[wrap(client) for client in task.clients], test=wrap(task.test), name="other"
    )
    local = ga.LocalTraining(lr=0.1, steps=3, batch_size=7)
    results = [ga.run(t, ga.FedGA(beta=0.1), rounds=2, local=local, workers=0) for t in (task, other)]
    assert torch.equal(vector(results[0]), vector(results[1]))
    assert results[0].summary["final_test_accuracy"] == results[1].summary["final_test_accuracy"]


def test_gradient_phase_over_some_examples_sees_the_first_batch_of_training():
    """K = 1 with as many gradient examples as the batch: GradAlign on mini-batches, g_i from the very same examples."""
    problem = Quadratics.make(2, examples=(6, 6))
    local = ga.LocalTraining(lr=0.1, steps=1, batch_size=2, gradient_examples=2)
    x, beta = problem.start, 0.3
    own = []
    for client in range(2):
        rows = torch.randperm(6, generator=torch_stream(0, Purpose.SHUFFLE, 0, client))[:2].numpy()
        own.append((problem.matrices[client][rows], problem.centres[client][rows]))

    def gradient(client: int, w: np.ndarray) -> np.ndarray:
        return np.einsum("nij,nj->ni", own[client][0], w - own[client][1]).mean(axis=0)

    mean = (gradient(0, x) + gradient(1, x)) / 2
    expected = x - 0.1 * np.mean([gradient(i, x - beta * (mean - gradient(i, x))) for i in range(2)], axis=0)
    found = final_point(ga.run(problem.task(), LargeBatchGradAlign(beta=beta), rounds=1, local=local, workers=0))
    assert np.abs(found - expected).max() < 1e-12


def test_gradient_of_a_large_client_is_the_mean_over_all_its_examples():
    """More examples than one chunk holds: the chunks' weighted gradients are one mean."""
    problem = Quadratics.make(1, examples=(1700,))
    task = problem.task()
    trainer = trainer_of(task, ga.LocalTraining(batch_size=10))
    found = trainer.gradient(told(trainer.flat.read()), *who([0]), task.client(0))
    assert np.abs(found.vector.numpy() - problem.gradient(0, problem.start)).max() < 1e-12


def test_the_gradient_phase_leaves_buffers_alone_and_training_averages_them():
    task = blobs(clients=3)
    trainer = trainer_of(task, ga.LocalTraining(lr=0.1, steps=2, batch_size=5))
    start = trainer.flat.read()
    assert start.floats.numel() == 32
    assert start.ints.tolist() == [0]
    trainer.gradient(told(start), *who([0]), task.client(0))
    untouched = trainer.train(told(start), *who([0]), Plan(), task.client(0))
    fresh = trainer_of(task, ga.LocalTraining(lr=0.1, steps=2, batch_size=5))
    direct = fresh.train(told(start), *who([0]), Plan(), task.client(0))
    assert torch.equal(untouched.floats, direct.floats), "a gradient phase before training left a trace"
    each = [fresh.train(told(start), *who([i]), Plan(), task.client(i)).floats.double() for i in range(3)]
    result = ga.run(task, ga.FedAvg(), rounds=1, local=ga.LocalTraining(lr=0.1, steps=2, batch_size=5), workers=0)
    floats, ints = FlatModel(result.model).read_buffers()
    assert torch.allclose(floats.double(), sum(each) / 3, atol=1e-7)
    assert ints.tolist() == [2], "integer buffers come from the first client"


def test_the_callers_random_state_is_left_alone():
    torch.manual_seed(7)
    np.random.seed(7)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(7)
    np.random.seed(7)
    ga.run(blobs(), ga.FedGA(beta=0.1), rounds=2, local=ga.LocalTraining(steps=2), workers=0)
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1])


def test_a_model_instance_is_copied_and_frozen_parameters_stay():
    task = blobs()
    model = task.model()
    model[0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = ga.Task(model=model, clients=task.clients, test=task.test)
    result = ga.run(own, ga.FedAvg(), rounds=2, local=ga.LocalTraining(steps=3), workers=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(result.model[0].weight, before["0.weight"])
    assert not torch.equal(result.model[4].weight, before["4.weight"])


class Half(nn.Module):
    """A frozen layer in half precision before a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.body(inputs).float())


def test_inputs_come_in_the_precision_of_the_first_layer_also_of_a_frozen_one():
    task = ga.Task(model=Half, clients=[(torch.randn(6, 4), torch.arange(6) % 3)])
    result = ga.run(task, ga.FedGA(beta=0.1), rounds=1, local=ga.LocalTraining(lr=0.1, steps=2), workers=0)
    assert result.model.body.weight.dtype == torch.bfloat16
    assert result.model.head.weight.dtype == torch.float32


def test_other_losses_and_batches():
    """A regression on dictionaries: no accuracy, the user's own predict and loss."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=generator)
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5])
    items = [{"features": x, "value": y} for x, y in zip(inputs, targets, strict=True)]
    task = ga.Task(
        model=lambda: nn.Linear(3, 1),
        clients=[items[:15], items[15:30]],
        test=items[30:],
        predict=lambda model, batch: (model(batch["features"]).squeeze(1), batch["value"]),
        loss=nn.functional.mse_loss,
    )
    result = ga.run(task, ga.FedGA(beta=0.05), rounds=40, local=ga.LocalTraining(lr=0.1, steps=5), workers=2)
    assert result.summary["final_test_accuracy"] is None
    assert result.summary["final_test_loss"] < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "local.lr must be greater than 0"),
        ({"steps": 3, "epochs": 2}, "choose one"),
        ({"batch_size": 0}, "local.batch_size must be a whole number of at least 1"),
        ({"momentum": 1.0}, r"local.momentum must be a number in \[0, 1\)"),
        ({"clip_norm": 0.0}, "local.clip_norm must be greater than 0"),
        ({"weight_decay": float("inf")}, "must be a finite number"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ga.GradalignError, match=message):
        ga.LocalTraining(**options)


def test_bad_tasks():
    task = blobs()
    with pytest.raises(ga.GradalignError, match="client 1 of the task x has no examples"):
        ga.Task(name="x", model=task.model, clients=[task.clients[0], (torch.empty(0, 8), torch.empty(0))])
    with pytest.raises(ga.GradalignError, match="the same length"):
        ga.Task(model=task.model, clients=[(torch.zeros(3, 8), torch.zeros(2))])
    with pytest.raises(ga.GradalignError, match="no clients"):
        ga.Task(model=task.model, clients=[])
    unreduced = ga.Task(model=task.model, clients=task.clients, loss=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ga.GradalignError, match="scalar tensor"):
        ga.run(unreduced, ga.FedAvg(), rounds=1, workers=0)
    mixed = ga.Task(model=nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4).double()), clients=task.clients)
    with pytest.raises(ga.GradalignError, match="one floating-point dtype"):
        ga.run(mixed, ga.FedAvg(), rounds=1, workers=0)

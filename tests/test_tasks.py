"""The paper's tasks: models, normalisation, augmentation in local steps only, test sets, scaling."""

from __future__ import annotations

import inspect
from dataclasses import fields

import numpy as np
import pytest
import torch

import gradalign as ga
from gradalign.algorithms.plan import combine
from gradalign.algorithms.view import Plan
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import ClientTrainer, Setup
from gradalign.errors import GradalignError
from gradalign.recipes.build import TASKS, build_task
from gradalign.tasks.divide import Division, class_counts_of
from gradalign.tasks.paper import CharLSTM, CropAndFlip, Normalise, emnist_cnn, lenet


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts_of_the_papers_models():
    assert parameters(emnist_cnn()) == 100_271
    assert parameters(lenet(10)) == 62_006
    assert parameters(lenet(100)) == 62_006 + 90 * 85
    # Two LSTM layers of 100: 4·100·(inputs + 100 + 2); the embedding 80·8; the scores 80·101.
    assert parameters(CharLSTM()) == 80 * 8 + 400 * (8 + 102) + 400 * (100 + 102) + 80 * 101
    assert CharLSTM()(torch.zeros(3, 80, dtype=torch.uint8)).shape == (3, 80)
    assert emnist_cnn()(torch.zeros(2, 1, 28, 28)).shape == (2, 47)


def test_pixels_are_normalised_when_a_batch_is_drawn(small_data):
    task = build_task("emnist", seed=0)
    client = task.client(0)
    images, labels = client.batch(torch.arange(len(client)))
    raw = task.clients.tensors[0][client.rows]
    assert raw.dtype == torch.uint8
    assert labels.dtype == torch.int64
    torch.testing.assert_close(images, (raw.float() / 255 - 0.5) / 0.5)
    normalise = Normalise((0.5, 0.25), (0.5, 0.1))
    black, _ = normalise((torch.zeros(1, 2, 3, 3, dtype=torch.uint8), torch.zeros(1)))
    torch.testing.assert_close(black[0, :, 0, 0], torch.tensor(normalise.black()))


def test_crop_and_flip_moves_every_image_by_itself():
    images = torch.arange(200 * 2 * 8 * 8, dtype=torch.float32).reshape(200, 2, 8, 8)
    fill = (-1.0, -2.0)
    torch.manual_seed(0)
    changed, labels = CropAndFlip(fill, padding=2)((images, torch.arange(200)))
    assert labels.tolist() == list(range(200))
    seen = set()
    for image, result in zip(images, changed, strict=True):
        framed = torch.tensor(fill).reshape(2, 1, 1).expand(2, 12, 12).clone()
        framed[:, 2:10, 2:10] = image
        found = [
            (down, across, mirrored)
            for down in range(5)
            for across in range(5)
            for mirrored in (False, True)
            if torch.equal(_cut(framed, down, across, mirrored), result)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 40, "nearly all of the 50 ways occur among 200 images"
    torch.manual_seed(0)
    again, _ = CropAndFlip(fill, padding=2)((images, labels))
    assert torch.equal(again, changed)


def _cut(framed, down, across, mirrored):
    window = framed[:, down : down + 8, across : across + 8]
    return window.flip(2) if mirrored else window


def test_augmentation_acts_in_local_steps_only():
    seen = []

    def augment(batch):
        seen.append(torch.rand(1).item())
        inputs, targets = batch
        return inputs + 1000.0, targets

    met = []

    class Watcher(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 2)

        def forward(self, x):
            met.append(float(x.mean()))
            return self.layer(x / 1000)

    data = (torch.ones(6, 1), torch.zeros(6, dtype=torch.int64))
    task = ga.Task(model=Watcher, clients=[data], test=data, augment=augment)
    trainer = ClientTrainer(Setup(task=task, local=ga.LocalTraining(lr=0.1, steps=3)))
    point = FlatModel(task.make_model(0)).read()
    client, who = task.client(0), Participant(client=0, weight=1.0)
    told, later = (Broadcast(point=point, round=n, algorithm=combine(), lr=0.1) for n in (0, 1))
    trainer.gradient(told, who, client)
    trainer.evaluate(point, client, torch.arange(6))
    assert met == [1.0, 1.0]
    assert not seen
    trainer.train(told, who, Plan(), client)
    assert met[2:] == [1001.0] * 3
    first = list(seen)
    assert len(set(first)) == 3
    trainer.train(told, who, Plan(), client)
    assert seen[3:] == first, "the same round draws the same augmentation"
    trainer.train(later, who, Plan(), client)
    assert seen[6:] != first


def test_cifar_is_augmented_and_the_gradient_phase_is_not(small_data):
    task = build_task("cifar10", seed=0)
    assert isinstance(task.augment, CropAndFlip)
    assert build_task("cifar10", seed=0, options={"augment": False}).augment is None
    assert build_task("emnist", seed=0).augment is None


def test_default_partitions_are_the_papers(small_data):
    emnist, cifar100, shakespeare = (build_task(name, seed=0) for name in ("emnist", "cifar100", "shakespeare"))
    for task, clients, classes in ((emnist, 47, 1), (cifar100, 50, 2)):
        labels = task.clients.tensors[1]
        held = [set(labels[task.client(i).rows].tolist()) for i in range(len(task.clients))]
        assert len(held) == clients
        assert {len(own) for own in held} == {classes}
        assert sum(len(own) for own in held) == len(set.union(*held))
    assert len(shakespeare.clients) == 12
    assert len(build_task("cifar10", seed=0).clients) == 10


def test_scaled_clients_keep_their_classes_and_all_of_the_test_set(small_data):
    task = build_task("emnist", seed=3, options={"client_share": 0.1, "data_share": 0.5})
    assert len(task.clients) == 47
    assert task.describe()["train_examples"] == 94
    assert len(task.test_examples) == 47
    assert "scaled to 47 of 47 clients with 50 %" in task.facts["kept"]
    task = build_task("emnist", seed=3, options={"clients": 5, "partition": "separate"})
    labels = task.clients.tensors[1]
    held = {int(label) for i in range(5) for label in labels[task.client(i).rows]}
    test = task.test_examples
    _, targets = test.batch(torch.arange(len(test)))
    assert set(targets.tolist()) <= held
    assert task.facts["classes"] == "5 of 47 classes"
    assert task.describe()["train_examples"] == 20


def test_scaled_shakespeare_is_tested_on_its_own_roles(small_data):
    whole = build_task("shakespeare", seed=0)
    task = build_task("shakespeare", seed=0, options={"clients": 3})
    assert len(task.clients) == 3
    assert 0 < len(task.test_examples) < len(whole.test_examples)
    assert build_task("shakespeare", seed=0, options={"partition": "iid", "clients": 4}).describe()["clients"] == 4
    with pytest.raises(GradalignError, match="a class here is a letter"):
        build_task("shakespeare", seed=0, options={"partition": "one-class", "clients": 4})


def test_limits_are_even_over_the_classes(small_data):
    task = build_task("emnist", seed=0, options={"partition": "iid", "train_limit": 94, "test_limit": 20})
    labels = task.clients.tensors[1][task.clients.rows].numpy()
    assert np.bincount(labels, minlength=47).tolist() == [2] * 47
    assert len(task.test_examples) == 20


def test_emnist_extra_files_are_asked_for_by_name(small_data):
    with pytest.raises(GradalignError, match="emnist-balancedextra-train-images"):
        build_task("emnist", seed=0, options={"extra": True})


@pytest.mark.parametrize("name", ["emnist", "cifar10", "shakespeare"])
def test_workers_give_the_same_bits(small_data, name):
    task = build_task(name, seed=0, options={"data_share": 0.5})
    local, measure = ga.LocalTraining(lr=0.1, steps=2, batch_size=4), ga.Measure(train_every=0)
    results = [
        ga.run(task, ga.FedGA(beta=0.1), rounds=1, clients_per_round=3, local=local, measure=measure, workers=workers)
        for workers in (0, 2)
    ]
    vectors = [torch.cat([p.reshape(-1) for p in result.model.parameters()]) for result in results]
    assert torch.equal(*vectors)


def test_tasks_are_described_without_data(tmp_path, monkeypatch):
    from gradalign.cli.tables import describe_tasks

    monkeypatch.setenv("GRADALIGN_DATA", str(tmp_path))
    described = {task["name"]: task["description"] for task in describe_tasks()}
    assert list(described) == list(TASKS) == ["digits", "emnist", "cifar10", "cifar100", "shakespeare", "table"]
    assert all(len(text) > 20 and "\n" not in text for text in described.values())


def test_settings_of_the_division_are_listed_once_and_belong_to_every_task():
    settings = {name: inspect.signature(make).parameters for name, make in TASKS.items() if name != "table"}
    shared = {field.name for field in fields(Division)}
    for name, known in settings.items():
        assert shared - set(known) == ({"classes_per_client"} if name == "shakespeare" else set())
        assert "division" not in known
    assert settings["emnist"]["clients"].default == 47
    assert settings["cifar100"]["classes_per_client"].default == 2
    with pytest.raises(TypeError, match="classes_per_client"):
        TASKS["shakespeare"](classes_per_client=2)


def test_facts_stand_beside_what_a_task_counts_itself():
    data = [(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))]
    facts = {"clients": 99, "test_examples": 7, "name": "mine", "hospital": "A"}
    described = ga.Task(model=torch.nn.Linear(1, 2), clients=data, facts=facts, name="task").describe()
    assert (described["name"], described["clients"], described["test_examples"]) == ("task", 1, 0)
    assert described["hospital"] == "A"
    assert described["clients (fact)"] == 99


def test_the_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    from gradalign.tasks.digits import images_and_labels

    pixels, labels = images_and_labels()
    bunch = load_digits()
    assert np.array_equal(pixels, bunch.data)
    assert np.array_equal(labels, bunch.target)


def test_a_users_task_with_a_known_name_and_more_classes_is_counted_by_number():
    inputs, labels = torch.zeros(12, 1), torch.arange(12)
    clients = [(inputs[:6], labels[:6]), (inputs[6:], labels[6:])]
    found = class_counts_of(ga.Task(model=torch.nn.Linear(1, 12), clients=clients, name="cifar10"))
    assert found.names == tuple(map(str, range(12)))
    assert found.counts.sum(axis=1).tolist() == [6, 6]

"""Numbers that others have printed, each with its source: a changed default is a changed experiment."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

import gradalign as ga
from gradalign.tasks.digits import digits
from gradalign.tasks.divide import Division
from gradalign.tasks.paper import CropAndFlip, Normalise, cifar10, cifar100, emnist_cnn, lenet


@pytest.mark.parametrize(
    ("made", "values"),
    [
        # Reddi et al., "Adaptive Federated Optimization" (ICLR 2021): β1 = 0.9 and β2 = 0.99 throughout, β1 = 0 for
        # Adagrad (section 5), τ = 10⁻³ (appendix), server learning rate 10⁻¹ as the middle of its grid.
        (ga.FedAdam(), {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}),
        (ga.FedYogi(), {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}),
        (ga.FedAdagrad(), {"lr": 0.1, "beta1": 0.0, "tau": 1e-3}),
        # Hsu, Qi & Brown 2019: FedAvgM with β = 0.9; the plain average is a step of 1 (McMahan et al. 2017).
        (ga.FedAvgM(), {"lr": 1.0, "momentum": 0.9, "nesterov": False}),
        (ga.ServerRule(), {"lr": 1.0}),
        # Li et al. 2020 search μ in {0.001, 0.01, 0.1, 1}; Acar et al. 2021 use α = 0.01 on CIFAR.
        (ga.FedProx(), {"mu": 0.01}),
        (ga.FedDyn(), {"alpha": 0.01}),
        # Dandi, Barba & Jaggi 2022, Algorithms 2 and 3, and their SCAFFOLD with fresh gradients.
        (
            ga.FedGA(beta=0.2),
            {"beta": 0.2, "mean": "fresh", "decay": 0.9, "gradient_every": 1, "form": "start", "length": None},
        ),
        # No source prints one value for all tasks: ours, of the size that their papers search.
        (ga.FedInit(), {"beta": 0.1}),
        (ga.FedSAM(), {"rho": 0.05}),
        (ga.FedLESAM(), {"rho": 0.05}),
        (ga.FedCM(), {"alpha": 0.1}),
        (ga.Scaffold(), {"control": "fresh"}),
        (ga.LinearScaling(), {"aligned": True}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_defaults_of_algorithms(made, values):
    assert asdict(made) == values


def test_the_length_that_auto_has_where_none_is_given():
    """docs/beta.md says where it comes from."""
    assert ga.FedGA(beta="auto", mean="fresh").length == ga.OffUntil(value=0.5, share=0.1)


def test_defaults_of_a_division():
    """At random; by classes one class each, and nothing of it at random; Dirichlet with 0.5, as in most papers."""
    one = Division(clients=3)
    assert (one.partition, one.classes_per_client, one.iid_share, one.alpha) == ("iid", 1, 0.0, 0.5)
    assert (one.client_share, one.data_share) == (1.0, 1.0)


def test_defaults_of_local_training():
    """Constant lr, no momentum, no decay, one pass: plain SGD, as in the paper's experiments."""
    local = ga.LocalTraining()
    assert (local.lr, local.momentum, local.weight_decay, local.clip_norm) == (0.1, 0.0, 0.0, None)
    assert (local.gradient_examples, local.precision) == (None, None)
    assert [local.steps_for(n) for n in (1, 7, 100)] == [1, 1, 1]
    assert [local.batch_for(n) for n in (1, 7, 100)] == [1, 7, 100]
    assert [ga.LocalTraining(batch_size=3).steps_for(n) for n in (1, 3, 4, 9, 10)] == [1, 1, 2, 3, 4]
    assert [ga.LocalTraining(epochs=3, batch_size=3).steps_for(n) for n in (1, 3, 4)] == [3, 3, 6]
    assert [ga.LocalTraining(batch_size=3).batch_for(n) for n in (1, 3, 10)] == [1, 3, 3]


def test_defaults_of_measuring():
    """Spacings that cost little, on up to fifty clients: what docs and recipes count on."""
    assert asdict(ga.Measure()) == {
        "test_every": None,
        "train_every": None,
        "train_clients": 50,
        "clients_every": None,
        "test_clients": 1000,
        "personalized": False,
        "metrics": (),
        "monitor": None,
        "mode": None,
        "early_stopping": None,
        "keep_best": False,
        "target_accuracy": None,
    }


@pytest.mark.parametrize("m", [0.0, 0.5, 0.9])
def test_travel_is_how_far_unit_gradients_move_a_client(m):
    local = ga.LocalTraining(momentum=m)
    speed = place = 0.0
    for steps in range(1, 6):
        speed = m * speed + 1.0
        place += 0.3 * speed
        assert local.total_step_size(0.3, steps) == pytest.approx(place, rel=1e-14)


def test_the_cosine_is_that_of_loshchilov_and_hutter():
    """SGDR (ICLR 2017), equation 5: η_min + ½(η_max − η_min)(1 + cos(π t/T)); then it stays."""
    schedule = ga.Cosine(value=0.8, end=0.2, rounds=6)
    expected = [0.2 + 0.5 * 0.6 * (1 + math.cos(math.pi * t / 6)) for t in range(7)] + [0.2, 0.2]
    assert [schedule.at(t) for t in range(9)] == pytest.approx(expected, rel=1e-14)
    assert schedule.at(2) == pytest.approx(0.2 + 0.6 * 0.75)


def test_a_warmup_rises_in_equal_steps():
    """Goyal et al. 2018: linear from the start to the value."""
    assert [ga.Warmup(value=0.9, start=0.1, rounds=4).at(t) for t in range(6)] == pytest.approx(
        [0.1, 0.3, 0.5, 0.7, 0.9, 0.9]
    )


def first_batch(task: ga.Task) -> torch.Tensor:
    return task.client(0).batch(torch.arange(4))[0]


def test_cifar_is_normalised_by_its_own_means_and_deviations(small_data):
    """Channel means and standard deviations of the training images, as everywhere in the literature."""
    published = {
        cifar10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        cifar100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    }
    for make, (mean, std) in published.items():
        task = make(partition="iid", clients=2)
        stored = task.clients.tensors[0][task.clients[0].rows[:4]].double() / 255
        expected = (stored - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
        assert torch.allclose(first_batch(task).double(), expected, atol=1e-5)


def test_a_normalised_pixel_by_hand():
    turn = Normalise((0.5, 0.25), (0.5, 0.125))
    images = torch.tensor([[[[0, 255]], [[51, 255]]]], dtype=torch.uint8)
    found, labels = turn((images, torch.tensor([3], dtype=torch.uint8)))
    assert found.flatten().tolist() == pytest.approx([-1.0, 1.0, (0.2 - 0.25) / 0.125, 6.0])
    assert labels.dtype == torch.int64
    assert turn.black() == (-1.0, -2.0)


def test_crops_move_by_up_to_four_pixels_and_half_are_mirrored():
    """The usual augmentation of CIFAR: pad 4, crop, flip with probability ½; the frame is black."""
    torch.manual_seed(0)
    assert CropAndFlip((0.0,)).padding == 4
    image = torch.arange(1.0, 65.0).view(1, 1, 8, 8).repeat(600, 1, 1, 1)
    found, _ = CropAndFlip((-7.0,))((image, None))
    framed = torch.full((16, 16), -7.0)
    framed[4:12, 4:12] = image[0, 0]
    places = {tuple(framed[r : r + 8, c : c + 8].flatten().tolist()): (r, c, 0) for r in range(9) for c in range(9)}
    places |= {
        tuple(framed[r : r + 8, c : c + 8].flip(1).flatten().tolist()): (r, c, 1) for r in range(9) for c in range(9)
    }
    where = [places[tuple(one.flatten().tolist())] for one in found]
    assert {r for r, _, _ in where} == {c for _, c, _ in where} == set(range(9))
    assert np.mean([mirrored for _, _, mirrored in where]) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(600))


def test_the_paper_s_models_have_the_paper_s_sizes():
    sizes = [sum(p.numel() for p in make().parameters()) for make in (emnist_cnn, lenet)]
    assert sizes == [100_271, 62_006]


def test_the_digits_are_scaled_and_a_quarter_is_for_testing():
    task = digits(partition="iid", clients=4)
    images = torch.cat([task.client(i).batch(torch.arange(len(task.client(i))))[0] for i in range(4)])
    assert len(task.test_examples) == round(0.25 * 1797)
    pixels = (images * 0.4 + 0.3) * 16
    assert torch.allclose(pixels, pixels.round(), atol=1e-4)
    assert (float(pixels.min()), float(pixels.max())) == pytest.approx((0.0, 16.0), abs=1e-4)

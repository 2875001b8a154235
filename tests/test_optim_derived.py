"""GradAlign where torch keeps values that it derived from the weights: autocast, parametrizations, compiled models."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import gradalign as ga

LR, PARTS = 0.1, 4
BFLOAT16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def pieces() -> list[tuple[Tensor, Tensor]]:
    """30 examples in parts of 8, 8, 7 and 7."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(30, 8, generator=generator), torch.randint(4, (30,), generator=generator)
    return list(zip(inputs.tensor_split(PARTS), targets.tensor_split(PARTS), strict=True))


def gradient(model: nn.Module, piece: tuple[Tensor, Tensor], precision) -> list[Tensor]:
    """A pass of its own, in an autocast block of its own that no other pass can have filled."""
    with precision():
        loss = F.cross_entropy(model(piece[0]), piece[1])
    return list(torch.autograd.grad(loss, list(model.parameters())))


def algorithm_1(model: nn.Module, beta: float, steps: int, precision) -> Tensor:
    """The paper's Algorithm 1, line by line, with parts weighted by their lengths."""
    parts, parameters = pieces(), list(model.parameters())
    shares = [len(targets) / 30 for _, targets in parts]
    for _ in range(steps):
        x = [p.detach().clone() for p in parameters]
        own = [gradient(model, piece, precision) for piece in parts]
        mean = [sum(s * g for s, g in zip(shares, column, strict=True)) for column in zip(*own, strict=True)]
        update = [torch.zeros_like(p) for p in x]
        for share, piece, gradients in zip(shares, parts, own, strict=True):
            with torch.no_grad():
                for p, x0, m, g in zip(parameters, x, mean, gradients, strict=True):
                    p.copy_(x0 - beta * (m - g))
            for u, h in zip(update, gradient(model, piece, precision), strict=True):
                u += share * h
        with torch.no_grad():
            for p, x0, u in zip(parameters, x, update, strict=True):
                p.copy_(x0 - LR * u)
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def by_closure(opt: ga.GradAlign, model: nn.Module) -> None:
    inputs, targets = (torch.cat(column) for column in zip(*pieces(), strict=True))
    opt.step(lambda x, y: F.cross_entropy(model(x), y), inputs, targets, parts=PARTS)


def by_verbs(opt: ga.GradAlign, model: nn.Module) -> None:
    opt.zero_grad()
    for x, y in pieces():
        F.cross_entropy(model(x), y).backward()
        opt.collect(weight=len(y))
    for x, y in pieces():
        opt.displace()
        F.cross_entropy(model(x), y).backward()
    opt.step()


def autocast() -> torch.autocast:
    return torch.autocast(**BFLOAT16)


WAYS = {
    "closure": (by_closure, {}),
    "low memory": (by_closure, {"memory": "low"}),
    "verbs": (by_verbs, {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("beta", [0.0, 5.0])
def test_steps_inside_one_autocast_block_are_algorithm_1_in_bfloat16(way, beta):
    drive, settings = WAYS[way]
    model = network()
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR), beta=beta, **settings)
    with autocast():
        for _ in range(3):
            drive(opt, model)
    expected = algorithm_1(network(), beta, 3, autocast)
    other = algorithm_1(network(), 5.0 - beta, 3, autocast)
    # Where a part's share is put on its loss, before bfloat16 rounds, and not on its gradient, some last bits differ.
    assert torch.allclose(flat(model), expected, rtol=0, atol=5e-4)
    assert (expected - other).abs().max() > 1e-2, "β makes a difference that can be seen in bfloat16"


@pytest.mark.parametrize("way", WAYS)
def test_an_evaluation_in_the_same_autocast_block_sees_the_new_point(way):
    drive, settings = WAYS[way]
    model = network()
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR), beta=0.3, **settings)
    inputs = pieces()[0][0]
    with autocast():
        drive(opt, model)
        inside = model(inputs)
    with autocast():
        assert torch.equal(inside, model(inputs))


def test_a_step_that_is_given_up_inside_autocast_leaves_x_to_be_seen():
    model = network()
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR), beta=5.0)
    with autocast():
        before = model(pieces()[0][0])
        for x, y in pieces():
            F.cross_entropy(model(x), y).backward()
            opt.collect()
        opt.displace()
        assert not torch.equal(model(pieces()[0][0]), before)
        opt.restore()
        assert torch.equal(model(pieces()[0][0]), before)


class Symmetric(nn.Module):
    """A weight made of its upper triangle. Nothing is saved for backward, so torch itself would not notice reuse."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def symmetric() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(parametrize.register_parametrization(nn.Linear(8, 8), "weight", Symmetric()))


@pytest.mark.parametrize("way", WAYS)
def test_cached_parametrizations_are_computed_anew_at_the_displaced_points(way):
    drive, settings = WAYS[way]
    model = symmetric()
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR), beta=0.5, **settings)
    with parametrize.cached():
        drive(opt, model)
        inside = model(pieces()[0][0])
    assert torch.allclose(flat(model), algorithm_1(symmetric(), 0.5, 1, nullcontext), rtol=0, atol=1e-6)
    assert torch.equal(inside, model(pieces()[0][0]))


def test_spectral_norms_power_iteration_goes_on_from_the_first_pass():
    def spectral() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)))

    model, plain = spectral(), spectral()
    by_closure(ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR), beta=0.5), model)
    for x, _ in pieces():
        plain(x)
    for (name, found), (_, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("way", ["closure", "verbs"])
def test_a_compiled_model_sees_the_displaced_weights(way):
    drive, settings = WAYS[way]
    model = network()
    compiled = torch.compile(model, backend="aot_eager")
    opt = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=LR), beta=5.0, model=compiled, **settings)
    with autocast():
        drive(opt, compiled)
    assert torch.allclose(flat(model), algorithm_1(network(), 5.0, 1, autocast), rtol=0, atol=1e-6)

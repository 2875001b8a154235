"""``fast=True`` trains the function that ``fast=False`` trains, whatever a model's own code does.

In double precision, where rounding is far from what another function, or another mask of dropout, would make.
"""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch
from benchmarks.workloads import WORKLOADS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations

import gradalign as ga
from conftest import vector
from exchanges import group_of, told, trainer_of, who
from gradalign.fast.eligible import cohort_layers
from gradalign.fast.linear import ProductLinear
from gradalign.fast.stacks import FasterStack, Run, _innermost, run_stacks_faster

SIDE, CLASSES = 14, 4


def features(*after_pool: nn.Module) -> nn.Sequential:
    """From 2 channels of 14×14 to 9 of 2×2."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), *after_pool, nn.Conv2d(6, 9, 3), nn.ReLU(), nn.MaxPool2d(2)
    )  # fmt: skip


def stack(*after_pool: nn.Module, before_flat: tuple[nn.Module, ...] = ()) -> nn.Sequential:
    return nn.Sequential(*features(*after_pool), *before_flat, nn.Flatten(), nn.Linear(36, CLASSES))


class Net(nn.Module):
    """Features and a head; what is done with them is the subclasses' own."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = features(), nn.Linear(36, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


class SliceWhileTraining(Net):
    def forward(self, images: Tensor) -> Tensor:
        seen = super().forward(images)
        return seen + self.features[:2](images).mean((1, 2, 3)).unsqueeze(1).tanh() * seen if self.training else seen


class OneLayerByItself(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.features[0](images).view(len(images), -1)[:, :CLASSES]


class Twice(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) - super().forward(images.flip(3)).detach() / 2


class EveryOtherTime(Net):
    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        body = self.features if self.calls % 2 else self.features[:1] + self.features[2:]
        return self.head(body(images).flatten(1))


class ByChance(Net):
    def forward(self, images: Tensor) -> Tensor:
        body = self.features if random.random() < 0.5 else self.features[:1] + self.features[2:]
        return self.head(body(images).flatten(1))


class Mnist(nn.Module):
    """torch's own example of convolutions, made small."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 6, 3, 1), nn.Conv2d(6, 8, 3, 1)
        self.dropout1, self.dropout2 = dropout, nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(200, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = F.relu(x)
        x = self.conv2(x)
        x = F.relu(x)
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = self.fc1(x)
        x = F.relu(x)
        x = self.dropout2(x)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


class Functional(nn.Module):
    """Convolutions and functions in a straight line, as many write them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.drop = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 9, 3), nn.Dropout2d(0.3)
        self.fc, self.width, self.share = nn.Linear(36, CLASSES), 36, 0.3

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = torch.nn.functional.max_pool2d(F.relu(self.conv2(x), inplace=True), kernel_size=2, stride=2)
        x = F.dropout(self.drop(x), self.share, training=self.training)
        return self.fc(x.view(-1, self.width))


class Added(Functional):
    """In place, on something that has another name."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        same = x
        x += 1.0
        return self.fc(F.relu(same).flatten(1)[:, : self.width])


class Kept(Functional):
    """Needs the result of a convolution twice."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(54, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        y = F.max_pool2d(F.relu(x), 2)
        y = F.max_pool2d(F.relu(self.conv2(y)), 2)
        return self.fc(y.view(-1, 36)) - self.other(torch.flatten(F.max_pool2d(x, 4), 1)) * 0.5


class Drawing(Functional):
    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2) * torch.rand(1).item()
        return self.fc(F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1))


class Counting(Functional):
    def forward(self, x: Tensor) -> Tensor:
        self.width += 1
        x = F.max_pool2d(F.relu(self.conv1(x)), 2) * self.width
        return self.fc(F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1) / 100)


class Helped(Functional):
    def scaled(self, x: Tensor) -> Tensor:
        return x * random.random()

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(F.max_pool2d(F.relu(self.conv1(x)), 2))
        return self.fc(F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1))


class FunctionalDropout(Net):
    def forward(self, images: Tensor) -> Tensor:
        seen = F.dropout2d(F.dropout(self.features(images), 0.3, self.training), 0.3, self.training)
        return self.head(seen.view(-1, 36))


class Noise(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images + 0.3 * torch.randn_like(images)


class Doubled(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = (
            nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(2, 6, 3), nn.MaxPool2d(2)),
            nn.Linear(216, 4),
        )

    def forward(self, images: Tensor) -> Tensor:
        images = images * 1.0
        return self.rest(self.first(images).flatten(1)) + images.mean((1, 2, 3)).unsqueeze(1) * self.rest.bias


class Reused(nn.Module):
    """A stack that begins in place, before pooling, on something that is needed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = (
            nn.Conv2d(2, 6, 3),
            nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(6, 6, 1)),
        )
        self.head = nn.Linear(216, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        seen = self.first(images)
        pooled = self.pool(seen)
        return self.head(pooled.flatten(1)) + seen.mean((1, 2, 3)).unsqueeze(1)


class ChannelsLast(Net):
    def forward(self, images: Tensor) -> Tensor:
        seen = self.features(images.contiguous(memory_format=torch.channels_last))
        return self.head(F.dropout(seen, 0.5, self.training).flatten(1))


class OneByOne(Net):
    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.stack([self.features(image) for image in images]).flatten(1))


class Penalised(Net):
    """Differentiates itself."""

    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images)
        if not torch.is_grad_enabled():
            return scores
        (slope,) = torch.autograd.grad(scores.square().sum(), self.features[3].weight, create_graph=True)
        return scores + 0.01 * slope.view(-1).square().sum()


class Watching(Net):
    """Looks at an activation through a hook of its own, at every call."""

    def forward(self, images: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.features[1].register_forward_hook(lambda module, given, made: seen.append(made))
        scores = super().forward(images)
        handle.remove()
        return scores + seen[0].mean((1, 2, 3)).unsqueeze(1)


class Segments(nn.Sequential):
    """Gives images back."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, CLASSES, 3, padding=1), nn.ReLU())


def hooked(change) -> nn.Module:
    model = stack()
    change(model)
    return model


def shared() -> nn.Module:
    relu, again = nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        relu,
        nn.MaxPool2d(2),
        again,
        relu,
        again,
        relu,
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(54, 4),
    )


def other_layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1, padding_mode="reflect"), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, groups=3, bias=False), nn.GroupNorm(2, 6), nn.GELU(), nn.AvgPool2d(2),
        nn.Sequential(nn.Conv2d(6, 5, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3, inplace=True)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, CLASSES),
    )  # fmt: skip


MODELS = {
    "a slice while training": SliceWhileTraining,
    "one layer by itself": OneLayerByItself,
    "called twice": Twice,
    "every other time": EveryOtherTime,
    "by chance": ByChance,
    "torch's MNIST example": lambda: Mnist(nn.Dropout(0.25)),
    "torch's older MNIST example": lambda: Mnist(nn.Dropout2d(0.25)),
    "functional": Functional,
    "functional, used twice": Kept,
    "functional, in place": Added,
    "functional, drawing": Drawing,
    "functional, counting": Counting,
    "functional, a method of its own": Helped,
    "functional dropout, then view": FunctionalDropout,
    "dropout before flatten": lambda: stack(before_flat=(nn.Dropout(0.4),)),
    "dropout in place": lambda: stack(nn.Dropout(0.4, inplace=True), before_flat=(nn.Dropout(0.4, inplace=True),)),
    "dropout of channels": lambda: stack(nn.Dropout2d(0.4)),
    "alpha dropout": lambda: stack(nn.AlphaDropout(0.2), before_flat=(nn.FeatureAlphaDropout(0.2),)),
    "random slopes": lambda: stack(nn.RReLU()),
    "noise": lambda: stack(Noise(), before_flat=(Noise(),)),
    "an input changed in place": Doubled,
    "a middle changed in place": Reused,
    "channels innermost by itself": ChannelsLast,
    "one by one": OneByOne,
    "differentiates itself": Penalised,
    "hooks at every call": Watching,
    "hook on a layer": lambda: hooked(lambda m: m[1].register_forward_hook(lambda layer, given, made: 2 * made)),
    "hook before a layer": lambda: hooked(lambda m: m[2].register_forward_pre_hook(lambda layer, given: (-given[0],))),
    "hook on the whole": lambda: hooked(lambda m: m.register_forward_hook(lambda layer, given, made: 2 * made)),
    "hook going back": lambda: hooked(lambda m: m[2].register_full_backward_hook(lambda _, into, out: (2 * into[0],))),
    "hook on a weight": lambda: hooked(lambda m: m[0].weight.register_hook(lambda gradient: gradient / 2)),
    "a layer's own forward": lambda: hooked(lambda m: setattr(m[1], "forward", torch.tanh)),
    "the whole's own forward": lambda: hooked(lambda m: setattr(m, "forward", lambda x: m[-1](x.flatten(1)[:, :36]))),
    "weight norm": lambda: hooked(lambda m: parametrizations.weight_norm(m[3])),
    "spectral norm": lambda: hooked(lambda m: parametrizations.spectral_norm(m[0])),
    "frozen": lambda: hooked(lambda m: m[0].requires_grad_(False)),
    "shared layers": shared,
    "other layers": other_layers,
}  # fmt: skip


def task_of(model, **more) -> ga.Task:
    generator = torch.Generator().manual_seed(5)
    draw = lambda n: (  # noqa: E731
        torch.randn(n, 2, SIDE, SIDE, generator=generator), torch.randint(CLASSES, (n,), generator=generator)
    )  # fmt: skip
    return ga.Task(model=lambda: model().double(), clients=[draw(9), draw(6)], test=draw(5), **more)


LOCAL = ga.LocalTraining(lr=0.05, steps=2, batch_size=4, weight_decay=0.01)


def agree(task: ga.Task) -> None:
    """The same after three rounds, and the same loss on the way."""
    random.seed(0)
    fast, plain = (
        ga.run(task, ga.FedGA(beta=0.1), rounds=3, local=LOCAL, weights="examples", workers=0, fast=fast)
        for fast in (True, False)
    )
    assert float((vector(fast) - vector(plain)).norm()) <= 1e-11 * float(vector(plain).norm())
    for name in ("test_loss", "train_loss", "local_loss"):
        known = [value for value in plain.history[name] if value is not None]
        assert [value for value in fast.history[name] if value is not None] == pytest.approx(known, rel=1e-10)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_fast_is_the_same_function(model):
    agree(task_of(model))


class ByKeyword(nn.Module):
    """Calls its parts with the names that torch gives their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rest = nn.Conv2d(2, 6, 3), nn.Sequential(nn.Conv2d(6, 9, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.LazyLinear(CLASSES)
        self(torch.zeros(1, 2, SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rest(input=self.conv(input=x)).flatten(1))


def test_parts_may_be_called_by_keyword():
    agree(task_of(ByKeyword))


def test_forward_mode_derivatives_are_those_of_the_plain_model():
    plain, images = stack().double().eval(), torch.randn(2, 2, SIDE, SIDE, dtype=torch.float64)
    fast, tangent = copy.deepcopy(plain), torch.randn_like(images)
    run_stacks_faster(fast)
    with torch.autograd.forward_ad.dual_level():
        found = [
            torch.autograd.forward_ad.unpack_dual(model(torch.autograd.forward_ad.make_dual(images, tangent))).tangent
            for model in (plain, fast)
        ]
    assert torch.allclose(*found, rtol=1e-12)


def test_runs_are_made_only_where_there_is_pooling():
    """Without it, laying images out anew for a few layers costs more than it gains."""
    residual = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.Flatten())
    run_stacks_faster(residual)
    residual(torch.randn(2, 2, SIDE, SIDE))
    assert not any(isinstance(step, Run) for step in residual.forward._steps)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_run_has_the_channels_innermost(channels):
    """Also where there is one channel, whose images look the same in both orders to ``contiguous``."""
    images = torch.randn(4, channels, SIDE, SIDE)
    moved = _innermost(images)
    assert moved.stride() == (channels * SIDE * SIDE, 1, channels * SIDE, channels)
    assert torch.equal(moved, images)


def test_images_that_come_out_are_handed_over_as_ever():
    """A loss that views the scores of every pixel as rows."""

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        each = scores.view(len(scores), CLASSES, -1)
        return F.cross_entropy(each, labels.unsqueeze(1).expand(-1, each.shape[2]))

    agree(task_of(Segments, loss=loss))
    agree(task_of(lambda: nn.Sequential(*Segments()), loss=loss))


def test_a_predict_of_ones_own_may_use_any_part():
    def own(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return model(images) + model[:4](images).mean((1, 2, 3)).unsqueeze(1), labels

    agree(task_of(stack, predict=own))


def test_hooks_on_all_modules_see_every_layer():
    model, seen = stack(), []
    run_stacks_faster(model)
    model(torch.randn(2, 2, SIDE, SIDE))
    handle = register_module_forward_hook(lambda layer, given, made: seen.append(layer))
    model(torch.randn(2, 2, SIDE, SIDE))
    handle.remove()
    assert seen == [*model, model]


def test_torch_s_function_transforms_work_as_ever():
    """Spectra have no rule for them: inside, convolutions are torch's own."""
    model = nn.Sequential(nn.Conv2d(16, 48, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(768, 3)).double()
    images = torch.randn(2, 60, 16, 12, 12, dtype=torch.float64)
    known = torch.stack([model(each) for each in images])
    run_stacks_faster(model)
    assert torch.allclose(model(images[0]), known[0])
    assert not torch.equal(model[0](images[0]), nn.Conv2d.forward(model[0], images[0])), "spectra round differently"
    assert torch.allclose(torch.func.vmap(model)(images), known)


def drawn(seed: int) -> nn.Sequential:
    """Return a random stack of layers that fit together."""
    draw, layers, channels, side = random.Random(seed), [], 2, SIDE
    for _ in range(draw.randrange(4, 9)):
        kind = draw.choice(("conv", "relu", "relu", "pool", "dropout", "norm", "other", "mean"))
        owns = bool(layers) and type(layers[-1]) in (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.BatchNorm2d)
        inplace = draw.random() < 0.4 and owns  # a result that its maker does not need again
        if kind == "conv":
            out, window = draw.choice((3, 5, 6, 8, 12)), draw.choice([w for w in (1, 2, 3, 5) if w <= side])
            layers.append(nn.Conv2d(channels, out, window, bias=draw.random() < 0.7))
            channels, side = out, side - window + 1
        elif kind in ("pool", "mean") and side > 3:
            layers.append(nn.MaxPool2d(2) if kind == "pool" else nn.AvgPool2d(2))
            side //= 2
        elif kind == "dropout":
            layers.append(draw.choice((nn.Dropout, nn.Dropout2d))(0.3, inplace=inplace))
        elif kind == "norm":
            layers.append(draw.choice((nn.BatchNorm2d(channels), nn.GroupNorm(1, channels))))
        elif kind == "relu":
            layers.append(nn.ReLU(inplace))
        elif kind == "other":
            layers.append(draw.choice((nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Identity))())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, CLASSES))


@pytest.mark.parametrize("seed", range(16))
def test_random_stacks_are_the_same_function(seed):
    """Outputs and gradients, of the same random numbers, in training and in evaluation."""
    found = []
    for fast in (True, False):
        task = task_of(lambda: drawn(seed))
        trainer = trainer_of(task, LOCAL, fast=fast)
        start = trainer.flat.read()
        gradient = trainer.gradient(told(start), *who([0]), task.client(0))
        score = trainer.evaluate(start, task.client(0), torch.arange(9))
        found.append([gradient.vector.double(), torch.tensor([*gradient.losses, score.loss])])
    for own, known in zip(*found, strict=True):
        assert float((own - known).norm()) <= 1e-11 * float(known.norm())


def test_random_stacks_take_the_fast_way_now_and_then():
    taken = [trainer_of(task_of(lambda seed=seed: drawn(seed)), LOCAL).flat.module for seed in range(16)]
    assert sum(isinstance(model.forward, FasterStack) for model in taken) >= 8


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W5", "W6"])
def test_the_benchmarks_take_their_fast_ways(name):
    workload = dataclasses.replace(WORKLOADS[name], clients=26, size=12, batch=min(WORKLOADS[name].batch, 12))
    trainer = group_of(workload.task(workload.data()), workload.local(), clients_per_round=26)
    layers = list(trainer.one.flat.module.modules())
    faster = any(isinstance(layer.forward, FasterStack) for layer in layers)
    products = any(isinstance(layer, ProductLinear) for layer in layers)
    ways = faster, products, trainer.cohort is not None, trainer.lockstep is not None
    assert (
        ways
        == {
            "W1": (True, False, False, False),
            "W2": (True, False, False, False),
            "W3": (False, False, True, False),
            "W5": (True, True, False, True),
            "W6": (True, True, False, True),
        }[name]
    )


def small() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * SIDE * SIDE, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def hooked_loss() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, given, made: 2 * made)
    return loss


def replaced_loss() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.forward = lambda scores, labels: F.multi_margin_loss(scores, labels)
    return loss


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1)), nn.CrossEntropyLoss(label_smoothing=0.1),
     nn.CrossEntropyLoss(ignore_index=0), hooked_loss(), replaced_loss()],
    ids=["weighted", "smoothed", "ignoring", "hooked", "replaced"],
)  # fmt: skip
def test_other_losses_keep_cohorts_out(loss):
    task = task_of(small, loss=loss)
    assert cohort_layers(task, task.make_model(0)) is None
    assert cohort_layers(task_of(small), small()) is not None
    assert cohort_layers(task_of(small, loss=nn.CrossEntropyLoss()), small()) is not None


def test_a_large_layer_keeps_products_only_in_a_stack_that_nobody_watches():
    def wide(change=lambda model: None) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(2 * SIDE * SIDE, 340), nn.ReLU(), nn.Linear(340, CLASSES))
        change(model)
        return model

    changes = {
        "hook": lambda m: m[2].register_forward_hook(lambda layer, given, made: 2 * made),
        "forward": lambda m: setattr(m[2], "forward", torch.tanh),
        "parametrised": lambda m: parametrizations.weight_norm(m[1]),
    }

    def kept(change) -> bool:
        model = trainer_of(task_of(lambda: wide(change)), LOCAL).flat.module
        return any(isinstance(part, ProductLinear) for part in model)

    assert kept(lambda model: None)
    assert not any(kept(change) for change in changes.values())
    for change in changes.values():
        agree(task_of(lambda change=change: wide(change)))

"""The paper's tasks: EMNIST, CIFAR-10 and -100, Shakespeare, with models as it describes them (no batch norm).

Its text names kinds and numbers of layers. Their sizes, the scaling of pixels, crops and flips are not in it: they are
those of the settings that the authors have published.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradalign.errors import GradalignError
from gradalign.tasks.batches import TensorExamples, Transform
from gradalign.tasks.datasets import DataSet, cifar_data, emnist_data, shakespeare_data
from gradalign.tasks.divide import Division, divided, even_choice, spaced_choice
from gradalign.tasks.partition import Labels, Rows
from gradalign.tasks.task import PartitionedClients, Task


@dataclass(frozen=True)
class Normalise:
    """Turns (N, C, H, W) bytes into floats: (pixel / 255 − mean) / std, channel by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        images, labels = batch
        shape = (1, len(self.mean), 1, 1)
        mean, std = (255.0 * torch.tensor(values).reshape(shape) for values in (self.mean, self.std))
        return images.to(torch.float32).sub_(mean).div_(std), labels.to(torch.int64)

    def black(self) -> tuple[float, ...]:
        """Return the value of a black pixel after normalisation, channel by channel."""
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))


@dataclass(frozen=True)
class CropAndFlip:
    """Moves each image by up to ``padding`` pixels inside a black frame and mirrors it with probability ½.

    All images of a batch at once; chance comes from torch's global generator, which local steps seed.
    """

    fill: tuple[float, ...]
    padding: int = field(default=4, kw_only=True)

    def __call__(self, batch: Any) -> Any:
        images, labels = batch
        count, _, height, width = images.shape
        # Padding with zeros around (image − fill) and adding fill back gives each channel its own frame colour.
        fill = torch.tensor(self.fill, dtype=images.dtype).reshape(1, -1, 1, 1)
        framed = F.pad(images - fill, [self.padding] * 4)
        places = torch.randint(2 * self.padding + 1, (2, count))
        mirrored = torch.rand(count) < 0.5
        windows = framed.unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, C, places down, places across, H, W)
        cut = windows[torch.arange(count), :, places[0], places[1]].add_(fill)
        return torch.where(mirrored.reshape(-1, 1, 1, 1), cut.flip(3), cut), labels


def _convolutions(*channels: int) -> list[nn.Module]:
    """Return 5×5 convolutions from channels to channels, each with a ReLU and pooling by two; the end is flat."""
    steps = [(nn.Conv2d(a, b, 5), nn.ReLU(), nn.MaxPool2d(2)) for a, b in itertools.pairwise(channels)]
    return [*itertools.chain(*steps), nn.Flatten()]


def emnist_cnn() -> nn.Module:
    """Return the EMNIST model: the paper's two convolutions and one linear layer; 100,271 parameters."""
    return nn.Sequential(*_convolutions(1, 32, 64), nn.Linear(1024, 47))


def emnist_mlp() -> nn.Module:
    """Return two hidden layers of 200, the "2NN" of FedAvg's paper, with 47 outputs; 206,647 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 47)
    )


def lenet(classes: int = 10) -> nn.Module:
    """Return the CIFAR model, LeNet on 3×32×32 images; 62,006 parameters for ten classes.

    Two convolutions and three linear layers, as in the paper's appendix; its main text speaks of two linear layers.
    """
    layers = _convolutions(3, 6, 16)  # first: layers draw their weights as they are made
    layers += [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)]
    return nn.Sequential(*layers)


class CharLSTM(nn.Module):
    """The paper's Shakespeare model: letters in 8 dimensions, two LSTM layers of 100; 133,520 parameters.

    It reads (batch, length) letter codes and scores the letter that follows, (batch, letters).
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 8)
        self.lstm = nn.LSTM(8, 100, num_layers=2, batch_first=True)
        self.scores = nn.Linear(100, 80)

    def forward(self, codes: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(codes.to(torch.int64)))
        scores: Tensor = self.scores(states[:, -1])
        return scores


@dataclass(frozen=True, kw_only=True)
class FileDivision(Division):
    """How a data set that lies on disk is divided among clients.

    Attributes:
        train_limit: At most this many training examples, evenly from all classes.
        test_limit: At most this many test examples, evenly from all classes.
        data_dir: The data folder, when it is not the usual one.
    """

    train_limit: int | None = None
    test_limit: int | None = None
    data_dir: str | None = None


def federate(
    division: FileDivision,
    data: DataSet,
    *,
    model: Callable[[], nn.Module],
    transform: Transform,
    augment: Callable[[Any], Any] | None = None,
    seed: int,
) -> Task:
    """Return the task of a data set divided among clients.

    Classes that no client holds are left out of the test set too, which happens only where there are fewer
    clients than it takes to hold all classes. Texts are tested on the same share of their examples as clients have;
    of images, all are there, however few are trained on.
    """
    labels = data.train.labels
    choose = spaced_choice if data.users else even_choice
    pool = choose(labels, division.train_limit)
    owners = None if data.train.owners is None else data.train.owners[pool]
    whole = division.divide(labels[pool], seed, owners)
    parts = [pool[part] for part in division.subset(whole, labels[pool], seed)]
    test = _test_rows(data, parts, natural=division.partition == "natural")
    if data.users:
        test = test[choose(data.test.labels[test], math.ceil(division.data_share * len(test)))]
    test = test[choose(data.test.labels[test], division.test_limit)]
    held = data.classes if data.users else len(_values(labels, parts))
    return Task(
        name=data.name,
        model=model,
        clients=PartitionedClients((data.train.inputs, torch.from_numpy(labels)), parts, transform),
        test=TensorExamples((data.test.inputs, torch.from_numpy(data.test.labels)), torch.from_numpy(test), transform),
        augment=augment,
        groups=None if data.train.spans is None else [data.train.spans[part] for part in parts],
        facts={
            **division.describe(len(whole), len(parts)),
            **({} if held == data.classes else {"classes": f"{held} of {data.classes} classes"}),
            **data.facts(),
            # What guessing the commonest class would score.
            "majority": f"commonest test class {np.bincount(data.test.labels[test]).max() / len(test):.2%}",
        },
    )


def _test_rows(data: DataSet, parts: list[Rows], *, natural: bool) -> Rows:
    """Return the test rows that belong to these clients: of their owners, or of the classes they hold."""
    mine = data.train.owners if natural else data.train.labels
    theirs = data.test.owners if natural else data.test.labels
    if mine is None or theirs is None or (data.users and not natural):
        return np.arange(len(data.test.labels))
    rows = np.flatnonzero(np.isin(theirs, _values(mine, parts)))
    # These owners may have no test examples of their own: then everyone's will do.
    return rows if len(rows) else np.arange(len(theirs))


def _values(labels: Labels, parts: list[Rows]) -> Labels:
    return np.unique(np.concatenate([np.unique(labels[part]) for part in parts]))


@divided(FileDivision, partition="one-class", clients=47)
def emnist(division: FileDivision, *, seed: int = 0, extra: bool = False, network: str = "cnn") -> Task:
    """EMNIST Balanced, handwritten digits and letters of 47 classes; a CNN of three layers.

    ``extra`` uses the ``emnist-balancedextra`` files too. ``network`` is "cnn", the paper's, or "mlp", two hidden
    layers of 200, whose rounds take a tenth of the time.
    """
    networks = {"cnn": emnist_cnn, "mlp": emnist_mlp}
    if network not in networks:
        raise GradalignError(f'task.network must be "cnn" or "mlp", got {network!r}')
    data = emnist_data(division.data_dir, extra=extra)
    # The authors' settings: mean 0.5 and standard deviation 0.5, that is, pixels from −1 to 1.
    return federate(division, data, model=networks[network], transform=Normalise((0.5,), (0.5,)), seed=seed)


@divided(FileDivision, partition="iid", clients=10, classes_per_client=2)
def cifar10(division: FileDivision, *, seed: int = 0, augment: bool = True) -> Task:
    """CIFAR-10, colour photographs of ten classes; LeNet.

    ``augment`` crops and flips the images in local steps.
    """
    return _cifar(10, Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), division, seed, augment)


@divided(FileDivision, partition="separate", clients=50, classes_per_client=2)
def cifar100(division: FileDivision, *, seed: int = 0, augment: bool = True) -> Task:
    """CIFAR-100, colour photographs of a hundred classes; LeNet with 100 outputs.

    ``augment`` crops and flips the images in local steps.
    """
    return _cifar(100, Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)), division, seed, augment)


def _cifar(classes: int, pixels: Normalise, division: FileDivision, seed: int, augment: bool) -> Task:
    """Return a task of CIFAR; pixels are normalised by the mean and deviation of the training pixels' channels."""
    return federate(
        division,
        cifar_data(classes, division.data_dir),
        model=partial(lenet, classes),
        transform=pixels,
        augment=CropAndFlip(pixels.black()) if augment else None,
        seed=seed,
    )


@divided(FileDivision, without=("classes_per_client",), partition="natural")
def shakespeare(division: FileDivision, *, seed: int = 0) -> Task:
    """Shakespeare's plays, the next letter after 80; a client is a speaking role; an LSTM.

    With the natural partition, ``clients`` takes that many of the roles, all when it is not given, and the test set is
    that of the same roles.
    """
    if division.partition in ("one-class", "separate", "classes"):
        raise GradalignError('task.partition: a class here is a letter; use "natural", "iid", "sorted" or "dirichlet"')
    return federate(division, shakespeare_data(division.data_dir), model=CharLSTM, transform=as_codes, seed=seed)


def as_codes(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Turn bytes into the whole numbers that embeddings and losses take."""
    return tuple(part.to(torch.int64) for part in batch)

"""A task that takes milliseconds: five uneven clients and a linear model. Copied beside the recipes that name it."""

from __future__ import annotations

import torch
from torch import nn

import gradalign as ga


def tiny(seed: int = 0) -> ga.Task:
    generator = torch.Generator().manual_seed(seed)
    sizes = (9, 4, 12, 6, 10)
    inputs = torch.randn(sum(sizes) + 20, 6, generator=generator)
    labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.3).long()
    *clients, test = zip(inputs.split([*sizes, 20]), labels.split([*sizes, 20]), strict=True)
    return ga.Task(name="tiny", model=lambda: nn.Linear(6, 3), clients=clients, test=test)

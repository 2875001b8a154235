"""The paper's models. Plain PyTorch, no batch norm, as in its experiments."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def emnist_cnn() -> nn.Module:
    """Return the paper's EMNIST model: two 5×5 convolutions and one linear layer; 100,271 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 47),
    )


def lenet(classes: int = 10) -> nn.Module:
    """Return the paper's CIFAR model, LeNet on 3×32×32 images; 62,006 parameters for ten classes."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


class CharLSTM(nn.Module):
    """The paper's Shakespeare model: letters in 8 dimensions, two LSTM layers of 100; 133,520 parameters.

    It reads (batch, length) letter codes and scores the letter that follows.
    """

    def __init__(self, letters: int = 80, embedding: int = 8, hidden: int = 100, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.scores = nn.Linear(hidden, letters)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the scores of the next letter, (batch, letters)."""
        states, _ = self.lstm(self.embedding(codes.to(torch.int64)))
        scores: Tensor = self.scores(states[:, -1])
        return scores

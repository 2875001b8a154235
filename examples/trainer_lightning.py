"""GradAlign in Lightning, with manual optimization or, given --automatic, with automatic. Takes seconds.

python examples/trainer_lightning.py
"""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch
from gradalign_loop import accuracy, data
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradalign
from gradalign.lightning import Alignment


class Digits(pl.LightningModule):
    """A classifier of digits; automatic or manual optimization differ in ``training_step`` alone."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
        self.automatic_optimization = automatic

    def loss(self, images, labels):
        """Return the loss of some images."""
        return F.cross_entropy(self.net(images), labels)

    def training_step(self, batch, batch_idx):
        """Return the loss of a micro-batch, or take the whole step."""
        if self.automatic_optimization:
            return self.loss(*batch)
        return self.optimizers().step(self.loss, *batch, parts=8)

    def configure_optimizers(self):
        """Wrap the optimizer; nothing else is new here."""
        return gradalign.GradAlign(torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9), beta=0.2)


def main(automatic: bool) -> None:
    """Train for fifteen epochs of large batches and print the test accuracy."""
    pl.seed_everything(0)
    images, labels, test_images, test_labels = data()
    loader = DataLoader(TensorDataset(images, labels), batch_size=50 if automatic else 400, shuffle=True)
    more = {"callbacks": [Alignment()], "accumulate_grad_batches": 8} if automatic else {}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=15, **more, **quiet)
    module = Digits(automatic)
    trainer.fit(module, loader)
    print(f"{trainer.global_step} steps: test accuracy {accuracy(module.net, test_images, test_labels):.4f}")


if __name__ == "__main__":
    main("--automatic" in sys.argv)

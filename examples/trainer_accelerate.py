"""GradAlign with accelerate, on two processes or, started with python, on one. Takes seconds.

torchrun --standalone --nproc-per-node 2 examples/trainer_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from gradalign_loop import accuracy, data
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import gradalign
from gradalign.accelerate import prepare

EPOCHS = 15


def main() -> None:
    """Train on large batches, each rank's cut into eight parts, and print the test accuracy."""
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    images, labels, test_images, test_labels = data()
    loader = DataLoader(TensorDataset(images, labels), batch_size=400, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = gradalign.GradAlign(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), beta=0.2)
    schedule = CosineAnnealingLR(opt, EPOCHS * len(loader))
    model, opt, loader, schedule = prepare(accelerator, model, opt, loader, schedule)

    def loss(inputs, targets):
        return F.cross_entropy(model(inputs), targets)

    for _ in range(EPOCHS):
        for inputs, targets in loader:
            opt.align(loss, inputs, targets, parts=8)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            schedule.step()
    found = accuracy(accelerator.unwrap_model(model), test_images, test_labels)
    accelerator.print(f"{opt.steps} steps on {accelerator.num_processes} process(es): test accuracy {found:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

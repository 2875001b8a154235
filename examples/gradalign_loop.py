"""GradAlign in a training loop of your own, on one device, in both of its ways. Takes a few seconds.

python examples/gradalign_loop.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradalign
from gradalign.tasks.digits import images_and_labels

BATCH, PARTS, UPDATES = 400, 8, 60


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, then test images and labels."""
    pixels, digits = images_and_labels()
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images = torch.as_tensor(pixels / 16.0, dtype=torch.float32)[order]
    labels = torch.as_tensor(digits)[order]
    return images[:1350], labels[:1350], images[1350:], labels[1350:]


def model_and_optimizer() -> tuple[nn.Module, gradalign.GradAlign]:
    """Return a fresh model and its optimizer: SGD with momentum, wrapped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    return model, gradalign.GradAlign(sgd, beta=0.2)


def large_batches(images: Tensor, labels: Tensor):
    """Yield UPDATES large batches."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        rows = torch.randperm(len(labels), generator=generator)[:BATCH]
        yield images[rows], labels[rows]


def with_a_closure(images: Tensor, labels: Tensor) -> nn.Module:
    """The short way: hand over the loss and the batch; GradAlign cuts it and makes both passes."""
    model, opt = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, UPDATES)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    for inputs, targets in large_batches(images, labels):
        opt.step(loss, inputs, targets, parts=PARTS)
        schedule.step()
    return model


def with_two_verbs(images: Tensor, labels: Tensor) -> nn.Module:
    """The long way, for loops that cannot hand over a closure: every forward and backward is yours."""
    model, opt = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, UPDATES)
    for inputs, targets in large_batches(images, labels):
        parts = list(zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True))
        opt.zero_grad()
        for x, y in parts:
            F.cross_entropy(model(x), y).backward()
            opt.collect()  # this part's gradient at the present point
        for x, y in parts:
            opt.displace()  # to this part's own displaced point
            F.cross_entropy(model(x), y).backward()
        opt.clip_grad_norm_(5.0)  # optional
        opt.step()  # back to where we were, then the wrapped optimizer's step
        schedule.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of right answers."""
    return float((model.eval()(images).argmax(1) == labels).double().mean())


def main() -> None:
    """Train in both ways and print the test accuracies."""
    images, labels, test_images, test_labels = data()
    for name, train in (("closure", with_a_closure), ("two verbs", with_two_verbs)):
        print(f"{name}: test accuracy {accuracy(train(images, labels), test_images, test_labels):.4f}")


if __name__ == "__main__":
    main()

"""FedGA as one plain loop: Algorithm 2 of Dandi, Barba & Jaggi 2022, line by line, with nothing of this library.

The library gives the same numbers (a test compares them), with weights, sampling, clients that fall silent, many
processes and a server rule beside it. Read this first. Takes a second:

python examples/fedga_by_hand.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


def gradient(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Return ∇f at the model's present parameters."""
    inputs, targets = batch
    return list(torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters())))


@torch.no_grad()
def put(model: nn.Module, values: Sequence[Tensor]) -> None:
    """Give the model's parameters these values."""
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


def fedga_round(
    model: nn.Module, clients: Sequence[Batch], batches: Sequence[Iterator[Batch]], lr: float, beta: float, steps: int
) -> None:
    """Move the model by one round; ``batches[i]`` yields client i's mini-batches ζ."""
    x = [parameter.detach().clone() for parameter in model.parameters()]
    # Line 3, the first trip: every client sends ∇f_i(x), the server answers with their mean ∇f(x).
    own = [gradient(model, client) for client in clients]
    mean = [sum(gradients) / len(clients) for gradients in zip(*own, strict=True)]
    ends = []
    for i in range(len(clients)):  # line 4, in parallel where there are machines
        # Lines 5 and 6: start from x displaced by −β(∇f(x) − ∇f_i(x)), a little way towards the client's own gradient.
        put(model, [value - beta * (m - g) for value, m, g in zip(x, mean, own[i], strict=True)])
        for _ in range(steps):  # lines 7 to 9: K local steps, as in FedAvg
            slopes = gradient(model, next(batches[i]))
            put(model, [y - lr * slope for y, slope in zip(model.parameters(), slopes, strict=True)])
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    # Line 11, the second trip: the mean of the ends. The displacements sum to zero and need no undoing.
    put(model, [sum(values) / len(clients) for values in zip(*ends, strict=True)])


def shuffled(client: Batch, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield mini-batches for ever, each pass in a new order."""
    while True:
        for rows in torch.randperm(len(client[1]), generator=generator).split(size):
            yield client[0][rows], client[1][rows]


def main() -> None:
    """Train three clients that know two of three classes each; print what alignment does to their gradients."""
    torch.manual_seed(0)
    centres = 2 * torch.randn(3, 10)
    labels = [torch.tensor(pair).repeat(50) for pair in ([0, 1], [1, 2], [0, 2])]
    clients = [(centres[y] + torch.randn(len(y), 10), y) for y in labels]
    for beta in (0.0, 0.2):  # without displacement, the loop is FedAvg
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
        batches = [shuffled(c, 20, torch.Generator().manual_seed(i)) for i, c in enumerate(clients)]
        for _ in range(20):
            fedga_round(model, clients, batches, lr=0.1, beta=beta, steps=10)
        flat = [torch.cat([part.flatten() for part in gradient(model, client)]) for client in clients]
        spread = sum(float((g - sum(flat) / len(flat)).square().sum()) for g in flat) / (2 * len(flat))
        right = [float((model(x).argmax(1) == y).double().mean()) for x, y in clients]
        print(f"beta {beta}: training accuracy {sum(right) / 3:.3f}, half the gradients' variance {spread:.2e}")


if __name__ == "__main__":
    main()

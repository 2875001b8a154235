"""The other side of every comparison: losses, gradients and ∇r by plain autograd, sharing no code with the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradalign.tasks.batches import map_tensors
from gradalign.tasks.task import Task


class _Objective(nn.Module):
    """The loss of a batch as a module, so that its parameters can be exchanged."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Any) -> Tensor:
        return self.task.loss(*self.task.predict(self.model, batch))


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class Calculus:
    """Exact calculus on the clients' losses in float64, as functions of the flat parameter vector.

    ``members`` is a sequence of client numbers A = (a_1, …, a_K); a client may occur more than once.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self._objective = _Objective(task, task.make_model(seed).double())
        self._trained = [(n, p.shape) for n, p in self._objective.named_parameters() if p.requires_grad]
        every = [task.client(i) for i in range(len(task.clients))]
        self._batches = [map_tensors(_double, examples.batch(torch.arange(len(examples)))) for examples in every]

    def loss(self, x: Tensor, client: int) -> Tensor:
        """Return f_i(x)."""
        pieces = x.split([shape.numel() for _, shape in self._trained])
        parameters = {name: piece.view(shape) for (name, shape), piece in zip(self._trained, pieces, strict=True)}
        value: Tensor = torch.func.functional_call(self._objective, parameters, (self._batches[client],))
        return value

    def gradient(self, x: Tensor, client: int) -> Tensor:
        """Return ∇f_i(x)."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.loss(x, client), x)[0]

    def mean_gradient(self, x: Tensor, members: Sequence[int]) -> Tensor:
        """Return ∇f_A(x)."""
        return torch.stack([self.gradient(x, client) for client in members]).mean(dim=0)

    def _gradient_graph(self, x: Tensor, client: int) -> Tensor:
        return torch.autograd.grad(self.loss(x, client), x, create_graph=True)[0]

    def hessian_product(self, x: Tensor, client: int, vector: Tensor) -> Tensor:
        """Return ∇²f_i(x)·vector."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self._gradient_graph(x, client) @ vector, x)[0]

    def objective(self, x: Tensor, members: Sequence[int], beta: float) -> float:
        """Return f_A(x) + β r_A(x)."""
        x = x.detach().requires_grad_()
        mean = sum(float(self.loss(x, client).detach()) for client in members) / len(members)
        return mean + beta * float(self._r(x, members).detach())

    def _r(self, x: Tensor, members: Sequence[int]) -> Tensor:
        gradients = torch.stack([self._gradient_graph(x, client) for client in members])
        return 0.5 * (gradients - gradients.mean(dim=0)).square().sum(dim=1).mean()

    def r(self, x: Tensor, members: Sequence[int]) -> float:
        """Return r_A(x)."""
        return float(self._r(x.detach().requires_grad_(), members).detach())

    def r_gradient(self, x: Tensor, members: Sequence[int]) -> Tensor:
        """Return ∇r_A(x): autograd of r_A itself, not the formula with Hessians."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self._r(x, members), x)[0]

    def bent_spread(self, x: Tensor, members: Sequence[int]) -> Tensor:
        """Return mean_i ∇²(½‖∇f_i‖²)(x)·(g_i − ḡ), the vector of the α²β term of FedGA."""
        mean, total = self.mean_gradient(x, members), torch.zeros_like(x)
        for client in members:
            y = x.detach().requires_grad_()
            gradient = self._gradient_graph(y, client)
            slope = torch.autograd.grad(0.5 * gradient.square().sum(), y, create_graph=True)[0]
            total += torch.autograd.grad(slope @ (gradient.detach() - mean), y)[0]
        return total / len(members)

    def curvature(self, x: Tensor, members: Sequence[int], iterations: int = 12) -> float:
        """Return about max_i ‖∇²f_i(x)‖, by power iteration."""
        largest = 0.0
        for client in dict.fromkeys(members):
            v = self.gradient(x, client) + 1e-3
            for _ in range(iterations):
                v = self.hessian_product(x, client, v / v.norm().clamp_min(1e-300))
            largest = max(largest, float(v.norm()))
        return largest

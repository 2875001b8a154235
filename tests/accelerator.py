"""A device that is not the processor, for machines that have no other: "beside:0".

Its tensors keep their numbers in the processor's memory but say that they lie elsewhere, and like a GPU's they do not
mix with the processor's: an operation on both raises, unless it copies or the processor's part is a single number.
So code that forgets to bring a tensor over fails here as it would there, and code that does not has the same bits.

Run as a script it trains on both devices and prints what was not the same; in a process of its own, since torch
must know a device before its first backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import gradalign as ga
from conftest import blobs, vector

NAME = "beside"
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Beside(torch.Tensor):
    """A tensor on the device; ``held`` has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Beside:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, device=f"{NAME}:0", **layout)
        made.held = held
        return made

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Beside) -> None:
        self.held = new.held

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(operation, args, kwargs or {})


class Everywhere(TorchDispatchMode):
    """Lets tensors be made on the device, and brought there."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(operation, args, kwargs or {})


def operate(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on the numbers; say of its result where it lies."""
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    there = {id(one.held): one for one in given if isinstance(one, Beside)}
    if there and operation not in COPIES and any(one.ndim for one in given if not isinstance(one, Beside)):
        raise RuntimeError(f"{operation}: expected all tensors to be on the same device, found {NAME}:0 and cpu")
    goes = bool(there)
    if kwargs.get("device") is not None:
        goes, kwargs = torch.device(kwargs["device"]).type == NAME, kwargs | {"device": "cpu"}
    elif operation is torch.ops.aten.copy_.default:
        goes = isinstance(args[0], Beside)
    args, kwargs = tree_map(lambda one: one.held if isinstance(one, Beside) else one, (args, kwargs))
    result = operation(*args, **kwargs)
    if not goes:
        return result
    wrapped = lambda one: there[id(one)] if id(one) in there else Beside(one)  # noqa: E731
    return tree_map(lambda one: wrapped(one) if isinstance(one, torch.Tensor) else one, result)


ALGORITHMS = {
    "fedga": ga.FedGA(beta=0.1),
    "running": ga.FedGA(beta=0.1, mean="running") + ga.FedAdam(lr=0.03),
    "kept": ga.Scaffold(control="kept"),
    "every step": ga.FedGA(beta=0.1, form="step") + ga.FedProx(mu=0.1) + ga.Scaffold(),
}
LOCAL = {
    "plain": ga.LocalTraining(lr=0.1, steps=3, batch_size=7, weight_decay=0.1, momentum=0.5, clip_norm=1.0),
    "adam": ga.LocalTraining(lr=0.01, steps=3, batch_size=7, optimizer="adam", weight_decay=0.1),
}
CASES = [("fedga", "plain", "local"), ("running", "plain", "local"), ("kept", "plain", "local")]
CASES += [("every step", "plain", "local"), ("every step", "adam", "local"), ("fedga", "adam", "flower")]


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME)
    with Everywhere():
        layer = nn.Linear(2, 2).to(NAME)
        assert layer.weight.device.type == NAME
        with pytest.raises(RuntimeError, match="same device"):
            layer(torch.ones(3, 2))
        with pytest.raises(RuntimeError, match="same device"):
            layer.weight.detach().add_(torch.ones(2, 2))
    for algorithm, local, engine in CASES:
        options = {"rounds": 2, "clients_per_round": 3, "local": LOCAL[local], "weights": "examples", "engine": engine}
        options |= {"workers": 0, "fast": False}
        here = ga.run(blobs(4, 11), ALGORITHMS[algorithm], **options)
        with Everywhere():
            there = ga.run(blobs(4, 11), ALGORITHMS[algorithm], device=f"{NAME}:0", **options)
        same = torch.equal(vector(here), vector(there)) and here.history["r"] == there.history["r"]
        print(algorithm, local, engine, "same" if same else "different", sep=", ")


if __name__ == "__main__":
    main()

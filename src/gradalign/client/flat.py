"""A model seen as one flat parameter vector, with its buffers beside it.

The module's parameters become views into ``vector`` and their gradients views into ``gradient``, so that an
algorithm's arithmetic is a handful of vector operations and nothing is copied between the two pictures.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradalign.errors import GradalignError


class Point(NamedTuple):
    """The server's point: the flat parameters x and the flat buffers (float ones, integer ones)."""

    x: Tensor
    floats: Tensor
    ints: Tensor

    def clone(self) -> Point:
        return Point(*(vector.clone() for vector in self))

    def moved(self, by: Tensor | None) -> Point:
        """Return the point with its parameters moved; the buffers are shared."""
        return self if by is None else self._replace(x=self.x + by)

    def copy_(self, other: Point) -> None:
        for own, new in zip(self, other, strict=True):
            own.copy_(new)

    @property
    def nbytes(self) -> int:
        """Bytes needed to send this point."""
        return sum(vector.numel() * vector.element_size() for vector in self)


def all_finite(vector: Tensor) -> bool:
    """Return whether no number is NaN or infinite.

    A sum of finite numbers is finite unless it overflows, and one pass over the vector is much cheaper than the
    several of ``isfinite``, which decides when the sum leaves a doubt.
    """
    return bool(torch.isfinite(vector.sum())) or bool(torch.isfinite(vector).all())


def _trained(module: nn.Module) -> list[nn.Parameter]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise GradalignError(f"the model {type(module).__name__} has no parameter that requires a gradient")
    kinds = {p.dtype for p in parameters}
    if len(kinds) > 1 or not parameters[0].is_floating_point():
        names = ", ".join(sorted(str(kind) for kind in kinds))
        raise GradalignError(f"the model's trained parameters must share one floating-point dtype, got {names}")
    return parameters


class FlatModel:
    """Wraps a module in place; parameters with ``requires_grad=False`` stay out of the flat vector."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = _trained(module)
        first = self.parameters[0]
        total = sum(p.numel() for p in self.parameters)
        self.vector = torch.empty(total, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self.vector)
        for p, view in zip(self.parameters, self.views(self.vector), strict=True):
            view.copy_(p.detach())
            p.data = view
        buffers = dict(module.named_buffers())
        self._buffer_names = [name for name in module.state_dict() if name in buffers]
        if complex_ones := [name for name in self._buffer_names if buffers[name].is_complex()]:
            problem = f"the buffer {complex_ones[0]} is complex"
            raise GradalignError(f"{problem}; register it with persistent=False or as two buffers")
        floats = (b.dtype for b in self._buffers(floating=True))
        self._buffer_dtype = reduce(torch.promote_types, floats, first.dtype)  # holds every float buffer's value
        # What is not exchanged begins every client's work as it was made: nothing leaks from one client to the next.
        constants = {name: b for name, b in buffers.items() if name not in self._buffer_names}
        constants |= {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._constants = {name: value.detach().clone() for name, value in constants.items()}

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the parameters' views of a flat vector."""
        spans = vector.split([p.numel() for p in self.parameters])
        return [span.view(p.shape) for span, p in zip(spans, self.parameters, strict=True)]

    def attach_gradients(self) -> None:
        """Make every parameter accumulate into the flat gradient, also after user code replaced ``.grad``."""
        for p, view in zip(self.parameters, self.views(self.gradient), strict=True):
            p.grad = view

    def _buffers(self, floating: bool) -> list[Tensor]:
        current = dict(self.module.named_buffers())
        buffers = [current[name] for name in self._buffer_names]
        return [b for b in buffers if b.is_floating_point() == floating]

    def read_buffers(self) -> tuple[Tensor, Tensor]:
        """Return (float buffers, integer buffers), each as one new flat CPU vector."""
        floats = [b.detach().reshape(-1).to("cpu", self._buffer_dtype) for b in self._buffers(floating=True)]
        ints = [b.detach().reshape(-1).to("cpu", torch.int64) for b in self._buffers(floating=False)]
        return (
            torch.cat(floats) if floats else torch.empty(0, dtype=self._buffer_dtype),
            torch.cat(ints) if ints else torch.empty(0, dtype=torch.int64),
        )

    def read(self) -> Point:
        """Return a copy of the module's present state, on the CPU."""
        return Point(self.vector.detach().to("cpu", copy=True), *self.read_buffers())

    def load(self, point: Point) -> None:
        """Overwrite the module's parameters and buffers."""
        self.vector.copy_(point.x)
        for source, floating in ((point.floats, True), (point.ints, False)):
            offset = 0
            for buffer in self._buffers(floating):
                buffer.copy_(source[offset : offset + buffer.numel()].view(buffer.shape))
                offset += buffer.numel()
        current = {**dict(self.module.named_buffers()), **dict(self.module.named_parameters())}
        for name, value in self._constants.items():
            if name in current and current[name].shape == value.shape:
                current[name].data.copy_(value)

"""Two passes over one batch: what GradAlign's step needs beside an optimizer.

A part's first pass gives g_i = ∇f_i(x). With ḡ, the mean over all parts, its second pass is made at the displaced
point x_i = x − β(ḡ − g_i) and gives h_i = ∇f_i(x_i). The step is then taken from x along the mean of h_i.

Memory, in gradient-sized vectors and counting ``.grad``, for n parts: n + 1. The parts' gradients become their
distances from ḡ in place, and ḡ's memory becomes the copy of x that is put back afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradalign.errors import GradalignError
from gradalign.optim.gradients import (
    Gradients,
    add_gradients,
    forget_derived_values,
    held_values,
    put_values,
    take_gradients,
)

RandomState = tuple[Tensor, Tensor | None]


def random_state(device: torch.device) -> RandomState:
    """Return the state of torch's generators: the CPU's and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


class FrozenBuffers:
    """Holds batch-norm statistics and all other buffers still during the second passes.

    With a model its buffers are copied at the start. Without one, a hook notes every module in training mode just
    before its forward; this sees all modules that run eagerly.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._release: Callable[[], object] | None = None
        self._saved: dict[tuple[int, str], tuple[nn.Module, str, Tensor, Tensor]] = {}

    def _save(self, module: nn.Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            if (id(module), name) not in self._saved:
                self._saved[id(module), name] = (module, name, buffer, buffer.detach().clone())

    def start(self) -> None:
        if self._release is not None or self._saved:
            return
        if self._model is None:
            this = weakref.ref(self)  # a step that is given up half-way leaves no hook for all modules behind

            def note(module: nn.Module, _: object) -> None:
                if module.training and (frozen := this()) is not None:
                    frozen._save(module)

            hook = nn.modules.module.register_module_forward_pre_hook(note)
            self._release = weakref.finalize(self, hook.remove)
        else:
            for module in self._model.modules():
                self._save(module)

    @torch.no_grad()
    def stop(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None
        for module, name, buffer, value in self._saved.values():
            buffer.copy_(value)
            setattr(module, name, buffer)  # some modules put a new tensor in the buffer's place
        self._saved.clear()


@dataclass
class Part:
    """One part of the batch: its gradient at x, later that gradient's distance from the mean."""

    vectors: Gradients
    weight: float
    random: RandomState
    scale: float
    """What the part's losses are multiplied with before backward."""


class TwoPasses:
    """The working memory of one step: parts are collected, then visited at their displaced points in the same order."""

    def __init__(self, parameters: Sequence[nn.Parameter], buffers: FrozenBuffers, same_randomness: bool) -> None:
        if not parameters:
            raise GradalignError("no parameter of the optimizer requires a gradient")
        devices = {p.device for p in parameters}
        if len(devices) > 1:
            named = " and ".join(sorted(str(device) for device in devices))
            raise GradalignError(f"GradAlign needs all parameters on one device, got {named}")
        self.parameters, self.device = parameters, parameters[0].device
        self.parts: list[Part] = []
        self.visited = 0
        self.accumulating = False  # whether the step's gradient is the sum of scaled ones, not the parts' mean
        self.staying = False  # whether this is a plain step: second passes are made at x, if at all, and add nothing
        self.nonfinite = False  # whether this rank's gradient is not finite and the other ranks do not know it yet
        self.total: Gradients = [None] * len(parameters)  # of what was gathered, each times its share
        self._buffers, self._same_randomness, self._beta = buffers, same_randomness, 0.0
        self._home: Gradients | None = None
        self._after: RandomState | None = None

    @property
    def weight(self) -> float:
        return sum(part.weight for part in self.parts)

    @property
    def displaced(self) -> bool:
        """Whether the parameters are away from x."""
        return self._home is not None

    @property
    def second(self) -> bool:
        """Whether the first passes are over."""
        return self.displaced or self.staying

    @torch.no_grad()
    def collect(self, weight: float, random: RandomState, scale: float = 1.0, *, accumulating: bool = False) -> None:
        self.accumulating = accumulating
        vectors = take_gradients(self.parameters)
        if scale != 1.0:
            vectors = [None if g is None else g.div_(scale) for g in vectors]
        self.parts.append(Part(vectors, weight, random, scale))

    def local_mean(self) -> Gradients:
        """Return the weighted mean of this process's parts as new tensors."""
        mean: Gradients = [None] * len(self.parameters)
        for part in self.parts:
            add_gradients(mean, part.vectors, part.weight / self.weight, in_place=False)
        return mean

    @torch.no_grad()
    def aim(self, beta: float, mean: Gradients) -> None:
        """Turn the parts' gradients into their distances from ḡ, and ḡ's memory into the copy of x."""
        for part in self.parts:
            pairs = zip(part.vectors, mean, strict=True)
            part.vectors = [None if m is None else -m if g is None else g.sub_(m) for g, m in pairs]
        for p, memory in zip(self.parameters, mean, strict=True):
            if memory is not None:
                memory.copy_(held_values(p))
        self._home, self._beta = mean, beta

    def stay(self) -> None:
        """Make this a plain step."""
        self.staying = True
        for part in self.parts:
            part.vectors = []
        self.leave()

    def leave(self) -> None:
        """Begin the second passes: from here on buffers and generators are put back by ``go_home``."""
        self._after = random_state(self.device)
        self._buffers.start()

    @contextmanager
    def second_passes(self) -> Iterator[None]:
        self.leave()
        try:
            yield
        finally:
            self.go_home()

    def set_random(self, state: RandomState | None) -> None:
        if state is not None and self._same_randomness:
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state(state[1], self.device)

    @torch.no_grad()
    def visit(self) -> None:
        """Go to the next part's displaced point x + β(g_i − ḡ), with the random numbers of its first pass."""
        part = self.parts[self.visited]
        self.visited += 1
        for p, x, distance in zip(self.parameters, self._home or (), part.vectors, strict=True):
            if x is not None and distance is not None:
                torch.add(x, distance, alpha=self._beta, out=held_values(p))  # one walk through memory
        forget_derived_values()
        part.vectors = []
        self.set_random(part.random)

    def gather(self) -> bool:
        """Add the gradient of the point just visited to the total; return whether there was one."""
        if self.visited == 0 or all(p.grad is None for p in self.parameters):
            return False
        add_gradients(
            self.total, take_gradients(self.parameters), self.share(self.parts[self.visited - 1]), in_place=True
        )
        return True

    def share(self, part: Part, whole: float | None = None) -> float:
        """Return what a part's second gradient counts, as it comes from backward."""
        return 1.0 if self.accumulating else part.weight / (self.weight if whole is None else whole) / part.scale

    def go_home(self) -> None:
        """Put back x to the bit, the buffers, and the generators as they were after the first passes."""
        if self._home is not None:
            put_values(self.parameters, self._home)
            self._home = None
        self._buffers.stop()
        self.set_random(self._after)
        self._after = None

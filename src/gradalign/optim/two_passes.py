"""Two passes over one batch: what GradAlign's step needs beside an optimizer.

A part's first pass gives g_i = ∇f_i(x). With ḡ, the mean over all parts, its second pass is made at the displaced
point x_i = x − β(ḡ − g_i) and gives h_i = ∇f_i(x_i). The step is then taken from x along the mean of h_i.

Memory, in gradient-sized vectors and counting ``.grad``, for n parts: n + 1. The parts' gradients become their
distances from ḡ in place, and ḡ's memory becomes the copy of x that is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradalign.errors import GradalignError
from gradalign.optim.ranks import Gradients, Ranks
from gradalign.optim.vectors import add_gradients, forget_derived_values, put_copies, put_values, take_gradients

RandomState = tuple[Tensor, Tensor | None]


def random_state(device: torch.device) -> RandomState:
    """Return the state of torch's generators: the CPU's and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: RandomState) -> None:
    """Put torch's generators back into a state."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


class FrozenBuffers:
    """Holds batch-norm statistics and all other buffers still during the second passes.

    With a model its buffers are copied at the start. Without one, every module in training mode that is called is
    noted by a hook just before its forward; this sees all modules that run eagerly.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._hook: RemovableHandle | None = None
        self._saved: dict[tuple[int, str], tuple[nn.Module, str, Tensor, Tensor]] = {}

    def _save(self, module: nn.Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            if (id(module), name) not in self._saved:
                self._saved[id(module), name] = (module, name, buffer, buffer.detach().clone())

    def start(self) -> None:
        """Begin to watch."""
        if self._hook is not None or self._saved:
            return
        if self._model is not None:
            for module in self._model.modules():
                self._save(module)
            return

        def before_forward(module: nn.Module, _: object) -> None:
            if module.training:
                self._save(module)

        self._hook = nn.modules.module.register_module_forward_pre_hook(before_forward)

    @torch.no_grad()
    def stop(self) -> None:
        """Put every buffer back as it was."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
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


class TwoPasses:
    """The working memory of one step: parts are collected, then visited at their displaced points in the same order."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks, buffers: FrozenBuffers) -> None:
        if not parameters:
            raise GradalignError("no parameter of the optimizer requires a gradient")
        devices = {p.device for p in parameters}
        if len(devices) > 1:
            named = " and ".join(sorted(str(device) for device in devices))
            raise GradalignError(f"GradAlign needs all parameters on one device, got {named}")
        self.parameters, self.ranks, self.device = parameters, ranks, parameters[0].device
        self.parts: list[Part] = []
        self.visited = 0
        self.staying = False
        """This step is a plain one: second passes are made at x, if at all, and count for nothing."""
        self.nonfinite = False
        """This rank's gradient is not finite and the other ranks do not know it yet."""
        self._buffers = buffers
        self._home: Gradients | None = None
        self._beta = 0.0
        self._total: Gradients = [None] * len(parameters)
        self._after: RandomState | None = None

    @property
    def weight(self) -> float:
        """The sum of the parts' weights."""
        return sum(part.weight for part in self.parts)

    @property
    def displaced(self) -> bool:
        """Whether the parameters are away from x."""
        return self._home is not None

    def collect(self, weight: float, random: RandomState) -> None:
        """Keep what lies in ``.grad`` as the next part's gradient at x."""
        self.parts.append(Part(take_gradients(self.parameters), weight, random))

    def local_mean(self) -> Gradients:
        """Return the weighted mean of this process's parts as new tensors."""
        mean: Gradients = [None] * len(self.parameters)
        for part in self.parts:
            share = part.weight / self.weight
            for j, g in enumerate(part.vectors):
                kept = mean[j]
                if g is not None:
                    mean[j] = g * share if kept is None else kept.add_(g, alpha=share)
        return mean

    @torch.no_grad()
    def aim(self, beta: float, mean: Gradients) -> None:
        """Turn the parts' gradients into their distances from ḡ, and ḡ's memory into the copy of x."""
        for part in self.parts:
            pairs = zip(part.vectors, mean, strict=True)
            part.vectors = [None if m is None else -m if g is None else g.sub_(m) for g, m in pairs]
        put_copies(self.parameters, mean)
        self._home, self._beta = mean, beta

    def stay(self) -> None:
        """Let second passes come and go without a trace."""
        self.staying = True
        for part in self.parts:
            part.vectors = []
        self._after = random_state(self.device)
        self._buffers.start()

    def visit(self, same_randomness: bool) -> None:
        """Go to the next part's displaced point, with the random numbers of its first pass."""
        part = self.parts[self.visited]
        if self.visited == 0:
            self._after = random_state(self.device)
            self._buffers.start()
        self.visited += 1
        self._go_to(part.vectors)
        part.vectors = []
        if same_randomness:
            set_random_state(self.device, part.random)

    @torch.no_grad()
    def _go_to(self, distances: Gradients) -> None:
        """Set the parameters to x + β(g_i − ḡ), in one walk through memory."""
        for p, x, distance in zip(self.parameters, self._home or (), distances, strict=True):
            if x is not None and distance is not None:
                torch.add(x, distance, alpha=self._beta, out=p)
        forget_derived_values()

    def gather(self) -> bool:
        """Add the gradient of the point just visited to the total; return whether there was one."""
        if self.visited == 0 or all(p.grad is None for p in self.parameters):
            return False
        share = self.parts[self.visited - 1].weight / self.weight
        self._total = add_gradients(self._total, take_gradients(self.parameters), share)
        return True

    def go_home(self, same_randomness: bool = True) -> None:
        """Put back x to the bit, the buffers, and the generators as they were after the first passes."""
        if self._home is not None:
            put_values(self.parameters, self._home)
            self._home = None
        self._buffers.stop()
        if self._after is not None and same_randomness:
            set_random_state(self.device, self._after)
        self._after = None

    def total(self) -> Gradients:
        """Return the sum of what was gathered, each times its share."""
        return self._total

"""Two passes over one batch: what GradAlign's step needs beside an optimizer.

A part's first pass gives g_i = ∇f_i(x). With ḡ, the mean over all parts, its second pass is made at the displaced
point x_i = x − β(ḡ − g_i) and gives h_i = ∇f_i(x_i). The step is then taken from x along the mean of h_i.

Memory, in gradient-sized vectors and counting ``.grad``, for n parts: n + 1. The parts' gradients become their
distances from ḡ in place, and ḡ's memory becomes the copy of x that is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradalign.errors import GradalignError
from gradalign.optim.ranks import Gradients, add_gradients, forget_derived_values, put_values, take_gradients

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
        self._hook: RemovableHandle | None = None
        self._saved: dict[tuple[int, str], tuple[nn.Module, str, Tensor, Tensor]] = {}

    def _save(self, module: nn.Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            if (id(module), name) not in self._saved:
                self._saved[id(module), name] = (module, name, buffer, buffer.detach().clone())

    def start(self) -> None:
        if self._hook is not None or self._saved:
            return
        if self._model is None:
            self._hook = nn.modules.module.register_module_forward_pre_hook(
                lambda module, _: self._save(module) if module.training else None
            )
        else:
            for module in self._model.modules():
                self._save(module)

    @torch.no_grad()
    def stop(self) -> None:
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

    def collect(self, weight: float, random: RandomState) -> None:
        self.parts.append(Part(take_gradients(self.parameters), weight, random))

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
                memory.copy_(p.detach())
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
                torch.add(x, distance, alpha=self._beta, out=p)  # one walk through memory
        forget_derived_values()
        part.vectors = []
        self.set_random(part.random)

    def gather(self) -> bool:
        """Add the gradient of the point just visited to the total; return whether there was one."""
        if self.visited == 0 or all(p.grad is None for p in self.parameters):
            return False
        share = self.parts[self.visited - 1].weight / self.weight
        add_gradients(self.total, take_gradients(self.parameters), share, in_place=True)
        return True

    def go_home(self) -> None:
        """Put back x to the bit, the buffers, and the generators as they were after the first passes."""
        if self._home is not None:
            put_values(self.parameters, self._home)
            self._home = None
        self._buffers.stop()
        self.set_random(self._after)
        self._after = None


class PendingGradient:
    """The step's gradient between the second passes and ``step()``: it lies complete in ``.grad``, where users clip it.

    Gradients are changed on their way into ``.grad`` by hooks, so that it does not matter how often a part's backward
    is called, nor whether someone cleared ``.grad`` before it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._noted: dict[Tensor, tuple[int, int]] = {}
        self._handles = [p.register_hook(partial(self._arrive, p)) for p in parameters]
        self._handles += [p.register_post_accumulate_grad_hook(self._note) for p in parameters]

    def _arrive(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        raise NotImplementedError  # what is to be added to .grad in the place of this gradient

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._noted[parameter] = id(parameter.grad), parameter.grad._version

    def changed(self, allowed: int) -> bool:
        """Return whether ``.grad`` was written to, more often than allowed, since the last backward."""
        return any(
            p.grad is not None and (id(p.grad) != name or p.grad._version > version + allowed)
            for p, (name, version) in self._noted.items()
        )

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class LastPart(PendingGradient):
    """Adds the last part's gradient, times its share, to the sum of the parts before."""

    def __init__(self, parameters: Sequence[nn.Parameter], so_far: Gradients, share: float) -> None:
        super().__init__(parameters)
        self._share = share
        self._waiting = {p: g for p, g in zip(parameters, so_far, strict=True) if g is not None}
        self._arrived: set[nn.Parameter] = set()

    @torch.no_grad()
    def _arrive(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        self._arrived.add(parameter)
        rest = self._waiting.pop(parameter, None)
        if rest is not None:
            return rest.add_(gradient, alpha=self._share)
        return gradient if self._share == 1.0 else gradient * self._share

    def _note(self, parameter: Tensor) -> None:
        super()._note(parameter)
        # Parameters that only other parts used may never be reached by this backward.
        for p in [p for p in self._waiting if p.grad is None]:
            p.grad = self._waiting.pop(p)
            self._arrived.add(p)
            super()._note(p)

    @torch.no_grad()
    def finish(self) -> None:
        """Let go; weigh and add where a gradient was put by hand, past the hooks."""
        self.close()
        for p in self.parameters:
            if p.grad is not None and p not in self._arrived:
                p.grad.mul_(self._share)
        for p, rest in self._waiting.items():
            p.grad = rest if p.grad is None else rest.add_(p.grad)


class PlainGradient(PendingGradient):
    """The gradient of a step that has no displaced points: second passes, if they are made, add nothing to it."""

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
        super().__init__(parameters)
        self._gradients = dict(zip(parameters, gradients, strict=True))
        self.put()

    def put(self) -> None:
        """Make it ``.grad``, again when someone cleared that."""
        for p, own in self._gradients.items():
            p.grad = own
            self._note(p)

    @torch.no_grad()
    def _arrive(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        own = self._gradients[parameter]
        return torch.zeros_like(gradient) if own is None or parameter.grad is not None else own

    def finish(self) -> None:
        """Let go; what was cleared or came where nothing belongs is put right."""
        self.close()
        for p, own in self._gradients.items():
            if own is None or p.grad is None:
                p.grad = own

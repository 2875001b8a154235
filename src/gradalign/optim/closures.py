"""GradAlign's step when the parts come with a closure: who is computed when, and what is kept meanwhile.

Each way leaves the step's gradient in ``.grad`` and returns the mean loss at x. Whatever the closure raises, the
parameters, buffers and random generators are put back first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradalign.errors import GradalignError
from gradalign.optim.averaging import DdpWatch
from gradalign.optim.pending import scaled_gradients
from gradalign.optim.ranks import Gradients, Ranks, positive_weight
from gradalign.optim.two_passes import FrozenBuffers, RandomState, TwoPasses, random_state, set_random_state
from gradalign.optim.vectors import all_finite, displaced_points, put_gradients, put_values, swap, take_gradients

Parts = list[tuple[Any, ...]]


def as_parts(
    batch: Sequence[Any], parts: int | Iterable[Any] | None, weights: Sequence[float] | None
) -> tuple[Parts, list[float]]:
    """Return the closure's arguments for every part, and the parts' weights.

    ``step(closure)`` is one part without arguments, ``step(closure, parts)`` an iterable of parts, and
    ``step(loss_fn, inputs, targets, parts=8)`` tensors that are cut along their first dimension, weighted by length.
    """
    if isinstance(parts, int):
        arguments, sizes = _cut(batch, parts)
        weights = sizes if weights is None else weights
    elif batch and (len(batch) > 1 or parts is not None):
        raise GradalignError("give step() a closure and the parts, or tensors and the number of parts as parts=8")
    else:
        given = batch[0] if batch else parts
        arguments = [()] if given is None else [(part,) for part in given]
    if not arguments:
        raise GradalignError("step() was given no parts; a batch needs at least one")
    weights = [1.0] * len(arguments) if weights is None else list(weights)
    if len(weights) != len(arguments):
        raise GradalignError(f"weights must be {len(arguments)} positive numbers, one for each part, got {weights}")
    return arguments, [positive_weight(weight, "the weight of a part") for weight in weights]


def _cut(batch: Sequence[Any], parts: int) -> tuple[Parts, list[float]]:
    lengths = {len(t) if isinstance(t, Tensor) and t.ndim else -1 for t in batch}
    if len(lengths) != 1 or -1 in lengths:
        raise GradalignError("parts=n cuts tensors that have the same first dimension; give other batches as a list")
    (length,) = lengths
    if parts < 1:
        raise GradalignError(f"parts must be at least 1, got {parts}")
    if length == 0:
        raise GradalignError("step() was given a batch of 0 examples; leave such batches out")
    # A loader's last batch may have fewer examples than parts: then every example is a part.
    pieces = list(zip(*(t.tensor_split(min(parts, length)) for t in batch), strict=True))
    return pieces, [float(len(piece[0])) for piece in pieces]


@contextmanager
def _refuse_synchronised_models() -> Iterator[None]:
    """Refuse a DistributedDataParallel model that would average the first pass's gradients by itself."""

    def check(module: nn.Module, _: object) -> None:
        if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync:
            raise GradalignError(
                "the DistributedDataParallel model would average the parts' gradients before GradAlign sees them; "
                "give it as GradAlign(..., model=model)"
            )

    hook = nn.modules.module.register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


@dataclass
class ClosureStep:
    """One step on given parts."""

    closure: Callable[..., Any]
    parts: Parts
    weights: list[float]
    parameters: list[nn.Parameter]
    ranks: Ranks
    buffers: FrozenBuffers
    same_randomness: bool
    model: DistributedDataParallel | None
    overlap: bool
    watch: DdpWatch

    def __post_init__(self) -> None:
        self.passes = TwoPasses(self.parameters, self.ranks, self.buffers)
        self.weight = self.all_weight = sum(self.weights)
        # loss / n and not loss · (1/n): the bits of the usual loop that accumulates gradients.
        self.divisors = [self.weight / w for w in self.weights]
        self.loss: Tensor | None = None
        take_gradients(self.parameters)

    def _quiet(self) -> AbstractContextManager[Any]:
        if self.model is not None:
            return self.model.no_sync()
        return _refuse_synchronised_models() if self.ranks.size > 1 else nullcontext()

    def _run(self, arguments: tuple[Any, ...], divisor: float, *, synchronised: bool = False) -> Tensor:
        """Let the closure compute one part's loss and add its gradient, divided, to ``.grad``."""
        clean = all(p.grad is None for p in self.parameters)
        with nullcontext() if synchronised else self._quiet():
            with torch.enable_grad():
                loss = self.closure(*arguments)
            if clean and any(p.grad is not None for p in self.parameters):
                if arguments:
                    raise GradalignError("the closure of a part must return the loss and leave backward() to GradAlign")
                return torch.as_tensor(float("nan") if loss is None else loss).detach()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                kind = type(loss).__name__ if not isinstance(loss, Tensor) else f"a tensor of shape {tuple(loss.shape)}"
                raise GradalignError(f"the closure must return the loss as a scalar tensor with a graph, got {kind}")
            (loss if divisor == 1.0 else loss / divisor).backward()
        return loss.detach().reshape(())

    def _add_loss(self, loss: Tensor, divisor: float) -> None:
        self.loss = loss / divisor if self.loss is None else self.loss + loss / divisor

    def _first(self, index: int, divisor: float, *, synchronised: bool = False) -> RandomState:
        """Make one part's first pass; return the random state it began with."""
        before = random_state(self.passes.device)
        loss = self._run(self.parts[index], divisor, synchronised=synchronised)
        self._add_loss(loss, self.divisors[index])
        return before

    def _reduce(self, gradients: Gradients, *, with_loss: bool) -> Gradients:
        """Return the mean over the ranks; the loss travels along with the first one of a step."""
        mean = self.ranks.mean(self.parameters, gradients, self.weight, self.loss if with_loss else None)
        self.loss = mean.loss if with_loss else self.loss
        self.all_weight = mean.weight
        return mean.gradients

    def _tell(self, *, lost: bool = False) -> bool:
        """Agree on loss and weight where no flat vector carries them; return whether any rank lost its gradient."""
        loss = 0.0 if self.loss is None else float(self.loss) * self.weight
        losses, self.all_weight, losts = self.ranks.sums([loss, self.weight, float(lost)], self.passes.device)
        if self.loss is not None:
            self.loss = torch.full_like(self.loss, losses / self.all_weight)
        return losts > 0.0

    def _weighted_for_ddp(self) -> AbstractContextManager[Any]:
        """Weigh this rank's gradients before DistributedDataParallel takes the plain mean of all ranks'."""
        if not self.overlap:
            return nullcontext()
        return scaled_gradients(self.parameters, self.weight * self.ranks.size / self.all_weight)

    def _finish(self, *, with_loss: bool) -> None:
        """Replace this rank's gradient in ``.grad`` by the mean over all ranks."""
        if self.ranks.size == 1 or (self.overlap and self.watch.averages):
            return
        own = take_gradients(self.parameters)
        if self.overlap:  # step() was called inside no_sync(), or the closure goes past DDP; the weights are in already
            put_gradients(self.parameters, self.ranks.mean(self.parameters, own, 1.0, None).gradients)
        else:
            put_gradients(self.parameters, self._reduce(own, with_loss=with_loss))

    def plain(self) -> None:
        """Fill ``.grad`` with the mean gradient at x: one pass, as in a loop that accumulates gradients."""
        last = len(self.parts) - 1
        if self.overlap:
            self._tell()
        with self._weighted_for_ddp():
            for i, divisor in enumerate(self.divisors):
                self._first(i, divisor, synchronised=self.overlap and i == last)
        if self.overlap:
            self._tell()
        self._finish(with_loss=True)

    def stored(self, beta: float) -> None:
        """Fill ``.grad`` with the mean of the displaced gradients: two passes, n + 1 vectors."""
        passes = self.passes
        for i, weight in enumerate(self.weights):
            random = self._first(i, 1.0)
            passes.collect(weight, random)
        mean = self._reduce(passes.local_mean(), with_loss=True)
        if not all_finite(mean):
            put_gradients(self.parameters, mean)
            return
        passes.aim(beta, mean)
        del mean  # its memory now holds x
        try:
            for arguments in self.parts:
                passes.visit(self.same_randomness)
                with self._weighted_for_ddp():
                    self._run(arguments, 1.0, synchronised=self.overlap)
                passes.gather()
        finally:
            passes.go_home(self.same_randomness)
        put_gradients(self.parameters, passes.total())
        self._finish(with_loss=False)

    def low_memory(self, beta: float) -> None:
        """The same with three vectors and three passes: ḡ first, then both gradients of each part in turn."""
        states = [self._first(i, divisor) for i, divisor in enumerate(self.divisors)]
        mean = self._reduce(take_gradients(self.parameters), with_loss=True)
        if not all_finite(mean):
            put_gradients(self.parameters, mean)
            return
        after = random_state(self.passes.device)
        self.buffers.start()
        try:
            for i, arguments in enumerate(self.parts):
                so_far = take_gradients(self.parameters)
                self._set_random(states[i])
                self._run(arguments, 1.0)
                own = take_gradients(self.parameters)
                put_gradients(self.parameters, so_far)
                del so_far  # two names for one tensor would make backward copy instead of add
                self._add_displaced(i, displaced_points(self.parameters, mean, own, beta), states[i])
                del own  # it is x by now, and the next part's gradient is about to come
        finally:
            self.buffers.stop()
            self._set_random(after)
        self._finish(with_loss=False)

    def with_previous(self, beta: float, mean: Gradients) -> None:
        """The same with a ḡ that is known already: two passes, three vectors, one all-reduce."""
        nonfinite = False
        for i in range(len(self.parts)):
            so_far = take_gradients(self.parameters)
            before = self._first(i, 1.0)
            own = take_gradients(self.parameters)
            put_gradients(self.parameters, so_far)
            del so_far
            nonfinite = not all_finite(own)
            if self.overlap:  # the averaging of the second pass is DDP's: all must make it, or nobody
                nonfinite = self._tell(lost=nonfinite)
            if nonfinite:
                break
            after = random_state(self.passes.device)
            self.buffers.start()
            try:
                self._add_displaced(i, displaced_points(self.parameters, mean, own, beta), before)
                del own
            finally:
                self.buffers.stop()
                self._set_random(after)
        if nonfinite:  # the other ranks do not know: NaN in the mean tells them
            put_gradients(self.parameters, [torch.full_like(p, float("nan")) for p in self.parameters])
        self._finish(with_loss=True)

    def _add_displaced(self, index: int, points: Gradients, random: RandomState) -> None:
        """Add one part's gradient at its displaced point to ``.grad``."""
        swap(self.parameters, points)
        try:
            self._set_random(random)
            with self._weighted_for_ddp():
                self._run(self.parts[index], self.divisors[index], synchronised=self.overlap)
        finally:
            put_values(self.parameters, points)

    def _set_random(self, state: RandomState) -> None:
        if self.same_randomness:
            set_random_state(self.passes.device, state)

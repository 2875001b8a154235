"""GradAlign's step when the parts come with a closure: what is computed when, and what is stored meanwhile.

Each way leaves the step's gradient in ``.grad`` and the mean loss at x in ``loss``. Whatever the closure raises, the
parameters, buffers and random generators are put back first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradalign.errors import GradalignError
from gradalign.optim.gradients import Gradients, add_gradients, displaced, put_gradients, take_gradients
from gradalign.optim.two_passes import RandomState, TwoPasses, random_state
from gradalign.optim.wrapper import OptimizerWrapper


def _refuse_averaging() -> NoReturn:
    raise GradalignError(
        "the DistributedDataParallel model would average the parts' gradients before GradAlign sees them; "
        "give it as GradAlign(..., model=model)"
    )


class ClosureStep:
    """One step of a wrapper on given parts, each the arguments of the closure."""

    def __init__(
        self, wrapper: OptimizerWrapper, closure: Callable[..., Any], parts: list[tuple[Any, ...]], weights: list[float]
    ) -> None:
        self.closure, self.parts = closure, parts
        self.parameters, self.overlap = wrapper.trained_parameters(), wrapper.overlap
        self.ranks, self.watch, self.model = wrapper._ranks, wrapper._watch, wrapper._parallel
        self.passes = TwoPasses(self.parameters, wrapper._buffers, wrapper.same_randomness)
        self.weights, self.scales = self.ranks.spread(weights, self.passes.device)
        self.weight = self.all_weight = sum(self.weights)
        # loss / n and not loss · (1/n): the bits of the usual loop that accumulates gradients.
        self.divisors = [self.weight / w for w in self.weights]
        self.loss: Tensor | None = None
        take_gradients(self.parameters)

    def _quiet(self) -> AbstractContextManager[Any]:
        if self.model is not None:
            return self.model.no_sync()
        return self.watch.refusing(self.parameters, _refuse_averaging) if self.ranks.size > 1 else nullcontext()

    def _run(self, index: int, divisor: float, *, synchronised: bool = False) -> Tensor:
        """Let the closure compute one part's loss and add its gradient, divided, to ``.grad``."""
        arguments = self.parts[index]
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
            loss = loss if self.scales[index] == 1.0 else loss * self.scales[index]
            (loss if divisor == 1.0 else loss / divisor).backward()
        self.ranks.gather_anew()
        return loss.detach().reshape(())

    def _first(self, index: int, divisor: float, *, synchronised: bool = False) -> RandomState:
        """Make one part's first pass; return the random state it began with."""
        before = random_state(self.passes.device)
        loss = self._run(index, divisor, synchronised=synchronised) / self.divisors[index]
        self.loss = loss if self.loss is None else self.loss + loss
        return before

    def _reduce(self, gradients: Gradients, *, with_loss: bool) -> Gradients:
        """Return the mean over the ranks; the loss goes along with the first one of a step."""
        loss = self.loss if with_loss else None
        means, loss, self.all_weight = self.ranks.mean(self.parameters, gradients, self.weight, loss)
        self.loss = loss if with_loss else self.loss
        return means

    def _tell(self, *, lost: bool = False) -> bool:
        """Agree on loss and weight where no flat vector carries them; return whether any rank lost its gradient."""
        loss = 0.0 if self.loss is None else float(self.loss) * self.weight
        losses, self.all_weight, losts = self.ranks.sums([loss, self.weight, float(lost)], self.passes.device)
        if self.loss is not None:
            self.loss = torch.full_like(self.loss, losses / self.all_weight)
        return losts > 0.0

    @contextmanager
    def _weighted_for_ddp(self) -> Iterator[None]:
        """With overlap, weigh what arrives in ``.grad`` before DDP takes the plain mean of all ranks'."""
        factor = self.weight * self.ranks.size / self.all_weight if self.overlap else 1.0
        handles = [] if factor == 1.0 else [p.register_hook(lambda g: g * factor) for p in self.parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _finish(self, *, with_loss: bool) -> None:
        if self.ranks.size == 1 or (self.overlap and self.watch.averages):
            return
        own = take_gradients(self.parameters)
        if self.overlap:  # step() was called inside no_sync(), or the closure goes past DDP; the weights are in already
            own = self.ranks.mean(self.parameters, own, 1.0, None)[0]
        else:
            own = self._reduce(own, with_loss=with_loss)
        put_gradients(self.parameters, own)

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
        mean: Gradients = [None] * len(self.parameters)
        for i, weight in enumerate(self.weights):
            passes.collect(weight, self._first(i, 1.0))
            # Added at once, while it is in the cache.
            add_gradients(mean, passes.parts[i].vectors, weight / self.weight, in_place=False)
        mean = self._reduce(mean, with_loss=True)
        if self.ranks.lost(mean):
            put_gradients(self.parameters, mean)
            return
        passes.aim(beta, mean)
        del mean  # its memory now holds x
        with passes.second_passes():
            for i in range(len(self.parts)):
                passes.visit()
                with self._weighted_for_ddp():
                    self._run(i, 1.0, synchronised=self.overlap)
                passes.gather()
        put_gradients(self.parameters, passes.total)
        self._finish(with_loss=False)

    def low_memory(self, beta: float) -> None:
        """The same with three vectors and three passes: ḡ first, then both gradients of each part in turn."""
        states = [self._first(i, divisor) for i, divisor in enumerate(self.divisors)]
        mean = self._reduce(take_gradients(self.parameters), with_loss=True)
        if self.ranks.lost(mean):
            put_gradients(self.parameters, mean)
            return
        with self.passes.second_passes():
            for i, state in enumerate(states):
                self.passes.set_random(state)
                # Its memory is x by the time that the next part's gradient comes, so it gets no name here.
                self._add_displaced(i, mean, self._apart(partial(self._run, i, 1.0)), beta, state)
        self._finish(with_loss=False)

    def with_previous(self, beta: float, mean: Gradients) -> None:
        """The same with a ḡ that is known already: two passes, three vectors, one all-reduce."""
        nonfinite = False
        for i in range(len(self.parts)):
            before = random_state(self.passes.device)
            own = self._apart(partial(self._first, i, 1.0))
            nonfinite = self.ranks.lost(own)
            if self.overlap:  # the averaging of the second pass is DDP's: all must make it, or nobody
                nonfinite = self._tell(lost=nonfinite)
            if nonfinite:
                break
            with self.passes.second_passes():
                self._add_displaced(i, mean, own, beta, before)
            del own
        if nonfinite:  # the other ranks do not know: NaN in the mean tells them
            put_gradients(self.parameters, [torch.full_like(p, float("nan")) for p in self.parameters])
        self._finish(with_loss=True)

    def _apart(self, run: Callable[[], object]) -> Gradients:
        """Return the gradient of a run, and leave the sum in ``.grad`` without it."""
        so_far = take_gradients(self.parameters)
        run()
        own = take_gradients(self.parameters)
        put_gradients(self.parameters, so_far)  # by its only name: with a second one backward would copy, not add
        return own

    def _add_displaced(self, index: int, mean: Gradients, own: Gradients, beta: float, random: RandomState) -> None:
        """Add one part's gradient at its displaced point to ``.grad``; the memory of ``own`` is used up."""
        with displaced(self.parameters, mean, own, beta), self._weighted_for_ddp():
            self.passes.set_random(random)
            self._run(index, self.divisors[index], synchronised=self.overlap)

"""GradAlign in your own training loop: a wrapper around any ``torch.optim`` optimizer.

One large batch is given as n parts. With g_i = ∇f_i(x) and ḡ their mean, a step hands the wrapped optimizer

    (1/n) Σ ∇f_i( x − β(ḡ − g_i) )

instead of ḡ: Algorithm 1 of Dandi, Barba & Jaggi 2022 when the wrapped optimizer is SGD. Momentum, weight decay and
Adam's moments stay the wrapped optimizer's. With β = 0 the step is the wrapped optimizer's own, to the last bit. Under
``torchrun`` every rank is one part, or holds several, and a step costs two all-reduces.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradalign.algorithms import LargeBatchGradAlign
from gradalign.algorithms.schedule import as_plain, from_plain
from gradalign.errors import GradalignError
from gradalign.optim.closures import ClosureStep
from gradalign.optim.gradients import forget_derived_values
from gradalign.optim.lightning_wrapper import complete, is_lightnings
from gradalign.optim.ranks import positive_weight
from gradalign.optim.two_pass_steps import TwoPassSteps

__all__ = ["GradAlign"]
STATE = "gradalign"
Parts = list[tuple[Any, ...]]


def _as_parts(
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
        raise GradalignError("give step() a closure and the parts, or tensors and the number of parts=8")
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


class GradAlign(TwoPassSteps):
    """Wraps an optimizer so that its steps align the gradients of the parts of a batch.

    The round algorithm for ``gradalign.run`` is ``LargeBatchGradAlign``.

    Args:
        optimizer: Any torch optimizer whose ``step()`` needs no closure.
        beta: β ≥ 0, the strength; ``opt.beta`` may be changed between steps. A schedule, such as
            ``Warmup(value=0.2, rounds=100)``, counts steps where it says rounds; the first step is 0.
        every: Align only each m-th step, beginning with the first; the others are plain and cost one pass.
        reuse: "previous" takes ḡ from the step before (the gradient that was stepped with) and saves an all-reduce.
            All parts are then also shifted together, by β times the change of the mean gradient since that step.
        memory: "full" holds n + 1 gradient-sized vectors for n parts. "low" holds three and computes every part's
            first gradient twice. ``displace()`` and ``step()`` always work as "full".
        same_randomness: Give both passes of a part the same random numbers of torch: dropout draws the same masks.
        model: The model, needed when it is wrapped in DistributedDataParallel, compiled or sharded by ``fully_shard``.
            Its buffers (batch-norm statistics) are updated by the first pass only; without ``model`` they are found
            while it runs.
        process_group: The ranks to align; the default group when torch.distributed is initialised.
        overlap: Let DistributedDataParallel average the second pass, bucket by bucket while it computes, instead of
            one flat all-reduce after it. Needs ``model``.

    Attributes:
        beta_now: β of the step now being prepared, a number.
        steps: Steps taken or skipped.
        skipped_steps: Steps skipped because of NaN or infinity.
        optimizer: The wrapped optimizer.
    """

    if not TYPE_CHECKING:  # a type checker goes by __init__

        def __new__(cls, *args: Any, **given: Any) -> Any:
            """Tell wrong arguments with the public name; the round algorithm was once made by this name, too."""
            if not args and "beta" in given and "optimizer" not in given:
                text = "GradAlign(beta=...) without an optimizer is called LargeBatchGradAlign(beta=...) now"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                return LargeBatchGradAlign(**given)
            try:
                if args or given:  # a copy is made without arguments
                    inspect.signature(cls.__init__).bind(None, *args, **given)
            except TypeError as error:
                if args and not isinstance(args[0], Optimizer):
                    text = f"GradAlign wraps a torch.optim optimizer, got {type(args[0]).__name__}; without one it is"
                    raise GradalignError(f"{text} LargeBatchGradAlign(beta=0.1)") from None
                raise GradalignError(f"GradAlign(optimizer, beta=0.1, ...): {error}") from None
            return super().__new__(cls)

    def __init_subclass__(cls, **given: Any) -> None:
        """Complete the class that Lightning makes of its own wrapper and this one."""
        super().__init_subclass__(**given)
        if is_lightnings(cls):
            complete(cls, GradAlign)

    def align(
        self,
        closure: Callable[..., Any],
        *batch: Any,
        parts: int | Iterable[Any] | None = None,
        weights: Sequence[float] | None = None,
    ) -> Tensor | None:
        """Fill ``.grad`` with the aligned gradient and return the mean loss at x; ``step()`` then takes the step.

        The forms are those of ``step``. In between is the place for ``clip_grad_norm_`` or a look at the gradient.
        """
        self._refuse_half_step("align")
        self._meet_ranks()
        if hasattr(self, "grad_scale"):
            raise GradalignError(
                "GradScaler cannot scale a closure's loss; use displace() and step(), or bfloat16 without a scaler"
            )
        arguments, numbers = _as_parts(batch, parts, weights)
        cut_short = isinstance(parts, int) and parts > 1  # a last batch of one example: nothing to warn of
        aligned = self.aligning and not self._alone(len(arguments), expected=cut_short)
        if self.overlap and aligned and len(arguments) > 1:
            raise GradalignError("overlap=True takes one part on every rank")
        work = ClosureStep(self, closure, arguments, numbers)
        previous = self._take_previous(work.parameters)
        if not aligned:
            work.plain()
        elif previous is not None:
            work.with_previous(self.beta_now, previous)
        elif self.memory == "low":
            work.low_memory(self.beta_now)
        else:
            work.stored(self.beta_now)
        return self._ready(work.loss)

    def step(  # type: ignore[override]
        self,
        closure: Callable[..., Any] | None = None,
        *batch: Any,
        parts: int | Iterable[Any] | None = None,
        weights: Sequence[float] | None = None,
    ) -> Tensor | None:
        """Take one step, and return the mean loss at x when there is a closure.

        - ``step(closure_of_part, parts)``: the closure gets one part and returns its loss.
        - ``step(loss_fn, inputs, targets, parts=8)``: the tensors are cut into 8 parts, weighted by their lengths.
        - ``step(closure)``: this process is one part; the closure returns its loss, with or without backward.
        - ``step()``: the end after ``displace`` or ``align``; without either, a plain step with what is in ``.grad``.

        A gradient with NaN or infinity is not stepped with: ``skipped_steps`` counts it, and parameters and optimizer
        state stay as they are.
        """
        loss = None
        if self._closure_of_trainer and closure is not None:
            loss = closure()
            closure = None
        if closure is not None:
            loss = self.align(closure, *batch, parts=parts, weights=weights)
        elif batch or parts is not None or weights is not None:
            raise GradalignError("step() was given parts but no closure")
        elif self._finite is None:
            self.finish()
        else:  # by align() or clip_grad_norm_(), which came before GradScaler told its scale
            self._refuse_unknown_scale()
            self._unscale()
        if self._finite:
            self.optimizer.step()
            forget_derived_values()  # an evaluation under the same autocast looks at the new point
        else:
            self.skipped_steps += 1
        self.steps += 1
        self._end_of_step()
        self._mark_random()
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the step's gradient down to this norm and return its norm before.

        Comes after the last backward and before ``step()``. It is the mean over all parts and ranks that is clipped.
        """
        self.finish()
        return nn.utils.clip_grad_norm_(self.trained_parameters(), max_norm, norm_type)

    def _second_passes(self, parts: Iterable[Any], run: Callable[[Any], object]) -> None:
        """Run the collected parts again, each at its displaced point where it has one; then ``.grad`` is complete."""
        try:
            for part in parts:
                if not self.displace():
                    break
                run(part)
        except BaseException:
            self.restore()
            raise
        self.finish()

    def _refuse_half_step(self, call: str, *, collected: bool = False) -> None:
        half = self._passes is not None and (self._passes.second or not collected)
        if half or self._finite is not None:
            raise GradalignError(f"{call} came in the middle of a step; call step() first, or restore() to give it up")

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict, with GradAlign's own under "gradalign".

        Gradients that were collected for the next step are no part of it, as ``.grad`` is none of any optimizer's.
        """
        self._refuse_half_step("state_dict()", collected=True)
        previous = None if self._previous is None else [self._previous.get(p) for p in self.all_parameters()]
        own = {"beta": as_plain(self.beta), "steps": self.steps, "skipped_steps": self.skipped_steps}
        return {**self.optimizer.state_dict(), STATE: own | {"previous": previous}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict: GradAlign's, or one of the wrapped optimizer alone."""
        self._refuse_half_step("load_state_dict()")
        rest = dict(state_dict)
        own = rest.pop(STATE, None)
        beta = self.beta if own is None else from_plain(own["beta"])  # before anything is changed
        self.optimizer.load_state_dict(rest)
        if own is None:
            return
        self.beta, self.steps, self.skipped_steps = beta, own["steps"], own["skipped_steps"]
        self._previous = None
        if own["previous"] is not None:
            pairs = zip(self.all_parameters(), own["previous"], strict=True)
            self._previous = {p: g.to(p.device, p.dtype, copy=True) for p, g in pairs if g is not None}

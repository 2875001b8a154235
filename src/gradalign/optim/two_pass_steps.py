"""The loop of two passes: ``displace()`` after the first backward, ``step()`` after the second, both the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gradalign.errors import GradalignError
from gradalign.optim.gradients import Gradients, all_finite, held_values, put_gradients, take_gradients
from gradalign.optim.pending import LastPart, PlainGradient
from gradalign.optim.ranks import positive_weight
from gradalign.optim.two_passes import TwoPasses, random_state
from gradalign.optim.wrapper import OptimizerWrapper


class TwoPassSteps(OptimizerWrapper):
    """Everything of ``GradAlign`` but the step with a closure and the state dict."""

    _step_supports_amp_scaling = True  # GradScaler then leaves unscaling and skipping to step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; the random numbers of a first pass are counted from here on."""
        if isinstance(self._pending, PlainGradient):  # a second pass begins that will add nothing
            self._pending.put()
            return
        self.optimizer.zero_grad(set_to_none)
        if self._passes is None:
            self._meet_ranks()
            self._mark_random()

    def _mark_random(self) -> None:
        parameters = self.trained_parameters()
        self._random = random_state(parameters[0].device) if parameters else None

    def collect(self, weight: float | None = None, *, scale: float | None = None) -> None:
        """Take what lies in ``.grad`` as the gradient of one part, after that part's first backward.

        For several parts in one process, and for a weight; a single part is collected by ``displace``.

        Args:
            weight: What the part counts beside the others, such as its number of examples; 1 when left out.
            scale: What the part's loss is multiplied with before backward, in both passes: 1/n in a loop that
                accumulates so. Without a weight, parts then count by their scales, and the step's gradient is the sum
                that the loop would have accumulated.
        """
        scale = None if scale is None else positive_weight(scale, "the scale of a part's loss")
        weight = None if weight is None else positive_weight(weight, "the weight of a part")
        if self._finite is not None or (self._passes is not None and self._passes.second):
            raise GradalignError("collect() belongs to the first pass; call step() or restore() before the next one")
        if self._watch.averages and self._ranks.size > 1:
            self._give_up(
                "DistributedDataParallel averaged this part over the ranks before collect() could weigh it; put the "
                "first forward and backward inside model.no_sync()"
            )
        self._collect(weight, scale)

    def _collect(self, weight: float | None = None, scale: float | None = None) -> TwoPasses:
        if self._passes is None:
            self._meet_ranks(after_a_pass=True)
            self._passes = TwoPasses(self.trained_parameters(), self._buffers, self.same_randomness)
        self._ranks.gather_anew()
        counts = (scale or 1.0) if weight is None else weight
        random = self._random or random_state(self._passes.device)
        self._passes.collect(counts, random, scale or 1.0, accumulating=weight is None and scale is not None)
        self._mark_random()
        return self._passes

    def displace(self, scaler: GradScaler | None = None) -> bool:
        """Move the parameters to the next part's displaced point, ready for its second forward and backward.

        Call it after the first backward; with several collected parts once for each, in the same order. ``.grad``
        is cleared. Under DistributedDataParallel both passes, forward and backward, belong inside ``model.no_sync()``;
        with ``overlap=True`` the first only.

        Args:
            scaler: The GradScaler, when the losses are scaled by one.

        Returns:
            Whether there is a point to go to. If not (β is 0, ``every`` says so, or the gradient is not finite) the
            step's gradient is in ``.grad`` already and the second pass may be left out; when made, nothing comes of it.
        """
        if self._finite is not None:
            raise GradalignError("the step is prepared already; call step() before the next displace()")
        passes = self._passes
        if passes is None or not passes.parts:
            passes = self._collect()
        if passes.staying:
            return False
        if not passes.displaced:
            return self._begin(passes, self._unscale_first_pass(passes, scaler))
        if passes.visited == len(passes.parts):
            raise GradalignError("every part was displaced already; call step(), or restore() to give the step up")
        self._ranks.gather_anew()
        if not passes.gather():
            self._give_up("displace() came for the next part without a second backward for the one before")
        self._visit(passes)
        return True

    def _begin(self, passes: TwoPasses, scale: float) -> bool:
        """Find ḡ and go to the first displaced point, or stay when this step has none."""
        problem = self._ranks.unequal([part.weight for part in passes.parts], passes.device)
        if problem:
            self._give_up(problem)
        if not self.aligning or self._alone(len(passes.parts)):
            return self._stay(passes, self._first_mean(passes), scale)
        if self.overlap and len(passes.parts) > 1:
            self._give_up("overlap=True takes one part on every rank")
        mean = self._take_previous(passes.parameters)
        if mean is None:
            mean = self._first_mean(passes)
            lost = self._ranks.lost(mean)
        else:
            lost = any(self._ranks.lost(part.vectors) for part in passes.parts)
            if self.overlap:  # the averaging of the second pass is DDP's: all must make it, or nobody
                anywhere, self._all_weight = self._ranks.sums([float(lost), passes.weight], passes.device)
                lost = anywhere > 0.0
            # Else this rank alone may know; the others hear of it with the displaced gradients.
            passes.nonfinite = lost and not self.overlap
            if lost:
                mean = [torch.full_like(p, float("nan")) for p in passes.parameters]
        if lost:
            return self._stay(passes, mean, scale)
        self._warn_of_equal_ranks(passes, mean)
        passes.aim(self.beta_now, mean)
        passes.leave()
        self._watch.stop()
        if self._ranks.size > 1 and not self.overlap:
            self._watch.refuse_averaging(passes.parameters, self._refuse_averaging)
        self._visit(passes)
        return True

    def _refuse_averaging(self) -> NoReturn:
        self._give_up(
            "DistributedDataParallel would average the second pass before GradAlign weighs it; put its forward and "
            "backward inside model.no_sync() as well, or give GradAlign(..., model=model, overlap=True)"
        )

    def _mean(self, parameters: Sequence[nn.Parameter], gradients: Gradients, weight: float) -> Gradients:
        means, _, self._all_weight = self._ranks.mean(parameters, gradients, weight, None)
        return means

    def _first_mean(self, passes: TwoPasses) -> Gradients:
        return self._mean(passes.parameters, passes.local_mean(), passes.weight)

    def _summed(self, passes: TwoPasses, mean: Gradients, scale: float = 1.0) -> Gradients:
        """Return the mean, times a scale; of scaled losses, the sum that their loop accumulates, in the ranks' mean."""
        scale *= self._all_weight / self._ranks.size if passes.accumulating else 1.0
        return mean if scale == 1.0 else [None if g is None else g.mul_(scale) for g in mean]

    def _stay(self, passes: TwoPasses, mean: Gradients, scale: float) -> bool:
        """Put the step's gradient, scaled as the user's own would be, into ``.grad`` for the rest of the step."""
        passes.stay()
        self._pending = PlainGradient(passes.parameters, self._summed(passes, mean, scale))
        return False

    def _visit(self, passes: TwoPasses) -> None:
        """Go to the next part's point; the last part's backward then completes the step's gradient in ``.grad``."""
        passes.visit()
        if passes.visited == len(passes.parts):
            # DDP takes the plain mean over ranks: what it averages is weighted before.
            whole = self._all_weight / self._ranks.size if self.overlap else passes.weight
            self._pending = LastPart(passes.parameters, passes.total, passes.share(passes.parts[-1], whole))

    def _unscale_first_pass(self, passes: TwoPasses, scaler: GradScaler | None) -> float:
        self._scaled = scaler is not None and scaler.is_enabled()
        if scaler is None or not self._scaled:
            return 1.0
        if len(passes.parts) > 1:
            self._give_up("a GradScaler works with one part in each process; collect() was used for several")
        scale = float(scaler.get_scale())
        for g in passes.parts[0].vectors:
            if g is not None:
                g.div_(scale)
        return scale

    def _warn_of_equal_ranks(self, passes: TwoPasses, mean: Gradients) -> None:
        if self.steps or self._ranks.size == 1 or len(passes.parts) > 1:
            return
        pairs = zip(passes.parts[0].vectors, mean, strict=True)
        if all(g is None or m is None or torch.allclose(g, m) for g, m in pairs):
            self._warn_once(
                "all ranks have the same gradient, so there is nothing to align; was the first pass, forward and "
                "backward, inside model.no_sync(), and has every rank its own part?"
            )

    def restore(self) -> None:
        """Give up a step half-way: the parameters go back to x exactly, and what was collected is forgotten."""
        if self._pending is not None:
            self._pending.close()
        if self._passes is not None:
            self._passes.go_home()
            put_gradients(self._passes.parameters, [None] * len(self._passes.parameters))
        self._end_of_step()

    def _end_of_step(self) -> None:
        self._watch.stop()
        self._passes, self._pending, self._finite, self._scaled = None, None, None, False

    def _give_up(self, problem: str) -> NoReturn:
        self.restore()
        raise GradalignError(problem)

    def finish(self) -> None:
        """End the passes: the parameters are back at x, the step's gradient, the mean over all ranks, is in ``.grad``.

        ``step()`` does it where it was not done. In between is the place for clipping or a look at the gradient.
        """
        if self._finite is not None:
            return
        if self._passes is not None and self._passes.second:
            self._end_second_pass(self._passes)
        else:
            self._end_first_pass(self._passes)
        self._ready()

    def _end_first_pass(self, passes: TwoPasses | None) -> None:
        """Nobody displaced anything: the gradients at x, in ``.grad`` or collected, are the step's."""
        parameters = self.trained_parameters()
        if self.aligning and (passes is not None or any(p.grad is not None for p in parameters)):
            self._warn_once(
                "step() came without displace(), so nothing was aligned and the step is the wrapped optimizer's own; "
                "use step(loss_fn, inputs, targets, parts=8), or displace() and a second backward before step()"
            )
        if passes is not None:
            take_gradients(parameters)
            self._refuse_unknown_scale()
            put_gradients(parameters, self._summed(passes, self._first_mean(passes)))
            return
        self._meet_ranks(after_a_pass=True)
        self._unscale()
        if self._ranks.size > 1 and not (self.overlap and self._watch.averages):
            put_gradients(parameters, self._mean(parameters, take_gradients(parameters), 1.0))

    def _end_second_pass(self, passes: TwoPasses) -> None:
        pending, averaged = self._pending, self._watch.averages
        self._watch.stop()
        self._ranks.gather_anew()
        if passes.displaced and all(p.grad is None for p in passes.parameters):
            self._give_up("step() came after displace() without a second backward")
        if pending is None:
            self._give_up(f"step() came after {passes.visited} of {len(passes.parts)} parts were displaced")
        changed = pending.changed(allowed=1 if self._scaled else 0)  # GradScaler's unscaling or its search for inf
        pending.finish()
        self._refuse_unknown_scale()
        self._unscale()
        passes.go_home()
        own = self._ranks.size > 1 and (passes.nonfinite or not (passes.staying or (self.overlap and averaged)))
        if own:  # it is this rank's own mean so far
            if self.overlap:
                self._warn_once(
                    "overlap=True had no effect, as DistributedDataParallel did not average the second pass; leave its "
                    "forward and backward outside model.no_sync(), or leave out overlap=True"
                )
            gradients = take_gradients(passes.parameters)
            # With overlap they are weighted already, for DDP's mean; scaled ones count as they are.
            weight = 1.0 if self.overlap or passes.accumulating else passes.weight
            put_gradients(passes.parameters, self._mean(passes.parameters, gradients, weight))
        early = own or (self._ranks.sharded and not passes.staying) or (self.reuse and not self.overlap)
        if changed and early:  # with overlap it is DDP that writes there
            self._warn_once(
                "the gradients were changed between the last backward and step(), where they are not yet the mean "
                "over all parts and ranks, or not what reuse should keep; clip them with the optimizer's own "
                "clip_grad_norm_(), and keep DistributedDataParallel from averaging them with model.no_sync()"
            )

    def _refuse_unknown_scale(self) -> None:
        if getattr(self, "grad_scale", None) is not None and not self._scaled:
            self._give_up("the losses are scaled: give the scaler to displace(scaler=scaler)")

    @torch.no_grad()
    def _unscale(self) -> None:
        """Undo GradScaler's scale; it hands it over as an attribute while its step() runs."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            for p in self.trained_parameters():
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.device))

    def _ready(self, loss: Tensor | None = None) -> Tensor | None:
        """Find out whether to take the step, and keep what the next one needs; return the mean loss of all ranks."""
        parameters = self.trained_parameters()
        gradients = {p: held_values(p.grad) for p in parameters if p.grad is not None}
        finite = all_finite(list(gradients.values()))
        self._finite, loss = self._ranks.agree(
            finite, loss, parameters[0].device if parameters else torch.device("cpu")
        )
        if self.reuse:
            self._previous = {p: g.clone() for p, g in gradients.items()} if self._finite else None
        return loss

    def _take_previous(self, parameters: Sequence[nn.Parameter]) -> Gradients | None:
        """Return the ḡ of the step before, to be used up."""
        previous, self._previous = self._previous, None
        return None if previous is None else [previous.get(p) for p in parameters]

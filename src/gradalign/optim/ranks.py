"""The ranks of a job: where they begin, and what they tell each other in a step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradalign.errors import GradalignError
from gradalign.optim.gradients import Gradients, all_finite, gathering_modules


class Ranks:
    """All ranks of a process group; the default group when none is given.

    Who they are is asked at every step, since a group may be started, or started anew, after the optimizer was made.
    Without one, or with a single rank, everything here is a no-op and costs nothing.
    """

    sharded = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        # The group that this process has shared its parameters with, and how many they were.
        self._met: weakref.ref[dist.ProcessGroup] | None = None
        self._shared = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_met": None, "_shared": 0}  # a copy, elsewhere, has met nobody

    @property
    def group(self) -> dist.ProcessGroup | None:
        if dist.is_available() and dist.is_initialized():
            return self._group if self._group is not None else dist.group.WORLD
        if self._group is not None:
            raise GradalignError("the process group given to GradAlign was destroyed; make the optimizer anew")
        return None

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def met(self) -> bool:
        """Whether these ranks have shared parameters before."""
        return self._met is not None and self._met() is self.group

    def unshared(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Return those parameters, the last ones, that these ranks have not shared yet."""
        return () if self.size == 1 else parameters[self._shared if self.met else 0 :]

    @torch.no_grad()
    def share(self, parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> bool:
        """Take the first rank's values for what was not shared yet; return whether any changed here."""
        new, group = self.unshared(parameters), self.group
        if group is None:
            return False
        self._met, self._shared = weakref.ref(group), len(parameters)
        changed = False
        for tensor in (*new, *buffers):
            # Once, at the start: not worth a flat copy of everything.
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
            changed = changed or not torch.equal(sent, tensor)
            tensor.copy_(sent)
        return changed

    def share_object(self, value: Any) -> Any:
        sent = [value]
        if self.group is not None:
            dist.broadcast_object_list(sent, dist.get_global_rank(self.group, 0), group=self.group)
        return sent[0]

    def sums(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        return list(numbers) if self.size == 1 else self._sums(numbers, device)

    def _sums(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        flat = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(flat, group=self.group)
        return list(flat.tolist())

    def spread(self, weights: list[float], device: torch.device) -> tuple[list[float], list[float]]:
        """Return the parts' weights, and what each part's loss is multiplied with on this rank."""
        return weights, [1.0] * len(weights)

    def unequal(self, weights: list[float], device: torch.device) -> str:
        """Return what is wrong when ranks weigh the same part differently; here a part is on one rank."""
        return ""

    def lost(self, gradients: Gradients) -> bool:
        """Return whether the step must end here, as ḡ is not finite on any rank."""
        return not all_finite(gradients)

    def agree(self, finite: bool, loss: Tensor | None, device: torch.device) -> tuple[bool, Tensor | None]:
        """Return whether all ranks' gradients are finite, and their mean loss; here all have the same already."""
        return finite, loss

    def gather_anew(self) -> None:
        """Let the next forward see what is written to the parameters from now on."""

    @torch.no_grad()
    def mean(
        self, parameters: Sequence[nn.Parameter], gradients: Gradients, weight: float, loss: Tensor | None
    ) -> tuple[Gradients, Tensor | None, float]:
        """Return the ranks' weighted mean of gradients and loss, and the sum of weights, from a single all-reduce.

        The flat vector carries, behind the gradients, one mark per parameter (does any rank have a gradient for it?),
        the loss and the weight, so that nothing else need be sent. All ranks receive the same bits.
        """
        if self.size == 1:
            return gradients, loss, weight
        # At least float32: a weight of thousands times a gradient would leave float16's range.
        kind = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
        device = parameters[0].device
        pieces = [
            torch.zeros(p.numel(), dtype=kind, device=device) if g is None else g.reshape(-1).to(kind)
            for p, g in zip(parameters, gradients, strict=True)
        ]
        tail = [float(g is not None) for g in gradients] + [0.0, 1.0]
        pieces.append(torch.tensor(tail, dtype=kind, device=device))
        if loss is not None:
            pieces[-1][-2] = loss.detach()
        flat = torch.cat(pieces)
        del pieces
        if weight != 1.0:
            flat.mul_(weight)
        dist.all_reduce(flat, group=self.group)
        total = float(flat[-1])
        flat.div_(flat[-1].clone())
        marks = flat[-len(tail) : -2].tolist()
        cut = flat[: -len(tail)].split([p.numel() for p in parameters])
        # A mark that is not a number means a weight that is not: the gradient stays so that it shows.
        means: Gradients = [
            None if mark == 0.0 else piece.view(p.shape).to(p.dtype)
            for p, piece, mark in zip(parameters, cut, marks, strict=True)
        ]
        return means, None if loss is None else flat[-2].clone(), total


class ShardedRanks(Ranks):
    """Ranks that hold shards of the same parameters: a part spans them all, and none is a part of its own.

    Gradients arrive as means over the ranks, so what is left to be said is small: what the parts weigh, and whether
    some rank's shards are not finite.
    """

    sharded = True

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._modules, self._lost = gathering_modules(model), False

    @property
    def size(self) -> int:
        """One, as nothing is to be averaged."""
        return 1

    def spread(self, weights: list[float], device: torch.device) -> tuple[list[float], list[float]]:
        """Weigh parts by what all ranks have of them; a rank's loss counts by what it has, times the ranks."""
        size = dist.get_world_size(self.group)
        counts = self._sums([float(len(weights)), float(len(weights)) ** 2], device)
        if size * counts[1] != counts[0] ** 2:
            raise GradalignError(
                "with fully_shard a part spans all ranks, so all need the same number of parts; give every rank at "
                "least as many examples as parts, or leave such a batch out on all"
            )
        totals = self._sums(weights, device)
        return totals, [size * own / total for own, total in zip(weights, totals, strict=True)]

    def unequal(self, weights: list[float], device: torch.device) -> str:
        """Compare the weights; fully_shard took the plain mean over the ranks already."""
        size, marks = dist.get_world_size(self.group), [w * (j + 1) for j, w in enumerate(weights)]
        sums = self._sums([sum(marks), sum(marks) ** 2], device)
        if math.isclose(size * sums[1], sums[0] ** 2, rel_tol=1e-12):
            return ""
        return (
            "with fully_shard a part spans all ranks, which count alike in its gradient: give collect() the same "
            "weight on all of them, or use step(loss_fn, inputs, targets, parts=8), which weighs the losses"
        )

    def lost(self, gradients: Gradients) -> bool:
        """Remember what is not finite here; the others hear of it at the end of the step, which all must reach."""
        self._lost = self._lost or not all_finite(gradients)
        return False

    def agree(self, finite: bool, loss: Tensor | None, device: torch.device) -> tuple[bool, Tensor | None]:
        own = 0.0 if loss is None else float(loss)
        lost, losses = self._sums([float(self._lost or not finite), own], device)
        self._lost = False
        mean = losses / dist.get_world_size(self.group)
        return lost == 0.0, None if loss is None else torch.full_like(loss, mean)

    def gather_anew(self) -> None:
        for module in self._modules:
            module.reshard()


def positive_weight(weight: Any, what: str) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0.0):
        raise GradalignError(f"{what} must be a positive number, such as its number of examples, got {weight!r}")
    return number

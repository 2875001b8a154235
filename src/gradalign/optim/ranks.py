"""The ranks of a torch.distributed job as GradAlign sees them: weighted means, each sent as one flat vector.

Without a process group, or with a single rank, everything here is a no-op and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

Gradients = list[Tensor | None]
"""One entry per parameter; None where the parameter took no part in the loss, as in torch."""


class Ranks:
    """All ranks of a process group; the default group when none is given."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite these tensors with the first rank's, so that all ranks start from the same point."""
        if self.size == 1:
            return
        source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        for tensor in tensors:
            # Once, at the start: not worth a flat copy of everything.
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, source, group=self._group)
            with torch.no_grad():
                tensor.copy_(sent)

    def mean(
        self, parameters: Sequence[nn.Parameter], gradients: Gradients, weight: float, loss: Tensor | None
    ) -> tuple[Gradients, Tensor | None]:
        """Return the ranks' weighted mean of gradients and loss, from a single all-reduce.

        The flat vector carries, behind the gradients, one mark per parameter (does any rank have a gradient for it?),
        the loss and the weight, so that nothing else need be sent. All ranks receive the same bits.
        """
        if self.size == 1:
            return gradients, loss
        kind = reduce(torch.promote_types, (p.dtype for p in parameters))
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
        dist.all_reduce(flat, group=self._group)
        flat.div_(flat[-1].clone())
        marks = flat[-len(tail) : -2].tolist()
        means: Gradients = []
        offset = 0
        for p, mark in zip(parameters, marks, strict=True):
            piece = flat[offset : offset + p.numel()].view(p.shape)
            # A mark that is not a number means a weight that is not: the gradient is kept so that it shows.
            means.append(None if mark == 0.0 else piece.to(p.dtype))
            offset += p.numel()
        return means, None if loss is None else flat[-2].clone()

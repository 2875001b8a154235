"""Messages between the ranks of a job: JSON and tensors over gloo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradalign.engines import under_torchrun
from gradalign.errors import GradalignError, LostRankError
from gradalign.stopping import left_to_the_kernel


class Wire:
    """Messages between rank 0 and the others over gloo; a rank that has ended is named in a LostRankError."""

    def __init__(self) -> None:
        if not dist.is_available():
            raise GradalignError("this torch was built without torch.distributed; use the local engine")
        self._owned = not dist.is_initialized()
        if self._owned:
            if not under_torchrun():
                raise GradalignError(
                    "the distributed engine needs ranks; start it with "
                    "torchrun --nproc-per-node N -m gradalign run RECIPE"
                )
            with left_to_the_kernel():
                dist.init_process_group("gloo")
        # Vectors are handed over on the CPU: a group of the user's that speaks only nccl gets one beside it.
        gloo = self._owned or dist.get_backend() == "gloo"
        self._group = None if gloo else dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.others = range(1, self.size) if self.rank == 0 else range(1)  # with whom this rank speaks

    @contextmanager
    def _with(self, peer: int | None) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            late = "timed out" in str(error).lower()
            what = "did not answer in time" if late else "ended before its work was done"
            raise LostRankError(f"{'a rank' if peer is None else f'rank {peer}'} of the job {what}") from error

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor whose shape and kind the receiver knows."""
        if tensor.numel():
            with self._with(peer):
                dist.send(tensor.detach().cpu().contiguous(), peer, group=self._group)

    def receive(self, like: Tensor, peer: int) -> Tensor:
        """Receive a tensor with the shape and kind of ``like``."""
        tensor = torch.empty(like.shape, dtype=like.dtype)
        if tensor.numel():
            with self._with(peer):
                dist.recv(tensor, peer, group=self._group)
        return tensor

    def say(self, value: Any, peer: int) -> None:
        """Send anything that JSON can say."""
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        self.send(torch.tensor([len(data)]), peer)
        self.send(data, peer)

    def hear(self, peer: int) -> Any:
        """Receive what ``say`` sent."""
        length = int(self.receive(torch.empty(1, dtype=torch.int64), peer))
        return json.loads(bytes(self.receive(torch.empty(length, dtype=torch.uint8), peer).tolist()))

    def give(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor whose shape and kind the receiver does not know."""
        self.say([str(tensor.dtype).removeprefix("torch."), list(tensor.shape)], peer)
        self.send(tensor, peer)

    def take(self, peer: int) -> Tensor:
        """Receive what ``give`` sent."""
        kind, shape = self.hear(peer)
        return self.receive(torch.empty(shape, dtype=getattr(torch, kind)), peer)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Give rank 0's tensor to every rank; all call this with the same shape and kind."""
        tensor = tensor.detach().cpu().contiguous()
        if tensor.numel():
            try:
                with self._with(1 - self.rank if self.size == 2 else None):
                    dist.broadcast(tensor, 0, group=self._group)
            except LostRankError:
                for peer in self.others:  # a broadcast does not say who is gone, sending something may
                    self.send(torch.zeros(1), peer)
                raise
        return tensor

    def close(self) -> None:
        """Leave the group that was joined here."""
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()

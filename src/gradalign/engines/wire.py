"""What the ranks of a job say to each other: short rows of numbers, flat vectors, and now and then a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradalign.engines.jobs import Failure
from gradalign.engines.launch import under_torchrun
from gradalign.errors import GradalignError, LostRankError
from gradalign.stopping import left_to_the_kernel

NUMBERS = 8
"""Numbers in a row. float64 holds every count and client number exactly."""


class Ask(IntEnum):
    """What the leader asks of a rank."""

    STOP = 0
    POINT = 1
    GRADIENT = 2
    TRAIN = 3
    EVALUATE = 4


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

    @contextmanager
    def _with(self, peer: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            late = "timed out" in str(error).lower()
            what = "did not answer in time" if late else "ended before its work was done"
            raise LostRankError(f"rank {peer} of the job {what}") from error

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a CPU tensor whose shape and kind the receiver knows."""
        if tensor.numel():
            with self._with(peer):
                dist.send(tensor.contiguous(), peer, group=self._group)

    def receive(self, like: Tensor, peer: int) -> Tensor:
        """Receive a tensor with the shape and kind of ``like``."""
        tensor = torch.empty(like.shape, dtype=like.dtype)
        if tensor.numel():
            with self._with(peer):
                dist.recv(tensor, peer, group=self._group)
        return tensor

    def send_row(self, numbers: Sequence[float], peer: int) -> None:
        """Send a few numbers."""
        row = torch.zeros(NUMBERS, dtype=torch.float64)
        row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        self.send(row, peer)

    def receive_row(self, peer: int) -> list[float]:
        """Receive a few numbers."""
        return [float(number) for number in self.receive(torch.empty(NUMBERS, dtype=torch.float64), peer)]

    def send_text(self, value: Any, peer: int) -> None:
        """Send anything that JSON can say."""
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        self.send_row([len(data)], peer)
        self.send(data, peer)

    def receive_text(self, peer: int) -> Any:
        """Receive what ``send_text`` sent."""
        length = int(self.receive_row(peer)[0])
        data = self.receive(torch.empty(length, dtype=torch.uint8), peer)
        return json.loads(bytes(data.tolist()))

    def send_failure(self, error: GradalignError, peer: int) -> None:
        """Send an error."""
        self.send_text(asdict(Failure.of(error)), peer)

    def receive_failure(self, peer: int) -> GradalignError:
        """Receive an error, to be raised here."""
        return Failure(**self.receive_text(peer)).as_error()

    def close(self) -> None:
        """Leave the group that was joined here."""
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()

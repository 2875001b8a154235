"""A worker process of the pool: the jobs that it is given, what it answers, and its loop."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from gradalign import stopping
from gradalign.client.exchange import (
    NOTHING,
    Broadcast,
    CachedGradient,
    ClientScore,
    Gradient,
    GradientCache,
    Participant,
    Reply,
    Score,
    Update,
)
from gradalign.client.trainer import Setup
from gradalign.engines.shared import Messages, RowOfGradient, SharedBuffers
from gradalign.errors import ClientError, GradalignError, named_failure
from gradalign.fast import Group

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # from glibc's malloc.h
_HELD_BYTES, _PAD_BYTES = 512 * 1024 * 1024, 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of a group of clients, or the evaluation of some test examples."""

    slot: int
    phase: int = 0
    said: bytes = b""
    """What all clients of the phase are told; nothing for an evaluation."""
    work: str = "gradients"
    """What the clients do: take their gradients, train, score the point, or tune it and score that."""
    who: Sequence[Participant] = ()
    rows: Mapping[int, int] = field(default_factory=dict)
    """The rows to put clients' gradients into."""
    known: Mapping[int, RowOfGradient] = field(default_factory=dict)
    """The gradients that are there."""
    span: tuple[int, int] = (0, 0)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is written: a list for each thing known of the clients, which is much quicker than objects."""
        clients, weights = [one.client for one in self.who], [one.weight for one in self.who]
        shares = [one.share for one in self.who]
        kept = {place: one.kept for place, one in enumerate(self.who) if one.kept}
        return {**vars(self), "who": (clients, weights, shares, kept)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        clients, weights, shares, kept = state["who"]
        who = [
            Participant(client=client, weight=weight, share=share, kept=kept.get(place, NOTHING))
            for place, (client, weight, share) in enumerate(zip(clients, weights, shares, strict=True))
        ]
        vars(self).update(state, who=who)

    def whose(self) -> str:
        if not self.who:
            return "the evaluation"
        first, last = self.who[0].client, self.who[-1].client
        return f"client {first}" if first == last else f"one of the clients {first} to {last}"


@dataclass(frozen=True)
class Answer:
    """A group's replies, and the gradients that were put into their clients' rows."""

    replies: Sequence[Reply]
    fresh: Mapping[int, RowOfGradient]


@dataclass(frozen=True)
class Failure:
    """A worker's answer when the work raised."""

    message: str
    details: str
    by_user_code: bool

    @classmethod
    def of(cls, error: GradalignError) -> Failure:
        """Describe an error in a form that crosses the process boundary."""
        details = "".join(traceback.format_exception(error))
        return cls(str(error), details, isinstance(error, ClientError))

    def as_error(self) -> GradalignError:
        """Return the error to raise in the server, with the worker's traceback as a note."""
        error = ClientError(self.message) if self.by_user_code else GradalignError(self.message)
        error.add_note("in a worker process:\n" + self.details)
        return error


class _JobCache(GradientCache):
    """The gradients of one job's clients, in shared memory as far as they have rows there."""

    def __init__(self, job: Job, buffers: SharedBuffers) -> None:
        super().__init__()
        self.entries, self._rows, self._room = buffers.read(job.known), job.rows, buffers.gradients
        self.fresh: dict[int, CachedGradient] = {}

    def begin(self, told: Broadcast, *, alone: bool) -> None:
        """Do nothing: the server begins phases, and says what is known in them."""

    def put(self, client: int, *parts: Tensor, rows: int | None = None, reply: Gradient | None = None) -> None:
        """Remember a client's gradient, in its row when it has one."""
        if client not in self._rows:
            super().put(client, *parts, rows=rows, reply=reply)
            return
        sizes = [part.numel() for part in parts]
        vector = self._room[self._rows[client], : sum(sizes)]
        for part, place in zip(parts, vector.split(sizes), strict=True):
            place.copy_(part.reshape(-1))
        entry = CachedGradient(vector, rows, None if reply is None else replace(reply, vector=vector))
        self.entries[client] = self.fresh[client] = entry

    def put_all(self, clients: Sequence[int], vectors: Tensor) -> None:
        """Remember several clients' gradients; with rows for all, in one go."""
        if not all(client in self._rows for client in clients):
            super().put_all(clients, vectors)
            return
        rows, room = [self._rows[client] for client in clients], self._room[:, : vectors.shape[1]]
        room[rows] = vectors
        self.fresh |= {client: CachedGradient(room[row]) for client, row in zip(clients, rows, strict=True)}
        self.entries |= self.fresh


class _Bench:
    """Where a worker works: its models, and what it was told last."""

    def __init__(self, setup: Setup, buffers: SharedBuffers, messages: Messages) -> None:
        self._group, self._buffers, self._messages = Group(setup), buffers, messages
        self._told: tuple[int, Broadcast] | None = None

    def do(self, job: Job) -> Answer | Score | list[ClientScore]:
        """Do a job; the replies' vectors stay in shared memory, in the slot unless they lie there already."""
        group, buffers = self._group, self._buffers
        if not job.said:
            return group.evaluate(buffers.point, *job.span)
        cache = group.cache = _JobCache(job, buffers)
        told = self._broadcast(job)
        if job.work in ("score", "tune"):
            scores = [group.score_client(told, one, tuned=job.work == "tune") for one in job.who]
            return [score for score in scores if score is not None]
        work = group.train if job.work == "train" else group.gradients
        replies = work(told, job.who, buffers.out[job.slot].unbind())
        return Answer(
            [self._brought(one, job.slot, row) for row, one in enumerate(replies)], buffers.written(cache.fresh)
        )

    def _brought(self, reply: Reply, slot: int, row: int) -> Reply:
        """Return a reply with its vectors in shared memory: where they are if they lie there, else in this row."""
        buffers = self._buffers
        if isinstance(reply, Update):
            floats, ints = buffers.floats[slot, row].copy_(reply.floats), buffers.ints[slot, row].copy_(reply.ints)
            reply = replace(reply, floats=floats, ints=ints)
        if self._messages.place_of(reply.vector) is not None:
            return reply
        return replace(reply, vector=buffers.out[slot, row].copy_(reply.vector))

    def _broadcast(self, job: Job) -> Broadcast:
        """Return what all clients of the phase are told: one object, so that what is made of it is made once."""
        if self._told is None or self._told[0] != job.phase:
            self._told = job.phase, self._messages.read(job.said)
        return self._told[1]


def start_method() -> str:
    """Return how workers are started.

    Forking shares the data without copying and asks nothing of user code. Where it is unsafe (autograd may hold
    CUDA threads; macOS frameworks) workers are spawned and the task must be picklable.
    """
    return "fork" if sys.platform == "linux" and not torch.cuda.is_available() else "spawn"


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this worker when its parent dies, however the parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _retain_freed_memory() -> None:
    """Ask glibc, where there is one, to hold on to freed memory.

    Activations of some megabytes would otherwise be mapped, zeroed and unmapped at every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _HELD_BYTES)
        mallopt(_M_TOP_PAD, _PAD_BYTES)


def work(pipe: Connection, inherited: list[Connection], parent: int, setup: Setup, buffers: SharedBuffers) -> None:
    """Serve jobs until the pipe closes. Runs in the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stopping.unblock()
    _end_with_parent(parent)
    for connection in inherited:
        # A forked worker holds copies of the server's pipe ends; while it does, its siblings never see them close.
        connection.close()
    torch.set_num_threads(1)
    if setup.fast:
        _retain_freed_memory()
    messages = Messages(buffers, setup.algorithm)
    bench: _Bench | None = None
    while True:
        try:
            job: Job = messages.read(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            with named_failure(job.whose()):
                bench = bench or _Bench(setup, buffers, messages)
                answer: Answer | Score | list[ClientScore] | Failure = bench.do(job)
        except GradalignError as error:
            answer = Failure.of(error)
        try:
            pipe.send_bytes(messages.written(answer))
        except OSError:
            return

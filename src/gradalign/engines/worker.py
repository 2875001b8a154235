"""A worker process: how it is started, and the loop in which it serves the pool's jobs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from gradalign import stopping
from gradalign.client import LocalTraining
from gradalign.engines.allocator import retain_freed_memory
from gradalign.engines.jobs import Failure, Job, SharedBuffers, for_whom
from gradalign.errors import GradalignError
from gradalign.fast.group import GroupTrainer, named_failure
from gradalign.tasks.task import Task

_PR_SET_PDEATHSIG = 1


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


def work(
    pipe: Connection,
    inherited: list[Connection],
    parent: int,
    task: Task,
    local: LocalTraining,
    seed: int,
    fast: bool,
    clients_per_round: int,
    buffers: SharedBuffers,
) -> None:
    """Serve jobs until the pipe closes. Runs in the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stopping.unblock()
    _end_with_parent(parent)
    for connection in inherited:
        # A forked worker holds copies of the server's pipe ends; while it does, its siblings never see them close.
        connection.close()
    torch.set_num_threads(1)
    if fast:
        retain_freed_memory()
    trainer: GroupTrainer | None = None
    while True:
        try:
            job: Job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            with named_failure(for_whom(job)):
                trainer = trainer or GroupTrainer(task, local, seed, fast=fast, clients_per_round=clients_per_round)
                answer: Any = job.run(trainer, buffers)
        except GradalignError as error:
            answer = Failure.of(error)
        try:
            pipe.send(answer)
        except OSError:
            return

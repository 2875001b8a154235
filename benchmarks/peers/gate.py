"""The contender's side of the pipe: a gate between two rounds, at which a simulator waits until it is told to go on.

The simulators run all their rounds in one call, but each lets its user do something after every round (evaluate the
model, call back). The gate stands there, so that rounds of several simulators can be played in turn.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from torch import Tensor


class Stopped(Exception):
    """Nobody wants another round."""


class Gate:
    """Where a contender waits: answers are lines of JSON, commands are ``round``, ``weights`` and the end of input."""

    def __init__(self, commands: TextIO, answers: TextIO) -> None:
        self._commands, self._answers = commands, answers
        self._began: float | None = None

    @classmethod
    def over_standard_streams(cls) -> Gate:
        """Take the standard streams, and send what the simulator itself prints to standard error."""
        answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(sys.stdin, answers)

    def wait(self, weights: Callable[[], Iterable[Tensor]]) -> None:
        """Report how long the round took that has just ended, and return when another one is wanted.

        Args:
            weights: Reads the server's parameters, which are compared when the peers are checked.

        Raises:
            Stopped: No further round is wanted, or nobody is there any more.
        """
        ended = time.perf_counter()
        self._say({"ready": True} if self._began is None else {"seconds": ended - self._began})
        while (command := self._commands.readline().strip()) == "weights":
            self._say({"weights": [value for tensor in weights() for value in tensor.detach().flatten().tolist()]})
        if command != "round":
            raise Stopped
        self._began = time.perf_counter()

    def refuse(self, reason: str) -> Stopped:
        """Say why there is nothing to be played; the end, to be raised."""
        self._say({"refused": reason})
        return Stopped(reason)

    def _say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

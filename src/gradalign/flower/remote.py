"""Clients whose data is elsewhere: the server knows how many there are and how much they hold, and no more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradalign.errors import GradalignError
from gradalign.tasks.data import Examples


class _RemoteExamples(Examples):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def batch(self, index: Tensor) -> Any:
        """Refuse: the examples are at the client."""
        raise GradalignError("the client's examples are on its own node, not on the server")


class RemoteClients(Sequence[Examples]):
    """The clients as the server sees them; ``sizes`` may grow while nodes connect."""

    elsewhere = True  # their data is not looked at here

    def __init__(self, total: int, sizes: Mapping[int, int]) -> None:
        self._total, self._sizes = total, sizes

    def __len__(self) -> int:
        return self._total

    def weight(self, client: int) -> float:
        """Return how many examples a client has; NaN while it has not said so, which no average takes for a number."""
        return float(self._sizes.get(client, math.nan))

    def __getitem__(self, client: Any) -> Any:
        return _RemoteExamples(self._sizes.get(client, 1))

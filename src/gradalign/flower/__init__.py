"""Gradient alignment on Flower: FedGA and every other algorithm here, with Flower's messages and machines.

The server is an ``AlignedStrategy`` in a ``ServerApp``; the clients are a ``ClientApp`` made by ``client_app`` from a
Task, or your own one with ``aligned_app``, ``gradient_reply`` and ``LocalRound``. See docs/flower.md.
"""

from __future__ import annotations

from gradalign.errors import GradalignError

try:
    import flwr as _flwr  # noqa: F401
except ModuleNotFoundError:
    raise GradalignError("gradalign.flower needs Flower: pip install 'gradalign[flower]'") from None

from gradalign.flower.client import aligned_app, client_app
from gradalign.flower.exchange import Patience
from gradalign.flower.grid import InProcessGrid
from gradalign.flower.loops import LocalRound, gradient_reply
from gradalign.flower.mods import on_update
from gradalign.flower.strategy import AlignedStrategy

__all__ = [
    "AlignedStrategy",
    "InProcessGrid",
    "LocalRound",
    "Patience",
    "aligned_app",
    "client_app",
    "gradient_reply",
    "on_update",
]

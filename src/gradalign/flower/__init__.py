"""Gradient alignment on Flower: FedGA and every other algorithm here, with Flower's messages and machines.

The server is an ``AlignedStrategy`` in a ``ServerApp``; the clients are a ``ClientApp`` made by ``client_app`` from a
Task, or your own one with ``aligned_app``, ``gradient_reply`` and ``LocalRound``. See docs/flower.md.

The names are loaded when first used: Flower starts a process for every message, and a client's needs no server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradalign.errors import need

need("flwr", "flower")

if TYPE_CHECKING:
    from gradalign.algorithms import FedGA as FedGA
    from gradalign.flower.client import aligned_app as aligned_app
    from gradalign.flower.client import client_app as client_app
    from gradalign.flower.client import on_update as on_update
    from gradalign.flower.exchange import Patience as Patience
    from gradalign.flower.grid import InProcessGrid as InProcessGrid
    from gradalign.flower.one_trip import OneTrip as OneTrip
    from gradalign.flower.one_trip import SecureOneTrip as SecureOneTrip
    from gradalign.flower.own_loop import LocalRound as LocalRound
    from gradalign.flower.own_loop import gradient_reply as gradient_reply
    from gradalign.flower.stock import ClientApp as ClientApp
    from gradalign.flower.strategy import AlignedStrategy as AlignedStrategy

_HOME_OF = {
    "AlignedStrategy": "strategy",
    "ClientApp": "stock",
    "FedGA": ".algorithms",
    "InProcessGrid": "grid",
    "LocalRound": "own_loop",
    "OneTrip": "one_trip",
    "Patience": "exchange",
    "SecureOneTrip": "one_trip",
    "aligned_app": "client",
    "client_app": "client",
    "gradient_reply": "own_loop",
    "on_update": "client",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'gradalign.flower' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)

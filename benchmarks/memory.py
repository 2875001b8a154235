"""Memory and start: each contender alone, in processes of its own, watched from outside while it plays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.driver import PeerError, contender
from benchmarks.peers.install import hint, is_installed, own_player, players
from benchmarks.workloads import Workload

ROUNDS = 3


def commands(place: Path | None) -> Iterator[tuple[str, list[str] | str]]:
    """Yield the contenders with their commands, or with what keeps them from being started."""
    for name, label in (("plain", "plain"), ("tuned", "tuned"), ("gradalign", "gradalign, 2 workers")):
        yield label, own_player(name)
    for name, (peer, command) in players(place).items() if place else ():
        assert place
        yield name, command if is_installed(peer, place) else hint(peer)


def watch(command: list[str]) -> dict[str, Any]:
    """Return a contender's peak memory over its start and some rounds, and how long its start takes.

    The start is taken without a look at the memory, which would slow it down.
    """
    began = time.perf_counter()
    with contender(command) as player:
        ready = time.perf_counter() - began
        player.play()
        first = time.perf_counter() - began
    with contender(command, watched=True) as player:
        for _ in range(ROUNDS):
            player.play()
    return {"bytes": player.memory.peak, "ready_seconds": ready, "first_round_seconds": first}


def measure_memory(workload: Workload, place: Path | None) -> dict[str, Any]:
    """Watch one contender after the other on a workload."""
    rows: dict[str, Any] = {}
    for name, command in commands(place):
        try:
            rows[name] = {"remark": command} if isinstance(command, str) else watch([*command, workload.name])
        except PeerError as error:
            rows[name] = {"remark": str(error)}
    return {"workload": workload.name, "what": workload.what, "contenders": rows}


def print_memory(results: list[dict[str, Any]]) -> None:
    """Print the rows for people."""
    table = Table(title=f"peak memory of all processes together over {ROUNDS} rounds, and the start")
    for name in ("workload", "contender", "GB", "seconds until ready", "until the first round is played"):
        table.add_column(name, justify="left" if name in ("workload", "contender") else "right")
    for result in results:
        for name, row in result["contenders"].items():
            if "remark" in row:
                table.add_row(result["workload"], f"{name} ({row['remark']})")
                continue
            numbers = (row["bytes"] / 1e9, row["ready_seconds"], row["first_round_seconds"])
            table.add_row(result["workload"], name, *(f"{number:.2f}" for number in numbers))
    Console(width=150).print(table)

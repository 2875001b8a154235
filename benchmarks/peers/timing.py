"""The peers beside the other contenders: which are there, their rounds in turn with the others', their rows."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.driver import Contender, PeerError, contender
from benchmarks.peers.install import hint, is_installed, players
from benchmarks.workloads import Workload


class Peers:
    """The peers that are installed, each at its gate, and what is to be said of the others."""

    def __init__(self, workload: Workload, place: Path | None, stack: ExitStack) -> None:
        self.remarks: dict[str, str] = {}
        self._playing: dict[str, Contender] = {}
        for name, (peer, command) in players(place).items() if place else ():
            if not is_installed(peer, place):
                self.remarks[name] = hint(peer)
                continue
            try:
                self._playing[name] = stack.enter_context(contender([*command, workload.name]))
            except PeerError as error:
                self.remarks[name] = f"did not start: {error}"

    def names(self) -> list[str]:
        """Return the peers that play."""
        return list(self._playing)

    def warm_up(self) -> None:
        """Play a round that is not counted."""
        self.play({name: [] for name in self._playing})

    def play(self, times: dict[str, list[float]]) -> None:
        """Play a round of each peer and write its seconds down; one that fails is not asked again."""
        for name, player in list(self._playing.items()):
            try:
                times[name].append(player.play())
            except PeerError as error:
                self.remarks[name] = f"failed: {error}"
                times[name].clear()
                del self._playing[name]


def compare(median: dict[str, float], remarks: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the peers' rows: seconds a round and ratios, or what keeps them from having any."""
    rows: dict[str, dict[str, Any]] = {}
    for name in [*median, *remarks]:
        if name in remarks:
            rows[name] = {"remark": remarks[name]}
        elif name not in ("plain", "tuned", "gradalign", "gradalign FedGA"):
            rows[name] = {
                "seconds": median[name],
                "speedup_over_plain": median["plain"] / median[name],
                "gradalign_speedup": median[name] / median["gradalign"],
            }
    return rows


def print_peers(results: list[dict[str, Any]]) -> None:
    """Print the peers' rows for people."""
    table = Table(title="peers: seconds a round (median)")
    for name in ("workload", "peer", "seconds", "faster than plain", "gradalign is faster by"):
        table.add_column(name, justify="left" if name in ("workload", "peer") else "right")
    for result in results:
        for name, row in result["peers"].items():
            if "remark" in row:
                table.add_row(result["workload"], f"{name} ({row['remark']})")
                continue
            ratios = (f"{row[key]:.2f}" for key in ("speedup_over_plain", "gradalign_speedup"))
            table.add_row(result["workload"], name, f"{row['seconds']:.3f}", *ratios)
        table.add_section()
    Console(width=150).print(table)

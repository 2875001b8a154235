"""One virtual environment for each peer, with every version pinned."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.peers.driver import ROOT

PEERS = ("flower", "pfl", "fedlab")
DEFAULT_PLACE = ROOT / ".peers"
_STAMP = "installed.txt"


def requirements(peer: str) -> Path:
    """Return the file with a peer's pinned versions."""
    return Path(__file__).parent / "requirements" / f"{peer}.txt"


def python_of(peer: str, place: Path) -> Path:
    """Return the interpreter of a peer's environment."""
    return place / peer / "bin" / "python"


def is_installed(peer: str, place: Path) -> bool:
    """Return whether a peer's environment is complete and holds the versions that are pinned now."""
    stamp = place / peer / _STAMP
    return stamp.is_file() and stamp.read_text() == requirements(peer).read_text()


def install(peer: str, place: Path) -> None:
    """Make a peer's environment anew.

    Raises:
        SystemExit: The packages could not be installed.
    """
    folder = place / peer
    print(f"{peer}: installing into {folder}", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    command = [str(python_of(peer, place)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "-r", str(requirements(peer))])
    if done.returncode:
        raise SystemExit(f"{peer}: pip failed; {folder} is not used until it succeeds")
    # Last, so that an installation that was cut short does not count.
    (folder / _STAMP).write_text(requirements(peer).read_text())
    print(f"{peer}: installed", flush=True)


def hint(peer: str) -> str:
    """Return what to say of a peer that is not installed."""
    return f"not installed: python -m benchmarks.peers install {peer}"


def players(place: Path) -> dict[str, tuple[str, list[str]]]:
    """Return, for each row of the table, its peer and the command that plays it, the workload's name to be added."""
    entry = ["-m", "benchmarks.peers.player"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return {
        "Flower": ("flower", [str(python_of("flower", place)), *entry, "flower"]),
        "pfl": ("pfl", [str(python_of("pfl", place)), *entry, "pfl"]),
        "pfl, 2 processes": ("pfl", [str(python_of("pfl", place)), *torchrun, *entry, "pfl"]),
        "FedLab": ("fedlab", [str(python_of("fedlab", place)), *entry, "fedlab"]),
    }


def own_player(name: str) -> list[str]:
    """Return the command that plays a contender in the interpreter at hand, the workload's name to be added."""
    return [sys.executable, "-m", "benchmarks.peers.player", name]

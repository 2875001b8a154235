"""The checkpoint: one safetensors file whose header carries the counters as JSON. Nothing is ever unpickled."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradalign.errors import GradalignError
from gradalign.experiment.federation import ServerState, Totals
from gradalign.experiment.files import write_atomically
from gradalign.flat import Point


def save_checkpoint(path: Path, state: ServerState, seconds: float) -> None:
    """Write the state and the seconds spent until then; a crash leaves the checkpoint before."""
    write_atomically(path, lambda file: _write(file, state, seconds))


def _write(file: Path, state: ServerState, seconds: float) -> None:
    tensors = {"x": state.point.x, "floats": state.point.floats, "ints": state.point.ints}
    tensors |= {f"memory.{name}": vector for name, vector in state.memory.items()}
    tensors |= {f"shared.{name}": vector for name, vector in state.shared.items()}
    for name, kept in state.kept.items():
        clients = sorted(kept)
        tensors[f"clients.{name}"] = torch.tensor(clients, dtype=torch.int64)
        tensors[f"kept.{name}"] = torch.stack([kept[client] for client in clients])
    counters = {"round": state.round, "seconds": seconds, "totals": asdict(state.totals)}
    save_file(tensors, file, metadata={"gradalign": json.dumps(counters)})


def load_checkpoint(path: Path) -> tuple[ServerState, float]:
    """Read a checkpoint: the state and the seconds spent until then."""
    try:
        with safe_open(path, framework="pt") as file:
            counters = json.loads(file.metadata()["gradalign"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise GradalignError(f"{path} is not a checkpoint of this library: {error}") from None

    def group(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    vectors = group("kept.")
    kept = {
        name: {int(client): vectors[name][row].clone() for row, client in enumerate(clients)}
        for name, clients in group("clients.").items()
    }
    state = ServerState(
        point=Point(tensors["x"], tensors["floats"], tensors["ints"]),
        round=int(counters["round"]),
        memory=group("memory."),
        shared=group("shared."),
        kept=kept,
        totals=Totals(**counters["totals"]),
    )
    return state, float(counters["seconds"])

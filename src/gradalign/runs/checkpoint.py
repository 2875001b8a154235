"""Tensors on disk as safetensors: the final model, and the checkpoint, whose header carries counters and a digest.

The digest covers every tensor, its name, kind and shape, and the counters, so a checkpoint that is not what was written
is known as such. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradalign.errors import GradalignError
from gradalign.server.federation import ServerState, Totals
from gradalign.runs import write_atomically
from gradalign.runs.untrusted import open_file, parse_json
from gradalign.client.flat import Point

NOTE, DIGEST = "gradalign", "sha256"
WHAT_TO_DO = "put a good copy of it back, or begin the run again in another folder"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A state, the seconds spent until then, and what it belongs to: the run's settings and its metrics so far.

    Attributes:
        state: What the next round starts from.
        seconds: The time spent until then.
        spec: The digest of the run's spec.
        metrics_bytes: How much of the metrics was written at that moment.
        metrics: The digest of that part.
    """

    state: ServerState
    seconds: float
    spec: str
    metrics_bytes: int
    metrics: str


def digest_of(data: bytes) -> str:
    """Return the digest of bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_of_settings(table: Mapping[str, Any]) -> str:
    """Return the digest of a table of plain values, in whatever order and spacing they are written."""
    return digest_of(json.dumps(table, sort_keys=True, default=str).encode())


def digest_of_file(path: Path) -> str:
    """Return the digest of a file, which may be larger than memory."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> None:
    """Write tensors; a crash leaves the file before."""

    def write(file: Path) -> None:
        try:
            save_file(dict(tensors), file, metadata=dict(header) if header else None)
        except SafetensorError as error:  # this is how a full disk shows itself here
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(os.strerror(int(number[1])) if number else str(error)) from None

    write_atomically(path, write)


def load_tensors(path: Path, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and the header's notes."""
    open_file(path).close()  # a link, a pipe or a device is refused before safetensors opens it
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # whatever the format's own reader says of a file that is not of its format
        raise GradalignError(f"{path} is not a {what} of this library: {error}; {WHAT_TO_DO}") from None


def _digest(tensors: Mapping[str, Tensor], note: str) -> str:
    found = hashlib.sha256(note.encode("utf-8"))
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _load_checked(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a checkpoint's tensors and counters; one that is not what was written is refused."""
    tensors, header = load_tensors(path, "checkpoint")
    if NOTE not in header or DIGEST not in header:
        raise GradalignError(
            f"{path} has no digest to check it by: it is damaged, or an earlier version wrote it; {WHAT_TO_DO}"
        )
    if _digest(tensors, header[NOTE]) != header[DIGEST]:
        raise GradalignError(f"{path} is damaged: it does not match its digest; {WHAT_TO_DO}")
    try:
        note = parse_json(header[NOTE])
    except ValueError:
        note = None
    if not isinstance(note, dict):
        raise GradalignError(f"{path} is not a checkpoint of this library; {WHAT_TO_DO}")
    return tensors, note


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; a crash leaves the one before."""
    state = checkpoint.state
    tensors = {"x": state.point.x, "floats": state.point.floats, "ints": state.point.ints}
    tensors |= {f"memory.{name}": vector for name, vector in state.memory.items()}
    tensors |= {f"shared.{name}": vector for name, vector in state.shared.items()}
    for name, kept in state.kept.items():
        clients = sorted(kept)
        tensors[f"clients.{name}"] = torch.tensor(clients, dtype=torch.int64)
        tensors[f"kept.{name}"] = torch.stack([kept[client] for client in clients])
    note = {"round": state.round, "seconds": checkpoint.seconds, "totals": asdict(state.totals)}
    belongs = {"spec": checkpoint.spec, "metrics_bytes": checkpoint.metrics_bytes, "metrics": checkpoint.metrics}
    text = json.dumps(note | belongs, sort_keys=True)
    save_tensors(path, tensors, {NOTE: text, DIGEST: _digest(tensors, text)})


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint that is whole."""
    tensors, note = _load_checked(path)
    try:
        return Checkpoint(
            state=_state(tensors, note),
            seconds=float(note["seconds"]),
            spec=str(note["spec"]),
            metrics_bytes=int(note["metrics_bytes"]),
            metrics=str(note["metrics"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else error
        raise GradalignError(f"{path} is not a whole checkpoint: {missing}; {WHAT_TO_DO}") from None


def _state(tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> ServerState:
    def group(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    point = Point(tensors["x"], tensors["floats"], tensors["ints"])
    for name, vector in (*group("memory.").items(), *group("shared.").items()):
        if vector.shape != point.x.shape:
            raise ValueError(f'the vector "{name}" has the shape {list(vector.shape)}, x has {list(point.x.shape)}')
    clients, vectors = group("clients."), group("kept.")
    if clients.keys() != vectors.keys() or vectors.keys() != group("shared.").keys():
        raise ValueError("clients, their vectors and the server's do not belong together")
    for name, matrix in vectors.items():
        if clients[name].ndim != 1 or matrix.shape != (clients[name].numel(), point.x.numel()):
            raise ValueError(f'the clients\' vectors "{name}" have the shape {list(matrix.shape)}')
    return ServerState(
        point=point,
        round=int(note["round"]),
        memory=group("memory."),
        shared=group("shared."),
        kept={
            name: {int(client): vectors[name][row].clone() for row, client in enumerate(clients[name])}
            for name in clients
        },
        totals=Totals(**note["totals"]),
    )

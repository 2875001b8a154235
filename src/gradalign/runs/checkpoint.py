"""Tensors on disk as safetensors: the final model, and the checkpoint, whose header carries counters and a digest.

The digest covers every tensor, its name, kind and shape, and the counters, so a checkpoint that is not what was written
is known as such. Nothing is ever unpickled. torch is imported when tensors are written or read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradalign.errors import GradalignError, need
from gradalign.runs import write_atomically
from gradalign.runs.untrusted import open_file, parse_json

if TYPE_CHECKING:
    from torch import Tensor, nn

NOTE, DIGEST = "gradalign", "sha256"
WHAT_TO_DO = "put a good copy of it back, or begin the run again in another folder"
State = TypeVar("State")


@dataclass(frozen=True, kw_only=True)
class Belongs:
    """The seconds spent until a checkpoint, its spec's digest, the length of the metrics then, and their digest."""

    seconds: float
    spec: str
    metrics_bytes: int
    metrics: str


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of_settings(table: Mapping[str, Any]) -> str:
    """Return the digest of a table of plain values, in whatever order and spacing they are written."""
    return digest_of(json.dumps(table, sort_keys=True, default=str).encode())


def digest_of_file(path: Path) -> str:
    """Return the digest of a file, which may be larger than memory."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_writable(model: nn.Module) -> None:
    """Refuse a model whose state cannot be written when it is trained: the answer is the same before."""
    from torch import Tensor

    save = need("safetensors.torch", "runs").save
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise GradalignError(
                f"the model's state has {name}, a {type(value).__name__}, and only tensors can be written; let "
                "get_extra_state return a tensor, or run without a folder"
            )
    try:
        # Kind and layout decide, not the values, so none are copied.
        save({name: tensor.detach().new_empty(0).cpu() for name, tensor in state.items()})
    except Exception as error:  # whatever the format's own writer says of a kind that it does not have
        raise GradalignError(f"the model's state cannot be written: {error}") from None


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> None:
    failed, save_file = need("safetensors", "runs").SafetensorError, need("safetensors.torch", "runs").save_file

    def write(file: Path) -> None:
        try:
            save_file(dict(tensors), file, metadata=dict(header) if header else None)
        except failed as error:  # this is how a full disk shows itself here
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(os.strerror(int(number[1])) if number else str(error)) from None

    write_atomically(path, write)


def load_tensors(path: Path, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    safe_open = need("safetensors", "runs").safe_open
    open_file(path).close()  # a link, a pipe or a device is refused before safetensors opens it
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # whatever the format's own reader says of a file that is not of its format
        raise GradalignError(f"{path} is not a {what} of this library: {error}; {WHAT_TO_DO}") from None


def _digest(tensors: Mapping[str, Tensor], note: str) -> str:
    import torch

    found = hashlib.sha256(note.encode("utf-8"))
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def save_noted(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Write tensors with a note in the header, and a digest of both."""
    text = json.dumps(note, sort_keys=True)
    save_tensors(path, tensors, {NOTE: text, DIGEST: _digest(tensors, text)})


def load_checkpoint(path: Path, make: Callable[[dict[str, Tensor], dict[str, Any]], State]) -> tuple[State, Belongs]:
    """Read a checkpoint that is what was written; ``make`` makes the state of its tensors and counters."""
    tensors, header = load_tensors(path, "checkpoint")
    if NOTE not in header or DIGEST not in header:
        problem = "has no digest to check it by: it is damaged, or an earlier version wrote it"
        raise GradalignError(f"{path} {problem}; {WHAT_TO_DO}")
    if _digest(tensors, header[NOTE]) != header[DIGEST]:
        raise GradalignError(f"{path} is damaged: it does not match its digest; {WHAT_TO_DO}")
    kinds = {"seconds": float, "spec": str, "metrics_bytes": int, "metrics": str}
    try:
        note = parse_json(header[NOTE])
        return make(tensors, note), Belongs(**{name: kind(note[name]) for name, kind in kinds.items()})
    except (KeyError, TypeError, ValueError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else error
        raise GradalignError(f"{path} is not a whole checkpoint: {missing}; {WHAT_TO_DO}") from None

"""The files of run folders: their names, and writing one whole or not at all. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gradalign.errors import NotWrittenError, need, shown_text

SPEC, METRICS, CHECKPOINT, SUMMARY = "spec.toml", "metrics.jsonl", "checkpoint.safetensors", "summary.json"
MODEL, LOCK = "model.safetensors", ".lock"
CLASS_COUNTS = "holdings.json"
CLIENTS, BEST = "clients.json", "best.safetensors"
"""Every client's results at the end, and the best round's model, where a run keeps them."""
FAILURE = "failure.json"
"""Why a run ended by itself before its last round, and whether it diverged; removed when it goes on."""
COMPARISON, CURVES, REPORT = "compare.toml", "curves.png", "report.html"
SWEEP, SWEEP_WORKERS, TRIALS = "sweep.toml", ".workers", "trials"
"""A sweep's description, where each of its processes holds a lock, and the folder of its trials' stages."""
TENSORBOARD, WANDB = "tensorboard", "wandb"
"""The trackers' own folders."""

_TAKEN = {SPEC, METRICS, CHECKPOINT, SUMMARY, MODEL, CLASS_COUNTS, FAILURE, COMPARISON, CURVES, REPORT, SWEEP, TRIALS}
_TAKEN |= {TENSORBOARD, WANDB, CLIENTS, BEST}
_DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
"""Names that some systems keep for themselves, whatever comes after a dot."""
_MARKED = re.compile(r".*-[0-9a-f]{10}")
_LONGEST_NAME = 100  # in bytes; systems stop at 255


def readable_name(text: str, otherwise: str = "unnamed") -> str:
    """Return text as a file or folder may be called anywhere: one step inside its folder, never hidden or overlong."""
    letters = re.sub(r"[^\w.+=,-]+", "-", text).strip("-.")
    name = letters.encode("utf-8", errors="replace")[:_LONGEST_NAME].decode("utf-8", errors="ignore").rstrip("-.")
    return f"_{name}" if _DEVICES.fullmatch(name) or name in _TAKEN else name or otherwise


def safe_name(text: str) -> str:
    """Return the name of the folder that belongs to a text: a readable one, and different texts have different ones.

    A text that can be a name is its own; any other is made one and marked by its digest.
    """
    name = readable_name(text)
    if name == text and not _MARKED.fullmatch(text):
        return name
    return f"{name}-{hashlib.sha256(text.encode('utf-8', errors='backslashreplace')).hexdigest()[:10]}"


def output_folder(out: Path | None, name: str, *, resume: bool) -> Path:
    """Return where to write: what was asked for, or runs/NAME with a number where that is taken.

    With ``resume`` and no folder named, it is the newest of the numbered ones.
    """
    if out is not None:
        return out
    name = readable_name(name, "run")
    base = Path("runs") / name
    numbered = [base] + [base.with_name(f"{name}-{n}") for n in range(2, 10_000)]
    taken = next(i for i, path in enumerate(numbered) if not path.exists())
    return numbered[max(0, taken - 1)] if resume else numbered[taken]


CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""How files of a run folder are opened: no link is followed, no pipe waited for."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file, then put it in place: readers see the old file or the new one.

    Raises:
        NotWrittenError: The system refused, as when the disk is full; the old file is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with writing(path):
        try:
            # A new file, never one that lies there under this name.
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY, 0o666))
            mode = temporary.stat().st_mode
            write(temporary)
            temporary.chmod(mode)  # some writers make private files; a run folder is as open as the user's umask says
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def writing(path: Path, what: str = "write") -> Iterator[None]:
    """Say in one sentence what the system would not do with a file inside the block."""
    try:
        yield
    except OSError as error:
        raise NotWrittenError(f"cannot {what} {path}: {error.strerror or error}") from None


def remove(path: Path) -> None:
    """Remove a file, or a link, if it is there."""
    with writing(path, "remove"):
        path.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text or bytes atomically."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    write_atomically(path, lambda file: file.write_bytes(data))


def write_json(path: Path, data: Any) -> None:
    write_whole(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_toml(path: Path, data: Mapping[str, Any]) -> None:
    write_whole(path, as_toml(data))


def as_toml(data: Mapping[str, Any]) -> str:
    text: str = need("tomli_w", "runs").dumps(dict(data))
    return text


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of the fields in which two specs differ, with both values.

    What a paper says, and how many rounds there were before scaling, is told beside a result and changes none.
    """
    found: list[str] = []
    told = set() if prefix else {"paper", "full_size"}  # a task's own setting of that name is not it
    for key in sorted((set(old) | set(new)) - told):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differing_fields(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(shown_text(f"{prefix}{key} ({_shown(a)} there, {_shown(b)} now)"))
    return found


def is_shorter(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two specs differ in nothing but that the old one has fewer rounds."""
    rounds = old.get("rounds"), new.get("rounds")
    known = type(rounds[0]) is int and type(rounds[1]) is int and rounds[0] < rounds[1]
    return known and not differing_fields({**old, "rounds": rounds[1]}, new)


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"

"""The law that every command must keep, whatever is done to it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from .bench import LIMIT, Outcome

_ABORTS = ("Traceback (most recent call last)", "Fatal Python error", "terminate called", "core dumped")


def broken(outcome: Outcome, codes: Collection[int]) -> list[str]:
    """Return what a command did wrong: it must end in time, in order, with one of these codes, and leave nothing."""
    found = []
    text = outcome.out + outcome.err
    if not outcome.ended:
        return [f"no end within {LIMIT:g} s"]
    if outcome.code not in codes:
        found.append(f"exit code {outcome.code}, not {' or '.join(map(str, sorted(codes)))}: {_end(outcome.err)}")
    found += [f"{word!r}: {_end(outcome.err)}" for word in _ABORTS if word in text][:1]
    raw = sorted({letter for letter in text if not letter.isprintable() and letter not in "\n\t\r"})
    if raw:
        found.append(f"raw control characters: {raw[:5]!r}")
    if outcome.code == 2 and not outcome.err.strip():
        found.append("exit code 2 without a word")
    if outcome.left:
        found.append(f"processes left: {outcome.left[:3]}")
    return found


def _end(text: str) -> str:
    return ascii(text.strip()[-300:])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def differing(folder: Path, whole: Path, *, metrics: bool = True) -> list[str]:
    """Return how a run that says it is complete differs from the undisturbed one."""
    try:
        model, wanted = load_file(folder / "model.safetensors"), load_file(whole / "model.safetensors")
        same = model.keys() == wanted.keys() and all(np.array_equal(model[name], wanted[name]) for name in model)
        found = [] if same else ["exit code 0, and another model"]
        if metrics and rows_of(folder) != rows_of(whole):
            found.append("exit code 0, and other metrics")
    except Exception as error:
        return [f"exit code 0, and a result that cannot be read: {type(error).__name__}: {error}"]
    return found

"""Strict reader of LEAF's Shakespeare files: JSON, plain or gzipped, one or several of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError
from gradalign.tasks.idx import read_bytes

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's vocabulary; a letter's code is its place in it."""
SEQUENCE = 80

_UNKNOWN = 255
_CODES = np.full(256, _UNKNOWN, np.uint8)
_CODES[np.frombuffer(LETTERS.encode("latin1"), np.uint8)] = np.arange(len(LETTERS), dtype=np.uint8)


def _encode(text: str, where: str) -> NDArray[np.uint8]:
    """Return the codes of all letters of a text."""
    try:
        codes = _CODES[np.frombuffer(text.encode("latin1"), np.uint8)]
    except UnicodeEncodeError as error:
        raise GradalignError(f"{where} has the letter {text[error.start]!r}, which LEAF's vocabulary lacks") from None
    if (codes == _UNKNOWN).any():
        letter = text[int(np.argmax(codes == _UNKNOWN))]
        raise GradalignError(f"{where} has the letter {letter!r}, which LEAF's vocabulary lacks")
    return codes


def _windows(data: Any, where: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return one user's windows (n, 80) and the letters that follow (n,)."""
    if not isinstance(data, Mapping) or not isinstance(data.get("x"), list) or not isinstance(data.get("y"), list):
        raise GradalignError(f'{where} must have the lists "x" and "y"')
    x, y = data["x"], data["y"]
    if len(x) != len(y):
        raise GradalignError(f"{where} has {len(x)} windows but {len(y)} next letters")
    if not all(isinstance(window, str) and len(window) == SEQUENCE for window in x):
        raise GradalignError(f"{where} has a window that is not a text of {SEQUENCE} letters")
    if not all(isinstance(letter, str) and len(letter) == 1 for letter in y):
        raise GradalignError(f"{where} has a next letter that is not one letter")
    return _encode("".join(x), where).reshape(-1, SEQUENCE), _encode("".join(y), where)


def window_starts(letters: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return where in its text each window begins, given windows with the letter that follows, in the text's order.

    A window begins as much later as the one before it must be moved to agree with it. Windows that agree at no shift
    are taken for neighbours in the text.
    """
    length = letters.shape[1]
    steps = np.full(max(len(letters) - 1, 0), length, np.int64)
    open_ = np.arange(len(steps))
    for shift in range(1, length):
        agree = (letters[open_, shift:] == letters[open_ + 1, : length - shift]).all(axis=1)
        steps[open_[agree]] = shift
        open_ = open_[~agree]
        if not len(open_):
            break
    return np.concatenate([[0], np.cumsum(steps)])[: len(letters)]


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(read_bytes(path))
    except GradalignError:
        raise
    except (ValueError, RecursionError) as error:
        raise GradalignError(f"{path} is cut short or not JSON: {error}") from None
    if not isinstance(content, Mapping) or not isinstance(content.get("user_data"), Mapping):
        raise GradalignError(f'{path} is not a LEAF file: it has no "user_data"')
    users, counts = content.get("users"), content.get("num_samples")
    if not isinstance(users, list) or not isinstance(counts, list) or len(users) != len(counts):
        raise GradalignError(f'{path} is not a LEAF file: it needs "users" and as many "num_samples"')
    if not all(isinstance(user, str) for user in users) or set(users) != set(content["user_data"]):
        raise GradalignError(f'{path}: "users" and "user_data" name different users')
    return content


def read_shakespeare(paths: Sequence[Path]) -> tuple[list[str], dict[str, NDArray[Any]]]:
    """Read LEAF files as one set.

    Args:
        paths: The files; a user occurs in one of them only.

    Returns:
        The users in the order of the files, and arrays: ``x`` (N, 80) and ``y`` (N,) letter codes, ``owner`` (N,) the
        number of the user in that order, ``start`` (N,) where in the user's text each window begins.

    Raises:
        GradalignError: If a file is not of this form, or counts other windows than it has.
    """
    users: list[str] = []
    xs: list[NDArray[np.uint8]] = []
    ys: list[NDArray[np.uint8]] = []
    for path in paths:
        content = _load(path)
        for user, count in zip(content["users"], content["num_samples"], strict=True):
            where = f"{path}: the user {user}"
            x, y = _windows(content["user_data"][user], where)
            if len(x) != count:
                raise GradalignError(f'{where} has {len(x)} windows, but "num_samples" says {count}')
            users.append(str(user))
            xs.append(x)
            ys.append(y)
    if len(set(users)) < len(users):
        raise GradalignError(f"{paths[0].parent}: the user {_twice(users)} occurs twice")
    if not sum(len(y) for y in ys):
        raise GradalignError(f"{paths[0].parent if paths else 'nowhere'}: there are no windows of text")
    owner = np.repeat(np.arange(len(users), dtype=np.int32), [len(y) for y in ys])
    starts = [window_starts(np.concatenate([x, y[:, None]], axis=1)) for x, y in zip(xs, ys, strict=True)]
    return users, {
        "x": np.concatenate(xs),
        "y": np.concatenate(ys),
        "owner": owner,
        "start": np.concatenate(starts).astype(np.int32),
    }


def _twice(names: list[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]

"""Checks of single options: each says in one sentence what was given and what is allowed."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from gradalign.errors import GradalignError


def flag(name: str, value: Any) -> bool:
    """Return a switch that is True or False and nothing that merely counts as such."""
    if not isinstance(value, bool | np.bool_):
        raise GradalignError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a whole number (NumPy's and torch's too) inside its range."""
    upper = "" if most is None else f" and at most {most:,}"
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise GradalignError(f"{name} must be a whole number of at least {least}{upper}, got {value!r}")
    return number


def real(name: str, value: Any, least: float, most: float = math.inf, *, below: bool = False) -> float:
    """Return a number inside its range; with ``below``, the upper end is not part of it."""
    ends = f"at least {least:g}" if math.isinf(most) else f"in [{least:g}, {most:g}{')' if below else ']'}"
    plain = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    number = float(value) if plain else math.nan
    if not (least <= number < most if below else least <= number <= most):
        raise GradalignError(f"{name} must be a number {ends}, got {value!r}")
    return number

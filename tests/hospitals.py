"""A table of patients as hospitals might have it: types of all kinds, gaps, an id, a note, hospitals that differ."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HOSPITALS = {"north": (70.0, 60), "south": (45.0, 80), "west": (30.0, 41)}
"""The mean age, and the number of patients."""


def patients(seed: int = 0, hospitals: Mapping[str, tuple[float, int]] = HOSPITALS) -> list[dict[str, Any]]:
    """Return the rows; "" is a gap."""
    random = np.random.default_rng(seed)
    rows = []
    for hospital, (age, count) in hospitals.items():
        for _ in range(count):
            years, pressure, smoker = random.normal(age, 8), random.normal(130, 15), bool(random.random() < 0.3)
            risk = (years - 50) / 10 + (pressure - 130) / 15 + smoker + random.normal(0, 0.5)
            rows.append(
                {
                    "patient_id": 10**12 + 7 * len(rows),
                    "hospital": hospital,
                    "age": round(years, 1),
                    "pressure": "" if random.random() < 0.1 else round(pressure),
                    "smoker": smoker,
                    "ward": random.choice(["A", "B", "C", ""]),
                    "admitted": f"2024-0{random.integers(1, 10)}-{random.integers(10, 29)}",
                    "note": f"note {len(rows)}",
                    "country": "X",
                    "outcome": "ill" if risk > 0 else "well",
                    "stay": round(3 + risk, 2),
                }
            )
    return rows


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path

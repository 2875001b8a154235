"""Run folders written by hand, with numbers that can be worked out on paper."""

from __future__ import annotations

import json
from pathlib import Path

import tomli_w

PAPER = {"source": "table 1", "test_accuracy": {"fedga": [85.0, 0.5], "fedavg": [80.0, 0.5]}}


def spec_of(algorithm: str = "fedga", seed: int = 0, **changes) -> dict:
    spec = {
        "name": "example",
        "seed": seed,
        "rounds": 4,
        "task": {"name": "digits", "clients": 3},
        "algorithm": {"name": algorithm} | ({"beta": 0.5} if "fedga" in algorithm else {}),
        "local": {"lr": 0.1, "steps": 2},
    }
    return spec | changes


def rows_of(final: float, rounds: int = 4, *, phases: int = 2) -> list[dict]:
    """Accuracy rises by equal steps to ``final``; round t has cost 100 t updates, 20 t bytes and t/2 seconds.

    Each phase of a round has cost 60 examples.
    """
    return [
        {
            "round": t,
            "communication_rounds": phases * t,
            "local_updates": 100 * t,
            "examples": 60 * phases * t,
            "bytes_up": 10 * t,
            "bytes_down": 10 * t,
            "seconds": t / 2,
            "test_accuracy": final * t / rounds,
            "test_loss": 2.0 / (t + 1),
            "train_accuracy": final * t / rounds + 0.05 if t % 2 == 0 else None,
            "drift": 3.0 - 0.5 * t if t % 2 == 0 else None,
            "r": 4.0 / (t + 1) if t % 2 == 0 else None,
            "beta": 0.5 if t and phases == 2 else 0.0 if t else None,
        }
        for t in range(rounds + 1)
    ]


def write_run(
    folder: Path, settings: dict | None = None, final: float = 0.8, *, rounds: int = 4, phases: int = 2, **files
) -> Path:
    """Write a finished run; ``files`` (spec, metrics, summary, holdings, failure) replaces a file; None omits it."""
    folder.mkdir(parents=True)
    settings = spec_of() if settings is None else settings
    rows = rows_of(final, rounds, phases=phases)
    summary = {
        "final_test_accuracy": final,
        "best_test_accuracy": final,
        "final_test_loss": 0.4,
        "final_r": 0.8,
        "communication_rounds": rounds * phases,
        "seconds": 2.0,
        "task": {"name": "digits", "clients": 3, "train_examples": 60, "test_examples": 40},
        "versions": {"gradalign": "0.1.0"},
    }
    contents = {
        "spec.toml": tomli_w.dumps(settings),
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "summary.json": json.dumps(summary),
    }
    names = {"spec": "spec.toml", "metrics": "metrics.jsonl"}
    contents |= {names.get(name, f"{name}.json"): content for name, content in files.items()}
    for name, content in contents.items():
        if content is not None:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_comparison(folder: Path, results: dict[str, list[float]], **changes) -> Path:
    """Write a comparison: the final accuracies of every algorithm's seeds 0, 1, …"""
    for name, finals in results.items():
        for seed, final in enumerate(finals):
            spec = spec_of(name, seed, **changes)
            write_run(folder / name / f"seed{seed}", spec, final, phases=2 if name in ("fedga", "scaffold") else 1)
    seeds = list(range(max(map(len, results.values()))))
    description = {"name": "example", "algorithms": list(results), "seeds": seeds}
    (folder / "compare.toml").write_text(tomli_w.dumps(description))
    return folder

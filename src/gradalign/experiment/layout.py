"""The names of what lies in a run folder, apart from the code that writes it: a reader need not wait for torch."""

from __future__ import annotations

SPEC, METRICS, CHECKPOINT = "spec.toml", "metrics.jsonl", "checkpoint.safetensors"
SUMMARY, MODEL, LOCK = "summary.json", "model.safetensors", ".lock"
FAILURE = "failure.txt"
"""Why a run ended by itself before its last round; removed when it goes on."""
COMPARISON = "compare.toml"
SWEEP, SWEEP_WORKERS = "sweep.toml", ".workers"
"""A sweep's description, and where each of its processes holds a lock."""
TENSORBOARD, WANDB = "tensorboard", "wandb"
"""The trackers' own folders."""

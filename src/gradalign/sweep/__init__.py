"""Tuning: the paper's protocol on Optuna. Its rooms are listed in docs/architecture.md."""

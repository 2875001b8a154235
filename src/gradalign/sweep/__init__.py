"""Tuning: the paper's protocol on Optuna. ``conduct`` carries a sweep out."""

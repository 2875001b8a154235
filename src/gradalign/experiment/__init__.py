"""Experiments: a validated description, the round loop, the run folder, comparisons."""

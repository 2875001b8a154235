"""Seeded trials of what may go wrong around a run: ``python -m tests.faults`` prints how many were tried and failed."""

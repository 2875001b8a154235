"""Runs seen from elsewhere while they run."""

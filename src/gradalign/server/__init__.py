"""The server: rounds, their sums, what is measured, and the run of all rounds."""

"""The paper's experiments as one list: settings chosen on validation examples, runs seed by seed, verdicts."""

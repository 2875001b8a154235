"""Other simulators of federated learning on the same workloads, each in an environment of its own.

``python -m benchmarks.peers install`` makes the environments, ``python -m benchmarks.peers check`` shows that every
peer computes the same average as the plain loop, and ``python -m benchmarks`` times the peers that are installed.
"""

"""One seed, and from it an independent stream for each (purpose, round, client).

No stream depends on another having been used, so neither the order of the clients nor the number of workers matters.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

# The global generators belong to one block at a time. Forking takes the lock too: a worker forked while another thread
# draws numbers would inherit a generator locked for ever.
_global_generators = threading.RLock()


def _forget_lock() -> None:
    global _global_generators
    _global_generators = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def quiet_generators() -> AbstractContextManager[bool]:
    """Hold everyone else off the global generators inside the block."""
    return _global_generators


class Purpose(IntEnum):
    """What a random stream is for. The numbers are part of every result: never reuse or renumber one."""

    INIT = 1
    SAMPLE_CLIENTS = 2
    SHUFFLE = 3
    TRAIN = 4
    GRADIENT = 5
    DROPOUT_OF_CLIENTS = 6
    PARTITION = 7
    SPLIT = 8
    PROBE = 9
    SYNTHETIC = 10
    EVALUATE = 11
    CLIENT = 12
    HOLDOUT = 13
    SWEEP = 14


def stream_seed(seed: int, purpose: Purpose, *keys: int) -> int:
    """Return the 64-bit seed of the stream for ``purpose`` and ``keys`` (round, client, ...)."""
    return int(np.random.SeedSequence([seed, int(purpose), *keys]).generate_state(1, np.uint64)[0])


def stream_seeds(seed: int, purpose: Purpose, *keys: int, last: Sequence[int]) -> list[int]:
    """Return ``stream_seed(seed, purpose, *keys, k)`` for every k in ``last``, all at once.

    This is NumPy's SeedSequence, whose every step is arithmetic on 32-bit words, with one column for each stream.
    """
    words = [seed, int(purpose), *keys]
    if not last or max(*words, *last) > _WORD or min(*words, *last) < 0:  # of several words each
        return [stream_seed(seed, purpose, *keys, k) for k in last]
    entropy = [np.array([word], np.uint32) for word in words] + [np.array(last, np.uint32)]
    entropy += [np.zeros(1, np.uint32)] * (_POOL - len(entropy))
    hashed = _Hash(0x43B0D7E5, 0x931E8875)
    pool = [hashed(word) for word in entropy[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mixed(pool[target], hashed(pool[source]))
    for word in entropy[_POOL:]:
        for target in range(_POOL):
            pool[target] = _mixed(pool[target], hashed(word))
    hashed = _Hash(0x8B51F9DD, 0x58F38DED)
    low, high = (np.broadcast_to(hashed(word), len(last)).astype(np.uint64) for word in pool[:2])
    return [int(word) for word in low | (high << np.uint64(32))]


_POOL = 4
_WORD = 0xFFFFFFFF


class _Hash:
    """SeedSequence's hash, whose constant moves on with every use."""

    def __init__(self, constant: int, factor: int) -> None:
        self._constant, self._factor = constant, factor

    def __call__(self, word: NDArray[np.uint32]) -> NDArray[np.uint32]:
        word = word ^ np.uint32(self._constant)
        self._constant = (self._constant * self._factor) & _WORD
        word = word * np.uint32(self._constant)
        return word ^ (word >> np.uint32(16))


def _mixed(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> NDArray[np.uint32]:
    word: NDArray[np.uint32] = np.uint32(0xCA01F9DD) * one - np.uint32(0x4973F715) * other
    return word ^ (word >> np.uint32(16))


def numpy_stream(seed: int, purpose: Purpose, *keys: int) -> np.random.Generator:
    return np.random.default_rng(stream_seed(seed, purpose, *keys))


def torch_stream(seed: int, purpose: Purpose, *keys: int) -> torch.Generator:
    return torch.Generator().manual_seed(stream_seed(seed, purpose, *keys))


@contextmanager
def global_stream(seed: int, purpose: Purpose, *keys: int) -> Iterator[None]:
    """Seed the *global* generators inside the block and restore them after it.

    Dropout, model initialisation and a user's data augmentation draw from the global generators of torch, NumPy and
    ``random``; this makes them follow our one seed without disturbing the caller's own streams.
    """
    with _global_generators:
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        numpy_state, python_state = np.random.get_state(), random.getstate()
        torch_state, cuda_states = torch.default_generator.get_state(), [torch.cuda.get_rng_state(d) for d in devices]
        number = stream_seed(seed, purpose, *keys)
        # Straight to the generators: torch.manual_seed also visits every backend, a hundred times slower.
        torch.default_generator.manual_seed(number)
        if devices:
            torch.cuda.manual_seed_all(number)
        np.random.seed(number & 0xFFFFFFFF)
        random.seed(number)
        try:
            yield
        finally:
            torch.default_generator.set_state(torch_state)
            for device, state in zip(devices, cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            np.random.set_state(numpy_state)
            random.setstate(python_state)

from __future__ import annotations

import pytest

import gradalign as ga
from gradalign.algorithms.schedule import value_at


def values(schedule: object, rounds: int) -> list[float]:
    return [value_at(schedule, r) for r in range(rounds)]


def test_values_by_hand():
    assert values(0.5, 2) == [0.5, 0.5]
    assert values(ga.Steps(value=1.0, at_rounds={2: 0.1, 4: 0.01}), 5) == [1.0, 1.0, 0.1, 0.1, 0.01]
    assert values(ga.Warmup(value=1.0, rounds=4), 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert values(ga.Warmup(value=0.1, start=0.3, rounds=2), 3) == pytest.approx([0.3, 0.2, 0.1])
    assert values(ga.OffUntil(value=0.3, round=2), 4) == [0.0, 0.0, 0.3, 0.3]
    assert values(ga.Cosine(value=1.0, rounds=2), 4) == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_a_share_of_nothing_is_the_beginning():
    assert values(ga.OffUntil(value=0.3, share=0.0).over(4), 2) == [0.3, 0.3]
    assert values(ga.Steps(value=1.0, at_shares={0.0: 0.5, 0.5: 0.1}).over(4), 4) == [0.5, 0.5, 0.1, 0.1]


def test_bad_schedules():
    with pytest.raises(ga.GradalignError, match="rounds >= 1"):
        ga.Warmup(value=1.0, rounds=0)
    with pytest.raises(ga.GradalignError, match=r"local.lr must be at least 0, got -1"):
        ga.LocalTraining(lr=ga.Warmup(value=0.1, start=-1.0, rounds=5))

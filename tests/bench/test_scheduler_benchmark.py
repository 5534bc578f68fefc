"""The benchmark of the scheduler with and without a target."""

from __future__ import annotations

from quire.tools.bench.engine.scheduler import DecodingScheduler, compare_targets


def test_both_decode_alike_and_only_one_promises() -> None:
    seconds, ratio = compare_targets(4, 20, 6)
    assert seconds > 0
    assert ratio > 0
    plain, promised = (DecodingScheduler(4, 20, target) for target in (None, 0.02))
    for scheduler in (plain, promised):
        assert [scheduler.step()[1] for _ in range(5)] == [False, True, True, True, True]

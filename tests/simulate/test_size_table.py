"""Seconds by size: medians, lines between them, and what a key costs."""

from __future__ import annotations

import random

import pytest

from quire.tools.what_if.size_table import Sample, Size, SizeTable

ANSWERS, PROMPTS, LARGE = (False, False), (True, False), (True, True)


def samples(kind: tuple[bool, bool], seconds: dict[float, float], count: int = 5) -> list[Sample]:
    return [
        Sample(Size(kind, rows, 0.0), took) for rows, took in seconds.items() for _ in range(count)
    ]


def test_between_two_sizes_it_is_the_line_between_them_and_beyond_it_goes_on() -> None:
    table = SizeTable(samples(ANSWERS, {1.0: 10.0, 2.0: 12.0, 4.0: 20.0, 8.0: 28.0}))
    assert table.seconds(Size(ANSWERS, 2.0, 0.0)) == 12.0
    assert table.seconds(Size(ANSWERS, 3.0, 0.0)) == 16.0
    # From the size below half of the largest to the largest: (28 - 12) / (8 - 2) a row.
    assert table.seconds(Size(ANSWERS, 14.0, 0.0)) == pytest.approx(28 + 6 * 16 / 6)
    # Never less than half of what the smallest takes.
    assert table.seconds(Size(ANSWERS, -100.0, 0.0)) == 5.0


def test_outliers_do_not_count() -> None:
    found = samples(ANSWERS, {1.0: 10.0, 2.0: 12.0}, count=20)
    table = SizeTable([*found, *(Sample(Size(ANSWERS, 1.0, 0.0), 500.0) for _ in range(5))])
    assert table.seconds(Size(ANSWERS, 1.0, 0.0)) == 10.0


def test_a_larger_step_never_takes_less() -> None:
    table = SizeTable(samples(ANSWERS, {1.0: 10.0, 2.0: 14.0, 4.0: 12.0, 8.0: 20.0}))
    times = [table.seconds(Size(ANSWERS, rows / 4, 0.0)) for rows in range(4, 60)]
    assert times == sorted(times)
    assert table.seconds(Size(ANSWERS, 3.0, 0.0)) == 13.0  # both of the two that fell


def test_each_kind_has_its_own_curve_and_one_that_was_never_measured_is_like_the_next() -> None:
    some = samples(ANSWERS, {1.0: 10.0, 2.0: 12.0}, count=50)
    some += samples(PROMPTS, {1.0: 15.0, 2.0: 17.0})
    table = SizeTable(some)
    assert table.seconds(Size(ANSWERS, 1.5, 0.0)) == 11.0
    assert table.seconds(Size(PROMPTS, 1.5, 0.0)) == 16.0
    assert table.seconds(Size(LARGE, 1.5, 0.0)) == 16.0  # with prompts, too


def test_a_kind_with_one_size_rises_as_all_sizes_together_do() -> None:
    table = SizeTable(samples(ANSWERS, {1.0: 10.0}) + samples(PROMPTS, {11.0: 30.0}))
    assert table.seconds(Size(ANSWERS, 4.0, 0.0)) == pytest.approx(10.0 + 3 * 2.0)


def test_what_a_key_costs_is_found_among_steps_of_one_size() -> None:
    source = random.Random(0)
    found = []
    for _ in range(400):
        rows, keys = float(source.choice((1, 2, 3))), float(source.randrange(100, 2000))
        seconds = (5.0 + rows + 0.002 * keys) * source.uniform(0.97, 1.03)
        found.append(Sample(Size(ANSWERS, rows, keys), seconds))
    table = SizeTable(found)
    for rows, keys in ((1.0, 100.0), (2.0, 3000.0), (3.0, 1000.0)):
        assert table.seconds(Size(ANSWERS, rows, keys)) == pytest.approx(
            5.0 + rows + 0.002 * keys, rel=0.03
        )


def test_noise_is_that_of_steps_of_about_the_size() -> None:
    calm = [Sample(Size(ANSWERS, 1.0, 0.0), 10.0 + 0.1 * i) for i in range(-3, 4)]
    wild = [Sample(Size(ANSWERS, 9.0, 0.0), 20.0 + 3.0 * i) for i in range(-3, 4)]
    table, source = SizeTable(calm + wild), random.Random(0)
    small = [table.draw(Size(ANSWERS, 1.2, 0.0), source) for _ in range(200)]
    large = [table.draw(Size(ANSWERS, 7.0, 0.0), source) for _ in range(200)]
    assert max(abs(ratio - 1) for ratio in small) < 0.05
    assert max(abs(ratio - 1) for ratio in large) > 0.3

"""Numbers that other processes read: the room for names is bounded, and a server lives for months."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from quire.observe.shared_metrics import Counter, Histogram, Info, Numbers, Registry


def page(registry: Registry) -> list[str]:
    return [
        line
        for line in generate_latest(registry.prometheus).decode().splitlines()
        if line[0] != "#"
    ]


def test_texts_that_change_replace_each_other(tmp_path: Path) -> None:
    """Adapters come and go with every step: their names once filled the table within minutes."""
    registry = Registry(Numbers(tmp_path / "numbers"))
    info = Info("names", "", ["engine", "running", "waiting"], registry)
    reader = Registry()
    Info("names", "", ["engine", "running", "waiting"], reader)
    reader.show([Numbers(tmp_path / "numbers")])
    for number in range(30_000):
        info.show(("0",), (f"adapter-{number},another one", ""), 7.0)
    info.show(("1",), ("x", "y"), 7.0)
    for shown in (registry, reader):
        first, second = page(shown)
        assert first.startswith('names{engine="0",running="adapter-29999,another one",waiting=""} ')
        assert second.startswith('names{engine="1",running="x",waiting="y"} ')
    info.show(("0",), (), 7.0)
    assert [line.partition("}")[0] for line in page(reader)] == [
        'names{engine="1",running="x",waiting="y"'
    ]
    info.show(("0",), ("z" * 600_000, ""), 7.0)  # has no room, and takes none from others
    assert len(page(reader)) == 1
    info.show(("0",), ("z", ""), 7.0)
    assert len(page(reader)) == 2


def test_readers_never_see_half_of_a_text(tmp_path: Path) -> None:
    """Another process writes all the time; long texts follow short ones."""
    path = tmp_path / "numbers"
    numbers = Numbers(path)
    numbers.set_texts(1, ("0",))
    code = f"""
from pathlib import Path
from quire.observe.shared_metrics import Numbers
numbers = Numbers(Path({str(path)!r}))
while True:
    for number in range(10):
        numbers.set_texts(1, (str(number) * (1 + 400 * number),))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as writer:
        try:
            seen = set()
            deadline = time.monotonic() + 60
            while len(seen) < 10 and time.monotonic() < deadline:
                for (text,) in numbers.texts().values():
                    assert text == text[0] * (1 + 400 * int(text[0]))
                    seen.add(text[0])
        finally:
            writer.kill()
    assert len(seen) == 10


def test_who_is_killed_while_writing_texts_harms_nobody(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path / "numbers")
    numbers.set_texts(3, ("a",))
    assert Numbers(tmp_path / "numbers").texts() == {3: ("a",)}
    numbers._text_state[0] += 1
    assert Numbers(tmp_path / "numbers").texts() == {}
    again = Numbers(tmp_path / "numbers")
    again.set_texts(4, ("b",))
    assert numbers.texts() == {4: ("b",)}


def test_a_full_table_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    known = Counter("known", "", ["name"], registry)
    known.labels("first").inc()
    others = Counter("others", "", ["name"], registry)
    sizes = Histogram("sizes", "", ["name"], registry, [1.0, 2.0])
    with caplog.at_level(logging.WARNING):
        for number in range(20_000):
            others.labels(f"name {number}").inc()
    sizes.labels("too late" * 10).observe(1.5)
    known.labels("first").inc()
    assert len(caplog.records) == 1
    lines = page(registry)
    assert 'known_total{name="first"} 2.0' in lines
    assert 5_000 < len(lines) < 20_000
    assert set(lines[1:]) <= {
        f'others_total{{name="name {number}"}} 1.0' for number in range(20_000)
    }

"""What a run left out, short enough to be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

_LINES = 3


class SkippedTest(Protocol):
    """What pytest reports of one."""

    @property
    def longrepr(self) -> object: ...


def skipped_lines(reports: Iterable[SkippedTest]) -> list[str]:
    """At most three: the most frequent reasons, the rest together in the last one."""
    reasons: Counter[str] = Counter()
    for report in reports:
        place = report.longrepr
        reason = str(place[2] if isinstance(place, tuple) else place)  # (file, line, reason)
        reasons[reason.removeprefix("Skipped: ")] += 1
    ranked = reasons.most_common()
    alone = ranked if len(ranked) <= _LINES else ranked[: _LINES - 1]
    rest = ranked[len(alone) :]
    lines = [f"skipped {count}: {reason}" for reason, count in alone]
    if rest:
        lines.append(
            f"skipped {sum(count for _, count in rest)}: {'; '.join(reason for reason, _ in rest)}"
        )
    return lines

"""What is said to the person at the terminal besides the answers."""

from __future__ import annotations

from rich.console import Console


def say(message: str) -> None:
    """A line on stderr, so that output stays clean; dim where colours work."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(message, style="dim", markup=False)

"""Looking for a mark in text that comes in pieces."""

from __future__ import annotations

WHITE = " \t\r\n"


def open_end(text: str, start: int, mark: str) -> int:
    """Where in `text[start:]` an end begins that `mark` may begin with; the text's length if nowhere."""
    for position in range(max(start, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[position:]):
            return position
    return len(text)

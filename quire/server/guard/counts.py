"""What a server's limits count, over all of its HTTP processes.

A table in shared memory with a row for each process: each writes its own row alone, so there are no
locks and nothing is lost, and reads the sums of the columns. Whoever wants a place counts itself
first and looks then, so that two who come at the same moment can't both take the last one (but may
both be refused it). The row of a process that was killed is cleared by the one that started it.
"""

from __future__ import annotations

import mmap
from pathlib import Path

ANSWERS, TOKENS, CONNECTIONS, BODY_BYTES = range(4)
"""Answers that run or wait, prompt tokens that wait, open connections, bytes of bodies that are
being read.
"""
_NUM_COLUMNS = 4


class Counts:
    """One process's view of the table; without a file it is the only one."""

    def __init__(
        self,
        path: Path | None = None,
        row: int = 0,
        num_rows: int = 1,
        num_columns: int = _NUM_COLUMNS,
    ) -> None:
        self._num_columns = num_columns
        size = max(8, 8 * num_columns * num_rows)
        if path is None:
            self._values = memoryview(bytearray(size)).cast("q")
        else:
            with path.open("a+b") as file:
                file.truncate(size)
                self._values = memoryview(mmap.mmap(file.fileno(), size)).cast("q")
        self._first = num_columns * row
        self.num_workers = max(1, num_rows - 1)
        """Processes that serve clients: the first row is of the one that started them."""

    def add(self, column: int, amount: int) -> int:
        """Adds to what this process counts; the sum over all."""
        self._values[self._first + column] += amount
        return self.total(column)

    def total(self, column: int) -> int:
        return sum(self.column(column))

    def column(self, column: int) -> list[int]:
        """What each process counts."""
        return self._values[column :: self._num_columns].tolist()

    def set(self, column: int, value: int) -> None:
        """Changes what this process counts."""
        self._values[self._first + column] = value

    def own(self, column: int) -> int:
        """What this process counts."""
        return self._values[self._first + column]

    def least(self, column: int) -> int:
        """The smallest count of those who serve clients."""
        values = self.column(column)
        return min(values[1:] or values)

    def clear(self, row: int) -> None:
        """A process is gone, and all that it counted with it."""
        for column in range(self._num_columns):
            self._values[self._num_columns * row + column] = 0

"""What goes to the person at the terminal: answers as they come on stdout, everything else on
stderr.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console

from quire.outputs import RequestDelta

_FENCE = "```"
_CODE, _PROMPT, _PLAIN = "\x1b[36m", "\x1b[1;32m", "\x1b[0m"


def say(message: str) -> None:
    """A line on stderr, so that output stays clean; dim where colours work."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(message, style="dim", markup=False)


def has_colours(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours, and its user wants them (NO_COLOR)."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and stream.isatty()


def input_prompt(text: str) -> str:
    """A prompt for input(), in colour where there are colours; readline does not count what stands
    between \\1 and \\2.
    """
    if not has_colours(sys.stdout):
        return text
    return f"\1{_PROMPT}\2{text}\1{_PLAIN}\2"


class WrappedText:
    """Text that streams to stdout: on a terminal, lines break between words, and code between
    fences is in colour and keeps its lines. In a pipe the text stays as it is.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._wraps = self._stream.isatty()
        self._colours = has_colours(self._stream)
        self._column = 0
        self._word = ""
        """What may still grow: it is written when its end is known."""
        self._line = ""
        """The answer's own line so far, which says whether code begins or ends."""
        self._in_code = False

    def write(self, text: str) -> None:
        if not self._wraps:
            self._stream.write(text)
        for letter in text if self._wraps else "":
            self._line += letter
            if letter in " \n":
                self._put_word()
                self._put_space(letter)
            else:
                self._word += letter
        self._stream.flush()

    def close(self) -> None:
        """Writes the last word, and ends the line."""
        self._put_word()
        self._stream.write(_PLAIN if self._in_code and self._colours else "")
        self._stream.write("\n")
        self._stream.flush()

    def _put_word(self) -> None:
        width, size = shutil.get_terminal_size().columns, cell_len(self._word)
        if self._column + size > width and self._column and not self._in_code:
            self._stream.write("\n")
            self._column = 0
        self._stream.write(self._word)
        self._column += size
        self._word = ""

    def _put_space(self, letter: str) -> None:
        if letter == "\n":
            is_fence = self._line.lstrip().startswith(_FENCE)
            if is_fence:
                self._in_code = not self._in_code
            self._stream.write("\n")
            if is_fence and self._colours:
                self._stream.write(_CODE if self._in_code else _PLAIN)
            self._line, self._column = "", 0
        elif self._column < shutil.get_terminal_size().columns or self._in_code:
            self._stream.write(" ")
            self._column += 1


class AnswerPrinter:
    """Streams the first unfinished answer to stdout; what later ones gain meanwhile waits for their
    turn.

    With several prompts each answer stands below its prompt.
    """

    def __init__(self, request_ids: Sequence[str], prompts: Sequence[str]) -> None:
        self._queue = list(zip(request_ids, prompts, strict=True))
        self._pending: dict[str, list[str]] = {request_id: [] for request_id in request_ids}
        self._finished: set[str] = set()
        self._several = len(self._queue) > 1
        self._begun = False
        self._text = WrappedText()

    def take(self, delta: RequestDelta) -> None:
        self._pending[delta.request_id].append(delta.text)
        if delta.finish_reason is not None:
            self._finished.add(delta.request_id)
        while self._queue:
            request_id, prompt = self._queue[0]
            if self._several and not self._begun:
                print(f"> {prompt}")
            self._begun = True
            self._text.write("".join(self._pending[request_id]))
            self._pending[request_id].clear()
            if request_id not in self._finished:
                return
            self._text.close()
            if self._several and len(self._queue) > 1:
                print(flush=True)
            self._text = WrappedText()
            self._queue.pop(0)
            self._begun = False

    def interrupt(self) -> None:
        """Ends the line that was being written."""
        if self._begun:
            self._text.close()

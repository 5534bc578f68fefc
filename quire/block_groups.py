"""How far back groups of layers look, and what recurrent ones carry on: the words of scheduler and
runner for it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class BlockGroup(NamedTuple):
    """A group of layers that read equally far back: each has a block of its own for the same
    tokens, and gives it up when no later token can see it.
    """

    keeps: Literal["all", "window", "chunk", "records"] = "all"
    """all: every token. window: the last `size` tokens. chunk: those from the begin of the present
    chunk of `size` tokens on. records: likewise, and when a chunk is over the `StateSpec`'s state
    has all there was to know of it.
    """
    size: int = 0

    def first_token(self, position: int) -> int:
        """The first token that tokens from `position` on can see."""
        if self.keeps == "all":
            return 0
        if self.keeps == "window":
            return max(0, position - self.size + 1)
        return position // self.size * self.size


class StateSpec(NamedTuple):
    """A state that recurrent layers carry from chunk to chunk: what they know of all tokens before
    the present chunk.

    The state at a chunk's begin is made by the step that computes the last token before it. A
    running request has room for two: those of even and of odd chunks. So a step whose last tokens
    are draft tokens can go over a chunk's end, and if they are wrong, the state before it is still
    there. Of a step that passes several chunks' ends, the last two stay.
    """

    chunk: int
    """Tokens of a chunk; a multiple of the block size."""
    num_blocks: int
    """Blocks of one state, in all layers together."""
    interval: int
    """Steps that compute a prompt end at multiples of this number of tokens: states there are kept
    in the prefix cache, like those at a prompt's and an answer's end.
    """

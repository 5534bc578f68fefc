"""Where one answer stands in its grammar."""

from __future__ import annotations

from collections.abc import Sequence

from quire.constrain.grammar import Grammar
from quire.constrain.guidance import error_of


class GrammarState:
    """One answer's place in its grammar: which tokens it has, and so which may come next.

    Not safe to share between threads; states of one grammar are independent of each other.
    """

    def __init__(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> None:
        """`token_ids` is the answer so far, for a request that comes back after a preemption."""
        self.grammar = grammar
        self._tokens: list[int] = []
        self._is_private = False
        self.matcher = grammar.matcher()
        for token_id in token_ids:
            self.advance(token_id)

    @property
    def error(self) -> str:
        """What went wrong; empty if nothing did."""
        return error_of(self.matcher)

    @property
    def is_finished(self) -> bool:
        """Nothing can follow: the text is complete, or its end token has come."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def may_end(self) -> bool:
        """The text so far is a whole one."""
        return self.matcher.is_accepting()

    def advance(self, token_id: int) -> bool:
        """Takes the next token; False, for good, if the grammar does not allow it."""
        self._tokens.append(token_id)
        return self.matcher.consume_token(token_id) or (self.start_over() and not self.matcher.is_error())

    def start_over(self) -> bool:
        """After an error: takes all tokens again with an automaton of its own, which only its own text can fill.

        False if that was done before, so that the error is its own.
        """
        if self._is_private:
            return False
        self._is_private = True
        self.matcher = self.grammar.private_matcher()
        self.matcher.consume_tokens(self._tokens)
        return True

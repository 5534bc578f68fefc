"""Rung 1, the naive loop: the whole sequence goes through the model for every new token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.ladder.contiguous import ContiguousCache, next_tokens
from quire.models.decoder import Decoder


def generate_naive(
    decoder: Decoder, prompt: Sequence[int], max_new_tokens: int, on_token: Callable[[int], None] | None = None
) -> list[int]:
    """A greedy answer of `max_new_tokens` tokens; `on_token` gets each as it comes.

    Token n costs n tokens of work, so an answer costs the square of its length.
    """
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        # Attention needs the keys and values of this pass somewhere; they are thrown away after it.
        scratch = ContiguousCache(decoder, num_sequences=1, capacity=len(prompt) + max_new_tokens)
        token = next_tokens(decoder, scratch, {0: tokens})[0]
        tokens.append(token)
        if on_token is not None:
            on_token(token)
    return tokens[len(prompt) :]

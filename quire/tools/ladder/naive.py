"""Rung 1, the naive loop: the whole sequence goes through the model for every new token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from quire.models.decoder import Decoder
from quire.tools.ladder.contiguous import ContiguousCache, next_tokens


def generate_naive(
    decoder: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    on_token: Callable[[int], None] | None = None,
    *,
    eos_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """An answer of at most `max_new_tokens` tokens; `on_token` gets each as it comes. One of
    `eos_token_ids` ends it (and is its last). At temperature 0 it is greedy; above, the same seed
    draws the same answer.

    Token n costs n tokens of work, so an answer costs the square of its length.
    """
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        # Attention needs the keys and values of this pass somewhere; they are thrown away after it.
        scratch = ContiguousCache(decoder, num_sequences=1, capacity=len(prompt) + max_new_tokens)
        token = next_tokens(decoder, scratch, {0: tokens}, temperature, seed)[0]
        tokens.append(token)
        if on_token is not None:
            on_token(token)
        if token in eos_token_ids:
            break
    return tokens[len(prompt) :]

"""Rung 10, speculation: guess a few tokens, compute them all at once, keep those the model would
have chosen itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.models.decoder import Decoder
from quire.tools.ladder.contiguous import ContiguousCache, as_token_tensor


def guess_from_repetition(tokens: Sequence[int], count: int) -> list[int]:
    """What followed the last time the last three tokens stood there; nothing if they never did."""
    tail = list(tokens[-3:])
    for place in range(len(tokens) - 4, -1, -1):
        if list(tokens[place : place + 3]) == tail:
            return list(tokens[place + 3 : place + 3 + count])
    return []


def generate_with_guesses(
    decoder: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    num_guesses: int = 4,
    guess: Callable[[Sequence[int], int], list[int]] = guess_from_repetition,
    on_step: Callable[[list[int], list[int]], None] | None = None,
) -> list[int]:
    """A greedy answer of `max_new_tokens` tokens; `on_step` gets the guesses of each step and the
    tokens it gave.

    A step computes the last token and the guesses behind it, and so learns what follows each of
    them. A guess is right if it is what follows the token before it; then what follows the guess is
    right, too. The keys and values of wrong ones stay where they are and are overwritten:
    forgetting them is setting a length.
    """
    end = len(prompt) + max_new_tokens
    cache = ContiguousCache(decoder, num_sequences=1, capacity=end)
    tokens, computed = list(prompt), 0
    while len(tokens) < end:
        room = end - len(tokens) - 1  # a step gives one token more than it has guesses
        guesses = guess(tokens, num_guesses)[:room]
        following = _compute(decoder, cache, tokens[computed:] + guesses, computed)[
            -1 - len(guesses) :
        ]
        num_right = 0
        while num_right < len(guesses) and guesses[num_right] == following[num_right]:
            num_right += 1
        computed = cache.lengths[0] = len(tokens) + num_right
        tokens += following[: num_right + 1]
        if on_step is not None:
            on_step(guesses, following[: num_right + 1])
    return tokens[len(prompt) :]


@torch.inference_mode()
def _compute(decoder: Decoder, cache: ContiguousCache, new: Sequence[int], start: int) -> list[int]:
    """Computes tokens from a position on; the likeliest token after each of them."""
    batch = cache.batch(decoder, [(0, start, start + len(new))])
    positions = torch.arange(start, start + len(new), device=decoder.device)
    hidden = decoder(as_token_tensor(decoder, new), positions, (batch,), cache.layers)
    following: list[int] = decoder.logits(hidden).float().argmax(-1).tolist()
    return following

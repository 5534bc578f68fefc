"""Rung 2, the KV cache: keys and values are kept, so each new token costs one token of work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from quire.models.decoder import Decoder
from quire.tools.ladder.contiguous import ContiguousCache, next_tokens


def generate_with_kv_cache(
    decoder: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    on_token: Callable[[int], None] | None = None,
    on_cache: Callable[[ContiguousCache], None] | None = None,
    *,
    eos_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """The naive loop's answer; `on_token` gets each token as it comes, `on_cache` the cache it came
    from.

    A token looks back at all before it but changes none of them: their keys and values are what
    they were.
    """
    cache = ContiguousCache(decoder, num_sequences=1, capacity=len(prompt) + max_new_tokens)
    answer: list[int] = []
    new = list(prompt)
    for _ in range(max_new_tokens):
        token = next_tokens(decoder, cache, {0: new}, temperature, seed)[0]
        answer.append(token)
        new = [token]
        if on_token is not None:
            on_token(token)
        if on_cache is not None:
            on_cache(cache)
        if token in eos_token_ids:
            break
    return answer


def print_cache_growth(
    decoder: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    write: Callable[[str], None] = print,
) -> list[int]:
    """Generates an answer and writes the shape of the first layer's keys after every token."""
    computed = 0

    def show(cache: ContiguousCache) -> None:
        nonlocal computed
        keys = cache.keys(layer=0, sequence=0)
        new = keys.shape[1] - computed
        computed = keys.shape[1]
        used = keys.shape[1] / cache.capacity
        write(
            f"computed {new:3} new: keys {list(keys.shape)} in each of {len(cache.layers)} layers, {used:.0%} used"
        )

    return generate_with_kv_cache(decoder, prompt, max_new_tokens, on_cache=show)

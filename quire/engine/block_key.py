"""What identifies the tokens in a block of the cache: a chain of hashes.

A block's digest is the hash of the digest of the block before it, of its own tokens, and of what
else its content depends on: in a sequence's first block the cache salt, in others whatever
`KeyPart`s lie on them (an adapter, a version of the weights, an image's pixels). A digest only
finds a candidate: a hit then compares the whole chain, so that a hash collision can't show one
request another one's text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

DigestFunction = Callable[[bytes, tuple[int, ...], tuple[str, ...]], bytes]


class KeyPart(NamedTuple):
    """Something besides the tokens on which what is computed for a stretch of a sequence depends."""

    name: str
    """Different for different content, such as a digest of it."""
    start: int = 0
    """The first token of the stretch. Blocks behind it depend on it, too, as they do on all tokens
    before them.
    """
    end: int | None = None
    """Behind the last one; None: to the end, however long the sequence grows."""


@dataclass(slots=True, eq=False, repr=False)
class BlockKey:
    """Identity of what a block holds: its tokens, and through `parent` all those before it. A block
    of a state (see `StateSpec`) has no tokens of its own.

    `parent` may be replaced by an equal key, which keeps comparisons of long chains short.
    """

    digest: bytes
    token_ids: tuple[int, ...]
    parent: BlockKey | None
    extra_keys: tuple[str, ...]


def sha256_digest(parent: bytes, token_ids: tuple[int, ...], extra_keys: tuple[str, ...]) -> bytes:
    """sha256 of the parent's digest, the token ids as little-endian int32, and each extra key with
    its length before it (so that no two lists of keys give the same bytes).
    """
    data = parent + struct.pack(f"<{len(token_ids)}i", *token_ids)
    for extra_key in extra_keys:
        encoded = extra_key.encode("utf-8", "surrogatepass")
        data += len(encoded).to_bytes(8, "little") + encoded
    return hashlib.sha256(data).digest()


def same_prefix(first: BlockKey | None, second: BlockKey | None) -> bool:
    """Whether two keys stand for the same tokens all the way from the start."""
    while first is not second:
        if first is None or second is None or first.digest != second.digest:
            return False
        if first.token_ids != second.token_ids or first.extra_keys != second.extra_keys:
            return False
        first, second = first.parent, second.parent
    return True

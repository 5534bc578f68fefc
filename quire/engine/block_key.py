"""What identifies the tokens in a block of the cache: a chain of hashes.

A block's digest is the hash of the digest of the block before it and of its own tokens; that of a sequence's first
block also covers what else its keys and values depend on (cache salt, adapter). A digest only finds a candidate: a hit
then compares the tokens of the whole chain, so that a hash collision can't show one request another one's text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

DigestFunction = Callable[[bytes, tuple[int, ...], tuple[str, ...]], bytes]


@dataclass(slots=True, eq=False, repr=False)
class BlockKey:
    """Identity of what a block holds: its tokens, and through `parent` all those before it.

    `parent` may be replaced by an equal key, which keeps comparisons of long chains short.
    """

    digest: bytes
    token_ids: tuple[int, ...]
    parent: BlockKey | None
    extra_keys: tuple[str, ...]


def sha256_digest(parent: bytes, token_ids: tuple[int, ...], extra_keys: tuple[str, ...]) -> bytes:
    """sha256 of the parent's digest, the token ids as little-endian int32, and each extra key with its length
    before it (so that no two lists of keys give the same bytes)."""
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

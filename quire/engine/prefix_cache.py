"""Names for what full blocks hold, and where on the device a block of that name lies.

A block's name is the hash of its parent's name and its own tokens; the first one adds whatever else the
keys and values depend on (cache salt, adapter). Names find candidates, contents decide: a hit compares
the tokens of the whole chain, so even a collision of hashes can't show one request another's text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.block_pool import Block

DigestFunction = Callable[[bytes, tuple[int, ...], tuple[str, ...]], bytes]


class BlockKey:
    """Identity of a full block: its tokens, and through `parent` all those before it.

    `parent` may be replaced by an equal key, which keeps comparisons of long chains short.
    """

    __slots__ = ("digest", "extra_keys", "parent", "token_ids")

    def __init__(
        self, digest: bytes, token_ids: tuple[int, ...], parent: BlockKey | None, extra_keys: tuple[str, ...]
    ) -> None:
        self.digest = digest
        self.token_ids = token_ids
        self.parent = parent
        self.extra_keys = extra_keys


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


class PrefixCache:
    """Which block holds a prefix. Blocks nobody references stay here until they are taken again."""

    def __init__(self, block_size: int, digest: DigestFunction = sha256_digest) -> None:
        self.block_size = block_size
        self._digest = digest
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def items(self) -> Iterator[tuple[bytes, Block]]:
        yield from self._blocks.items()

    def extend_keys(
        self, keys: list[BlockKey], token_ids: list[int], num_blocks: int, extra_keys: tuple[str, ...]
    ) -> None:
        """Appends the missing keys of a sequence's first `num_blocks` blocks: each block is hashed once."""
        size = self.block_size
        while len(keys) < num_blocks:
            index = len(keys)
            parent = keys[-1] if keys else None
            extra = () if keys else extra_keys
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            digest = self._digest(b"" if parent is None else parent.digest, tokens, extra)
            keys.append(BlockKey(digest, tokens, parent, extra))

    def find(self, key: BlockKey) -> Block | None:
        """The block that holds exactly this prefix."""
        block = self._blocks.get(key.digest)
        if block is None or not same_prefix(block.key, key):
            return None
        return block

    def knows(self, block: Block) -> bool:
        """Whether a block is to be found under the name it carries."""
        return block.key is not None and self._blocks.get(block.key.digest) is block

    def publish(self, key: BlockKey, block: Block) -> bool:
        """Offers a block under its key. The first one stays: block tables in use are never rewritten, so a
        second copy of the same prefix simply isn't found."""
        if key.digest in self._blocks:
            return False
        assert block.key is None, f"block {block.block_id} holds another prefix already"
        self._blocks[key.digest] = block
        block.key = key
        return True

    def remove(self, block: Block) -> BlockKey:
        """Forgets what a block holds; returns the key it had."""
        key = block.key
        assert key is not None
        del self._blocks[key.digest]
        block.key = None
        return key

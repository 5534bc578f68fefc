"""Which block on the device holds a prefix. Full blocks are found by the hash of all tokens up to
their end; the last, partly filled block of a sequence is found by the block before it (its parent)
and compared token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from quire.engine.block_key import BlockKey, DigestFunction, KeyPart, same_prefix, sha256_digest
from quire.engine.block_pool import Block


class PrefixCache:
    """Which block holds a prefix. Blocks nobody references stay here until they are taken again."""

    def __init__(self, block_size: int, digest: DigestFunction = sha256_digest) -> None:
        self.block_size = block_size
        self._digest = digest
        self._blocks: dict[bytes, Block] = {}
        self._partial: dict[tuple[bytes, tuple[str, ...]], list[Block]] = {}
        """Those of the blocks that are not full, by the digest of the block before them."""

    def __len__(self) -> int:
        return len(self._blocks)

    def extend_keys(
        self,
        keys: list[BlockKey],
        token_ids: list[int],
        num_blocks: int,
        extra_keys: Sequence[tuple[str, ...]],
        parts: Sequence[KeyPart] = (),
    ) -> None:
        """Appends the missing keys of a sequence's first `num_blocks` blocks, so that each block is
        hashed once. Each group of layers has a chain of keys of its own, which begins with its
        entry of `extra_keys`.
        """
        size, groups = self.block_size, len(extra_keys)
        for first in range(len(keys) // groups * size, num_blocks * size, size):
            tokens = tuple(token_ids[first : first + size])
            own = part_keys(parts, first, size) if parts else ()
            if first == 0:
                keys += [self.key(None, tokens, extra + own) for extra in extra_keys]
            else:
                keys += [self.key(parent, tokens, own) for parent in keys[-groups:]]

    def key(
        self, parent: BlockKey | None, token_ids: Sequence[int], extra_keys: tuple[str, ...]
    ) -> BlockKey:
        """The key of a block that holds these tokens, after the tokens of `parent`."""
        tokens = tuple(token_ids)
        before = b"" if parent is None else parent.digest
        return BlockKey(self._digest(before, tokens, extra_keys), tokens, parent, extra_keys)

    def find(self, key: BlockKey) -> Block | None:
        """The block that holds exactly this prefix."""
        block = self._blocks.get(key.digest)
        return block if block is not None and same_prefix(block.key, key) else None

    def find_partial(
        self, parent: BlockKey | None, token_ids: Sequence[int], extra_keys: tuple[str, ...]
    ) -> tuple[Block, int] | None:
        """The partly filled block after `parent` that holds the most of these tokens, and how many
        it holds.
        """
        best, most = None, 0
        for block in self._partial.get(_place(parent, extra_keys), ()):
            assert block.key is not None
            if same_prefix(block.key.parent, parent):
                pairs = zip(block.key.token_ids, token_ids, strict=False)
                count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                if count > most:
                    best, most = block, count
        return None if best is None else (best, most)

    def knows(self, block: Block) -> bool:
        """Whether a block is listed under the digest it carries."""
        return block.key is not None and self._blocks.get(block.key.digest) is block

    def is_partial(self, key: BlockKey) -> bool:
        """Whether a key names a block that is not full, such as a prompt's last one."""
        return 0 < len(key.token_ids) < self.block_size

    def publish(self, key: BlockKey, block: Block) -> bool:
        """Lists a block under its key. If another block is listed for the same prefix, that one
        stays: block tables in use are never rewritten, so this copy just isn't found. A block
        listed partly filled may be listed anew.
        """
        if block.key is not None:
            assert self.is_partial(block.key), (
                f"block {block.block_id} holds another prefix already"
            )
            self.remove(block)
        if key.digest in self._blocks:
            return False
        self._blocks[key.digest] = block
        block.key = key
        if self.is_partial(key):
            self._partial.setdefault(_place(key.parent, key.extra_keys), []).append(block)
        return True

    def remove(self, block: Block) -> BlockKey:
        """Forgets what a block holds; returns the key it had."""
        key = block.key
        assert key is not None
        del self._blocks[key.digest]
        block.key = None
        if self.is_partial(key):
            place = _place(key.parent, key.extra_keys)
            self._partial[place].remove(block)
            if not self._partial[place]:
                del self._partial[place]
        return key


def part_keys(parts: Sequence[KeyPart], first: int, size: int) -> tuple[str, ...]:
    """What a block depends on besides its tokens and all before it: each part that lies on it, and
    where.
    """
    found: list[str] = []
    for part in parts:
        start, end = (
            max(part.start - first, 0),
            size if part.end is None else min(part.end - first, size),
        )
        if start < end:
            found += (part.name, f"{start}:{end}")
    return tuple(found)


def _place(parent: BlockKey | None, extra_keys: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    return (b"" if parent is None else parent.digest, extra_keys)

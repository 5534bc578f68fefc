"""Blocks of the device cache: who holds them, and in which order the free ones are taken."""

from __future__ import annotations

from collections import OrderedDict

from quire.engine.block_key import BlockKey


class Block:
    """One block of keys and values."""

    __slots__ = ("block_id", "key", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None
        """Identifies the tokens it holds, while the prefix cache lists it; else None."""

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, cached={self.key is not None})"


class BlockPool:
    """All blocks. A block is referenced (by block tables, counted) or in the free list, never both.

    The free list is taken from its head. A freed block that holds a cached prefix goes to the tail,
    so the least recently used prefix is evicted first; one that holds nothing of use goes to the
    head. Block 0 is in neither place: it is the target of padding.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free = OrderedDict.fromkeys(self.blocks[1:])
        """The free list, as a dict: a block is taken out of the middle in constant time."""

    @property
    def num_free(self) -> int:
        return len(self.free)

    def take(self) -> Block | None:
        """The block at the head of the free list, now referenced once; None if there is none.

        It may still carry the key of a cached prefix: the caller evicts that.
        """
        if not self.free:
            return None
        block, _ = self.free.popitem(last=False)
        block.ref_count = 1
        return block

    def share(self, block: Block) -> None:
        """One more reference to a block; a free one leaves the free list."""
        if block.ref_count == 0:
            del self.free[block]
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One reference less; the last one puts the block on the free list."""
        assert block.ref_count > 0, (
            f"block {block.block_id} is released more often than it was taken"
        )
        block.ref_count -= 1
        if block.ref_count == 0:
            self.place(block)

    def place(self, block: Block) -> None:
        """Puts a free block at the end of the free list where it belongs; called again when its key
        was removed.
        """
        self.free[block] = None
        self.free.move_to_end(block, last=block.key is not None)

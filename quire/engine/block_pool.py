"""Blocks of the device cache: who holds them, and in which order the free ones are taken."""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine.block_key import BlockKey


class Block:
    """One block of keys and values. `previous` and `next` link the free list through the blocks themselves,
    so a block leaves the middle of it without a search."""

    __slots__ = ("block_id", "key", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None
        """What it holds, while the prefix cache knows it under that name."""
        self.previous: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, cached={self.key is not None})"


class BlockPool:
    """All blocks. A block is referenced (by block tables, counted) or in the free list, never both.

    The free list is taken from its head. A freed block that holds a cached prefix goes to the tail, so the
    least recently used prefix is evicted first; one that holds nothing of use goes to the head. Block 0 is
    in neither place: it is the target of padding.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next = self._tail
        self._tail.previous = self._head
        self.num_free = 0
        for block in self.blocks[1:]:
            self._insert_before(self._tail, block)

    def take(self) -> Block | None:
        """The block at the head of the free list, now referenced once; None if there is none.

        It may still carry the key of a cached prefix: the caller evicts that.
        """
        block = self._head.next
        assert block is not None
        if block is self._tail:
            return None
        self._remove(block)
        block.ref_count = 1
        return block

    def share(self, block: Block) -> None:
        """One more reference to a block; a free one leaves the free list."""
        if block.ref_count == 0:
            self._remove(block)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One reference less; the last one puts the block on the free list."""
        assert block.ref_count > 0, f"block {block.block_id} is released more often than it was taken"
        block.ref_count -= 1
        if block.ref_count == 0:
            self._return(block)

    def reposition(self, block: Block) -> None:
        """Puts a free block where it belongs after its key came or went."""
        self._remove(block)
        self._return(block)

    def free_blocks(self) -> Iterator[Block]:
        """From the next one taken to the last."""
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def _return(self, block: Block) -> None:
        after = self._tail if block.key is not None else self._head.next
        assert after is not None
        self._insert_before(after, block)

    def _insert_before(self, after: Block, block: Block) -> None:
        before = after.previous
        assert before is not None
        before.next = block
        block.previous = before
        block.next = after
        after.previous = block
        self.num_free += 1

    def _remove(self, block: Block) -> None:
        assert block.previous is not None
        assert block.next is not None
        block.previous.next = block.next
        block.next.previous = block.previous
        block.previous = block.next = None
        self.num_free -= 1

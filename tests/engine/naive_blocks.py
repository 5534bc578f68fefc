"""Pool, prefix cache and host tier once more, the slow and obvious way: lists searched from end to
end.
"""

from __future__ import annotations

from collections import Counter

Prefix = tuple[str, tuple[int, ...]]
"""Salt and all tokens from the start to the end of a block."""


class NaiveBlocks:
    """What BlockManager should do, in terms of whole prefixes instead of hashes and links."""

    def __init__(self, num_blocks: int, block_size: int, num_host: int) -> None:
        self.size = block_size
        self.num_host = num_host
        self.free = list(range(1, num_blocks))
        self.refs: Counter[int] = Counter()
        self.names: dict[int, Prefix] = {}
        self.host: list[Prefix] = []
        """Least recently used first."""

    def prefix(self, salt: str, tokens: list[int], index: int) -> Prefix:
        return salt, tuple(tokens[: (index + 1) * self.size])

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.size - 1) // self.size

    def holder(self, prefix: Prefix) -> int | None:
        return next((block for block, name in self.names.items() if name == prefix), None)

    def is_full(self, prefix: Prefix) -> bool:
        return len(prefix[1]) % self.size == 0

    def save(self, prefix: Prefix, pinned: list[Prefix]) -> None:
        if not self.is_full(prefix):
            return
        if prefix in self.host:
            self.host.remove(prefix)
            self.host.append(prefix)
            return
        if len(self.host) >= self.num_host:
            loose = [stored for stored in self.host if stored not in pinned]
            if not loose:
                return
            self.host.remove(loose[0])
        self.host.append(prefix)

    def take(self, pinned: list[Prefix]) -> int:
        block = self.free.pop(0)
        if block in self.names:
            self.save(self.names[block], pinned)
            del self.names[block]
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        if block in self.free:
            self.free.remove(block)
        self.refs[block] += 1

    def release(self, table: list[int]) -> None:
        for block in reversed(table):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.insert(len(self.free) if block in self.names else 0, block)

    def grow(self) -> int | None:
        return self.take([]) if self.free else None

    def find_partial(self, salt: str, tokens: list[int], first: int) -> tuple[int, int] | None:
        """The block that is not full and holds the most of the tokens from `first` on, and how
        many.
        """
        found: tuple[int, int] | None = None
        usable = tokens[: min(len(tokens) - 1, first + self.size)]
        for block, (its_salt, its_tokens) in self.names.items():
            full = len(its_tokens) // self.size * self.size
            if self.is_full((its_salt, its_tokens)) or its_salt != salt or full != first:
                continue
            if list(its_tokens[:first]) != tokens[:first]:
                continue
            count = 0
            while (
                first + count < min(len(usable), len(its_tokens))
                and usable[first + count] == its_tokens[first + count]
            ):
                count += 1
            if count > (0 if found is None else found[1]):
                found = block, count
        return found

    def place(
        self, salt: str, tokens: list[int], reserve: int
    ) -> tuple[list[int], tuple[int, int] | None] | None:
        """The table, and the block whose first so many tokens are copied into it."""
        hits: list[int | Prefix] = []
        for index in range((len(tokens) - 1) // self.size):
            prefix = self.prefix(salt, tokens, index)
            block = self.holder(prefix)
            if block is None and prefix not in self.host:
                break
            hits.append(prefix if block is None else block)
        shared = [hit for hit in hits if isinstance(hit, int)]
        loose = set(self.free) - set(shared)
        need = self.blocks_for(reserve) - len(shared)
        if need > len(loose):
            return None
        partial = self.find_partial(salt, tokens, len(hits) * self.size)
        if partial is not None and partial[0] in loose and need > len(loose) - 1:
            partial = None
        pinned = [hit for hit in hits if not isinstance(hit, int)]
        for block in shared:
            self.share(block)
        if partial is not None:
            self.share(partial[0])
        fresh = [self.take(pinned) for _ in range(self.blocks_for(len(tokens)) - len(shared))]
        table = []
        for hit in hits:
            if isinstance(hit, int):
                table.append(hit)
            else:
                table.append(fresh.pop(0))
                self.names[table[-1]] = hit
        for stored in reversed(pinned):
            self.host.remove(stored)
            self.host.append(stored)
        if partial is not None:
            self.release([partial[0]])
        return table + fresh, partial

    def publish(
        self, salt: str, tokens: list[int], table: list[int], first: int, num_computed: int
    ) -> None:
        """Each block is offered once: `first` is the first that was not."""
        for index in range(first, num_computed // self.size):
            prefix = self.prefix(salt, tokens, index)
            if table[index] in self.names and not self.is_full(self.names[table[index]]):
                del self.names[table[index]]
            if self.holder(prefix) is None:
                self.names[table[index]] = prefix

    def publish_partial(
        self, salt: str, tokens: list[int], table: list[int], num_computed: int
    ) -> None:
        prefix = salt, tuple(tokens[:num_computed])
        if self.is_full(prefix) or table[num_computed // self.size] in self.names:
            return
        if self.holder(prefix) is None:
            self.names[table[num_computed // self.size]] = prefix

    def demote(self, table: list[int]) -> None:
        named = [
            block for block in table if block in self.names and self.is_full(self.names[block])
        ]
        for block in reversed(named[: self.num_host]):
            self.save(self.names[block], [])

"""Blocks by their names: which ones a prompt consists of, and a compact set of those that an engine has cached."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from quire.observe.cache_events import NAME_BYTES

CHUNK_BLOCKS = 8
_FULLEST = 0.75
"""Part of the slots that may be taken: beyond, the way from one to the next free one gets long."""


class BlockNamer:
    """Names the blocks of prompts by the chain of hashes that the engine makes (`quire.engine.block_key`). Chunks of
    prompts that were seen before are looked up, which takes a tenth of the time that hashing takes."""

    def __init__(self, block_size: int, most_chunks: int = 16384) -> None:
        self.block_size = block_size
        self._most = most_chunks
        self._seen: OrderedDict[tuple[bytes, int], tuple[array[int], bytes]] = OrderedDict()
        """By what comes before a chunk and the hash of its own tokens: its names, and its last digest."""

    def chunks(self, token_ids: Sequence[int], cache_salt: str | None = None) -> Iterator[Sequence[int]]:
        """The names of a prompt's full blocks, as far as they can be found in a cache (one token is always computed),
        some at a time: whoever has seen enough need not have the rest hashed."""
        num_blocks = (len(token_ids) - 1) // self.block_size
        digest, salt = b"", _encoded(cache_salt)
        for first in range(0, num_blocks, CHUNK_BLOCKS):
            end = min(first + CHUNK_BLOCKS, num_blocks)
            tokens = tuple(token_ids[first * self.block_size : end * self.block_size])
            # Two chunks of one key would cost a detour at most: the engine compares tokens.
            key = (digest + salt, hash(tokens))
            found = self._seen.get(key)
            if found is None:
                found = self._seen[key] = self._hashed(digest, tokens, salt)
                if len(self._seen) > self._most:
                    self._seen.popitem(last=False)
            else:
                self._seen.move_to_end(key)
            names, digest = found
            salt = b""  # what does not stand in the tokens counts in the first block, and through it in all others
            yield names

    def names(self, token_ids: Sequence[int], cache_salt: str | None = None) -> list[int]:
        """All of them."""
        return [name for chunk in self.chunks(token_ids, cache_salt) for name in chunk]

    def _hashed(self, digest: bytes, tokens: tuple[int, ...], salt: bytes) -> tuple[array[int], bytes]:
        data = struct.pack(f"<{len(tokens)}i", *tokens)
        size, sha256, from_bytes = 4 * self.block_size, hashlib.sha256, int.from_bytes
        names = array("Q")
        for first in range(0, len(data), size):
            digest = sha256(digest + data[first : first + size] + salt).digest()
            salt = b""
            names.append(from_bytes(digest[:NAME_BYTES], "little"))
        return names, digest


def _encoded(cache_salt: str | None) -> bytes:
    if cache_salt is None:
        return b""
    encoded = cache_salt.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded


def read_names(packed: bytes) -> Sequence[int]:
    """Names as an engine tells them."""
    names = array("Q")
    names.frombytes(packed)
    if sys.byteorder == "big":
        names.byteswap()
    return names


class NameSet:
    """A set of names in eight bytes per slot: a table in which a name stands at the place its value says, or in the
    next free one after it. A Python set of the same takes five times the memory."""

    def __init__(self, expected: int = 0) -> None:
        """There is room for `expected` names before the table has to grow."""
        num_slots = 64
        while num_slots * _FULLEST <= expected:
            num_slots *= 2
        self._slots = array("Q", bytes(8 * num_slots))
        """0 where there is no name."""
        self._last = num_slots - 1
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, name: int) -> bool:
        slots, last = self._slots, self._last
        place = (name or 1) & last
        while found := slots[place]:
            if found == name:
                return True
            place = place + 1 & last
        return name == 0 and 1 in self

    def add(self, name: int) -> None:
        name = name or 1  # 0 stands for a free slot
        slots, last = self._slots, self._last
        place = name & last
        while (found := slots[place]) != name:
            if not found:
                slots[place] = name
                self._size += 1
                if self._size > (last + 1) * _FULLEST:
                    self._grow()
                return
            place = place + 1 & last

    def discard(self, name: int) -> None:
        name = name or 1
        slots, last = self._slots, self._last
        hole = name & last
        while (found := slots[hole]) != name:
            if not found:
                return
            hole = hole + 1 & last
        self._size -= 1
        # Names behind it move up, unless they stand where their value says or between there and the hole.
        place = hole + 1 & last
        while found := slots[place]:
            if (place - found & last) >= (place - hole & last):
                slots[hole] = found
                hole = place
            place = place + 1 & last
        slots[hole] = 0

    def _grow(self) -> None:
        names = self._slots
        self._slots = array("Q", bytes(16 * len(names)))
        self._last = len(self._slots) - 1
        self._size = 0
        for name in names:
            if name:
                self.add(name)

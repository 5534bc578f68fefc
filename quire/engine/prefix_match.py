"""What is cached of a request's prefix, on the device and on the host tier, and by which keys it is
found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.block_key import BlockKey
from quire.engine.block_pool import Block
from quire.engine.config import SchedulerConfig
from quire.engine.host_tier import HostTier
from quire.engine.prefix_cache import PrefixCache, part_keys
from quire.engine.request import Request
from quire.engine.state_keeper import StateKeeper

Hit = Block | tuple[BlockKey, int] | None
"""Where a block is cached: on the device, or on the host tier (key and slot); None: not needed,
before the window.
"""


@dataclass(slots=True)
class PrefixMatch:
    """What is cached of a request's prefix."""

    found: list[Hit] = field(default_factory=list)
    """Its first blocks, those of all groups of layers side by side."""
    state: list[Hit] = field(default_factory=list)
    """The blocks of the state of the chunk in which `found` ends; none in the first chunk."""
    partial: list[Block] = field(default_factory=list)
    """Then partly filled blocks, one per group of layers. These are copied, not shared, since the
    request that filled them may go on writing into them.
    """
    num_partial: int = 0
    """How many of the request's next tokens they hold."""
    num_blocks_alike: int = 0
    """How many blocks of each group that keeps all its tokens were found, though the others may
    have less.
    """

    @property
    def shared(self) -> list[Block]:
        """Blocks on the device that will be in the request's block table."""
        return [hit for hit in self.found if isinstance(hit, Block)]

    @property
    def copied(self) -> list[Block]:
        """Blocks on the device of which the request gets copies."""
        return [*self.partial, *(hit for hit in self.state if isinstance(hit, Block))]


class PrefixIndex:
    """Finds the beginnings of requests in the prefix cache and in the host tier, which it owns."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        host: HostTier,
        states: StateKeeper | None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.host = host
        self._states = states
        self._groups = config.num_groups

    def match(self, request: Request) -> PrefixMatch:
        """The cached blocks a request can start with; one token is always left to compute."""
        # The cache holds keys and values, no hidden states: a mean over all hidden states needs
        # every token computed.
        if not self.config.prefix_caching or request.pooling == "mean":
            return PrefixMatch()
        num_usable = len(request.token_ids) - 1
        if request.score_prompt_from is not None:
            # A prompt position is scored by computing the token before it.
            num_usable = min(num_usable, request.score_prompt_from - 1)
        num_blocks, groups = num_usable // self.config.block_size, self._groups
        self.extend_keys(request, num_blocks)
        match = self._find_blocks(request, num_blocks)
        num_found = len(match.found) // groups
        first = num_found * self.config.block_size
        rest = request.token_ids[first : min(num_usable, first + self.config.block_size)]
        partial = (
            self.cache.find_partial(parent, rest, extra)
            for parent, extra in self.partial_keys(request, num_found)
        )
        held = [one for one in partial if one is not None]
        if len(held) == groups:
            match.partial = [block for block, _ in held]
            match.num_partial = min(count for _, count in held)
        return match

    def _find_blocks(self, request: Request, num_blocks: int) -> PrefixMatch:
        """Where the first blocks of a sequence are cached, up to the last one after which no group
        lacks anything: a group that keeps all needs all blocks, others those that later tokens can
        see, and there is a state.
        """
        groups, keys, config = self._groups, request.block_keys, self.config
        keeps_all = [group.keeps == "all" for group in config.groups]
        found: list[Hit] = []
        unbroken = [0] * groups
        """By group of layers: how many blocks, up to the one looked at, were found without a gap."""
        best = PrefixMatch()
        num_found = 0
        for place in range(num_blocks * groups):
            group, key = place % groups, keys[place]
            # The blocks before were just compared: with their key as the parent, `same_prefix`
            # stops there at once.
            key.parent = keys[place - groups] if place >= groups else None
            hit = self.cache.find(key) or self.host.find(key)
            if hit is not None:
                stored = hit.key if isinstance(hit, Block) else hit[0]
                assert stored is not None
                stored.parent = key.parent
                keys[place] = stored
            elif keeps_all[group]:
                break
            found.append(hit)
            unbroken[group] = unbroken[group] + 1 if hit is not None else 0
            if group < groups - 1:
                continue
            number = place // groups + 1
            best.num_blocks_alike = number if any(keeps_all) else 0
            needed = (
                number - config.first_kept(one, number * self.config.block_size)
                for one in range(groups)
            )
            if all(have >= need for have, need in zip(unbroken, needed, strict=True)):
                state = self._find_state(request, number * self.config.block_size)
                if state is not None:
                    num_found, best.state = number, state
        kept = [
            config.first_kept(group, num_found * self.config.block_size) for group in range(groups)
        ]
        best.found = [
            hit if place // groups >= kept[place % groups] else None
            for place, hit in enumerate(found[: num_found * groups])
        ]
        return best

    def _find_state(self, request: Request, num_tokens: int) -> list[Hit] | None:
        """Where the blocks of the state before a chunk are cached; none are needed before the first
        one.
        """
        if self._states is None or num_tokens < self._states.spec.chunk:
            return []
        keys = self._states.keys(self.cache, request, num_tokens // self._states.spec.chunk)
        found: list[Hit] = []
        for key in keys:
            hit = self.cache.find(key) or self.host.find(key)
            if hit is None:
                return None
            found.append(hit)
        return found

    def extend_keys(self, request: Request, num_blocks: int) -> None:
        """Computes the keys of a request's first blocks that it does not have yet."""
        keys, tokens, parts = request.block_keys, request.token_ids, request.key_parts
        self.cache.extend_keys(keys, tokens, num_blocks, self._extra_keys(request), parts)

    def _extra_keys(self, request: Request) -> list[tuple[str, ...]]:
        """What the first block of each group of layers depends on. Groups hold different content
        for the same tokens; the number of the salts stands beside a group's name, so that no salt
        can pass for one.
        """
        extra = request.extra_keys
        is_plain = not part_keys(request.key_parts, 0, self.config.block_size)
        return [
            extra if is_plain and not group else (f"group {group}", str(len(extra)), *extra)
            for group in range(self._groups)
        ]

    def partial_keys(
        self, request: Request, num_full: int
    ) -> list[tuple[BlockKey | None, tuple[str, ...]]]:
        """By group, what identifies a partly filled block after its first full ones besides the
        tokens: the block before it, and what else it depends on.
        """
        own = part_keys(
            request.key_parts, num_full * self.config.block_size, self.config.block_size
        )
        if not num_full:
            return [(None, extra + own) for extra in self._extra_keys(request)]
        last = (num_full - 1) * self._groups
        return [(key, own) for key in request.block_keys[last : last + self._groups]]

"""States of recurrent layers: which of a request's are worth keeping, and under which keys the
prefix cache has them.

A running request has blocks for two states, those of even and of odd chunks, which its steps
overwrite as it goes on (see `StateSpec`). States are large, so only few are kept: at the end of a
prompt and of an answer, at multiples of the interval, and where a prompt was found to part from a
cached one. Before such a state is overwritten it is copied, if there are free blocks for it.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.block_groups import StateSpec
from quire.engine.block_key import BlockKey
from quire.engine.block_pool import Block, BlockPool
from quire.engine.config import SchedulerConfig
from quire.engine.prefix_cache import PrefixCache
from quire.engine.request import Request, RequestState
from quire.errors import QuireError
from quire.step import BlockCopy

_CUE = 16
"""The last tokens of a prompt, at most, that only ask for the answer, such as the begin of an
assistant's turn and of its reasoning. A chat's next prompt may have others in their place.
"""


class StateKeeper:
    """Decides which states are kept, and lists them in the prefix cache."""

    def __init__(self, config: SchedulerConfig, spec: StateSpec, pool: BlockPool) -> None:
        self.spec = spec
        self._config = config
        self._pool = pool

    def keys(self, cache: PrefixCache, request: Request, chunk: int) -> list[BlockKey]:
        """The keys of the blocks of a state. It follows from the tokens before its chunk, the last
        block of which is the parent; `request.block_keys` must reach that far.
        """
        last = chunk * self.spec.chunk // self._config.block_size - 1
        parent = request.block_keys[last * self._config.num_groups]
        return [
            cache.key(parent, (), (f"state {number}",)) for number in range(self.spec.num_blocks)
        ]

    def cut(self, request: Request, start: int, end: int) -> int:
        """Where a step that would compute tokens `start` to `end` should end, so that it does not
        pass over a state that is worth keeping.
        """
        places = [place for place in request.state_ends if place > start]
        place = min([*places, (start // self.spec.interval + 1) * self.spec.interval])
        return place if place // self.spec.chunk < end // self.spec.chunk else end

    def advance(
        self,
        cache: PrefixCache,
        request: Request,
        start: int,
        end: int,
        allocate: Callable[[int], list[Block] | None],
    ) -> list[BlockCopy]:
        """A step computes tokens `start` to `end` and overwrites states. Returns copies of those to
        be kept, to be made before.
        """
        first, last = start // self.spec.chunk, end // self.spec.chunk
        copies: list[BlockCopy] = []
        for chunk in range(max(first + 1, last - 1), last + 1):
            state = request.states[chunk % 2]
            if state.chunk != chunk:
                copies += self._save(cache, request, state, allocate)
                state.chunk, state.is_published = chunk, False
        return copies

    def _save(
        self,
        cache: PrefixCache,
        request: Request,
        state: RequestState,
        allocate: Callable[[int], list[Block] | None],
    ) -> list[BlockCopy]:
        keys = [None if block.key is None else cache.remove(block) for block in state.blocks]
        is_elsewhere = state.is_published and not any(keys)
        if is_elsewhere or not self._is_worth_keeping(request, state.chunk):
            return []
        try:
            fresh = allocate(self.spec.num_blocks)
        except QuireError:  # it need not be kept
            return []
        if fresh is None:
            return []
        for key, block in zip(keys, fresh, strict=True):
            if key is not None:
                cache.publish(key, block)
        if state.is_published:
            self._give_back(fresh)
        else:
            request.left_states.append(RequestState(fresh, state.chunk))
        pairs = zip(state.blocks, fresh, strict=True)
        return [
            BlockCopy("device_to_device", source.block_id, target.block_id)
            for source, target in pairs
        ]

    def publish(self, cache: PrefixCache, request: Request) -> None:
        """Lists the states that committed tokens have made and that are worth keeping."""
        for state in request.states:
            if self._is_worth_keeping(request, state.chunk):
                self._publish(cache, request, state)
        for state in [state for state in request.left_states if self._is_made(request, state)]:
            self._publish(cache, request, state)
            request.left_states.remove(state)
            self._give_back(state.blocks)

    def publish_last(self, cache: PrefixCache, request: Request) -> None:
        """Lists the state of the chunk in which the committed tokens end: whoever continues them
        starts there.
        """
        for state in request.states:
            if state.chunk == request.num_committed_tokens // self.spec.chunk:
                self._publish(cache, request, state)

    def release(self, request: Request) -> None:
        """Gives up all blocks of a request's states."""
        for state in [*request.states, *request.left_states]:
            self._give_back(state.blocks)
        request.states, request.left_states = [], []

    def _is_worth_keeping(self, request: Request, chunk: int) -> bool:
        """Whether others may want to start from the state at the begin of a chunk."""
        start = chunk * self.spec.chunk
        end = request.num_prompt_tokens
        before_cue = (end - _CUE) // self.spec.chunk
        # a step that passes both keeps both, so they need no cut
        at_prompts_end = chunk in (end // self.spec.chunk, before_cue)
        is_chosen = at_prompts_end or start % self.spec.interval == 0 or start in request.state_ends
        return self._config.prefix_caching and chunk > 0 and is_chosen

    def _is_made(self, request: Request, state: RequestState) -> bool:
        """Whether the steps that have come back made it: what others in flight make is not certain
        yet.
        """
        return 0 < state.chunk * self.spec.chunk <= request.num_committed_tokens

    def _publish(self, cache: PrefixCache, request: Request, state: RequestState) -> None:
        if self._is_made(request, state) and not state.is_published:
            for key, block in zip(
                self.keys(cache, request, state.chunk), state.blocks, strict=True
            ):
                cache.publish(key, block)
            state.is_published = True

    def _give_back(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            self._pool.release(block)

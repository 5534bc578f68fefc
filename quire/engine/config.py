"""The scheduler's limits: a frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.block_groups import BlockGroup, StateSpec
from quire.config import LEAST_WEIGHT, MOST_WEIGHT
from quire.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How many blocks, rows and tokens there are to share out, and in which order requests get
    them.
    """

    num_blocks: int
    """Blocks of the device cache, block 0 (the padding target, never handed out) included."""
    max_num_seqs: int
    """Rows: how many requests run at once."""
    max_batched_tokens: int
    """How many tokens one step may compute."""
    max_model_len: int
    """The longest sequence, prompt and answer together."""
    block_size: int = 16
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    """fcfs: by arrival. priority: lower number first, then arrival. fair: by what tenants have had
    so far (`FairShares`), then as priority does.
    """
    tenant_weights: tuple[tuple[str, float], ...] = ()
    """Shares of tenants under policy "fair"; 1 of those that are not named."""
    num_host_blocks: int = 0
    """Blocks of the host tier below the prefix cache; 0 turns it off, and preemption recomputes."""
    prefix_caching: bool = True
    groups: tuple[BlockGroup, ...] = (BlockGroup(),)
    """Groups of layers. Each group has a block of its own for the same `block_size` tokens; a
    request's block table has first each group's block for the first tokens, then each group's for
    the next ones. Windows are as far as kernels read, which take whole tiles, so they may be longer
    than the model's.
    """
    state: StateSpec | None = None
    """The state of recurrent layers; None where there are none."""
    bytes_per_block: int = 0
    """The same for all blocks, whatever they hold: so all groups and states share one budget."""
    max_checked_tokens: int = 0
    """The most tokens of a step that is a CUDA graph. Steps with draft tokens have no more, and a
    step of up to half as many again is cut to it; 0: there are no graphs.
    """

    max_loras: int = 0
    """How many different adapters running requests may have; 0: any number."""
    target_token_time: float | None = None
    """Seconds in which whoever is being answered should get the next token (`TokenTimes`)."""
    target_first_token: float | None = None
    """Seconds after its arrival in which a request should get its first token."""
    gives_way: Literal["first_token", "token_time"] = "first_token"
    """Which target is missed where both can't be held."""

    def __post_init__(self) -> None:
        lowest = {"num_blocks": 2, "max_model_len": 2, "num_host_blocks": 0, "bytes_per_block": 0}
        lowest["max_loras"] = 0
        for field in ("max_num_seqs", "max_batched_tokens", "block_size", *lowest):
            value, low = getattr(self, field), lowest.get(field, 1)
            if value < low:
                raise InvalidRequestError(field, f"must be at least {low}, not {value}")
        if self.policy not in ("fcfs", "priority", "fair"):
            raise InvalidRequestError(
                "policy", f"must be 'fcfs', 'priority' or 'fair', not {self.policy!r}"
            )
        for tenant, weight in self.tenant_weights:
            if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
                raise InvalidRequestError(
                    "tenant_weights",
                    f"must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, not {weight} for {tenant!r}",
                )
        if self.tenant_weights and self.policy != "fair":
            raise InvalidRequestError(
                "tenant_weights", f"count under policy 'fair' only, not {self.policy!r}"
            )
        for field in ("target_token_time", "target_first_token"):
            target = getattr(self, field)
            if target is not None and not 0 < target < float("inf"):
                raise InvalidRequestError(field, f"must be seconds above 0, not {target}")
        if self.target_first_token is not None and self.target_token_time is None:
            raise InvalidRequestError(
                "target_first_token",
                "needs target_token_time: without it prompts are computed as soon as they can be",
            )
        if self.gives_way not in ("first_token", "token_time"):
            raise InvalidRequestError(
                "gives_way", f"must be 'first_token' or 'token_time', not {self.gives_way!r}"
            )
        # With every other row decoding, one token is left for a prompt: neither decodes nor prompts
        # can starve.
        if self.max_batched_tokens < self.max_num_seqs:
            raise InvalidRequestError(
                "max_batched_tokens",
                f"is {self.max_batched_tokens}, less than max_num_seqs ({self.max_num_seqs}): a step must be "
                "able to compute one token for every running request; raise the one or lower the other",
            )
        if self.num_host_blocks and not self.prefix_caching:
            raise InvalidRequestError(
                "num_host_blocks",
                "the host tier lies below the prefix cache: turn prefix_caching on or set this to 0",
            )

        if not self.groups:
            raise InvalidRequestError("groups", "must have at least one")
        if any(group.keeps != "all" and group.size < 1 for group in self.groups):
            raise InvalidRequestError("groups", "a window or chunk has at least one token")
        chunks = {group.size for group in self.groups if group.keeps == "records"}
        state = self.state
        if state is not None and (
            state.chunk < 1 or state.chunk % self.block_size or state.num_blocks < 1
        ):
            raise InvalidRequestError(
                "state", f"chunks of {state.chunk} tokens are not whole blocks, or it has none"
            )
        if state is not None and (state.interval < state.chunk or state.interval % state.chunk):
            raise InvalidRequestError(
                "state", f"its interval of {state.interval} tokens is not whole chunks"
            )
        if chunks != (set() if state is None else {state.chunk}):
            raise InvalidRequestError(
                "groups", f"records of chunks of {sorted(chunks)} tokens, with the state {state}"
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> SchedulerConfig:
        """From plain values, as step logs have them; older logs have one window for the last
        groups.
        """
        given = dict(settings)
        num_groups, num_windowed = given.pop("num_groups", 1), given.pop("num_windowed", 0)
        windowed = BlockGroup("window", given.pop("window", 0))
        groups = given.pop(
            "groups", [BlockGroup()] * (num_groups - num_windowed) + [windowed] * num_windowed
        )
        state = given.pop("state", None)
        weights = given.pop("tenant_weights", ())
        return cls(
            **given,
            tenant_weights=tuple((tenant, weight) for tenant, weight in weights),
            groups=tuple(BlockGroup(*group) for group in groups),
            state=None if state is None else StateSpec(*state),
        )

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can have: all but block 0, to which padding is written."""
        return self.num_blocks - 1

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def leaving_groups(self) -> tuple[int, ...]:
        """The groups that give up blocks while a request runs."""
        return tuple(index for index, group in enumerate(self.groups) if group.keeps != "all")

    @property
    def num_state_blocks(self) -> int:
        """Blocks that a running request has for its two states."""
        return 0 if self.state is None else 2 * self.state.num_blocks

    @property
    def num_tokens(self) -> int:
        """How many tokens one request can have in the cache, if no other runs and no block is given
        up.
        """
        return (
            max(0, self.num_usable_blocks - self.num_state_blocks)
            // self.num_groups
            * self.block_size
        )

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks that many tokens need, in all groups together, besides those of states."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def first_kept(self, group: int, num_tokens: int) -> int:
        """The index of a group's first block that tokens from position `num_tokens` on can see."""
        return self.groups[group].first_token(num_tokens) // self.block_size

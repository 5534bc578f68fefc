"""The scheduler's limits: a frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How many blocks, rows and tokens there are to share out, and in which order requests get them."""

    num_blocks: int
    """Blocks of the device cache, block 0 (the padding target, never handed out) included."""
    max_num_seqs: int
    """Rows: how many requests run at once."""
    max_batched_tokens: int
    """How many tokens one step may compute."""
    max_model_len: int
    """The longest sequence, prompt and answer together."""
    block_size: int = 16
    policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs: by arrival. priority: lower number first, then arrival."""
    num_host_blocks: int = 0
    """Blocks of the host tier below the prefix cache; 0 turns it off, and preemption recomputes."""
    prefix_caching: bool = True
    num_groups: int = 1
    """Groups of layers. Each group has a block of its own for the same `block_size` tokens; a request's block table has
    first each group's block for the first tokens, then each group's for the next ones."""
    num_windowed: int = 0
    """How many groups, the last ones, consist of layers with a sliding window; blocks before the window are freed."""
    window: int = 0
    """How far back those layers read, in tokens (kernels read whole tiles, so it may be more than the model's)."""
    max_checked_tokens: int = 0
    """The most tokens of a step that is a CUDA graph. Steps with guesses have no more, and a step of up to half as many
    again is cut to it; 0: there are no graphs."""

    def __post_init__(self) -> None:
        lowest = {"num_blocks": 2, "max_model_len": 2, "num_host_blocks": 0}
        for field in ("max_num_seqs", "max_batched_tokens", "block_size", *lowest):
            value, low = getattr(self, field), lowest.get(field, 1)
            if value < low:
                raise InvalidRequestError(field, f"must be at least {low}, not {value}")
        if self.policy not in ("fcfs", "priority"):
            raise InvalidRequestError("policy", f"must be 'fcfs' or 'priority', not {self.policy!r}")
        # With every other row decoding, one token is left for a prompt: neither decodes nor prompts can starve.
        if self.max_batched_tokens < self.max_num_seqs:
            raise InvalidRequestError(
                "max_batched_tokens",
                f"is {self.max_batched_tokens}, less than max_num_seqs ({self.max_num_seqs}): a step must be "
                "able to compute one token for every running request; raise the one or lower the other",
            )
        if self.num_host_blocks and not self.prefix_caching:
            raise InvalidRequestError(
                "num_host_blocks", "the host tier lies below the prefix cache: turn prefix_caching on or set this to 0"
            )

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks that many tokens need, in all groups together."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def first_kept(self, num_tokens: int) -> int:
        """The index of the first block of a windowed group that tokens from position `num_tokens` on can see."""
        return max(0, num_tokens - self.window + 1) // self.block_size if self.num_windowed else 0

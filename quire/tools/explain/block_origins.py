"""Who had computed the cached tokens a request found: its blocks are followed back to whoever last
took them fresh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice

from quire.observe.packed_entry import block_events
from quire.step import Admission, Step, StepLogEntry

UNKNOWN = "someone before this log begins"
_MOST_STEPS = 2000
"""Steps looked back: an engine waits while one of its requests is explained."""


def cached_from(
    log: Sequence[StepLogEntry],
    step: Step,
    admission: Admission,
    before: Sequence[StepLogEntry] = (),
) -> dict[str, int]:
    """Tokens by the request that computed them; most first. `before`: entries older than those of
    `log`.
    """
    found = admission.num_cached_tokens + admission.num_host_tokens
    held = [block for block in admission.block_ids if block]  # 0 stands for what has left a window
    if not found or not held:
        return {}
    size = _block_size(found, len(held))
    tokens = {block: min(size, found - place * size) for place, block in enumerate(held)}
    counts: Counter[str] = Counter()
    for block, name in _origins(log, step, admission, before).items():
        counts[name] += max(0, tokens[block])
    return dict(counts.most_common())


def _block_size(num_tokens: int, num_blocks: int) -> int:
    """A log does not say it: the usual one if it fits, else the least power of two that does."""
    for size in (16, 1, 2, 4, 8, 32, 64, 128, 256):
        if (num_blocks - 1) * size < num_tokens <= num_blocks * size:
            return size
    return -(-num_tokens // num_blocks)


def _origins(
    log: Sequence[StepLogEntry], step: Step, admission: Admission, before: Sequence[StepLogEntry]
) -> dict[int, str]:
    """Goes back through the log. A block that was filled by a copy is looked for where the copy
    came from.
    """
    held = [block for block in admission.block_ids if block]
    wanted: dict[tuple[str, int], list[int]] = {("device", block): [block] for block in held}
    origins: dict[int, str] = dict.fromkeys(held, UNKNOWN)
    last = next(
        (index for index in range(len(log) - 1, -1, -1) if log[index].step is step), len(log) - 1
    )
    steps = chain(block_events(log[: last + 1]), block_events(before))
    for number, (taken, copies) in enumerate(islice(steps, _MOST_STEPS)):
        # Whoever took a block fresh in a step before this one wrote to it then or later, before
        # others found it.
        for name, blocks in taken if number else ():
            for block in blocks:
                for origin in wanted.pop(("device", block), ()):
                    origins[origin] = name
        for copy in reversed(copies):
            target = "host" if copy.kind == "device_to_host" else "device"
            source = "host" if copy.kind == "host_to_device" else "device"
            waiting = wanted.pop((target, copy.target), None)
            if waiting is not None:
                wanted.setdefault((source, copy.source), []).extend(waiting)
        if not wanted:
            break
    return origins

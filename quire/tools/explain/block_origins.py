"""Who had computed the cached tokens a request found: its blocks are followed back to whoever last
took them fresh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice

from quire.engine import SchedulerConfig
from quire.observe.packed_entry import block_events
from quire.step import AdmittedRequest, Step, StepLogEntry

UNKNOWN = "someone before this log begins"
_MOST_STEPS = 2000
"""Steps looked back: an engine waits while one of its requests is explained."""


def cached_from(
    log: Sequence[StepLogEntry],
    step: Step,
    admission: AdmittedRequest,
    before: Sequence[StepLogEntry] = (),
    config: SchedulerConfig | None = None,
) -> dict[str, int]:
    """Tokens by the request that computed them; most first. `before`: entries older than those of
    `log`. Without a config there is one group of layers.
    """
    found = admission.num_cached_tokens + admission.num_host_tokens
    tokens = _tokens_by_block(admission, found, config)
    counts: Counter[str] = Counter()
    for block, name in _origins(log, step, list(tokens), before).items():
        counts[name] += tokens[block]
    return dict(counts.most_common())


def _tokens_by_block(
    admission: AdmittedRequest, found: int, config: SchedulerConfig | None
) -> dict[int, int]:
    """The blocks that show who computed the tokens that were found. Every group of layers has a
    block for the same tokens, or none where no layer of it looks at them any more (block 0). Tokens
    of which no group has one are those of whoever made the state that stands for them, or, with
    windows, the first block that is there.
    """
    num_groups = 1 if config is None else config.num_groups
    table = admission.block_ids
    places = [table[at : at + num_groups] for at in range(0, len(table), num_groups)]
    held = [next(filter(None, blocks), 0) for blocks in places]
    size = _block_size(found, sum(map(bool, held))) if config is None else config.block_size
    if config is None:
        held = list(filter(None, held))
    state = None if config is None else config.state
    if state is None or not admission.state_ids or found < state.chunk:
        instead = next(filter(None, held), 0)
    else:
        instead = admission.state_ids[found // state.chunk % 2][0]
    tokens: Counter[int] = Counter()
    for place, block in enumerate(held):
        tokens[block or instead] += max(0, min(size, found - place * size))
    return {block: count for block, count in tokens.items() if block and count}


def _block_size(num_tokens: int, num_blocks: int) -> int:
    """Of a log without its engine's settings: the usual one if it fits, else the least power of two
    that does.
    """
    if not num_blocks:
        return 1
    for size in (16, 1, 2, 4, 8, 32, 64, 128, 256):
        if (num_blocks - 1) * size < num_tokens <= num_blocks * size:
            return size
    return -(-num_tokens // num_blocks)


def _origins(
    log: Sequence[StepLogEntry], step: Step, held: Sequence[int], before: Sequence[StepLogEntry]
) -> dict[int, str]:
    """Goes back through the log. A block that was filled by a copy is looked for where the copy
    came from.
    """
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

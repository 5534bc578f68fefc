"""An entry of the step log in little memory: the log keeps thousands, of up to hundreds of requests each.

As objects, a step of 256 requests takes 70 kB in a thousand pieces, through which the garbage collector looks again and
again, and whose gaps nobody else can use when they are freed. Here it is a string of bytes of 20 kB, four of them
for a token of a prompt instead of forty.
"""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, overload

from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import Admission, BlockCopy, Finished, Preemption, ScheduledRequest, Step, StepLogEntry, StepResult

_T = TypeVar("_T")
_OBJECTS = ("params", "resolved")
"""What an admission holds that is no plain value."""
_PLAIN = [field.name for field in fields(Admission) if field.name not in (*_OBJECTS, "token_ids")]
_NAME, _NEW_BLOCKS = (ScheduledRequest._fields.index(name) for name in ("request_id", "new_block_ids"))
_plain_fields = attrgetter(*_PLAIN)
_preemption_fields = attrgetter(*(field.name for field in fields(Preemption)))
_finished_fields = attrgetter(*(field.name for field in fields(Finished)))


class PackedEntry(NamedTuple):
    """What `pack` makes of an entry, without scores and vectors."""

    values: bytes
    """All that is numbers and text, as Python writes compiled modules."""
    params: tuple[tuple[SamplingParams, ResolvedTokens], ...]
    """Of the admissions."""
    num_prompt_tokens: int
    committed: float

    def mentions(self, request_id: str) -> bool:
        """Whether a request of this name, or one whose name has this one in it, may be in it."""
        return request_id.encode("utf-8", "surrogatepass") in self.values


class UnpackedEntries(Sequence[StepLogEntry]):
    """Packed entries as what they stand for, each made when it is looked at."""

    def __init__(self, packed: Sequence[PackedEntry]) -> None:
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed)

    @overload
    def __getitem__(self, index: int) -> StepLogEntry: ...
    @overload
    def __getitem__(self, index: slice) -> UnpackedEntries: ...
    def __getitem__(self, index: int | slice) -> StepLogEntry | UnpackedEntries:
        if isinstance(index, slice):
            return UnpackedEntries(self.packed[index])
        return unpack(self.packed[index])


class BlockEvents(NamedTuple):
    """What a step did to blocks."""

    taken: list[tuple[str, Sequence[int]]]
    """By whom, and which, fresh."""
    copies: Sequence[BlockCopy]


def block_events(entries: Sequence[StepLogEntry]) -> Iterator[BlockEvents]:
    """Of the entries, the last one first. Packed ones are not made anew for it, which takes four times as long: an
    engine waits while thousands are looked through."""
    if not isinstance(entries, UnpackedEntries):
        for entry in reversed(entries):
            step = entry.step
            yield BlockEvents([(one.request_id, one.new_block_ids) for one in step.scheduled], step.copies)
        return
    for packed in reversed(entries.packed):
        values = marshal.loads(packed.values)
        taken = [(one[_NAME], one[_NEW_BLOCKS]) for one in values[2] if one[_NEW_BLOCKS]]
        yield BlockEvents(taken, [BlockCopy(*one) for one in values[3][3]])


def pack(entry: StepLogEntry) -> PackedEntry:
    """Scores (logprobs) and pooled vectors are left out."""
    step, result = entry.step, entry.result
    found: tuple[Any, ...] | None = None
    if result is not None:
        found = (result.step_id, dict(result.tokens), dict(result.errors), result.ended, dict(result.drafts))
    counts = (step.num_free_blocks, step.num_waiting, step.num_running, step.num_decodes)
    scheduled = [tuple(one) for one in step.scheduled]
    events: list[list[Any]] = [
        [(_plain_fields(one), array("i", one.token_ids).tobytes()) for one in step.admitted],
        [_preemption_fields(one) for one in step.preempted],
        [_finished_fields(one) for one in step.finished],
        [tuple(one) for one in step.copies],
    ]
    times = (entry.committed, entry.submitted)
    return PackedEntry(
        marshal.dumps((step.step_id, step.now, scheduled, events, counts, found, entry.error, times)),
        tuple((_shared(one.params), _shared(one.resolved)) for one in step.admitted),
        sum(len(one.token_ids) for one in step.admitted),
        entry.committed,
    )


def unpack(packed: PackedEntry) -> StepLogEntry:
    """An entry equal to the one that was packed."""
    step_id, now, scheduled, events, counts, found, error, times = marshal.loads(packed.values)
    admitted, preempted, finished, copies = events
    step = Step(
        step_id,
        now,
        tuple(map(ScheduledRequest._make, scheduled)),
        tuple(map(_admission, admitted, packed.params)),
        tuple(Preemption(*one) for one in preempted),
        tuple(Finished(*one) for one in finished),
        tuple(map(BlockCopy._make, copies)),
        *counts,
    )
    result = None
    if found is not None:
        result_id, tokens, errors, ended, drafts = found
        result = StepResult(result_id, tokens, errors, ended=ended, drafts=drafts)
    return StepLogEntry(step, result, error, *times)


def _admission(packed: tuple[Sequence[Any], bytes], objects: tuple[SamplingParams, ResolvedTokens]) -> Admission:
    plain, token_ids = packed
    known: dict[str, Any] = dict(zip((*_PLAIN, *_OBJECTS), (*plain, *objects), strict=True))
    return Admission(token_ids=tuple(array("i", token_ids)), **known)


def _shared(value: _T) -> _T:
    """Most requests have parameters that others have, too: one object for all of them. Those with code in them, which
    may hold anything, are not kept beyond their entries."""
    if getattr(value, "logits_processors", ()):
        return value
    try:
        found: _T = _first_equal(value)
    except TypeError:  # it can't be looked up: a schema that is a dictionary
        return value
    return found


@lru_cache(maxsize=256)
def _first_equal(value: Any) -> Any:
    return value

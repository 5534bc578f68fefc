"""An entry of the step log in little memory: the log keeps thousands, of up to hundreds of requests
each.

As objects, a step of 256 requests takes 70 kB in a thousand pieces, through which the garbage
collector looks again and again, and whose gaps nobody else can use when they are freed. Here it is
a string of bytes of 20 kB, four of them for a token of a prompt instead of forty.
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
from quire.step import (
    AdmittedRequest,
    BlockCopy,
    Finished,
    Preemption,
    ScheduledRequest,
    Step,
    StepAdapters,
    StepLogEntry,
    StepPromise,
    StepResult,
)

_T = TypeVar("_T")
_OBJECTS = ("params", "resolved")
"""What an admission holds that is no plain value."""
_PLAIN = [
    field.name for field in fields(AdmittedRequest) if field.name not in (*_OBJECTS, "token_ids")
]
_NAME, _NEW_BLOCKS = (
    ScheduledRequest._fields.index(name) for name in ("request_id", "new_block_ids")
)
_OWNER, _STATES = (_PLAIN.index(name) for name in ("request_id", "state_ids"))
_COUNTS = [field.name for field in fields(Step) if field.name.startswith("num_")]
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


class _Values(NamedTuple):
    """What `PackedEntry.values` holds, plain values all the way down."""

    step_id: int
    now: float
    scheduled: list[tuple[Any, ...]]
    admitted: list[tuple[Sequence[Any], bytes]]
    """Plain fields, and the prompt as int32."""
    preempted: list[tuple[Any, ...]]
    finished: list[tuple[Any, ...]]
    copies: list[tuple[Any, ...]]
    counts: dict[str, int]
    promise: tuple[Any, ...] | None
    adapters: tuple[Any, ...] | None
    result: dict[str, Any] | None
    error: str | None
    committed: float
    submitted: float | None

    @classmethod
    def of(cls, packed: PackedEntry) -> _Values:
        return cls._make(marshal.loads(packed.values))


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

    taken: Sequence[tuple[str, Sequence[int]]]
    """By whom, and which, fresh."""
    copies: Sequence[BlockCopy]


def block_events(entries: Sequence[StepLogEntry]) -> Iterator[BlockEvents]:
    """Of the entries, the last one first. Packed ones are not made anew for it, which takes four
    times as long: an engine waits while thousands are looked through.
    """
    if not isinstance(entries, UnpackedEntries):
        for entry in reversed(entries):
            step = entry.step
            taken: list[tuple[str, Sequence[int]]] = [
                (one.request_id, one.new_block_ids) for one in step.scheduled
            ]
            for one in step.admitted:
                taken += ((one.request_id, state) for state in one.state_ids)
            yield BlockEvents(taken, step.copies)
        return
    for packed in reversed(entries.packed):
        values = _Values.of(packed)
        taken = [(one[_NAME], one[_NEW_BLOCKS]) for one in values.scheduled if one[_NEW_BLOCKS]]
        for about, _ in values.admitted:
            taken += ((about[_OWNER], state) for state in about[_STATES])
        yield BlockEvents(taken, [BlockCopy(*one) for one in values.copies])


def pack(entry: StepLogEntry) -> PackedEntry:
    """Scores (logprobs) and pooled vectors are left out."""
    step = entry.step
    result = entry.result
    found: dict[str, Any] | None = None
    if result is not None:
        found = {
            "step_id": result.step_id,
            "tokens": dict(result.tokens),
            "errors": dict(result.errors),
            "ended": result.ended,
            "drafts": dict(result.drafts),
        }
    values = _Values(
        step_id=step.step_id,
        now=step.now,
        scheduled=list(map(tuple, step.scheduled)),
        admitted=[
            (_plain_fields(one), array("i", one.token_ids).tobytes()) for one in step.admitted
        ],
        preempted=[_preemption_fields(one) for one in step.preempted],
        finished=[_finished_fields(one) for one in step.finished],
        copies=list(map(tuple, step.copies)),
        counts={name: getattr(step, name) for name in _COUNTS},
        promise=None if step.promise is None else tuple(step.promise),
        adapters=None if step.adapters is None else tuple(step.adapters),
        result=found,
        error=entry.error,
        committed=entry.committed,
        submitted=entry.submitted,
    )
    return PackedEntry(
        marshal.dumps(tuple(values)),
        tuple((_shared(one.params), _shared(one.resolved)) for one in step.admitted),
        sum(len(one.token_ids) for one in step.admitted),
        entry.committed,
    )


def unpack(packed: PackedEntry) -> StepLogEntry:
    """An entry equal to the one that was packed."""
    values = _Values.of(packed)
    step = Step(
        step_id=values.step_id,
        now=values.now,
        scheduled=tuple(map(ScheduledRequest._make, values.scheduled)),
        admitted=tuple(map(_admission, values.admitted, packed.params)),
        preempted=tuple(Preemption(*one) for one in values.preempted),
        finished=tuple(Finished(*one) for one in values.finished),
        copies=tuple(map(BlockCopy._make, values.copies)),
        promise=None if values.promise is None else StepPromise(*values.promise),
        adapters=None if values.adapters is None else StepAdapters(*values.adapters),
        **values.counts,
    )
    result = None if values.result is None else StepResult(**values.result)
    return StepLogEntry(step, result, values.error, values.committed, values.submitted)


def _admission(
    packed: tuple[Sequence[Any], bytes], objects: tuple[SamplingParams, ResolvedTokens]
) -> AdmittedRequest:
    plain, token_ids = packed
    known: dict[str, Any] = dict(zip((*_PLAIN, *_OBJECTS), (*plain, *objects), strict=True))
    return AdmittedRequest(token_ids=tuple(array("i", token_ids)), **known)


def _shared(value: _T) -> _T:
    """Most requests have parameters that others have, too: one object for all of them. Those with
    code in them, which may hold anything, are not kept beyond their entries.
    """
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

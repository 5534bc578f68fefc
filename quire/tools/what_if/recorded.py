"""The requests of a step log, as they were sent, and the tokens they got."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from quire.engine.request import PromptProgress, Request
from quire.sampling_params import SamplingParams
from quire.step import AdmittedRequest, StepLogEntry


@dataclass(slots=True)
class RecordedRequest:
    """One answer."""

    admission: AdmittedRequest
    """Its first."""
    tokens: list[int] = field(default_factory=list)
    """The answer, as far as the log has it."""
    finish_reason: str | None = None
    """None where the log has no end of it."""
    noticed: float | None = None
    """When an engine that was idle began with it, if it was: what is sent at once is all there
    before its first step.
    """

    @property
    def name(self) -> str:
        return self.admission.request_id

    @property
    def group_id(self) -> str | None:
        """What the answers to one call share."""
        base, _, index = self.name.rpartition("/")
        return base if base and index.isdigit() else None

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.admission.token_ids[: self.admission.num_prompt_tokens]

    def request(self, params: SamplingParams, name: str, group_id: str | None) -> Request:
        """The same request again."""
        admission = self.admission
        return Request(
            request_id=name,
            prompt_token_ids=self.prompt,
            params=params,
            seed=admission.seed,
            eos_token_ids=admission.eos_token_ids,
            group_id=group_id,
            resolved=admission.resolved,
            prompt_progress=PromptProgress(),
            pooling=admission.pooling,
        )

    def fixed(self, name: str) -> Request:
        """One that takes as many tokens as this one got, whatever they are."""
        params = replace(
            self.admission.params,
            max_tokens=max(1, len(self.tokens)),
            min_tokens=0,
            ignore_eos=True,
            stop=(),
            stop_token_ids=(),
            deadline=None,
            structured=None,
        )
        return self.request(params, name, self.group_id)


def recorded_requests(entries: Sequence[StepLogEntry]) -> list[RecordedRequest]:
    """All answers whose beginning the log has, by arrival. A name that is used again is another
    request.
    """
    live: dict[str, RecordedRequest] = {}
    everyone: list[RecordedRequest] = []
    for entry in entries:
        for finished in entry.step.finished:
            ended = live.pop(finished.request_id, None)
            if ended is not None:
                # what came after its end was dropped
                del ended.tokens[finished.num_output_tokens :]
                ended.finish_reason = finished.reason
        for admission in entry.step.admitted:
            if (
                admission.request_id not in live
                and len(admission.token_ids) == admission.num_prompt_tokens
            ):
                live[admission.request_id] = RecordedRequest(admission)
                everyone.append(live[admission.request_id])
        if entry.result is not None:
            for name, tokens in entry.result.tokens.items():
                if name in live:
                    live[name].tokens.extend(tokens)
    _note_beginnings(everyone, entries)
    return sorted(everyone, key=lambda one: one.admission.arrival)


def _note_beginnings(requests: Sequence[RecordedRequest], entries: Sequence[StepLogEntry]) -> None:
    begins = [entry.step.now for entry in entries]
    ends = list(accumulate((entry.committed for entry in entries), max))
    for one in requests:
        arrival = one.admission.arrival
        place = bisect_left(begins, arrival)
        if place < len(begins) and (place == 0 or ends[place - 1] <= arrival):
            one.noticed = begins[place]

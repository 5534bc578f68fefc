"""A call for text: tokens of its answers become text, reasoning and tool calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from quire.engine import make_requests
from quire.frontend.live_request import AnswerText, LiveRequest
from quire.observe.tracing import Trace
from quire.outputs import Completion, RequestDelta, TokenLogprobs
from quire.server.calls.answer_reader import AnswerReader, Pieces, new_reader
from quire.server.calls.call import Call, TextSink
from quire.server.calls.generation import FinishReason, GenerationEvent, Usage
from quire.server.link.listeners import Grow
from quire.step import RequestMetrics, RequestUpdate


@dataclass(slots=True)
class _Answer:
    """One choice, as far as it has come."""

    call: TextCall
    usage: Usage
    events: list[GenerationEvent]
    """Of the call, that wait for its reader."""
    gaps: dict[float, int]
    """`ServerMetrics.gaps`"""
    answer_id: str
    prompt: int
    live: LiveRequest
    text: AnswerText
    """Of this answer, inside of `live`."""
    position: int
    """Which answer of its prompt."""
    reader: AnswerReader
    index: int
    """Which choice it is, if not the best of several are chosen."""
    grows: bool
    """While it runs, tokens that come alone bring text and nothing else (`grow`)."""
    sink: TextSink | None = None
    """Who takes its text, once the first of it was told."""
    first_token: float | None = None
    last_token: float = 0.0
    num_tokens: int = 0
    held_ids: tuple[int, ...] = ()
    """Tokens that came without text (half a character, what may begin a tag): they are told with
    those that complete it.
    """

    def take_held(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """These tokens, after those that were held."""
        held = self.held_ids
        self.held_ids = ()
        return (*held, *token_ids)

    def grow(self, token_ids: tuple[int, ...], now: float) -> None:
        """Nearly every token of every stream comes this way, so it is short."""
        sink = self.sink
        if sink is not None and len(token_ids) == 1:
            gaps = self.gaps
            gap = now - self.last_token
            if not gaps:
                self.call.count_gaps_soon()
            gaps[gap] = gaps.get(gap, 0) + 1
            self.last_token = now
            self.num_tokens += 1
            self.usage.completion_tokens += 1
        else:
            self.call.count(self, len(token_ids), now)
        reader = self.reader
        if reader.is_plain:
            text = content = self.text.grow(token_ids)
            reasoning = ""
        elif reader.only_splits and len(token_ids) == 1:
            self.usage.reasoning_tokens += reader.is_reasoning
            text = self.text.grow(token_ids)
            content, reasoning = reader.split(text)
        else:
            text = ""
            pieces = []
            for one in zip(token_ids, strict=True):  # each may end the reasoning
                self.usage.reasoning_tokens += reader.is_reasoning
                piece = self.text.grow(one)
                text += piece
                pieces += reader.feed(piece, False)
            content, reasoning, calls = pieces[0]
            if calls or len(pieces) > 1:
                token_ids = self.take_held(token_ids)
                self.call.tell(self.index, pieces, reader.unmarked(text), token_ids)
                return
        if self.held_ids:
            token_ids = self.take_held(token_ids)
        if sink is not None and not self.events:
            if not reasoning:
                if not content:
                    self.held_ids = token_ids
                    return
                if sink.push(content, token_ids, False):
                    return
            elif not content and sink.push(reasoning, token_ids, True):
                return
        pieces = [Pieces(content, reasoning)]
        self.call.tell(self.index, pieces, reader.unmarked(text), token_ids)


class TextCall(Call):
    """A call whose prompts are answered with text, reasoning and tool calls.

    There is one way for text: tokens become text (`_Answer.grow` where there is nothing but text to look
    for, which is nearly always; else `_advance`), the answer's reader takes it apart, and `tell`
    passes on what it found.
    """

    def __init__(self, *args: Any) -> None:
        self._lives: list[LiveRequest] = []
        self._answers: dict[str, _Answer] = {}
        super().__init__(*args)

    def prompt_logprobs(self, number: int) -> tuple[TokenLogprobs | None, ...] | None:
        return self._lives[number].prompt_logprobs()

    def _prepare(self, number: int, request_id: str, seed: int) -> Sequence[str]:
        prompt = self.prompts[number]
        params = prompt.params
        live = LiveRequest(
            request_id,
            prompt.text,
            prompt.token_ids,
            make_requests(request_id, prompt.token_ids, params, seed),
            params,
            self.tokenizer,
            continues_prompt=prompt.continues,
            deltas_only=True,
            special_mark=prompt.plan.special_mark if prompt.plan is not None else "",
        )
        self._lives.append(live)
        is_plain = params.logprobs is None and params.best_of is None and not params.stop
        for position, answer_id in enumerate(live.names):
            reader = new_reader(prompt, self.request.split)
            self._answers[answer_id] = _Answer(
                self,
                self.usage,
                self.events,
                self._metrics.gaps,
                answer_id,
                number,
                live,
                live.text_of(position),
                position,
                reader,
                index=number * params.n + position,
                grows=is_plain and not reader.ends_at_repeat and type(self._trace) is Trace,
            )
        return live.names

    def update(self, update: RequestUpdate) -> None:
        answer = self._answers[update.request_id]
        if update.only_appends_tokens and answer.grows:
            answer.grow(update.new_token_ids, time.monotonic())
        else:
            super().update(update)

    def grower(self, answer_id: str) -> Grow:
        answer = self._answers[answer_id]
        return answer.grow if answer.grows else super().grower(answer_id)

    def write_text_to(self, index: int, sink: TextSink) -> None:
        for answer in self._answers.values():
            if answer.index == index and answer.grows:
                answer.sink = sink

    def _take(self, update: RequestUpdate) -> None:
        answer = self._answers[update.request_id]
        if update.prompt_logprobs is not None:
            answer.live.take_prompt_logprobs(update.prompt_logprobs)
        if update.request_id not in self._unfinished:
            # A stop string ended it before; these are the engine's own counts.
            if update.metrics is not None:
                self._metrics.answer_finished(update.metrics, "stop")
            return
        if not update.new_token_ids and update.finish_reason is None:
            return
        count = 0
        now = time.monotonic()
        is_read_apart = self.request.split and (bool(update.logprobs) or not answer.reader.is_plain)
        for part in _parts(update) if is_read_apart else (update,):
            count += self._advance(answer, part)
            if update.request_id not in self._unfinished:
                if part is not update and part.metrics is None and update.metrics is not None:
                    # it ended before the engine did
                    self._metrics.answer_finished(update.metrics, "stop")
                break
        self.count(answer, count, now)

    def _advance(self, answer: _Answer, update: RequestUpdate) -> int:
        """Reads an update; returns how many of its tokens count."""
        began = time.monotonic()
        delta = answer.live.advance(answer.position, update, partial(self._end_answer, answer))
        if not answer.reader.is_plain and answer.reader.is_reasoning:
            self.usage.reasoning_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._unfinished.discard(update.request_id)
            # the engine ended it, no stop string
            if update.finish_reason is not None and update.metrics is not None:
                self._metrics.answer_finished(update.metrics, delta.finish_reason)
                self.weights_version = update.metrics.weights_version or 0
                self.usage.rejected_tokens += (
                    update.metrics.drafted_tokens - update.metrics.accepted_tokens
                )
                self._trace.answered(update.request_id, update.metrics)
        params = self.request.params
        if params.best_of is None:
            is_last = delta.finish_reason is not None
            stop_reason = answer.live.stop_reason(answer.position) if is_last else None
            held = answer.take_held(())
            self._read(answer.index, answer.reader, delta, stop_reason, held)
            if answer.reader.is_over and not is_last:
                self._end_answer(answer)
                self._unfinished.discard(update.request_id)
        elif delta.output is not None:
            for place, best in enumerate(delta.output.completions):
                reader = new_reader(self.prompts[answer.prompt], self.request.split)
                self._read(answer.prompt * params.n + place, reader, best, best.stop_reason)
        if delta.token_ids:
            self._trace.text(update.request_id, began, time.monotonic())
        return len(delta.token_ids)

    def _end_answer(self, answer: _Answer) -> RequestMetrics:
        """A stop string is complete, or a call was repeated. The engine hears of it; its own counts
        follow.
        """
        self._client.end(answer.answer_id)
        return RequestMetrics(
            request_id=answer.answer_id,
            arrival=self._arrival,
            first_scheduled=None,
            first_token=answer.first_token,
            finished=time.monotonic(),
            num_prompt_tokens=len(self.prompts[answer.prompt].token_ids),
            num_output_tokens=answer.num_tokens,
            cached_tokens=self._asked[answer.prompt].cached_tokens or 0,
            host_tokens=0,
            recomputed_tokens=0,
            preemptions=0,
        )

    def count(self, answer: _Answer, count: int, now: float) -> None:
        """An answer gained so many tokens."""
        if not count:
            return
        since = self._arrival if answer.first_token is None else answer.last_token
        self._metrics.tokens(count, now - since, answer.first_token is None)
        if answer.first_token is None:
            answer.first_token = now
            self._ticket.answered()
            self.record.timings.setdefault("first_token", round(now - self._arrival, 6))
        answer.last_token = now
        answer.num_tokens += count
        self.usage.completion_tokens += count
        # a step gives one, and one for each accepted draft token
        self.usage.accepted_tokens += count - 1

    def count_gaps_soon(self) -> None:
        self.callbacks.add(self._metrics.count_gaps)

    def _read(
        self,
        index: int,
        reader: AnswerReader,
        found: RequestDelta | Completion,
        why: str | int | None,
        held: tuple[int, ...] = (),
    ) -> None:
        """Makes events of what is new of a choice, or (best_of) of all of it. `why` it stopped, if
        it did; `held` are tokens before it that were not told yet.
        """
        reason = cast("FinishReason | None", found.finish_reason)
        text = found.text
        token_ids = (*held, *found.token_ids)
        logprobs = found.logprobs or ()
        pieces = reader.feed(text, reason is not None, is_cut=reason == "length")
        if reader.is_over:
            reason = "stop"
            why = None
        if reason is not None:
            # An answer that was cut off says so, calls or not: the last of them may be half of one.
            reason = "tool_calls" if reader.num_calls and reason == "stop" else reason
            self.record.finish_reasons.append(reason)
        self.tell(index, pieces, reader.unmarked(text), token_ids, logprobs, reason, why)

    def tell(
        self,
        index: int,
        pieces: Sequence[Pieces],
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        reason: FinishReason | None = None,
        why: str | int | None = None,
    ) -> None:
        for place, (content, reasoning, calls) in enumerate(pieces):
            last = (reason, why) if place == len(pieces) - 1 else (None, None)
            self._emit(
                GenerationEvent(index, text, content, reasoning, calls, token_ids, logprobs, *last)
            )
            # they are told with the first of the pieces
            text = ""
            token_ids = ()
            logprobs = ()

    def _count_finished(self) -> None:
        params = self.request.params
        seconds = time.monotonic() - self._arrival
        counts = [answer.num_tokens for answer in self._answers.values()]
        self._metrics.request_finished(
            seconds, self.usage.prompt_tokens, counts, params.n, params.max_tokens
        )


def _parts(update: RequestUpdate) -> Iterator[RequestUpdate]:
    """The update token by token: where the text ends an answer, and which part of it a token
    belongs to, must not depend on how many come at a time.
    """
    last = len(update.new_token_ids) - 1
    for place, token_id in enumerate(update.new_token_ids[:last] if last > 0 else ()):
        yield RequestUpdate(
            update.request_id, (token_id,), logprobs=update.logprobs[place : place + 1]
        )
    if last > 0:
        update = update._replace(
            new_token_ids=update.new_token_ids[last:], logprobs=update.logprobs[last:]
        )
    yield update

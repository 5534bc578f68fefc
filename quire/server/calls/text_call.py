"""A call for text: tokens of its answers become text, reasoning and tool calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from quire.engine import make_requests
from quire.frontend.live_request import AnswerText, LiveRequest
from quire.frontend.reasoning import ReasoningSplitter
from quire.observe.tracing import Trace
from quire.outputs import Completion, RequestDelta, TokenLogprobs
from quire.server.calls.answer_reader import AnswerReader, Pieces
from quire.server.calls.engine_call import EngineCall, TextSink
from quire.server.calls.generation import FinishReason, GenerationEvent, Usage
from quire.server.calls.prompts import EncodedPrompt
from quire.server.guard.connection import new_id
from quire.server.listeners import Grow
from quire.step import RequestMetrics, RequestUpdate


@dataclass(slots=True)
class _Answer:
    """One choice, as far as it has come."""

    call: TextCall
    events: list[GenerationEvent]
    """Of the call, that wait for its reader."""
    usage: Usage
    gaps: dict[float, int]
    """`ServerMetrics.gaps`"""
    name: str
    prompt: int
    live: LiveRequest
    text: AnswerText
    """Of this answer, inside of `live`."""
    position: int
    """Which answer of its prompt."""
    reader: AnswerReader
    index: int
    """Which choice it is, if not the best of several are chosen."""
    taker: TextSink | None = None
    """Who takes its text, once the first of it was told."""
    sink: TextSink | None = None
    """The same, if there is nothing in its text but content and, before it, what `splitter` finds."""
    splitter: ReasoningSplitter | None = None
    """Of the reader, as long as there is reasoning or may be."""
    first_token: float | None = None
    last_token: float = 0.0
    num_tokens: int = 0

    def grow(self, token_ids: tuple[int, ...], now: float) -> None:
        """Nearly every token of every stream comes this way, so it is short."""
        sink = self.sink
        if sink is None or self.events or len(token_ids) != 1:
            self.call.grow(self, token_ids, now)
            return
        text = self.text.grow(token_ids)
        gaps, gap = self.gaps, now - self.last_token
        if not gaps:
            self.call.count_gaps_soon()
        gaps[gap] = gaps.get(gap, 0) + 1
        self.last_token = now
        self.num_tokens += 1
        self.usage.completion_tokens += 1
        splitter = self.splitter
        if splitter is None:
            content, reasoning = text, ""
        else:
            self.usage.reasoning_tokens += splitter.is_reasoning
            reasoning, content = splitter.feed(text)
            if splitter.is_over:
                self.splitter = None
                self.reader.is_plain = True
        if not content and not reasoning:
            return  # half a character, or what may begin a tag
        if (content and reasoning) or not sink.push(
            content or reasoning, token_ids, bool(reasoning)
        ):
            self.call.tell(GenerationEvent(self.index, text, content, reasoning, (), token_ids))


class TextCall(EngineCall):
    """A call whose prompts are answered with text, reasoning and tool calls."""

    def __init__(self, *args: Any) -> None:
        self._lives: list[LiveRequest] = []
        self._answers: dict[str, _Answer] = {}
        super().__init__(*args)
        params = self.request.params
        is_plain = (
            params.logprobs is None
            and params.best_of is None
            and not params.stop
            and type(self._trace) is Trace
        )
        self._growing = {
            name
            for name, one in self._answers.items()
            if is_plain and not one.reader.ends_at_repeat
        }
        """Answers that run and of which most updates are nothing but more text."""

    def prompt_logprobs(self, number: int) -> tuple[TokenLogprobs | None, ...] | None:
        return self._lives[number].prompt_logprobs()

    def _prepare(self, number: int, request_id: str) -> Sequence[str]:
        prompt = self.prompts[number]
        ids, params = prompt.token_ids, prompt.params
        requests = make_requests(request_id, ids, params, self._seeds[number])
        mark = prompt.plan.special_mark if prompt.plan is not None else ""
        live = LiveRequest(
            request_id,
            prompt.text,
            ids,
            requests,
            params,
            self.tokenizer,
            prompt.continues,
            True,
            mark,
        )
        self._lives.append(live)
        for position, name in enumerate(live.names):
            reader = new_reader(prompt, self.request.split)
            text, index = live.text_of(position), number * params.n + position
            shared = (self, self._events, self.usage, self._metrics.gaps)
            self._answers[name] = _Answer(
                *shared, name, number, live, text, position, reader, index
            )
        return live.names

    def update(self, update: RequestUpdate) -> None:
        is_growth = (
            update.finish_reason is None and update.prompt_scores is None and not update.scores
        )
        if is_growth and update.request_id in self._growing:
            self._answers[update.request_id].grow(update.new_token_ids, time.monotonic())
        else:
            super().update(update)

    def grower(self, name: str) -> Grow:
        return self._answers[name].grow

    def grow(self, answer: _Answer, token_ids: tuple[int, ...], now: float) -> None:
        """An answer gained tokens, and they can't be told the shortest way (`_Answer.grow`)."""
        if answer.name not in self._growing:
            super().update(RequestUpdate(answer.name, token_ids))
            return
        if not token_ids:
            return
        self._count(answer, len(token_ids), now)
        if answer.reader.is_plain:
            text = answer.text.grow(token_ids)
            self.tell(GenerationEvent(answer.index, text, text, "", (), token_ids))
            return
        text, pieces = "", []
        for token_id in token_ids:  # one by one: each may end the reasoning
            self.usage.reasoning_tokens += answer.reader.is_reasoning
            piece = answer.text.grow((token_id,))
            text += piece
            pieces += answer.reader.feed(piece, False)
        answer.splitter = None if answer.reader.is_plain else answer.splitter
        taker = answer.taker
        if taker is not None and len(pieces) == 1 and not self._events and not pieces[0].tool_calls:
            content, reasoning, _ = pieces[0]
            if not content and not reasoning:
                return  # it is held back
            if not (content and reasoning) and taker.push(
                content or reasoning, token_ids, bool(reasoning)
            ):
                return
        self._tell_pieces(answer.index, pieces, answer.reader.unmarked(text), token_ids)
        self._check_buffer()

    def tell(self, event: GenerationEvent) -> None:
        self._emit(event)
        self._check_buffer()

    def write_text_to(self, index: int, sink: TextSink) -> None:
        for answer in self._answers.values():
            if answer.index == index and answer.name in self._growing:
                reader = answer.reader
                answer.taker = sink
                answer.sink = sink if reader.parser is None and not reader.special_mark else None
                answer.splitter = None if reader.is_plain else reader.splitter

    def count_gaps_soon(self) -> None:
        self.next_turn.add(self._metrics.count_gaps)

    def _take(self, update: RequestUpdate) -> None:
        answer = self._answers[update.request_id]
        if update.prompt_scores is not None:
            answer.live.take_prompt_scores(update.prompt_scores)
        if update.request_id not in self._unfinished:
            # A stop string ended it before; these are the engine's own counts.
            if update.metrics is not None:
                self._metrics.answer_finished(update.metrics, "stop")
            return
        if not update.new_token_ids and update.finish_reason is None:
            return
        count, now = 0, time.monotonic()
        is_read_apart = self.request.split and (bool(update.scores) or not answer.reader.is_plain)
        for part in _parts(update) if is_read_apart else (update,):
            count += self._advance(answer, part)
            if update.request_id not in self._unfinished:
                if part is not update and part.metrics is None and update.metrics is not None:
                    # it ended before the engine did
                    self._metrics.answer_finished(update.metrics, "stop")
                break
        self._count(answer, count, now)

    def _advance(self, answer: _Answer, update: RequestUpdate) -> int:
        """Reads an update; returns how many of its tokens count."""
        began = time.monotonic()
        delta = answer.live.advance(
            answer.position, update, partial(self._end_answer, update.request_id, answer)
        )
        if not answer.reader.is_plain and answer.reader.is_reasoning:
            self.usage.reasoning_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._unfinished.discard(update.request_id)
            self._growing.discard(update.request_id)
            answer.taker = answer.sink = None
            # the engine ended it, no stop string
            if update.finish_reason is not None and update.metrics is not None:
                self._metrics.answer_finished(update.metrics, delta.finish_reason)
                self.usage.rejected_tokens += (
                    update.metrics.drafted_tokens - update.metrics.accepted_tokens
                )
                self._trace.answered(update.request_id, update.metrics)
        params = self.request.params
        if params.best_of is None:
            is_last = delta.finish_reason is not None
            stop_reason = answer.live.stop_reason(answer.position) if is_last else None
            self._read(answer.index, answer.reader, delta, stop_reason)
            if answer.reader.is_over and not is_last:
                self._end_answer(update.request_id, answer)
                self._unfinished.discard(update.request_id)
        elif delta.output is not None:
            for place, best in enumerate(delta.output.completions):
                reader = new_reader(self.prompts[answer.prompt], self.request.split)
                self._read(answer.prompt * params.n + place, reader, best, best.stop_reason)
        if delta.token_ids:
            self._trace.text(update.request_id, began, time.monotonic())
        return len(delta.token_ids)

    def _end_answer(self, name: str, answer: _Answer) -> RequestMetrics:
        """A stop string is complete, or a call was repeated. The engine hears of it; its own counts
        follow.
        """
        self._client.end(name)
        return RequestMetrics(
            request_id=name,
            arrival=self._arrival,
            first_scheduled=None,
            first_token=answer.first_token,
            finished=time.monotonic(),
            num_prompt_tokens=len(self.prompts[answer.prompt].token_ids),
            num_output_tokens=answer.num_tokens,
            cached_tokens=self._cached[answer.prompt] or 0,
            host_tokens=0,
            recomputed_tokens=0,
            preemptions=0,
        )

    def _count(self, answer: _Answer, count: int, now: float) -> None:
        if not count:
            return
        if answer.first_token is None:
            answer.first_token = now
            self._metrics.tokens(count, now - self._arrival, True)
            self.record.timings.setdefault("first_token", round(now - self._arrival, 6))
        elif count == 1:  # as in `_Answer.grow`
            gap = now - answer.last_token
            if not answer.gaps:
                self.count_gaps_soon()
            answer.gaps[gap] = answer.gaps.get(gap, 0) + 1
        else:
            self._metrics.tokens(count, now - answer.last_token, False)
        answer.last_token = now
        answer.num_tokens += count
        self.usage.completion_tokens += count
        if count > 1:  # a step gives one token, and one more for every guess that was right
            self.usage.accepted_tokens += count - 1

    def _read(
        self,
        index: int,
        reader: AnswerReader,
        found: RequestDelta | Completion,
        why: str | int | None,
    ) -> None:
        """Makes events of what is new of a choice, or (best_of) of all of it. `why` it stopped, if
        it did.
        """
        reason = cast("FinishReason | None", found.finish_reason)
        text, token_ids, logprobs = found.text, found.token_ids, found.logprobs or ()
        pieces = reader.feed(text, reason is not None, is_cut=reason == "length")
        if reader.is_over:
            reason, why = "stop", None
        if reason is not None:
            # An answer that was cut off says so, calls or not: the last of them may be half of one.
            reason = "tool_calls" if reader.num_calls and reason == "stop" else reason
            self.record.finish_reasons.append(reason)
        self._tell_pieces(index, pieces, reader.unmarked(text), token_ids, logprobs, reason, why)

    def _tell_pieces(
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
            text, token_ids, logprobs = "", (), ()  # they are told with the first of the pieces

    def _count_finished(self) -> None:
        params, seconds = self.request.params, time.monotonic() - self._arrival
        counts = [answer.num_tokens for answer in self._answers.values()]
        self._metrics.request_finished(
            seconds, self.usage.prompt_tokens, counts, params.n, params.max_tokens
        )


def new_reader(prompt: EncodedPrompt, split: bool) -> AnswerReader:
    """For one answer to a prompt."""
    plan = prompt.plan
    if plan is None or not split:
        return AnswerReader(None, None, partial(new_id, "call-"))
    splitter = ReasoningSplitter(prompt.inside_reasoning) if plan.support.thinks else None
    is_shaped = bool(plan.tools) and prompt.params.structured is not None
    parser = plan.new_parser(prompt.is_begun)
    return AnswerReader(
        splitter, parser, plan.new_call_id, plan.parallel, is_shaped, plan.special_mark
    )


def _parts(update: RequestUpdate) -> Iterator[RequestUpdate]:
    """The update token by token: where the text ends an answer, and which part of it a token
    belongs to, must not depend on how many come at a time.
    """
    last = len(update.new_token_ids) - 1
    for place, token_id in enumerate(update.new_token_ids[:last] if last > 0 else ()):
        yield RequestUpdate(update.request_id, (token_id,), scores=update.scores[place : place + 1])
    if last > 0:
        update = update._replace(
            new_token_ids=update.new_token_ids[last:], scores=update.scores[last:]
        )
    yield update

"""OpenTelemetry spans of requests: where the time of each one went.

A request is one span, `llm_request`, under the span of whoever sent it. Each of its answers has
five below:

    queue         from its arrival until the engine has a place for it
    prompt        until the first token is made
    first_token   from there until its text is handed on
    decode        from the first token until the last
    detokenize    from the first text to the last; `quire.busy_seconds` of it were spent on making text

A text to embed has the first two, and an answer of an offline `LLM` those of the engine: queue,
prompt and decode.

No text of prompts or answers goes into a span. Needs the extra `otel`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import QuireError
from quire.step import RequestMetrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Attributes = Mapping[str, str | int | float | Sequence[str]]


class Trace:
    """One request's. This one keeps nothing, for servers that don't trace. Times are those of
    time.monotonic, which is one clock for all processes of a machine.
    """

    def started(self, name: str, now: float) -> None:
        """An answer left the queue."""

    def text(self, name: str, began: float, now: float) -> None:
        """Tokens of an answer came at `began` and were text at `now`."""

    def answered(self, name: str, metrics: RequestMetrics) -> None:
        """What the engine says about an answer that is complete."""

    def ended(
        self, state: str, attributes: Attributes, error: str | None = None, now: float | None = None
    ) -> None:
        """The request is over, now or then. Only the first call counts."""


class Tracing:
    """Begins traces."""

    def __init__(self, provider: TracerProvider) -> None:
        from quire import __version__

        self._provider = provider
        self._tracer = provider.get_tracer("quire", __version__)

    @classmethod
    def to_endpoint(cls, url: str) -> Tracing:
        """Spans go to a collector that takes OTLP over HTTP, such as
        http://localhost:4318/v1/traces. The standard OTEL_… variables say the rest
        (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS).
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise QuireError(f"traces need {error.name}: pip install 'quire[otel]'") from None
        resource = Resource.create()
        # the environment says nothing
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "quire"}))
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        return cls(provider)

    def begin(self, arrival: float, attributes: Attributes, headers: Mapping[str, str]) -> Trace:
        """A request has come. Its parent is what the sender says of its own trace in `traceparent`
        and `tracestate`.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ahead = time.time_ns() - time.monotonic_ns()
        parent = TraceContextTextMapPropagator().extract(
            {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        )
        span = self._tracer.start_span(
            "llm_request",
            parent,
            SpanKind.SERVER,
            dict(attributes),
            start_time=_wall(arrival, ahead),
        )
        return _RequestTrace(self._tracer, span, arrival, ahead)

    def close(self) -> None:
        """Sends what has not been sent."""
        self._provider.shutdown()


@dataclass(slots=True)
class _AnswerTimes:
    """What is known of an answer; the engine's own times come when it is complete."""

    started: float | None = None
    first_text_began: float | None = None
    first_text: float | None = None
    last_text: float = 0.0
    busy: float = 0.0
    metrics: RequestMetrics | None = None

    def spans(self, arrival: float, end: float) -> list[tuple[str, float, float]]:
        """Names, starts and ends, as far as it came."""
        made = self.first_text_began
        finished = end
        scheduled = self.started
        if self.metrics is not None:
            made = self.metrics.first_token or made
            finished = self.metrics.finished
            scheduled = self.metrics.first_scheduled or scheduled
        spans = [("queue", arrival, end if scheduled is None else scheduled)]
        if scheduled is not None:
            spans.append(("prompt", scheduled, finished if made is None else made))
        if made is not None and self.first_text is not None:
            spans.append(("first_token", made, self.first_text))
        if made is not None and (self.first_text is not None or self.metrics is not None):
            spans.append(("decode", made, finished))
        if made is not None and self.first_text is not None:
            spans.append(("detokenize", self.first_text_began or made, self.last_text))
        return spans


class _RequestTrace(Trace):
    """A request being traced."""

    def __init__(self, tracer: Tracer, span: Span, arrival: float, ahead: int) -> None:
        self._tracer = tracer
        self._span = span
        self._arrival = arrival
        self._ahead = ahead
        """Nanoseconds the clock on the wall is ahead of the monotonic one."""
        self._answers: dict[str, _AnswerTimes] = {}

    def started(self, name: str, now: float) -> None:
        self._answer(name).started = now

    def text(self, name: str, began: float, now: float) -> None:
        answer = self._answer(name)
        if answer.first_text is None:
            answer.first_text_began = began
            answer.first_text = now
        answer.last_text = now
        answer.busy += now - began

    def answered(self, name: str, metrics: RequestMetrics) -> None:
        self._answer(name).metrics = metrics

    def ended(
        self, state: str, attributes: Attributes, error: str | None = None, now: float | None = None
    ) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        if not self._span.is_recording():
            return
        now = time.monotonic() if now is None else now
        context = set_span_in_context(self._span)
        for name, answer in self._answers.items():
            for part, start, end in answer.spans(self._arrival, now):
                about: dict[str, str | float] = {"quire.answer": name}
                if part == "detokenize":
                    about["quire.busy_seconds"] = answer.busy
                span = self._tracer.start_span(
                    part, context, attributes=about, start_time=_wall(start, self._ahead)
                )
                span.end(_wall(max(start, end), self._ahead))
        self._span.set_attributes({"quire.state": state, **attributes, **self._latencies(now)})
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_wall(now, self._ahead))

    def _latencies(self, now: float) -> dict[str, float]:
        """Of the answer that was first, under vLLM's names."""
        found = {"gen_ai.latency.e2e": now - self._arrival}
        spans = [
            span for answer in self._answers.values() for span in answer.spans(self._arrival, now)
        ]
        for part, key in (("queue", "time_in_queue"), ("first_token", "time_to_first_token")):
            ends = [end for name, _, end in spans if name == part]
            if ends:
                found[f"gen_ai.latency.{key}"] = min(ends) - self._arrival
        return found

    def _answer(self, name: str) -> _AnswerTimes:
        return self._answers.setdefault(name, _AnswerTimes())


def _wall(moment: float, ahead: int) -> int:
    return round(moment * 1e9) + ahead

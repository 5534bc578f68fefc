"""Spans of requests: through the real server, its engine process included, into memory and over
OTLP.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from quire.checkpoints.sources import resolve
from quire.errors import QuireError
from quire.load import open_tokenizer
from quire.observe.prometheus import ServerMetrics
from quire.observe.tracing import Tracing
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.link.engine_client import EngineClient
from quire.server.service import GenerationService
from tests.server.harness import SMALL_ENGINE, Server, wait_for

COMPLETIONS = "/v1/completions"
PARTS = ["queue", "prompt", "first_token", "decode", "detokenize"]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextlib.asynccontextmanager
async def traced(
    model: str, **fields: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, InMemorySpanExporter]]:
    """A server without sockets around a real engine process; its spans stay in memory."""
    config = ServerConfig(model=model, engine=SMALL_ENGINE, log_level="error", **fields)
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    metrics = ServerMetrics(model)
    engine = EngineClient(config, metrics, lambda: None)
    ready = await engine.start()
    try:
        tokenizer = open_tokenizer(resolve(model))
        service = GenerationService(config, tokenizer, engine, ready, metrics, Tracing(provider))
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=30
        ) as client:
            yield client, exporter
    finally:
        await engine.stop()


def run(
    test: Callable[[httpx.AsyncClient, InMemorySpanExporter], Any], model: str, **fields: Any
) -> None:
    async def body() -> None:
        async with traced(model, **fields) as (client, exporter):
            await test(client, exporter)

    asyncio.run(body())


def tree(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The request's span and those below it."""
    spans = exporter.get_finished_spans()
    exporter.clear()
    (root,) = [span for span in spans if span.name == "llm_request"]
    below = [span for span in spans if span is not root]
    for span in below:
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert span.context.trace_id == root.context.trace_id
        assert root.start_time <= span.start_time <= span.end_time
    return root, below


@pytest.mark.slow
def test_where_the_time_of_a_request_went(small_model: str) -> None:
    async def check(client: httpx.AsyncClient, exporter: InMemorySpanExporter) -> None:
        body = {
            "prompt": "one two three " * 20,
            "max_tokens": 5,
            "ignore_eos": True,
            "temperature": 0,
        }
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        response = await client.post(COMPLETIONS, json=body, headers=headers)
        assert response.status_code == 200
        root, below = tree(exporter)
        assert f"{root.context.trace_id:032x}" == TRACE
        assert root.parent is not None
        assert f"{root.parent.span_id:016x}" == PARENT
        attributes = dict(root.attributes or {})
        usage = response.json()["usage"]
        assert attributes["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
        assert attributes["gen_ai.usage.completion_tokens"] == 5
        assert attributes["gen_ai.request.id"] == response.json()["id"]
        assert attributes["http.request.id"] == "mine"
        assert attributes["gen_ai.request.max_tokens"] == 5
        assert attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert attributes["quire.state"] == "finished"
        assert "one two three" not in str(attributes)
        assert [span.name for span in below] == PARTS
        queue, prompt, first, decode, detokenize = below
        # One after the other, and the engine's clock is that of this process.
        assert queue.start_time == root.start_time
        assert queue.end_time == prompt.start_time
        assert prompt.end_time == first.start_time == decode.start_time
        assert prompt.end_time > prompt.start_time
        assert decode.end_time <= root.end_time
        assert first.end_time <= detokenize.end_time <= root.end_time
        seconds = attributes["gen_ai.latency.time_to_first_token"]
        assert seconds == pytest.approx((first.end_time - root.start_time) / 1e9, abs=1e-6)
        busy = (detokenize.attributes or {})["quire.busy_seconds"]
        assert 0 < busy <= (detokenize.end_time - detokenize.start_time) / 1e9

        # Nobody's parent when nobody says so; every answer has spans of its own.
        response = await client.post(
            COMPLETIONS, json={"prompt": "a", "max_tokens": 3, "n": 2, "ignore_eos": True}
        )
        root, below = tree(exporter)
        assert root.parent is None
        assert sorted(span.name for span in below) == sorted(2 * PARTS)
        assert len({(span.attributes or {})["quire.answer"] for span in below}) == 2

    run(check, small_model)


@pytest.mark.slow
def test_requests_that_come_to_a_stop_string_or_to_nothing(
    small_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(client: httpx.AsyncClient, exporter: InMemorySpanExporter) -> None:
        long = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "temperature": 0}
        text = (await client.post(COMPLETIONS, json=long)).json()["choices"][0]["text"]
        tree(exporter)
        stop = next(character for character in text[2:] if character not in text[:2])
        response = await client.post(COMPLETIONS, json={**long, "stop": stop})
        assert response.json()["choices"][0]["finish_reason"] == "stop"
        root, below = tree(exporter)
        assert [span.name for span in below] == PARTS
        assert (root.attributes or {})["gen_ai.response.finish_reasons"] == ("stop",)

        # One whose steps fail, and one the engine never takes. Another before: the engine has then
        # heard of the stop string, and no step of that request can take the fault.
        await client.post(COMPLETIONS, json={**long, "max_tokens": 1})
        tree(exporter)
        fault.write_text("raise 1")
        response = await client.post(COMPLETIONS, json=long)
        fault.write_text("")
        assert response.status_code == 500
        root, below = tree(exporter)
        assert root.status.status_code is StatusCode.ERROR
        assert (root.attributes or {})["quire.state"] == "failed"
        assert [span.name for span in below] == ["queue", "prompt"]
        response = await client.post(COMPLETIONS, json={**long, "guided_regex": "("})
        assert response.status_code == 400
        root, below = tree(exporter)
        assert root.status.status_code is StatusCode.ERROR
        assert below == []

    fault = tmp_path / "fault"
    monkeypatch.setenv("QUIRE_TEST_FAULT", str(fault))
    run(check, small_model, engine_module="tests.server.faulty_engine")


@pytest.mark.slow
def test_texts_to_embed_have_spans_too(
    small_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(client: httpx.AsyncClient, exporter: InMemorySpanExporter) -> None:
        body = {"input": ["one two three " * 20, "four"]}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        response = await client.post("/v1/embeddings", json=body, headers=headers)
        assert response.status_code == 200
        root, below = tree(exporter)
        assert f"{root.context.trace_id:032x}" == TRACE
        attributes = dict(root.attributes or {})
        assert attributes["http.route"] == "/v1/embeddings"
        assert attributes["http.request.id"] == "mine"
        assert attributes["quire.state"] == "finished"
        assert attributes["gen_ai.usage.prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
        assert "gen_ai.request.temperature" not in attributes
        assert [span.name for span in below] == 2 * ["queue", "prompt"]
        for queue, prompt in (below[:2], below[2:]):
            assert queue.start_time == root.start_time
            assert queue.end_time == prompt.start_time < prompt.end_time <= root.end_time
        assert len({(span.attributes or {})["quire.answer"] for span in below}) == 2

        fault.write_text("raise 1")
        response = await client.post("/v1/embeddings", json={"input": "one"})
        fault.write_text("")
        assert response.status_code == 500
        root, _ = tree(exporter)
        assert root.status.status_code is StatusCode.ERROR
        assert (root.attributes or {})["quire.state"] == "failed"

    fault = tmp_path / "fault"
    monkeypatch.setenv("QUIRE_TEST_FAULT", str(fault))
    run(check, small_model, engine_module="tests.server.faulty_engine")


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans as a collector does."""

    bodies: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Not to the terminal."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    Collector.bodies = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", Collector.bodies
        server.shutdown()


def test_spans_reach_a_collector(
    small_model: str, collector: tuple[str, list[tuple[str, bytes]]]
) -> None:
    """A whole server, as `--otlp-traces-endpoint` starts it; the last spans are sent when it ends."""
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="pip install 'quire[otel]'"
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url, bodies = collector
    # it imports whatever this process can
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with Server(
        model=small_model, engine=SMALL_ENGINE, otlp_traces_endpoint=url, environment=path
    ) as server:
        server.complete(prompt="Hello", max_tokens=3, ignore_eos=True)
        assert server.process is not None
        server.process.terminate()
        assert server.process.wait(60) == 0
    wait_for(lambda: bodies, "spans")
    names: list[str] = []
    services = set()
    for path, body in bodies:
        assert path == "/v1/traces"
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            services |= {
                one.value.string_value
                for one in group.resource.attributes
                if one.key == "service.name"
            }
            names += [span.name for scope in group.scope_spans for span in scope.spans]
    assert sorted(names) == sorted([*PARTS, "llm_request"])
    assert services == {"quire"}


def test_a_server_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(QuireError, match=r"pip install 'quire\[otel\]'"):
        Tracing.to_endpoint("http://127.0.0.1:9/v1/traces")

"""Parts of the server on their own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI, Request

from quire.backends.select import device_of
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.errors import CapacityError, InvalidRequestError, QuireError
from quire.frontend.gguf_tokenizer import read_gguf_tokenizer
from quire.frontend.live_request import LiveRequest
from quire.frontend.reasoning import ReasoningSplitter
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tool_calls import ToolSupport
from quire.frontend.tool_calls.hermes import HermesParser
from quire.observe.prometheus import ServerMetrics
from quire.observe.request_records import RecordBook, RequestRecord
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.server.api.body import Body
from quire.server.api.completions import CompletionRequest
from quire.server.api.endpoint import convert, ignored_header, parse_body
from quire.server.calls.answer_reader import AnswerReader
from quire.server.calls.prompts import EncodedPrompt, PromptEncoder
from quire.server.calls.text_call import new_reader
from quire.server.config import ServerConfig
from quire.server.errors import ApiError, error_body, field_name, install, to_api_error
from quire.server.guard.admission import Admission
from quire.server.guard.limits import BodyLimits, RequestContext
from quire.server.guard.request_ids import http_request_id_of
from quire.server.link.engine_process import engine_config
from quire.server.link.messages import (
    AddRequest,
    Ready,
    Updates,
    decode_command,
    decode_event,
    encode,
    pack_tokens,
)
from quire.step import PromptLogprobs, RequestMetrics, RequestUpdate, TokenLogprob
from tests.frontend.helpers import byte_level_metadata, train_byte_level
from tests.frontend.templates import QWEN
from tests.frontend.test_tool_plan import make_tokenizer
from tests.server.harness import error_of


class TestAdmission:
    def test_answers_are_bounded_and_places_come_back_once(self) -> None:
        admission = Admission(max_running=2, max_queued_requests=2, max_queued_tokens=100)
        tickets = [admission.enter(1) for _ in range(4)]
        with pytest.raises(ApiError, match="at most 4") as caught:
            admission.enter(1)
        assert caught.value.status == 429
        assert caught.value.headers()["retry-after"] == "1"
        tickets[0].release()
        tickets[0].release()
        assert admission.num_answers == 3
        admission.enter(1)
        with pytest.raises(ApiError):
            admission.enter(1)

    def test_a_request_takes_a_place_for_each_of_its_answers(self) -> None:
        admission = Admission(max_running=2, max_queued_requests=2, max_queued_tokens=100)
        admission.enter(3)
        with pytest.raises(ApiError, match="3 answers are running or waiting"):
            admission.enter(2)
        assert admission.num_answers == 3
        admission.enter(1)

    def test_tokens_are_bounded_while_they_wait(self) -> None:
        admission = Admission(max_running=2, max_queued_requests=8, max_queued_tokens=100)
        first, second = admission.enter(1), admission.enter(1)
        first.add_tokens(80)
        with pytest.raises(ApiError, match="80 prompt tokens are waiting"):
            second.add_tokens(30)
        first.begun(80)
        second.add_tokens(30)
        assert admission.num_tokens == 30
        first.release()
        second.release()
        assert (admission.num_tokens, admission.num_answers) == (0, 0)

    def test_an_empty_server_takes_anything(self) -> None:
        admission = Admission(max_running=1, max_queued_requests=1, max_queued_tokens=10)
        ticket = admission.enter(50)
        ticket.add_tokens(5000)
        ticket.release()
        assert admission.num_tokens == 0

    def test_the_draft_follows_the_pace(self) -> None:
        now = [0.0]
        admission = Admission(1, 20, 100, clock=lambda: now[0])
        for _ in range(10):
            admission.enter(1).release()
            now[0] += 2.0
        tickets = [admission.enter(1) for _ in range(21)]
        with pytest.raises(ApiError) as caught:
            admission.enter(1)
        # Twenty wait and one ends every two seconds: ten are gone in about twenty seconds.
        assert 15 <= (caught.value.retry_after or 0) <= 25
        assert len(tickets) == 21


class TestRecords:
    def test_a_book_forgets_the_oldest(self) -> None:
        book = RecordBook(keep=2)
        for i in range(3):
            book.add(RequestRecord(f"response-{i}", f"request-{i % 2}", "/", 0.0))
        assert book.find("response-0", "") is None
        found = book.find("request-0", "")
        assert found is not None
        assert found.response_id == "response-2"
        assert book.find("request-1", "") is book.find("response-1", None)

    def test_two_keys_with_one_request_id_find_their_own(self) -> None:
        book = RecordBook(keep=4)
        mine = RequestRecord("cmpl-1", "same", "/", 0.0, notes={"user": "me"}, owner="a")
        other = RequestRecord("cmpl-2", "same", "/", 0.0, notes={"user": "you"}, owner="b")
        book.add(mine)
        book.add(other)
        assert book.find("same", "a") is mine
        assert book.find("same", "b") is other
        assert (
            book.find("same", "c") is book.find("cmpl-2", "a") is book.find("cmpl-1", "b") is None
        )
        assert book.find("same", None) is other
        assert "owner" not in mine.describe()


class TestErrors:
    def test_fields_are_named_as_clients_write_them(self) -> None:
        assert field_name(("messages", 0, "content", 1, "text")) == "messages[0].content[1].text"
        assert field_name(("stop", "list[str]", 3)) == "stop[3]"
        assert field_name(("stop", "str")) == "stop"
        assert field_name(()) == ""

    @pytest.mark.parametrize(
        ("error", "status"),
        [
            (InvalidRequestError("n", "is wrong"), 400),
            (CapacityError("too large"), 400),
            (QuireError("internal words"), 500),
            (RuntimeError("secret"), 500),
            (ApiError(429, "busy"), 429),
        ],
    )
    def test_what_nobody_foresaw_is_not_shown(self, error: Exception, status: int) -> None:
        found = to_api_error(error)
        assert found.status == status
        assert "secret" not in found.message
        assert "internal" not in found.message

    def test_what_nobody_foresaw_has_the_shape_of_an_error(self) -> None:
        app = FastAPI()
        install(app)

        @app.get("/")
        async def fail() -> None:
            raise RuntimeError("secret")

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(RequestContext(app, ServerMetrics("m")))
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.get("/")

        response = asyncio.run(ask())
        assert "secret" not in error_of(response, 500)

    def test_each_protocol_has_its_shape(self) -> None:
        error = ApiError(503, "later")
        assert error_body("/v1/messages", error, "id")["error"]["type"] == "overloaded_error"
        assert error_body("/v1/chat/completions", error, "id")["error"]["request_id"] == "id"

    def test_headers_hold_nothing_odd(self) -> None:
        assert http_request_id_of([(b"x-request-id", b"abc-1")]) == "abc-1"
        for bad in (b"", b"a b", b"x" * 200, "ä".encode(), b"a\r\nb"):
            assert http_request_id_of([(b"x-request-id", bad)]).startswith("req-")
        assert ignored_header(["a\r\nset-cookie: x"])["x-quire-ignored"] == "a??set-cookie??x"
        assert len(ignored_header(["x" * 500] * 100)["x-quire-ignored"]) == 1000


def test_messages_survive_the_wire() -> None:
    metrics = RequestMetrics("a", 1.0, 1.5, 2.0, 3.0, 4, 5, 0, 0, 0, 0)
    scores = (TokenLogprob(7, -0.5, 1, ((7, -0.5), (8, -1.5))),)
    update = RequestUpdate(
        "a", (7,), "stop", 7, None, metrics, scores, PromptLogprobs(1, scores), b"\x00\x01"
    )
    event = Updates(updates=[update], accepted=["a"], cached={"a": 16})
    assert decode_event(encode(event)) == event
    command = AddRequest(
        "a", pack_tokens((1, 2)), {"seed": 2**64 - 1}, 2**64 - 1, ResolvedTokens(((1,),), (2,)), 1.5
    )
    assert decode_command(encode(command)) == command
    assert (command.num_prompt_tokens, command.prompt_token_ids) == (2, (1, 2))


def test_an_answer_is_taken_apart() -> None:
    names = iter(["call-1", "call-2"])
    reader = AnswerReader(ReasoningSplitter(), HermesParser(), lambda: next(names))
    text = (
        '<think>\nhm</think>\nSure. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    )
    pieces = [one for character in text for one in reader.feed(character, False)] + reader.feed(
        "", True
    )
    assert "".join(reasoning for _, reasoning, _ in pieces) == "hm"
    assert "".join(content for content, _, _ in pieces) == "Sure."
    calls = [call for _, _, calls in pieces for call in calls]
    assert (calls[0].id, calls[0].name) == ("call-1", "f")
    assert "".join(call.arguments for call in calls) == '{"a": 1}'
    assert reader.num_calls == 1


def test_one_call_is_told_if_one_is_wanted() -> None:
    """Also where no grammar holds the model to it."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for parallel, expected in ((True, ["f", "f"]), (False, ["f"])):
        reader = AnswerReader(None, HermesParser(), lambda: "id", parallel)
        fed = [reader.feed(character, False) for character in f"{call}\n{call} Done."] + [
            reader.feed("", True)
        ]
        pieces = [piece for pieces in fed for piece in pieces]
        calls = [one for _, _, calls in pieces for one in calls]
        assert [one.name for one in calls if one.name is not None] == expected
        assert "".join(one.arguments for one in calls) == '{"a": 1}' * len(expected)
        assert "".join(content for content, _, _ in pieces).strip() == "Done."
        assert reader.num_calls == len(expected)
    tool = {"type": "function", "function": {"name": "f"}}
    plan = ToolSupport(make_tokenizer(QWEN)).plan(
        [{"role": "user", "content": "Hi"}], [tool], parallel=False
    )
    prompt = EncodedPrompt((1,), None, False, SamplingParams(), ResolvedTokens(), plan)
    ((_, _, found),) = new_reader(prompt, split=True).feed(f"{call}\n{call}", True)
    assert [one.name for one in found] == ["f"]


def test_special_tokens_are_added_to_a_text_unless_not_wanted() -> None:
    metadata = byte_level_metadata(train_byte_level("qwen2"), "qwen2") | {
        "tokenizer.ggml.add_bos_token": True
    }
    tokenizer = Tokenizer(read_gguf_tokenizer(metadata))
    encoder = PromptEncoder(tokenizer)
    limits = Ready(tokenizer.vocab_size, 8, 100, 64, 64, 16, "fcfs", "fp")
    prompts = []
    for wanted in (True, False):
        body = CompletionRequest.model_validate({"prompt": "one two", "add_special_tokens": wanted})
        request = body.to_generation()
        prompts.append(encoder.encode(request, request.prompts[0], limits).token_ids)
    assert prompts[0] == (metadata["tokenizer.ggml.bos_token_id"], *prompts[1])


@pytest.mark.parametrize("deltas_only", [False, True])
def test_logprobs_are_spelt_once_for_those_who_read_deltas(
    small_model: str, deltas_only: bool
) -> None:
    """A server reads deltas, and asks for the prompt's logprobs when it writes the response:
    thousands of them would hold the event loop up.
    """
    tokenizer = Tokenizer.from_hf_folder(Path(small_model))
    params = SamplingParams(logprobs=1, prompt_logprobs=1)
    requests = make_requests("a", (1, 2), params, 0)
    live = LiveRequest("a", None, (1, 2), requests, params, tokenizer, True, deltas_only)
    scores = (TokenLogprob(2, -0.5, 1, ((2, -0.5),)),)
    live.take_prompt_logprobs(PromptLogprobs(1, scores))
    metrics = RequestMetrics("a", 1.0, 1.5, 2.0, 3.0, 4, 5, 0, 0, 0, 0)
    delta = live.advance(
        0, RequestUpdate("a", (2,), "length", None, None, metrics, scores), lambda: metrics
    )
    assert delta.logprobs[0].logprob == -0.5
    assert delta.output is not None
    assert (delta.output.prompt_logprobs is None) is deltas_only
    assert (delta.output.completions[0].logprobs is None) is deltas_only
    found = live.prompt_logprobs()
    assert found is not None
    assert [entry and entry.token_id for entry in found] == [None, 2]


def test_bodies_are_bounded_together() -> None:
    async def read_all(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        scope["done"].set()
        await scope["go"].wait()

    async def run() -> None:
        limits = BodyLimits(read_all, max_bytes=100, max_total_bytes=150, seconds=5)
        go = asyncio.Event()

        def request(size: int) -> tuple[dict[str, Any], Any]:
            scope = {
                "type": "http",
                "headers": [(b"content-length", b"%d" % size)],
                "path": "/",
                "state": {},
            }
            scope |= {"done": asyncio.Event(), "go": go}
            message = {"type": "http.request", "body": b"x" * size, "more_body": False}

            async def receive() -> Any:
                return message

            return scope, limits(scope, receive, None)  # type: ignore[arg-type]

        scope, first = request(90)
        task = asyncio.create_task(first)
        await scope["done"].wait()
        with pytest.raises(ApiError, match="too many large requests") as caught:
            await request(90)[1]
        assert caught.value.status == 503
        go.set()
        await task
        await request(90)[1]

    asyncio.run(run())


@pytest.mark.parametrize(("size", "is_beside"), [(100, False), (100_000, True)])
def test_large_bodies_are_converted_beside_the_loop(size: int, is_beside: bool) -> None:
    async def run() -> bool:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"x" * size}

        request = Request({"type": "http", "headers": []}, receive)
        return await convert(request, threading.get_ident) != threading.get_ident()

    assert asyncio.run(run()) is is_beside


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": -1}, "port"),
        ({"engine": {"nonsense": 1}}, "nonsense"),
        ({"engine": {"dtype": "int3"}}, "dtype"),
        ({"tls_key": "x"}, "certificate"),
        ({"api_keys": (" ",)}, "api_keys"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"queue_seconds": 0}, "queue_seconds"),
        ({"queue_seconds": float("nan")}, "queue_seconds"),
        ({"stall_seconds": 10.0, "hang_seconds": 5.0}, "hang_seconds"),
    ],
)
def test_a_configuration_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ServerConfig(**fields)


def test_who_can_reach_the_server() -> None:
    assert not ServerConfig().is_public
    assert not ServerConfig(host="localhost").is_public
    assert not ServerConfig(host="::1").is_public
    assert ServerConfig(host="0.0.0.0").is_public
    assert "secret" not in repr(ServerConfig(api_keys=("secret",)))


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ('{"a": [' + "1," * 150_000 + "1]}", False),
        ('{"a": [' + "1," * 250_000 + "1]}", True),
        ('{"a": [' + "[]," * 40_000 + "1]}", False),
        ('{"a": [' + "[]," * 60_000 + "1]}", True),
        ('{"a": [' + '"x",' * 60_000 + "1]}", True),
        ('{"a": [' + '"\\\\\\"[",' * 30_000 + "1]}", False),
        ('{"a": "' + "[{,," * 200_000 + '"}', False),
        ('{"a": "' + '\\"' * 500_000 + '"}', False),
        ('{"a": "' + "\\\\" * 500_000 + '", "b": [' + "[]," * 60_000 + "1]}", True),
    ],
)
def test_bodies_of_too_many_parts_are_refused_before_they_are_made(
    body: str, is_refused: bool
) -> None:
    if is_refused:
        with pytest.raises(ApiError, match="too many parts"):
            parse_body(body.encode(), Body)
    else:
        assert parse_body(body.encode(), Body).model_extra


def test_a_server_computes_less_at_once_than_the_engine_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, where nothing is said; what is said counts."""
    monkeypatch.setattr(
        "quire.server.link.engine_process.pick_device", lambda name: device_of(torch.device(name))
    )
    chosen = engine_config({"device": "cuda"})
    assert (
        chosen.limits(on_gpu=True).max_batched_tokens
        == EngineConfig().limits(on_gpu=True).max_batched_tokens // 2
    )
    assert engine_config({"device": "cuda", "max_batched_tokens": 300}).max_batched_tokens == 300
    assert engine_config({"device": "cpu"}).max_batched_tokens is None

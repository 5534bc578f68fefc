"""The official clients of OpenAI and Anthropic, against a server that wants a key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.late_import import LateModule
from tests.server.harness import KEY, Server

pytestmark = pytest.mark.slow

anthropic: Any = LateModule("anthropic")
openai: Any = LateModule("openai")
ASK: Any = [{"role": "user", "content": "Name three colours."}]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def tool() -> Any:
    return openai.pydantic_function_tool(Weather, name="weather")


@pytest.fixture(scope="module")
def client(keyed: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(keyed: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=keyed.url, api_key=KEY, max_retries=0) as client:
        yield client


# OpenAI


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_chat(client: Any) -> None:
    made = client.chat.completions.create(
        model="smollm2",
        messages=ASK,
        n=2,
        seed=3,
        max_completion_tokens=10,
        temperature=0.9,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=3,
        user="me",
        extra_body={"top_k": 20, "min_p": 0.01, "return_token_ids": True},
    )
    assert made.id.startswith("chatcmpl-")
    assert made.system_fingerprint
    turns = [*ASK, made.choices[0].message.model_dump(), *ASK]  # with null for all it does not have
    assert client.chat.completions.create(model="smollm2", messages=turns, max_tokens=1).choices
    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.choices[0].message.content != made.choices[1].message.content
    for choice in made.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(choice.token_ids)  # type: ignore[attr-defined]
        assert len(choice.logprobs.content[0].top_logprobs) == 3
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.usage.prompt_tokens_details is not None
    again = client.chat.completions.create(
        model="smollm2",
        messages=ASK,
        seed=3,
        max_tokens=10,
        temperature=0.9,
        stop=["zebra", "\n\n\n"],
    )
    third = client.chat.completions.create(
        model="smollm2", messages=ASK, seed=3, max_tokens=10, temperature=0.9
    )
    assert again.choices[0].message.content == third.choices[0].message.content


def test_chat_streams(client: Any) -> None:
    whole = client.chat.completions.create(
        model="smollm2", messages=ASK, temperature=0, max_tokens=12
    )
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=ASK,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].choices == []
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    # This one takes an answer that was cut off for an error, so here is one that ends.
    forced = {"structured_outputs": {"choice": ["Red, green and blue."]}}
    with client.chat.completions.stream(model="smollm2", messages=ASK, extra_body=forced) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == "Red, green and blue."


def test_chat_parses_what_a_schema_shaped(client: Any) -> None:
    parsed = client.chat.completions.parse(
        model="smollm2", messages=ASK, response_format=Weather, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    loose = client.chat.completions.create(
        model="smollm2",
        messages=ASK,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=5,
    )
    assert (loose.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_chat_tools(client: Any, choice: Any) -> None:
    arguments: dict[str, Any] = {
        "model": "smollm2",
        "messages": ASK,
        "tools": [tool()],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    parsed = client.chat.completions.parse(**arguments)
    (call,) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    assert parsed.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**arguments) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0].message
    assert len(pieces) > 2
    (again,) = final.tool_calls or []
    assert again.function.arguments == call.function.arguments
    history = [
        *ASK,
        parsed.choices[0].message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model="smollm2", messages=history, tools=[tool()], max_tokens=5
    )
    assert answer.usage is not None
    plain = client.chat.completions.create(
        model="smollm2", messages=ASK, tools=[tool()], tool_choice="none", max_tokens=5
    )
    assert plain.choices[0].message.tool_calls is None


def test_completions(client: Any) -> None:
    made = client.completions.create(
        model="smollm2",
        prompt=["One, two,", "A, B,"],
        max_tokens=4,
        temperature=0,
        echo=True,
        logprobs=2,
    )
    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.choices[0].text.startswith("One, two,")
    assert made.choices[0].logprobs is not None
    tokens = client.completions.create(model="smollm2", prompt=[[504, 3575], [28]], max_tokens=2)
    assert len(tokens.choices) == 2
    chunks = list(
        client.completions.create(
            model="smollm2", prompt="One,", max_tokens=3, temperature=0, stream=True
        )
    )
    whole = client.completions.create(model="smollm2", prompt="One,", max_tokens=3, temperature=0)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="smollm2", prompt="One,", suffix="three")


def test_embeddings(client: Any) -> None:
    # in base64, as this client likes it
    made = client.embeddings.create(model="smollm2", input=["red", "blue"])
    plain = client.embeddings.create(model="smollm2", input="red", encoding_format="float")
    assert len(made.data) == 2
    assert made.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-7)
    assert (
        len(client.embeddings.create(model="smollm2", input="red", dimensions=16).data[0].embedding)
        == 16
    )


def test_responses(client: Any) -> None:
    question = "What is the capital of France? Answer in one word."
    arguments: dict[str, Any] = {"model": "smollm2", "input": question, "temperature": 0}
    made = client.responses.create(**arguments, max_output_tokens=100, instructions="Be short.")
    assert made.status == "completed"
    assert made.output_text
    with client.responses.stream(
        **arguments, max_output_tokens=100, instructions="Be short."
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == made.output_text
    parsed = client.responses.parse(**arguments, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    (follow_up,) = client.responses.create(
        model="smollm2",
        input=[
            {"role": "user", "content": "Hi"},
            *made.output,
            {"role": "user", "content": "And?"},
        ],  # type: ignore[list-item]
        max_output_tokens=3,
    ).output
    assert follow_up.type == "message"


def test_responses_tools(client: Any) -> None:
    function = {"type": "function", **tool()["function"]}
    arguments: dict[str, Any] = {
        "model": "smollm2",
        "input": [{"role": "user", "content": "Weather?"}],
        "tools": [function],
        "tool_choice": {"type": "function", "name": "weather"},
        "temperature": 0,
    }
    (call,) = client.responses.create(**arguments).output
    assert call.type == "function_call"
    assert Weather.model_validate_json(call.arguments)
    events = list(client.responses.create(**arguments, stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output[0].arguments == call.arguments  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turns: Any = [*arguments["input"], call, result]
    answer = client.responses.create(model="smollm2", input=turns, max_output_tokens=4)
    assert answer.usage is not None


def test_errors_are_the_clients_own(keyed: Server, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="smollm2", messages=ASK, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=ASK)
    with (
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(model="smollm2", messages=ASK)
    raw = client.chat.completions.with_raw_response.create(
        model="smollm2",
        messages=ASK,
        max_tokens=1,
        extra_headers={"x-request-id": "mine"},
        extra_body={"colour": "red"},
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-quire-ignored"] == "colour"
    assert raw.parse().choices


def test_openai_async(keyed: Server) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0
        ) as client:
            fields: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 8}
            many = [client.chat.completions.create(messages=ASK, **fields) for _ in range(4)]
            texts = {one.choices[0].message.content for one in await asyncio.gather(*many)}
            stream = await client.chat.completions.create(messages=ASK, stream=True, **fields)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert texts == {"".join(pieces)}
            done = await client.completions.create(prompt="One,", **fields)
            assert done.choices[0].text
            vectors = await client.embeddings.create(model="smollm2", input="red")
            assert len(vectors.data) == 1
            async with client.responses.stream(
                model="smollm2", input="Hi", temperature=0
            ) as responses:
                async for _ in responses:
                    pass
                assert (await responses.get_final_response()).output_text
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(messages=[], **fields)
            assert [model.id async for model in client.models.list()] == ["smollm2"]
            many_tokens: dict[str, Any] = {**fields, "max_tokens": 100}
            parsed = await client.chat.completions.parse(
                messages=ASK, response_format=Weather, **many_tokens
            )
            assert isinstance(parsed.choices[0].message.parsed, Weather)
            called = await client.chat.completions.create(
                messages=ASK, tools=[tool()], tool_choice=NAMED, stream=True, **many_tokens
            )
            deltas = [
                call async for chunk in called for call in chunk.choices[0].delta.tool_calls or ()
            ]
            arguments = "".join(call.function.arguments or "" for call in deltas if call.function)
            assert Weather.model_validate_json(arguments)

    asyncio.run(run())


# Anthropic


def test_models_as_anthropic_lists_them(claude: Any) -> None:
    (model,) = claude.models.list()
    assert (model.id, model.type, model.display_name) == ("smollm2", "model", "smollm2")
    assert claude.models.retrieve("smollm2").created_at == model.created_at


def test_messages(claude: Any) -> None:
    arguments: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 40,
        "system": "Be short.",
        "messages": ASK,
        "extra_body": {"temperature": 0},
    }
    made = claude.messages.create(**arguments)
    assert made._request_id  # from the header this client reads
    assert made.stop_reason in ("end_turn", "max_tokens")
    (block,) = made.content
    assert block.type == "text"
    with claude.messages.stream(**arguments) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert final.content[0].type == "text"
    assert final.usage.output_tokens == made.usage.output_tokens
    counted = claude.messages.count_tokens(model="smollm2", system="Be short.", messages=ASK)
    cached = made.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == made.usage.input_tokens + cached
    raw = list(claude.messages.create(**arguments, stream=True))
    assert (raw[0].type, raw[-1].type) == ("message_start", "message_stop")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_messages_tools(claude: Any, choice: Any) -> None:
    function: Any = {
        "name": "weather",
        "description": "d",
        "input_schema": Weather.model_json_schema(),
    }
    arguments: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 100,
        "messages": ASK,
        "tools": [function],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 0},
    }
    made = claude.messages.create(**arguments)
    (block,) = made.content
    assert made.stop_reason == "tool_use"
    assert block.type == "tool_use"
    assert Weather.model_validate(block.input)
    with claude.messages.stream(**arguments) as stream:
        pieces = [event for event in stream if event.type == "input_json"]
        (again,) = stream.get_final_message().content
    assert len(pieces) > 2
    assert again.type == "tool_use"
    assert again.input == block.input
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    turns: Any = [
        *ASK,
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(model="smollm2", max_tokens=4, messages=turns, tools=[function])
    assert answer.content


def test_anthropic_errors(keyed: Server, claude: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        claude.messages.create(model="smollm2", max_tokens=4, messages=ASK, stop_sequences=["  "])
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", max_tokens=4, messages=ASK)
    with (
        anthropic.Anthropic(base_url=keyed.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model="smollm2", max_tokens=4, messages=ASK)


def test_anthropic_async(keyed: Server) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(
            base_url=keyed.url, api_key=KEY, max_retries=0
        ) as client:
            fields: dict[str, Any] = {
                "model": "smollm2",
                "max_tokens": 8,
                "extra_body": {"temperature": 0},
            }
            made = await client.messages.create(messages=ASK, **fields)
            async with client.messages.stream(messages=ASK, **fields) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            assert made.content[0].type == "text"
            assert made.content[0].text == text
            counted = await client.messages.count_tokens(model="smollm2", messages=ASK)
            assert counted.input_tokens == made.usage.input_tokens + (
                made.usage.cache_read_input_tokens or 0
            )
            function: Any = {"name": "weather", "input_schema": Weather.model_json_schema()}
            many_tokens: dict[str, Any] = {**fields, "max_tokens": 100, "tools": [function]}
            async with client.messages.stream(
                messages=ASK, tool_choice={"type": "tool", "name": "weather"}, **many_tokens
            ) as stream:
                (block,) = (await stream.get_final_message()).content
            assert block.type == "tool_use"
            assert Weather.model_validate(block.input)
            with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
                await client.messages.create(messages=ASK, **{**fields, "max_tokens": 0})
            assert caught.value.request_id

    asyncio.run(run())

"""LangChain and instructor, against a server that wants a key."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, SecretStr

from tests.late_import import LateModule
from tests.server.harness import KEY, Server

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    import instructor
    import openai
    from langchain_core import messages
    from langchain_openai import ChatOpenAI
else:
    instructor, messages, openai = map(
        LateModule, ("instructor", "langchain_core.messages", "openai")
    )


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def chain(keyed: Server) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="smollm2",
        base_url=f"{keyed.url}/v1",
        api_key=SecretStr(KEY),
        temperature=0,
        max_retries=0,
        timeout=60,
    )


def test_langchain(chain: ChatOpenAI) -> None:
    made = chain.bind(max_tokens=10).invoke("Name three colours.")
    assert isinstance(made, messages.AIMessage)
    pieces = [chunk.content for chunk in chain.bind(max_tokens=10).stream("Name three colours.")]
    assert "".join(map(str, pieces)) == made.content
    assert made.usage_metadata is not None

    async def several() -> list[Any]:
        return await chain.bind(max_tokens=5).abatch(["Hi", "Hi"])

    first, second = asyncio.run(several())
    assert first.content == second.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chain: ChatOpenAI, method: Any) -> None:
    found = chain.with_structured_output(Weather, method=method).invoke("The weather in Rome?")
    assert isinstance(found, Weather)
    pieces = list(
        chain.with_structured_output(Weather, method=method).stream("The weather in Rome?")
    )
    assert pieces[-1] == found


def test_langchain_tools(chain: ChatOpenAI) -> None:
    from langchain_core.tools import tool

    made_tool = tool(weather)
    bound = chain.bind_tools([made_tool], tool_choice="weather")
    question = messages.HumanMessage("Weather?")
    made = bound.invoke([question])
    assert isinstance(made, messages.AIMessage)
    (call,) = made.tool_calls
    assert call["args"]["city"] in ("Rome", "Oslo")
    whole: Any = None
    for chunk in bound.stream([question]):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == call["args"]
    result = messages.ToolMessage(made_tool.invoke(call["args"]), tool_call_id=call["id"])
    assert chain.bind(max_tokens=5).invoke([question, made, result]).content is not None


def test_langchain_embeddings(keyed: Server) -> None:
    from langchain_openai import OpenAIEmbeddings

    vectors = OpenAIEmbeddings(
        model="smollm2",
        base_url=f"{keyed.url}/v1",
        api_key=SecretStr(KEY),
        check_embedding_ctx_length=False,
    ).embed_documents(["red", "blue"])
    assert [len(vector) for vector in vectors] == [576, 576]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
@pytest.mark.filterwarnings("ignore:FUNCTIONS is deprecated")
def test_instructor(keyed: Server, mode: str) -> None:
    client = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0)
    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    found = patched.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "The weather in Rome?"}],
        response_model=Weather,
        temperature=0,
        max_tokens=200,
        max_retries=1,
    )
    assert isinstance(found, Weather)


@pytest.mark.filterwarnings("ignore:FUNCTIONS is deprecated")
def test_instructor_async(keyed: Server) -> None:
    async def ask() -> Weather:
        async with openai.AsyncOpenAI(
            base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0
        ) as client:
            patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
            return await patched.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "The weather in Rome?"}],
                response_model=Weather,
                temperature=0,
                max_tokens=200,
                max_retries=1,
            )

    assert isinstance(asyncio.run(ask()), Weather)

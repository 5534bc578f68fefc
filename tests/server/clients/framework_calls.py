"""Python frameworks that speak OpenAI's API, run by test_client_programs: python framework_calls.py
NAME URL
"""

import asyncio
import json
import sys
from typing import Any


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


async def inspect_ai(url: str) -> dict[str, Any]:
    from inspect_ai.model import ChatMessageTool, ChatMessageUser, get_model
    from inspect_ai.tool import ToolInfo, ToolParams

    model = get_model("openai-api/quire/scripted", base_url=f"{url}/v1", api_key="none")
    parameters = ToolParams(properties={"city": {"type": "string"}}, required=["city"])  # type: ignore[dict-item]
    tools = [ToolInfo(name="weather", description="The weather in a city", parameters=parameters)]
    asked: list[Any] = [ChatMessageUser(content="Please @weather")]
    called = await model.generate(asked, tools=tools)
    (call,) = called.message.tool_calls or []
    result = ChatMessageTool(
        content=weather(**call.arguments), tool_call_id=call.id, function="weather"
    )
    after = await model.generate([*asked, called.message, result], tools=tools)
    return {"chat": (await model.generate("hi")).completion, "tool": after.completion}


async def autogen(url: str) -> dict[str, Any]:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "family": "unknown",
    }
    info["structured_output"] = True
    client = OpenAIChatCompletionClient(
        model="scripted", base_url=f"{url}/v1", api_key="none", model_info=info
    )
    plain = await AssistantAgent("plain", client).run(task="hi")
    agent = AssistantAgent("agent", client, tools=[weather], reflect_on_tool_use=True)
    called = await agent.run(task="Please @weather")
    return {"chat": plain.messages[-1].to_text(), "tool": called.messages[-1].to_text()}


async def strands(url: str) -> dict[str, Any]:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(
        client_args={"base_url": f"{url}/v1", "api_key": "none"}, model_id="scripted"
    )
    plain = await Agent(model=model, callback_handler=None).invoke_async("hi")
    agent = Agent(model=model, tools=[tool(weather)], callback_handler=None)
    return {
        "chat": str(plain).strip(),
        "tool": str(await agent.invoke_async("Please @weather")).strip(),
    }


async def mirascope(url: str) -> dict[str, Any]:
    from mirascope import llm

    llm.register_provider(
        "openai:completions", scope="quire/", base_url=f"{url}/v1", api_key="none"
    )
    model = llm.model("quire/scripted")
    plain = model.call("hi")
    called = model.call("Please @weather", tools=[llm.tool(weather)])
    after = called.resume(called.execute_tools())
    return {"chat": plain.text(), "tool": after.text()}


async def guidance(url: str) -> dict[str, Any]:
    import guidance as library

    model = library.models.experimental.VLLMModel("scripted", base_url=f"{url}/v1", api_key="none")
    with library.user():
        model += "Which?"
    with library.assistant():
        model += library.select(["red", "blue"], name="colour")
    return {"choice": model["colour"]}


found = asyncio.run(globals()[sys.argv[1]](sys.argv[2]))
print(json.dumps(found))

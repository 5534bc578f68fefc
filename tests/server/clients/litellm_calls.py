"""LiteLLM in its ways to this server; prints one JSON object. Run by an interpreter that has it,
against the URL it is given.
"""

import asyncio
import json
import sys

import litellm

URL = sys.argv[1]
OPENAI = {"api_base": f"{URL}/v1", "api_key": "none"}
ASK = [{"role": "user", "content": "hi"}]
litellm.suppress_debug_info = True

bridged = litellm.completion(
    model="openai/responses/scripted", messages=ASK, logprobs=True, top_logprobs=2, **OPENAI
)
first = litellm.responses(model="openai/scripted", input="hi", **OPENAI)
second = litellm.responses(
    model="openai/scripted", input="more", previous_response_id=first.id, **OPENAI
)
tools = [
    {
        "name": "weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
messages = litellm.anthropic.messages.acreate(
    model="openai/scripted",
    messages=ASK,
    max_tokens=50,
    tools=tools,
    tool_choice={"type": "auto"},
    thinking={"type": "enabled", "budget_tokens": 1024},
    **OPENAI,
)
pieces = litellm.completion(model="openai/scripted", messages=ASK, stream=True, **OPENAI)
native = litellm.completion(model="anthropic/scripted", messages=ASK, api_base=URL, api_key="none")
found = {
    "chat": litellm.completion(model="openai/scripted", messages=ASK, **OPENAI)
    .choices[0]
    .message.content,
    "stream": "".join(piece.choices[0].delta.content or "" for piece in pieces),
    "chat through responses": bridged.choices[0].message.content,
    "responses": first.output[0].content[0].text,
    "previous_response_id": second.output[0].content[0].text,
    "messages through responses": asyncio.run(messages)["content"][0]["text"],
    "messages": native.choices[0].message.content,
}
print(json.dumps(found))

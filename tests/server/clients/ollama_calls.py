"""Ollama's own Python client, run by test_client_programs: python ollama_calls.py URL"""

import json
import sys
from typing import Any

import ollama

client = ollama.Client(host=sys.argv[1])
ASK: list[Any] = [{"role": "user", "content": "hi"}]


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: which
    """
    return f"sunny in {city}"


found: dict[str, Any] = {"models": [model.model for model in client.list().models]}
found["chat"] = client.chat("scripted", ASK).message.content
found["stream"] = "".join(
    part.message.content or "" for part in client.chat("scripted", ASK, stream=True)
)
found["generate"] = client.generate("scripted", "hi", options={"temperature": 0}).response
found["generated"] = "".join(
    part.response for part in client.generate("scripted", "hi", stream=True)
)
asked: list[Any] = [{"role": "user", "content": "Please @weather"}]
answer = client.chat("scripted", asked, tools=[weather])
calls = answer.message.tool_calls or []
asked += [answer.message]
asked += [
    {"role": "tool", "tool_name": call.function.name, "content": weather(**call.function.arguments)}
    for call in calls
]
found["calls"] = [[call.function.name, dict(call.function.arguments)] for call in calls]
found["after"] = client.chat("scripted", asked, tools=[weather]).message.content
found["vector"] = len(client.embed("scripted", "hi").embeddings[0])
found["context"] = (client.show("scripted").modelinfo or {})["quire.context_length"]
found["running"] = [model.model for model in client.ps().models]
try:
    client.chat("another", ASK)
except ollama.ResponseError as error:
    found["missing"] = error.status_code
print(json.dumps(found))

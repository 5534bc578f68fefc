"""A server of one's own, and OpenAI's client: `base_url` is all that changes."""

import re
import subprocess
import sys

import openai

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
command = [
    sys.executable,
    "-m",
    "quire",
    "serve",
    "--model",
    model,
    "--served-model-name",
    "mine",
    "--port",
    "0",
]
server = subprocess.Popen([*command, *sys.argv[2:]], stderr=subprocess.PIPE, text=True)
try:
    assert server.stderr is not None
    address = next(
        found[0] for line in server.stderr if (found := re.search(r"http://[\d.]+:\d+", line))
    )
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="mine",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=20,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
finally:
    server.terminate()
    server.communicate()

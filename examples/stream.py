"""Text as it comes. Leaving the loop early ends the request."""

import sys

from quire import LLM, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    for piece in llm.stream(
        "Once upon a time", SamplingParams(temperature=0.7, seed=3, max_tokens=40)
    ):
        print(piece, end="", flush=True)
    print()

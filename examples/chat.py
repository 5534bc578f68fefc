"""A conversation. The second question sends the first one along again: its tokens come from the
prefix cache.
"""

import sys

from quire import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=40)

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    messages = [{"role": "system", "content": "Answer in one short sentence."}]
    for question in ("What is the capital of France?", "And of Italy?"):
        messages.append({"role": "user", "content": question})
        output = llm.chat(messages, PARAMS)[0]
        messages.append({"role": "assistant", "content": output.text})
        metrics = output.metrics
        print(f"> {question}\n{output.text}")
        print(
            f"  ({metrics.num_prompt_tokens} prompt tokens, {metrics.cached_tokens} of them from the cache)"
        )

"""One prompt, one answer."""

import sys

from quire import LLM, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=12))[
        0
    ]
    print(output.prompt + output.text)
    print(f"{output.metrics.num_output_tokens} tokens, ended by {output.finish_reason}")

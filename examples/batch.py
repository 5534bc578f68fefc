"""Many prompts as one batch. Each gets the answer it would get alone: company changes nothing."""

import sys

from quire import LLM, SamplingParams

PROMPTS = ["One, two, three,", "Red, green,", "Monday, Tuesday,", "The opposite of hot is"]
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12)

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    outputs = llm.generate(PROMPTS, PARAMS)
    for output in outputs:
        print(f"{output.prompt!r} -> {output.text!r}")
    alone = [llm.generate(prompt, PARAMS)[0].token_ids for prompt in PROMPTS]
    print("alone the same:", alone == [output.token_ids for output in outputs])
    print(f"{llm.metrics.output_tokens} tokens in {llm.metrics.steps} steps")

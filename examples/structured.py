"""An answer that fits a JSON schema, whatever the model would rather say."""

import json
import sys

from quire import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "price": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["colour", "price"],
    "additionalProperties": False,
}

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    params = SamplingParams(temperature=0, max_tokens=60, structured={"json_schema": SCHEMA})
    output = llm.generate("A toy car, as JSON: ", params)[0]
    print(json.loads(output.text))

"""A model made by hand: one `.npy` file per weight. Its logits are checked, and it goes on with the
alphabet.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from quire import LLM, SamplingParams

SCRIPT = Path(__file__).parents[1] / "scripts" / "export_npy.py"

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, str(SCRIPT), "--out", folder], check=True)
    tokens = np.load(f"{folder}/test_tokens.npy").tolist()
    # by a forward pass that shares no code with Quire
    expected = np.load(f"{folder}/test_logits.npy")
    with LLM(folder, dtype="float32", kv_cache_memory="64MiB") as llm:
        # The logprob of each token of the prompt, given those before it, is its logit less the
        # logsumexp of all.
        scored = llm.generate(tokens, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        ours = np.array([entry.logprob for entry in scored.prompt_logprobs[1:]])
        rows = expected[:-1].astype(np.float64)
        theirs = rows[range(len(rows)), tokens[1:]] - np.log(np.exp(rows).sum(1))
        print(f"largest difference of a logprob: {abs(ours - theirs).max():.1e}")
        print("abc" + llm.generate("abc", SamplingParams(temperature=0, max_tokens=30))[0].text)

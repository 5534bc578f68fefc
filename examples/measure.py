"""Is my change faster? Measure both in turn, several times, take medians, and see that no answer
changed.

Here the "change" is the prefix cache: put your own setting, or your own branch's build, in its
place.
"""

import statistics
import sys
import time

from quire import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
prompts = [
    "You are a careful assistant. " * 12 + question
    for question in ("Hi!", "Who are you?", "1 + 1 =")
]
params = SamplingParams(temperature=0, max_tokens=8)
llms = {
    "before": LLM(model, kv_cache_memory="256MiB", prefix_caching=False),
    "after": LLM(model, kv_cache_memory="256MiB", prefix_caching=True),
}
times: dict[str, list[float]] = {name: [] for name in llms}
answers = {}
for _ in range(rounds + 1):  # the first round warms up
    for name, llm in llms.items():
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        times[name].append(time.perf_counter() - started)
        answers[name] = [output.token_ids for output in outputs]
medians = {name: statistics.median(found[1:]) for name, found in times.items()}
for name, found in times.items():
    print(f"{name}: {medians[name]:.3f} s (from {min(found[1:]):.3f} to {max(found[1:]):.3f})")
faster, same = medians["before"] / medians["after"], answers["before"] == answers["after"]
print(f"after is {faster:.2f} x as fast; same answers: {same}")
for llm in llms.values():
    llm.close()

"""A thousand updates of the weights while requests, of several adapters and of none, come, run, are kept,
aborted and put to sleep: no answer mixes versions without saying so, no block of old weights or of
another adapter is met, and nothing leaks.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from quire import LLM, LoRARequest, RequestOutput, SamplingParams
from quire.engine.invariants import check_invariants
from quire.outputs import TokenLogprobs
from tests.adapters import random_adapter
from tests.frontend.templates import QWEN
from tests.long_runs import short_or_long
from tests.models.test_given_weights import changed
from tests.server.random_model import write_model

OPTIONS = {"max_model_len": 128, "kv_cache_memory": "1MiB", "max_num_seqs": 4, "max_loras": 2}
NUM_UPDATES = short_or_long(60, 1000)
NUM_SETS = 3
NUM_ADAPTERS = 4
NAMES = ("first", "second")
"""What adapters are called in turn: a name stands for another one again and again."""
PROMPTS = [list(range(3, 40)), [7, 8, 9], list(range(3, 30)), [*range(3, 20), *range(50, 90)]]
"""Three begin alike, so that they meet each other's blocks."""
PARAMS = [
    SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=9, temperature=1, seed=5, ignore_eos=True, logprobs=1),
]

Answer = tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    write_model(path, QWEN)
    return path


@pytest.fixture(scope="module")
def sets(folder: Path) -> list[dict[str, Tensor]]:
    (file,) = folder.glob("*.safetensors")
    first = load_file(file)
    return [first, *(changed(first, seed) for seed in range(1, NUM_SETS))]


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    with LLM(str(folder), **OPTIONS) as llm:  # type: ignore[arg-type]
        decoder = llm.engine.decoder
        return [random_adapter(root / str(i), decoder, i) for i in range(NUM_ADAPTERS)]


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams
    adapter: Path | None = None


@dataclass
class Alone:
    """What each set of weights makes of a prompt, in an engine that never had others."""

    engines: list[LLM]
    known: dict[tuple[object, ...], Answer] = field(default_factory=dict)

    def answer(self, number: int, asked: Asked) -> Answer:
        params, adapter = asked.params, asked.adapter
        key = (number, tuple(asked.prompt), params.max_tokens, params.temperature, adapter)
        if key not in self.known:
            output = self.engines[number].generate(
                asked.prompt,
                params,
                progress=False,
                lora_request=adapter and LoRARequest(adapter.name, 1, str(adapter)),
            )[0]
            self.known[key] = output.token_ids, output.logprobs
        return self.known[key]


@pytest.fixture(scope="module")
def alone(folder: Path, sets: list[dict[str, Tensor]], adapters: list[Path]) -> Iterator[Alone]:
    engines = [LLM(str(folder), **OPTIONS) for _ in sets]  # type: ignore[arg-type]
    for llm, weights in zip(engines[1:], sets[1:], strict=True):
        llm.update_weights(weights.items())
    found = Alone(engines)
    for number in range(NUM_SETS):  # what they keep from here on is counted
        for adapter in (None, *adapters):
            found.answer(number, Asked(PROMPTS[0], PARAMS[0], adapter))
    one = Asked(PROMPTS[0], PARAMS[0])
    assert len({found.answer(number, one) for number in range(NUM_SETS)}) > 1
    yield found
    for llm in engines:
        llm.close()


def check(output: RequestOutput, asked: Asked, set_of: dict[int, int], alone: Alone) -> int:
    """Each part of the answer is what its weights make of everything before it. Returns how many
    parts it has.
    """
    assert output.logprobs is not None
    spans = [*output.metrics.weights_versions, (len(output.token_ids), -1)]
    parts = 0
    for (first, version), (end, _) in pairwise(spans):
        prompt = [*asked.prompt, *output.token_ids[:first]]
        most = (asked.params.max_tokens or 0) - first
        if first == end:
            continue
        rest = replace(asked.params, max_tokens=most)
        tokens, logprobs = alone.answer(set_of[version], Asked(prompt, rest, asked.adapter))
        assert output.token_ids[first:end] == tokens[: end - first]
        assert logprobs is not None
        assert output.logprobs[first:end] == logprobs[: end - first]
        parts += 1
    return parts


def record_all(llm: LLM, adapter: Path) -> None:
    """Decode steps of every size, with adapters and without: their memory is kept."""
    short = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for lora in (None, LoRARequest(NAMES[0], 1, str(adapter))):
        for count in range(1, 5):
            llm.generate([PROMPTS[1]] * count, short, progress=False, lora_request=lora)


@pytest.mark.slow
@pytest.mark.soak
def test_updates_under_load(
    folder: Path, sets: list[dict[str, Tensor]], adapters: list[Path], alone: Alone
) -> None:
    rng = random.Random(0)
    live: dict[str, Asked] = {}
    set_of = {0: 0}
    kept: set[str] = set()
    """Requests that an update may have found begun, and that went on after it."""
    ended: Counter[str] = Counter()
    cached = 0
    sizes: list[tuple[int, int, int]] = []
    with LLM(str(folder), **OPTIONS) as llm:  # type: ignore[arg-type]
        core = llm.engine.core
        record_all(llm, adapters[0])

        def step() -> None:
            nonlocal cached
            for delta in llm.step():
                if (output := delta.output) is None:
                    continue
                asked = live.pop(delta.request_id)
                parts = check(output, asked, set_of, alone)
                assert parts < 2 or output.request_id in kept
                assert output.finish_reason in ("length", "abort")
                is_whole = len(output.token_ids) == asked.params.max_tokens
                assert is_whole == (output.finish_reason == "length")
                whose = "of an adapter" if asked.adapter else "plain"
                ended[f"{output.finish_reason} of {min(parts, 2)}, {whose}"] += 1
                cached += output.metrics.cached_tokens or 0

        for number in range(1, NUM_UPDATES + 1):
            for _ in range(rng.randrange(7)):
                adapter = rng.choice([None, *adapters])
                one = Asked(rng.choice(PROMPTS), rng.choice(PARAMS), adapter)
                asked_for = adapter and LoRARequest(rng.choice(NAMES), 1, str(adapter))
                live[llm.add_request(one.prompt, one.params, lora_request=asked_for)] = one
            for _ in range(rng.randrange(20)):
                step()
            mode = rng.choice(["wait", "keep", "keep", "abort"])
            version = rng.choice([None, llm.weights_version + rng.randint(1, 9)])
            chosen = rng.randrange(NUM_SETS)
            if mode == "keep":
                kept |= live.keys()
            if rng.random() < 0.1:
                llm.pause(mode)  # type: ignore[arg-type]
                llm.sleep(level=1)
                llm.wake_up()
                llm.update_weights(sets[chosen].items(), version=version)
                llm.resume()
            else:
                llm.update_weights(sets[chosen].items(), mode=mode, version=version)  # type: ignore[arg-type]
            set_of[llm.weights_version] = chosen
            check_invariants(core.scheduler)
            if number % (NUM_UPDATES // 10) == 0:
                while llm.has_work:
                    step()
                llm.reset_prefix_cache()
                for name in llm.adapters:
                    llm.unload_adapter(name)
                assert not llm.engine.adapters.nbytes
                gc.collect()
                tensors = sum(isinstance(one, Tensor) for one in gc.get_objects())
                sizes.append((core.scheduler.blocks.pool.num_free, tensors, resident()))
                print(f"{number} updates: {sizes[-1]}, {dict(ended)}, {cached} cached", flush=True)
    assert not live
    assert len(set_of) == NUM_UPDATES + 1
    for kind in ("length of 1", "length of 2", "abort of 1"):
        assert ended[f"{kind}, plain"] > 0
        assert ended[f"{kind}, of an adapter"] > 0
    assert cached > 0  # blocks of the same version were met
    free, tensors, _ = zip(*sizes, strict=True)
    assert len(set(free)) == 1
    half = len(sizes) // 2
    assert len(set(tensors[half:])) == 1
    assert sizes[-1][2] - sizes[half][2] < 8 * 2**20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

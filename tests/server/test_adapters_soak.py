"""Adapters come, go and change while requests of them and of none run: no wrong answer, no stale
block, no leak. `make soak` runs it for ten minutes (SOAK_SECONDS=).
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from tests.adapters import KINDS, random_adapter
from tests.long_runs import IS_LONG
from tests.server.harness import SMALL_ENGINE, Server, wait_for

PROMPTS = [list(range(20 + i, 60 + 7 * i)) for i in range(3)]
CONTENTS = 12
SLOTS = 2
AT_ONCE = 6
KEPT = 2
"""Names whose content changes in place."""
ROUNDS = 12
GROWTH = 12 * 1024
"""KiB of both processes' memory that the second half may gain."""


def body(model: str, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
        "return_token_ids": True,
    }


class Load:
    """Asks and manages until its time is over. What a changing name may stand for is what it stood
    for at some time between a request's begin and its end.
    """

    def __init__(self, server: Server, folders: list[Path], wanted: dict[Any, list[int]]) -> None:
        self.server, self.folders, self.wanted = server, folders, wanted
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.now: dict[str, int | None] = {}
        """What each changing name stands for; None: it is not loaded."""
        self.past: list[tuple[float, str, int | None]] = []
        self.lock = threading.Lock()

    def ask(self, source: Random) -> None:
        number, prompt = source.randrange(-1, CONTENTS + KEPT), source.randrange(len(PROMPTS))
        name = "small" if number < 0 else f"a{number}"
        changes = number >= CONTENTS
        started = time.monotonic()
        with self.lock:
            before = self.now.get(name)
        if source.random() < 0.15:
            self.cut(name, PROMPTS[prompt], source)
            return
        response = self.server.post("/v1/completions", body(name, PROMPTS[prompt]))
        with self.lock:
            since = [to for at, one, to in self.past if one == name and at >= started]
        allowed = {before, *since} if changes else {number}
        if response.status_code == 404 and None in allowed and changes:
            self.outcomes["not there"] += 1
            return
        if response.status_code != 200:
            self.wrong.append(f"{name}: {response.status_code} {response.text[:200]}")
            return
        found = response.json()["choices"][0]["token_ids"]
        if not any(found == self.wanted[one, prompt] for one in allowed if one is not None):
            self.wrong.append(f"{name}: an answer of none of {allowed}")
        self.outcomes["changing" if changes else "plain" if number < 0 else "adapter"] += 1

    def cut(self, name: str, prompt: list[int], source: Random) -> None:
        """A client that leaves in the middle."""
        with (
            self.server.client() as client,
            client.stream(
                "POST",
                "/v1/completions",
                json={**body(name, prompt), "stream": True, "max_tokens": 60},
            ) as response,
        ):
            lines = response.iter_lines()
            for _ in range(source.randrange(4)):
                next(lines, None)
        self.outcomes["cut"] += 1

    def manage(self, source: Random) -> None:
        """Loads, replaces or unloads a changing name; when it changes lies between two notes."""
        name, content = f"a{CONTENTS + source.randrange(KEPT)}", source.randrange(CONTENTS)
        with self.lock:
            there = self.now.get(name) is not None
        if there and source.random() < 0.4:
            self.note(name, None)
            response = self.server.post("/v1/unload_lora_adapter", {"lora_name": name})
        else:
            self.note(name, content)
            response = self.server.post(
                "/v1/load_lora_adapter",
                {
                    "lora_name": name,
                    "lora_path": str(self.folders[content]),
                    "load_inplace": there,
                },
            )
        if response.status_code != 200:
            self.wrong.append(f"managing {name}: {response.text[:200]}")
        with self.lock:
            self.now[name] = self.past[-1][2]
        self.outcomes["managed"] += 1

    def note(self, name: str, content: int | None) -> None:
        """From here on the name may stand for this, and still for what it did."""
        with self.lock:
            self.past.append((float("inf"), name, self.now.get(name)))
            self.past.append((float("inf"), name, content))

    def settle(self) -> None:
        """A change is over: requests that begin from here on see the new content only."""
        with self.lock:
            now = time.monotonic()
            self.past = [(min(at, now), name, to) for at, name, to in self.past if at >= now - 60]

    def run(self, seconds: float, seed: int) -> None:
        end = time.monotonic() + seconds

        def asks(number: int) -> None:
            source = Random(f"{seed} {number}")
            while time.monotonic() < end:
                self.ask(source)

        def manages() -> None:
            source = Random(f"{seed} manager")
            while time.monotonic() < end:
                self.manage(source)
                self.settle()
                time.sleep(0.05)

        with ThreadPoolExecutor(AT_ONCE + 1) as threads:
            done = [threads.submit(asks, number) for number in range(AT_ONCE)]
            done.append(threads.submit(manages))
            for one in done:
                one.result()


@pytest.mark.soak
@pytest.mark.skipif(not IS_LONG, reason="runs for ten minutes: make soak")
def test_adapters_come_and_go_under_load(small_model: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    wanted: dict[Any, list[int]] = {}
    with LLM(small_model, **SMALL_ENGINE) as llm:
        made = [
            random_adapter(
                tmp_path / "made" / f"a{i}",
                llm.engine.decoder,
                i,
                (4, 1, 16)[i % 3],
                kind=KINDS[i % len(KINDS)],
            )
            for i in range(CONTENTS)
        ]
        for content in (-1, *range(CONTENTS)):
            asked = None if content < 0 else LoRARequest(f"a{content}", 1, str(made[content]))
            outputs = llm.generate(PROMPTS, params, lora_request=asked)
            for i, output in enumerate(outputs):
                wanted[content, i] = list(output.completions[0].token_ids)
        sizes = sorted(one.nbytes for one in llm.engine.adapters.loaded)
    assert len({tuple(one) for one in wanted.values()}) > CONTENTS
    (tmp_path / "served").mkdir()
    for folder in made:
        shutil.copytree(folder, tmp_path / "served" / folder.name)
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    # For those that are asked for at once, not for all: adapters leave all the time.
    size = sum(sizes[-(AT_ONCE + 3) :])
    assert size < sum(sizes)
    with Server(
        model=small_model,
        engine={**SMALL_ENGINE, "max_loras": SLOTS, "lora_memory": size},
        served_model_names=["small"],
        adapter_folder=tmp_path / "served",
    ) as server:
        load = Load(server, made, wanted)
        memory = []
        for number in range(ROUNDS):
            load.run(seconds / ROUNDS, number)
            assert not load.wrong, (load.wrong[:5], server.log[-5000:])
            wait_for(lambda: server.is_idle, "rest")
            assert server.metrics("vllm:kv_cache_usage_perc") == [0.0]
            time.sleep(1)
            memory.append(sum(server.memory()))
        assert load.outcomes["adapter"] > load.outcomes["managed"] > ROUNDS
        half = memory[ROUNDS // 2 :]
        growth = statistics.mean(half[-3:]) - statistics.mean(half[:3])
        print(dict(load.outcomes), memory, f"{growth:.0f} KiB")
        assert growth < GROWTH, memory

"""Grammars whose masks take long: whoever shares the steps with them does not wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from quire.constrain.grammar import GrammarState
from quire.constrain.masks import Words, _MaskWorker
from tests.server.replicas.local_engines import LocalEngines, LocalServer, local_links

ATTACKERS = 14
TOKENS = 3
MASK_SECONDS = 0.05
INNOCENT = {"prompt": "one two", "ignore_eos": True, "temperature": 0}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "structured",
    [
        {"regex": "(?:[a-z]{0,300} ){0,300}"},
        {"grammar": "start: x x x x\nx: /[a-z]*/ | /[a-z ]+/ x"},
        {"json": {"type": "array", "items": {"enum": [f"v {i}" for i in range(200)]}}},
    ],
)
def test_an_innocent_stream_goes_on_while_slow_masks_are_computed(
    small_model: str, structured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mask but the first takes long here, as some do with a large vocabulary. All of them are
    computed beside the steps, so there are many steps for each.
    """
    compute, in_step = _MaskWorker._compute, []

    def compute_slowly(
        self: _MaskWorker, states: Mapping[int, GrammarState], out: Words
    ) -> dict[int, str]:
        if not all(state.is_at_start for state in states.values()):
            time.sleep(MASK_SECONDS)
            if not threading.current_thread().name.startswith("quire-masks-ahead"):
                in_step.append(len(states))
        return compute(self, states, out)

    monkeypatch.setattr(_MaskWorker, "_compute", compute_slowly)
    engines = LocalEngines(small_model, {"max_num_seqs": 16})

    async def main() -> None:
        server = LocalServer(engines, 1)
        async with server as http:
            body = {"prompt": "a", "max_tokens": TOKENS, "structured_outputs": structured}
            attacks = [
                asyncio.create_task(
                    http.post("/v1/completions", json={**body, "seed": number, "ignore_eos": True})
                )
                for number in range(ATTACKERS)
            ]
            num_tokens = 0
            while not all(one.done() for one in attacks):
                await http.post("/v1/completions", json={**INNOCENT, "max_tokens": 4})
                num_tokens += 4
            assert {one.result().status_code for one in attacks} == {200}
            # one mask after the other is slow, and during each of them others have several steps
            assert num_tokens > ATTACKERS

    with local_links(engines):
        asyncio.run(main())
    assert in_step == []

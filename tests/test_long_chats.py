"""A chat computes what is new at each turn, and little of what it said before, however long it is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from quire.assemble import Engine, assemble
from quire.backends.cpu.kernels import CpuKernels
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.sampling_params import SamplingParams
from tests.long_runs import IS_LONG
from tests.random_models import WITH_STATES, random_decoder

MOST_OLD = 128
CUE = [5, 6, 7, 8, 9]
"""Where the answer begins: what every prompt ends with."""


def engine_of(model: str, **options: object) -> Engine:
    spec = replace(WITH_STATES[model], max_position=20_000)
    config = {"device": "cpu", "max_model_len": 20_000, "kv_cache_memory": "300MB", **options}
    decoder = random_decoder(spec, CpuKernels(), torch.float32)
    return assemble(decoder, EngineConfig(**config), name="small")  # type: ignore[arg-type]


class Chat:
    """Turns of a chat, with what was computed for each."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.history: list[int] = []
        self.computed: list[int] = []
        """All tokens of the last turn."""
        self.old: list[int] = []
        """By turn, how many tokens were computed that stood at the same place in the last one."""
        self.answers: list[list[int]] = []

    def turn(self, size: int, most: int, keeps_reasoning: bool) -> None:
        """One turn whose prompt has `size` tokens more than the history, and an answer of `most`."""
        said = [self.rng.randrange(10, 97) for _ in range(size - len(CUE))]
        prompt = [*self.history, *said, *CUE]
        params = SamplingParams(temperature=1, seed=size, max_tokens=most, ignore_eos=True)
        (request,) = make_requests(f"turn {len(self.old)}", prompt, params, size)
        self.engine.core.add_request(request, 0.0)
        answer: list[int] = []
        while self.engine.core.has_work:
            for update in self.engine.core.step(0.0):
                answer += update.new_token_ids
        pairs = zip(prompt, self.computed, strict=False)
        differs = (i for i, (one, other) in enumerate(pairs) if one != other)
        known = next(differs, min(len(prompt), len(self.computed)))
        self.old.append(known - request.cached_tokens)
        self.answers.append(answer)
        self.computed = [*prompt, *answer]
        if keeps_reasoning:
            self.history = self.computed
        else:  # templates drop it with the last words of the cue, which began it
            self.history = [*self.history, *said, *CUE[:2], *answer[most // 2 :]]


KINDS = [(True, "off"), (False, "ngram"), (True, "ngram"), (False, "off")]
"""Whether turns keep the reasoning of those before, and what drafts."""


def sizes(chat: Chat, remainders: list[int], least: int) -> int:
    """How many tokens the next turn adds, for its prompt to end so many behind a chunk's begin."""
    wanted = remainders[len(chat.old) % len(remainders)]
    return least + (wanted - len(chat.history) - least) % 64


@pytest.mark.few(2)
@pytest.mark.parametrize("keeps_reasoning", [True, False])
@pytest.mark.parametrize("model", ["delta rule", "state space", "convolution"])
def test_a_turn_computes_at_most_128_old_tokens(model: str, keeps_reasoning: bool) -> None:
    chat = Chat(engine_of(model), 1)
    fresh = Chat(engine_of(model, prefix_caching=False), 1)
    for one in (chat, fresh):
        for _ in range(5):
            one.turn(sizes(one, [2, 1, 63, 0], 130), 24, keeps_reasoning)
    assert max(chat.old) <= MOST_OLD
    assert max(fresh.old) > MOST_OLD
    assert chat.answers == fresh.answers


def chats() -> list[tuple[str, bool, str]]:
    """All of each model; in the short form the first two in turn."""
    models = ["delta rule", "state space"]
    if IS_LONG:
        return [(model, *kind) for model in models for kind in KINDS]
    return [(model, *kind) for model, kind in zip(models, KINDS[:2], strict=True)]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("model", "keeps_reasoning", "speculation"), chats())
def test_twenty_turns_over_16_000_tokens(
    model: str, keeps_reasoning: bool, speculation: str
) -> None:
    chat = Chat(engine_of(model, speculation=speculation), 2)
    while len(chat.old) < 20:
        remainders = [chat.rng.randrange(64), chat.rng.randrange(5)]
        chat.turn(sizes(chat, remainders, 690), 120, keeps_reasoning)
    assert len(chat.computed) > 16_000 - 20 * 60 * (not keeps_reasoning)
    assert max(chat.old) <= MOST_OLD

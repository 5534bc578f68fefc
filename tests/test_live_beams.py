"""Beam search on the engine under every condition, against the same search without an engine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from quire.engine.invariants import check_invariants
from quire.engine.request import make_requests
from quire.errors import CapacityError, InvalidRequestError
from quire.frontend.beam_search import Beam, BeamSearchParams, Continuations, LiveBeams
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from quire.step import Step
from tests.beams import search_beams
from tests.decoding import all_logits
from tests.random_models import SPECS, Bench, random_decoder
from tests.test_logprobs import gather_logprobs

PROMPT = tuple((i * 7) % 97 for i in range(37))
ENDS = frozenset({3, 50})


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(SPECS["llama"], ReferenceKernels(), torch.float32)


@functools.cache
def alone(decoder: Decoder, prompt: tuple[int, ...], params: BeamSearchParams) -> list[Beam]:
    """The search without an engine: every beam is computed from its first token, at every step."""

    def expand(beams: Sequence[tuple[int, ...]]) -> list[Continuations]:
        found: list[Continuations] = []
        for token_ids in beams:
            logits = all_logits(decoder, [*prompt, *token_ids])[-1:]
            found.append(
                gather_logprobs(logits, torch.tensor([0]), [params.num_continuations])[0].top
            )
        return found

    return search_beams(params, expand)


class Searches:
    """A bench on which beam searches and ordinary requests run together."""

    def __init__(
        self, decoder: Decoder, depth: int = 1, preempt_every: int = 0, **settings: Any
    ) -> None:
        bench = Bench(decoder, **settings)
        self.core, self.log = bench.core, bench.log
        self.core.depth = depth
        self.searches: list[LiveBeams] = []
        self.tokens: dict[str, list[int]] = {}
        self.turns = 0
        self._preempt_every = preempt_every

    @property
    def steps(self) -> list[Step]:
        return [entry.step for entry in self.log]

    @property
    def num_held_blocks(self) -> int:
        scheduler = self.core.scheduler
        return scheduler.config.num_usable_blocks - scheduler.blocks.pool.num_free

    def start(self, prompt: Sequence[int], params: BeamSearchParams) -> LiveBeams:
        search = LiveBeams(self.core, f"search{len(self.searches)}", prompt, params, 0.0)
        self.searches.append(search)
        return search

    def add(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        for request in make_requests(name, prompt, params, seed=1):
            self.core.add_request(request, 0.0)

    def turn(self) -> None:
        self.turns += 1
        assert self.turns < 3000, "no end in sight"
        if self._preempt_every and self.turns % self._preempt_every == 0:
            names = sorted(self.core.scheduler.table.requests)
            if names:
                self.core.scheduler.preempt(names[self.turns % len(names)])
        for update in self.core.step(float(self.turns)):
            self.tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
            for search in self.searches:
                if update.request_id in search.names:
                    search.take(update, float(self.turns))
        check_invariants(self.core.scheduler)

    def run(self) -> None:
        while self.core.has_work:
            self.turn()
        assert all(search.is_done and search.error is None for search in self.searches)
        assert self.num_held_blocks == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_caching": False},
        {"block_size": 4, "prefix_caching": False},
        {"max_num_seqs": 2},  # fewer rows than beams
        {"max_batched_tokens": 5, "max_num_seqs": 5},
        {"num_blocks": 13, "block_size": 4},  # room for one beam and hardly more
        {"num_blocks": 13, "block_size": 4, "prefix_caching": False},
        {"num_blocks": 16, "block_size": 4, "num_host_blocks": 12},
        {"preempt_every": 3},
        {"preempt_every": 2, "prefix_caching": False, "block_size": 4},
        {"preempt_every": 2, "num_blocks": 16, "block_size": 4, "num_host_blocks": 12},
    ],
    ids=lambda settings: ",".join(f"{key}={value}" for key, value in settings.items()) or "plain",
)
def test_the_beams_are_those_of_a_search_without_an_engine(
    decoder: Decoder, settings: dict[str, Any], depth: int
) -> None:
    params = BeamSearchParams(4, 10, 1.0, ENDS)
    engine = Searches(decoder, depth, **settings)
    search = engine.start(PROMPT, params)
    engine.run()
    assert search.beams == alone(decoder, PROMPT, params)


@pytest.mark.few(2)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_each_beam_computes_one_token_per_step(
    decoder: Decoder, block_size: int, depth: int
) -> None:
    engine = Searches(decoder, depth, block_size=block_size)
    engine.start(PROMPT, BeamSearchParams(4, 12, 1.0, frozenset()))
    engine.run()
    steps = [step for step in engine.steps if step.scheduled]
    assert [step.num_tokens for step in steps] == [37] + [4] * 11
    admissions = [admission for step in steps[1:] for admission in step.admitted]
    assert len(admissions) == 44
    assert all(a.num_cached_tokens == len(a.token_ids) - 1 for a in admissions)


def test_full_blocks_are_shared_and_beams_free_theirs_at_once(decoder: Decoder) -> None:
    engine = Searches(decoder, block_size=4)
    engine.start(PROMPT, BeamSearchParams(4, 20, 1.0, frozenset()))
    most = 0
    while engine.core.has_work:
        engine.turn()
        most = max(most, engine.num_held_blocks)
    # The prompt's nine full blocks once, and for each beam what its own tokens fill: up to 20 after
    # the 36th.
    assert most <= 9 + 4 * 5
    assert engine.num_held_blocks == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 30, "block_size": 4, "max_num_seqs": 5}, {"preempt_every": 3}]
)
def test_several_searches_and_ordinary_requests_at_once(
    decoder: Decoder, settings: dict[str, Any]
) -> None:
    searches = {
        4: (PROMPT, BeamSearchParams(4, 8, 1.0, ENDS)),
        3: (PROMPT[:20], BeamSearchParams(3, 12, 0.0, frozenset())),
        1: ((5,), BeamSearchParams(1, 15, 1.0, ENDS)),
    }
    plain = SamplingParams(temperature=0.8, max_tokens=20)
    solo = Searches(decoder)
    solo.add("plain", PROMPT[:9], plain)
    solo.run()
    engine = Searches(decoder, **settings)
    engine.add("plain", PROMPT[:9], plain)
    started = {width: engine.start(*what) for width, what in searches.items()}
    engine.add("long", PROMPT * 2, SamplingParams(temperature=0, max_tokens=3))
    engine.run()
    for width, (prompt, params) in searches.items():
        assert started[width].beams == alone(decoder, prompt, params)
    assert engine.tokens["plain"] == solo.tokens["plain"]


@pytest.mark.parametrize("turns", range(6))
def test_a_search_that_is_closed_leaves_nothing_behind(decoder: Decoder, turns: int) -> None:
    engine = Searches(decoder, depth=2, max_num_seqs=3, max_batched_tokens=16)
    search = engine.start(PROMPT, BeamSearchParams(4, 10, 1.0, frozenset()))
    for _ in range(turns):
        engine.turn()
    search.close(9.0)
    assert engine.num_held_blocks == 0
    assert not engine.core.scheduler.table.requests
    engine.run()
    assert search.beams == []


def test_a_beam_that_is_aborted_ends_the_search_with_an_error(decoder: Decoder) -> None:
    engine = Searches(decoder)
    search = engine.start(PROMPT, BeamSearchParams(3, 10, 1.0, frozenset()))
    engine.turn()
    engine.turn()
    engine.core.abort(search.names[:1], 2.0)
    while engine.core.has_work:
        engine.turn()
    assert str(search.error) == "the beam search failed: abort"
    assert engine.num_held_blocks == 0


def test_beams_that_outgrow_the_cache_end_the_search_with_an_error(decoder: Decoder) -> None:
    engine = Searches(decoder, num_blocks=11, block_size=4)  # 40 tokens
    search = engine.start(PROMPT, BeamSearchParams(2, 10, 1.0, frozenset()))
    while engine.core.has_work:
        engine.turn()
    assert isinstance(search.error, CapacityError)
    assert engine.num_held_blocks == 0


@pytest.mark.parametrize("prompt", [[], [5] * 1024])
def test_a_prompt_that_cannot_be_computed_is_refused(decoder: Decoder, prompt: list[int]) -> None:
    engine = Searches(decoder)
    with pytest.raises(InvalidRequestError, match="prompt"):
        engine.start(prompt, BeamSearchParams(2, 10, 1.0, frozenset()))
    assert not engine.core.scheduler.table.requests

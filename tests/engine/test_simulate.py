"""Thousands of seeds of the simulator, and proof that it would notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.engine.block_manager import BlockManager
from quire.engine.prefix_cache import PrefixCache
from quire.engine.prefix_match import PrefixIndex
from quire.engine.request import Request
from quire.engine.results import ResultTaker
from quire.engine.scheduler import Scheduler
from quire.step import BlockCopy, PromptLogprobs, RequestUpdate, Step, StepResult
from quire.tools.simulate import simulation
from quire.tools.simulate.scenario import make_scenario
from quire.tools.simulate.simulation import SimulationError, main, run_seed
from tests.long_runs import short_or_long

SEEDS_PER_TEST = short_or_long(200, 200, quick=100)


@pytest.mark.soak
@pytest.mark.parametrize("start", range(0, short_or_long(800, 20_000, quick=100), SEEDS_PER_TEST))
def test_every_seed_gives_solo_answers_and_leaks_nothing(start: int) -> None:
    for seed in range(start, start + SEEDS_PER_TEST):
        run_seed(seed)


def test_an_answer_that_stops_at_once_was_scored_by_the_weights_of_then() -> None:
    """It counts no token; the weights change before it is looked at."""
    run_seed(18843)


def test_a_seed_plays_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "11"]) == 0
    first = capsys.readouterr().out
    assert main(["--seed", "11"]) == 0
    second = capsys.readouterr().out
    assert first.splitlines()[:-1] == second.splitlines()[:-1]  # The last line tells the speed.
    assert "ScheduledRequest" in first


def test_a_missing_copy_is_noticed_and_the_seed_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take_copies = BlockManager.take_copies

    def lose_partial_blocks(self: BlockManager) -> tuple[BlockCopy, ...]:
        return tuple(copy for copy in take_copies(self) if copy.kind != "device_to_device")

    monkeypatch.setattr(BlockManager, "take_copies", lose_partial_blocks)
    assert main(["--seeds", "50"]) == 1
    assert "replay: python -m quire.tools.simulate --seed " in capsys.readouterr().err


def test_a_scheduler_that_forgets_someone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_schedule_waiting", lambda self, plan: None)
    with pytest.raises(SimulationError, match="no end after"):
        run_seed(12)


def test_a_scheduler_that_forgets_wrong_draft_tokens_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = Scheduler.commit

    def as_if_all_were_right(
        self: Scheduler, step: Step, result: StepResult, now: float
    ) -> list[RequestUpdate]:
        before = [(request, request.num_computed_tokens) for request in self.in_flight[0][1]]
        updates = commit(self, step, result, now)
        for request, num_computed in before:
            if request.row is not None and request.num_computed_tokens < num_computed:
                request.num_computed_tokens = min(num_computed, request.num_tokens)
        return updates

    monkeypatch.setattr(Scheduler, "commit", as_if_all_were_right)
    assert main(["--seeds", "60"]) == 1
    assert "replay" in capsys.readouterr().err


def test_a_partly_filled_block_offered_with_too_many_tokens_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = PrefixCache.find_partial

    def one_more(self: PrefixCache, *arguments: Any) -> Any:
        found = find(self, *arguments)
        return None if found is None else (found[0], min(found[1] + 1, len(arguments[1])))

    monkeypatch.setattr(PrefixCache, "find_partial", one_more)
    assert main(["--seeds", "200"]) == 1
    assert "replay" in capsys.readouterr().err


def test_a_scheduler_that_loses_a_prompts_scores_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = ResultTaker._note_prompt_logprobs

    def only_for_the_living(self: ResultTaker, request: Request, found: PromptLogprobs) -> None:
        if request.finish_reason is None:
            note(self, request, found)
        else:
            request.prompt_progress.next_position = found.start + len(found.logprobs)

    monkeypatch.setattr(ResultTaker, "_note_prompt_logprobs", only_for_the_living)
    with pytest.raises(SimulationError, match="the prompt's scores are"):
        run_seed(3089)


def test_prefix_hits_over_positions_to_be_scored_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    match = PrefixIndex.match

    def greedy(self: PrefixIndex, request: Request) -> Any:
        params, request.params = request.params, replace(request.params, prompt_logprobs=None)
        try:
            return match(self, request)
        finally:
            request.params = params

    monkeypatch.setattr(PrefixIndex, "match", greedy)
    assert main(["--seeds", "200"]) == 1
    assert "the prompt's scores are" in capsys.readouterr().err


def test_prefix_hits_under_a_mean_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    match = PrefixIndex.match

    def greedy(self: PrefixIndex, request: Request) -> Any:
        pooling, request.pooling = request.pooling, None
        try:
            return match(self, request)
        finally:
            request.pooling = pooling

    monkeypatch.setattr(PrefixIndex, "match", greedy)
    assert main(["--seeds", "200"]) == 1
    assert "pooled" in capsys.readouterr().err


def test_keys_and_values_of_old_weights_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks named by what they hold, and not by the version that computed them."""
    monkeypatch.setattr(Request, "extra_keys", ())
    monkeypatch.setattr(BlockManager, "reset", lambda self: None)
    assert main(["--paused", "--seeds", "60"]) == 1
    assert "replay: python -m quire.tools.simulate --seed " in capsys.readouterr().err


def test_only_seeds_that_pause_are_played_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[int] = []
    monkeypatch.setattr(simulation, "run_seed", lambda seed: played.append(seed) or 1)
    assert main(["--paused", "--start", "4", "--seeds", "5"]) == 0
    assert "5 of 5 seeds" in capsys.readouterr().out
    assert played[0] == 5
    assert all(make_scenario(seed).pause_chance for seed in played)
    with pytest.raises(SystemExit):
        main(["--paused", "--timed"])

"""Where guesses come from, and how many there are: n-grams, predictions, what pays."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.request import Request
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.speculate.adaptive import MAX_DRAFT_TOKENS, Acceptance, StepTimeModel, best_number
from quire.speculate.ngram import NgramIndex, continuation
from quire.speculate.prediction import PredictedAnswer
from quire.speculate.speculator import Speculator
from quire.step import ScheduledRequest, Step, StepLogEntry, StepResult
from tests.long_runs import short_or_long


def slow_find(tokens: Sequence[int]) -> int:
    """By comparing every place: behind the one with most tokens alike, 24 being enough, of the
    latest six with three; of several the latest.
    """
    last, best, longest = len(tokens) - 1, -1, 2
    places = [place for place in range(2, last) if tokens[place - 2 : place + 1] == tokens[-3:]]
    for place in places[:-7:-1]:
        length = 3
        while length < 24 and length <= place and tokens[place - length] == tokens[last - length]:
            length += 1
        if length > longest:
            best, longest = place + 1, length
    return best


class TestNgrams:
    @given(st.data())
    @settings(max_examples=short_or_long(60, 2000), deadline=None)
    @pytest.mark.soak
    def test_it_finds_what_a_slow_search_finds(self, data: st.DataObject) -> None:
        """However late and in whatever pieces tokens are taken in, be they indexed or searched as
        they are.
        """
        tokens: list[int] = []
        index, token = (
            NgramIndex(),
            st.integers(0, data.draw(st.sampled_from([1, 3, 300, 2**31 - 1]))),
        )
        with patch("quire.speculate.ngram._SCANNED", data.draw(st.sampled_from([0, 1, 5, 1024]))):
            for _ in range(data.draw(st.integers(1, 12))):
                tokens += data.draw(st.lists(token, min_size=1, max_size=30))
                start = data.draw(st.integers(0, len(tokens)))
                tokens += tokens[start : start + data.draw(st.integers(0, 30))]
                if data.draw(st.booleans()):
                    place = index.follow(tokens)
                    assert place < len(tokens)  # and no more than its last token differs
                    assert (
                        place < 0
                        or tokens[place - 1] == tokens[-1]
                        or tokens[place - 2] == tokens[-2]
                    )
                if data.draw(st.booleans()):
                    while not index.extend(tokens, data.draw(st.integers(1, 10))):
                        pass
                    assert index.find(tokens) == slow_find(tokens)

    def test_the_longer_repetition_wins_over_the_later_one(self) -> None:
        tokens = [1, 2, 3, 4, 5, 90, 3, 4, 5, 91, 1, 2, 3, 4, 5]
        index = NgramIndex()
        index.extend(tokens, 100)
        assert tokens[index.find(tokens)] == 90

    def test_a_copy_is_followed_without_a_search_and_past_a_single_change(self) -> None:
        tokens = [*range(100, 120), 1, 101, 102, 103]
        index = NgramIndex()
        assert index.follow(tokens) == -1
        index.extend(tokens, 100)
        assert index.find(tokens) == 4
        tokens += [104, 105]
        assert index.follow(tokens) == index.follow(tokens) == 6
        assert index.follow([*tokens, 7]) == -1  # a change after five tokens ends it
        tokens += [106, 107, 7]  # after seven it does not
        assert index.follow(tokens) == 9
        # nor two of them, nor one soon after the other
        for changed in ([7], [7, 110], [109, 110, 111, 7]):
            assert index.follow(tokens + changed) == -1
        # If it has gone on where it was, behind whatever changed, that is taken up again, and the
        # next change expected.
        tokens += [7, 7, 111, 112]
        assert index.follow(tokens) == -1
        tokens += [113]
        assert index.follow(tokens) == 14
        assert index.follow([*tokens, 7]) == 15
        assert index.follow([*tokens, 7, 7]) == -1
        tokens += [7, 115, 7]
        assert index.follow(tokens) == 17
        # What was copied is found where it stands last, and so is what changed.
        tokens += [9, 105, 106, 107]
        assert index.follow(tokens) == -1
        assert index.extend(tokens, 100)
        assert tokens[index.find(tokens)] == 7
        assert index.follow([*tokens, 7, 7, 7, 111]) == 32

    def test_what_runs_past_the_end_goes_round(self) -> None:
        assert list(continuation([1, 2, 3, 1, 2, 3], 3, 7)) == [1, 2, 3, 1, 2, 3, 1]
        assert list(continuation([9, 9, 9, 9], 3, 4)) == [9, 9, 9, 9]

    def test_a_long_context_is_cheap(self) -> None:
        rng = random.Random(1)
        tokens = [rng.randrange(40_000) for _ in range(100_000)]
        tokens += tokens[500:520]
        index = NgramIndex()
        began = time.process_time()
        while not index.extend(tokens, 8192):
            pass
        built = time.process_time()
        for _ in range(1000):
            assert index.find(tokens) == 520
        found = time.process_time()
        assert built - began < 2.0  # 0.05 s on an idle machine
        assert (found - built) / 1000 < 500e-6  # 5 microseconds


class TestPredictions:
    def test_it_follows_and_finds_its_way_back(self) -> None:
        predicted = PredictedAnswer(tuple(range(20)))
        assert predicted.propose([], 4) == (0, 1, 2, 3)
        assert predicted.propose([0, 1], 2) == (2, 3)
        assert predicted.propose([0, 1, 77], 3) == ()
        assert predicted.propose([0, 1, 77, 5, 6], 3) == ()
        assert predicted.propose([0, 1, 77, 5, 6, 7], 3) == (8, 9, 10)
        assert predicted.propose([0, 1, 77, *range(5, 19)], 3) == (19,)
        assert predicted.propose([0, 1, 77, *range(5, 20)], 3) == ()
        assert predicted.propose([0, 1, 77, *range(5, 20), 3], 3) == ()

    def test_no_token_outside_the_model_is_drafted(self) -> None:
        request = Request(
            "a", (1, 2), SamplingParams(), 0, resolved=ResolvedTokens(prediction_ids=(5, 900))
        )
        request.num_placeholders = 1
        assert list(Speculator(1000, adaptive=False).propose(request, 5)) == [5, 900]
        request.draft_state = None
        assert list(Speculator(500, adaptive=False).propose(request, 5)) == []


class TestWhoIsDraftedFor:
    @pytest.mark.parametrize(
        ("params", "expected"),
        [
            (SamplingParams(), True),
            (SamplingParams(speculation=False), False),
            (SamplingParams(logits_processors=(lambda tokens, logits: logits,)), False),
        ],
    )
    def test_a_request_may_turn_it_off(self, params: SamplingParams, expected: bool) -> None:
        request = Request("a", (1, 2, 3, 1, 2, 3, 1, 2, 3), params, 0)
        request.num_placeholders = 1
        assert bool(Speculator(10, ngrams=True, adaptive=False).propose(request, 5)) == expected
        request.draft_state = None
        assert not Speculator(10).propose(request, 5)

    def test_a_fixed_number_is_drafted_right_or_wrong(self) -> None:
        request = Request("a", (1, 2, 3) * 9, SamplingParams(), 0)
        request.num_placeholders = 1
        speculator = Speculator(10, ngrams=True, runner_drafts=True, num_tokens=4)
        for _ in range(20):
            assert len(speculator.propose(request, 9)) == 4
            assert speculator.num_drafts(request) == 4
            request.num_rejections += 4
        assert len(speculator.propose(request, 3)) == 3  # what the scheduler has room for

    def test_nothing_is_drafted_behind_the_end(self) -> None:
        """A prompt that is repeated to its last word goes on with what ends an answer, and a
        question's beginning.
        """
        speculator = Speculator(10, ngrams=True, adaptive=False)
        request = Request(
            "a", (1, 2, 3, 4, 9, 7, 8, 1, 2, 3), SamplingParams(), 0, eos_token_ids=(9,)
        )
        request.num_placeholders = 1
        assert list(speculator.propose(request, 5)) == [4, 9]
        request.num_placeholders = 3
        assert list(speculator.propose(request, 5)) == []
        request = Request(
            "a", request.prompt_token_ids, SamplingParams(ignore_eos=True), 0, eos_token_ids=(9,)
        )
        request.num_placeholders = 1
        assert list(speculator.propose(request, 5)) == [4, 9, 7, 8, 1]

    def test_what_the_runner_was_asked_to_draft_is_checked(self) -> None:
        """Also where guesses have long been wrong, and one is tried now and then."""
        request = Request("a", (1, 2, 3), SamplingParams(), 0)
        speculator = Speculator(10, runner_drafts=True)
        request.num_placeholders, request.num_rejections = 1, 40
        num_tried = 0
        for _ in range(60):
            request.drafts = (5,) * speculator.num_drafts(request)
            assert tuple(speculator.propose(request, 9)) == tuple(request.drafts)
            num_tried += bool(request.drafts)
            request.num_rejections += len(request.drafts)
        assert 2 < num_tried < 20

    def test_draft_tokens_behind_tokens_in_flight_go_on_from_them(self) -> None:
        request = Request("a", (1, 2, 3, 4, 5, 6, 1, 2, 3), SamplingParams(), 0)
        speculator = Speculator(10, ngrams=True, adaptive=False)
        request.num_placeholders = 1
        assert list(speculator.propose(request, 2)) == [4, 5]
        request.num_placeholders = 3  # one that is drawn and two guesses are on their way
        assert list(speculator.propose(request, 2)) == [6, 1]


@cache
def requests(count: int, draft_tokens: int) -> tuple[ScheduledRequest, ...]:
    return tuple(
        ScheduledRequest(f"r{i}", i, 10, 1 + draft_tokens, True, (), (1,) * draft_tokens)
        for i in range(count)
    )


def step_entry(number: int, num_requests: int, draft_tokens: int, seconds: float) -> StepLogEntry:
    step = Step(number, float(number), requests(num_requests, draft_tokens))
    return StepLogEntry(step, StepResult(number, {}), None, float(number) + seconds)


class TestPauses:
    """Nobody asks for guesses while a request pauses."""

    @staticmethod
    def asked_at(speculator: Speculator, request: Request, steps: int) -> list[int]:
        """In which of so many steps, each of which brings a token that has never come before."""
        asked = []
        request.num_placeholders = 1
        for step in range(steps):
            if request.draft_pause:  # as the scheduler does
                request.draft_pause -= request.draft_pause > 0
            else:
                asked.append(step)
                speculator.propose(request, 5)
            request.token_ids.append(1000 + len(request.token_ids))
        return asked

    def test_searches_in_vain_become_rare_where_they_would_add_up(self) -> None:
        speculator = Speculator(10**6, ngrams=True)
        for number in range(20):  # 32 requests, steps of a millisecond: one search a step
            speculator.observe(step_entry(number, 32, 0, 0.001))
        request = Request("a", (1, 2, 3, 4, 5, 6, 7), SamplingParams(), 0)
        asked = self.asked_at(speculator, request, 256)
        pauses = [after - before - 1 for before, after in pairwise(asked)]
        assert pauses[:3] == [2, 4, 8]
        assert all(one in (31, 32) for one in pauses[5:])
        # What repeats itself in the end is noticed, and then the next search in vain comes soon
        # again.
        request.token_ids += [1, 2, 3]
        request.draft_pause = 0
        assert list(speculator.propose(request, 5))[:3] == [4, 5, 6]
        assert self.asked_at(speculator, request, 8)[:2] == [0, 1]
        # Whoever comes after requests for which nothing was found is not expected to differ from
        # them.
        others = [Request(f"r{i}", (1, 2, 3), SamplingParams(), 0) for i in range(40)]
        assert sum(len(self.asked_at(speculator, other, 64)) for other in others[20:]) < 20 * 4

    def test_there_is_no_pause_where_a_search_costs_next_to_nothing(self) -> None:
        speculator = Speculator(10**6, ngrams=True)
        for number in range(20):
            speculator.observe(step_entry(number, 8, 0, 0.05))
        assert self.asked_at(speculator, Request("a", (1, 2, 3), SamplingParams(), 0), 50) == list(
            range(50)
        )

    def test_where_draft_tokens_never_come_nobody_asks_twice(self) -> None:
        for request in (
            Request("a", (1,), SamplingParams(speculation=False), 0),
            Request("a", (1,), SamplingParams(), 0),
        ):
            assert self.asked_at(
                Speculator(10, ngrams=not request.params.speculation), request, 9
            ) == [0]

    @pytest.mark.parametrize("most", [1, 5, 100])
    def test_a_rest_is_as_long_as_being_told_that_nothing_pays(self, most: int) -> None:
        costs, plain, resting = StepTimeModel(), Acceptance(0.0), Acceptance(0.0)
        costs.share = 0.5
        expected = [plain.count(costs, MAX_DRAFT_TOKENS) for _ in range(400)]
        found: list[int] = []
        while len(found) < 400:
            found.append(resting.count(costs, MAX_DRAFT_TOKENS))
            found += [0] * (0 if found[-1] else resting.rest(most))
        assert found[:400] == expected
        assert 2 < sum(expected) < 20


class TestWhatPays:
    """Costs are base + slope per token; a request's guesses are right with a chance, one after the
    other.
    """

    def run(
        self,
        num_requests: int,
        base: float,
        slope: float,
        chance: float,
        seed: int = 0,
        early: float | None = None,
    ) -> tuple[float, float]:
        """(time per token, that without guesses), after it has settled. In every other 60 steps the
        chance is `early`, if that is given.
        """
        rng = random.Random(seed)
        costs, acceptance = StepTimeModel(), Acceptance()
        right = wrong = 0
        spent = tokens = 0.0
        for number in range(600):
            count = acceptance.count(costs, MAX_DRAFT_TOKENS)
            now = chance if early is None or number // 60 % 2 else early
            accepted = next((i for i in range(count) if rng.random() >= now), count)
            right, wrong = right + accepted, wrong + (accepted < count)
            seconds = (base + slope * num_requests * (1 + count)) * rng.uniform(0.9, 1.1)
            costs.observe(step_entry(number, num_requests, count, seconds / 1e6))
            if count:
                acceptance.learn(right, wrong)
            if number >= 100:
                spent, tokens = spent + seconds, tokens + 1 + accepted
        return spent / tokens, base + slope * num_requests

    @pytest.mark.parametrize("num_requests", [1, 32])
    def test_right_draft_tokens_are_used_where_a_step_is_bound_by_its_weights(
        self, num_requests: int
    ) -> None:
        took, plain = self.run(num_requests, 1000.0, 2.0, 0.9)
        assert took < plain / 3

    @pytest.mark.parametrize(
        ("num_requests", "base", "slope"),
        [(1, 1000.0, 50.0), (32, 1000.0, 50.0), (256, 100.0, 50.0), (1, 100.0, 50.0)],
    )
    @pytest.mark.parametrize("chance", [0.0, 0.05, 0.4, 0.7])
    def test_wrong_draft_tokens_cost_nothing(
        self, num_requests: int, base: float, slope: float, chance: float
    ) -> None:
        took, plain = self.run(num_requests, base, slope, chance)
        assert took < plain * 1.02

    def test_where_every_token_costs_its_full_price_nothing_is_drafted(self) -> None:
        took, plain = self.run(256, 0.0, 50.0, 0.7)
        assert took < plain * 1.03

    def test_after_a_stretch_of_wrong_draft_tokens_right_ones_are_soon_used_again(self) -> None:
        took, plain = self.run(1, 100.0, 50.0, 0.97, early=0.05)
        assert took < plain / 1.2
        took, plain = self.run(1, 1000.0, 50.0, 0.97, early=0.05)
        assert took < plain / 3

    def test_as_many_are_checked_as_bring_the_most_tokens_a_second(self) -> None:
        for share in (0.01, 0.1, 0.3, 0.7, 1.0):
            for percent in range(0, 100, 7):
                chance = percent / 100
                speeds = [
                    sum(chance**i for i in range(k + 1)) / (1 + share * k)
                    for k in range(MAX_DRAFT_TOKENS + 1)
                ]
                assert speeds[best_number(chance, share)] >= 0.97 * max(speeds)

    def test_prompts_say_nothing_about_draft_tokens(self) -> None:
        costs: Any = StepTimeModel()
        before = costs.share
        scheduled = (ScheduledRequest("a", 0, 0, 300, True, ()),)
        costs.observe(StepLogEntry(Step(0, 0.0, scheduled), StepResult(0, {"a": (1,)}), None, 9.0))
        assert costs.share == before

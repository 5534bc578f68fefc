"""What passes through the scheduler besides tokens: scores, prompt scores, and ends found
elsewhere.
"""

from __future__ import annotations

import pytest

from quire.engine.request import make_requests
from quire.engine.scheduler import Scheduler
from quire.errors import InvalidRequestError
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import PromptLogprobs, StepResult, TokenLogprob
from quire.tools.simulate.fake_model import solo_prompt_logprobs
from tests.engine.harness import Harness, config

PROMPT = list(range(20))


def test_scores_go_with_their_tokens_to_the_last_one() -> None:
    scheduler = Scheduler(config())
    (request,) = make_requests("a", [1, 2], SamplingParams(max_tokens=2, logprobs=1), 0)
    scheduler.add(request, 0.0)
    for token in (7, 8):
        step = scheduler.schedule(0.0)
        score = TokenLogprob(token, -1.0, 2, ((9, -0.5),))
        result = StepResult(step.step_id, {"a": (token,)}, logprobs={"a": (score,)})
        (update,) = scheduler.commit(step, result, 0.0)
        assert update.new_token_ids == (token,)
        assert update.logprobs == (score,)
    assert update.finish_reason == "length"


def test_a_request_whose_grammar_ended_stops_with_that_token() -> None:
    scheduler = Scheduler(config())
    requests = make_requests("a", [1, 2], SamplingParams(max_tokens=9), 0)
    requests += make_requests("b", [1, 3], SamplingParams(max_tokens=9), 0)
    for request in requests:
        scheduler.add(request, 0.0)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)  # in flight when the end is found
    result = StepResult(first.step_id, {"a": (5,), "b": (6,)}, ended=frozenset("a"))
    updates = scheduler.commit(first, result, 1.0)
    assert [(u.request_id, u.new_token_ids, u.finish_reason, u.stop_token_id) for u in updates] == [
        ("a", (5,), "stop", None),
        ("b", (6,), None, None),
    ]
    updates = scheduler.commit(second, StepResult(second.step_id, {"a": (5,), "b": (7,)}), 2.0)
    assert [update.request_id for update in updates] == ["b"]


def test_an_end_also_reaches_a_request_that_was_preempted_meanwhile() -> None:
    scheduler = Scheduler(config())
    (request,) = make_requests("a", [1, 2], SamplingParams(max_tokens=9), 0)
    scheduler.add(request, 0.0)
    step = scheduler.schedule(0.0)
    scheduler.preempt("a")
    (update,) = scheduler.commit(
        step, StepResult(step.step_id, {"a": (5,)}, ended=frozenset("a")), 1.0
    )
    assert (update.new_token_ids, update.finish_reason) == ((5,), "stop")
    assert not scheduler.table.requests


@pytest.mark.parametrize("depth", [1, 2])
def test_an_end_its_owner_found_is_told_once_and_frees_everything(depth: int) -> None:
    harness = Harness(depth=depth)
    harness.add("a", PROMPT, max_tokens=30)
    harness.add("b", PROMPT[:5], max_tokens=12)
    harness.turn(4)
    count = len(harness.tokens["a"])
    metrics = harness.core.end("a", "stop", harness.now)
    assert (metrics.num_output_tokens, metrics.finished) == (count, harness.now)
    harness.turn(2)
    assert len(harness.tokens["a"]) == count
    assert "a" not in harness.ends
    assert [f.reason for step in harness.steps for f in step.finished if f.request_id == "a"] == [
        "stop"
    ]
    with pytest.raises(InvalidRequestError, match="unknown or has finished"):
        harness.core.end("a", "stop", harness.now)
    harness.run()
    harness.check_answers("b")


def test_a_prompt_to_be_scored_takes_no_hits_and_leaves_some_for_others() -> None:
    harness = Harness(config(max_batched_tokens=8))
    harness.add("warm", PROMPT, max_tokens=1)
    harness.run()
    (scored,) = harness.add("scored", PROMPT, prompt_logprobs=0)
    (plain,) = harness.add("plain", PROMPT)
    harness.run()
    harness.check_answers()
    assert (scored.cached_tokens, plain.cached_tokens) == (0, 16)
    parts = harness.prompt_logprobs
    assert {name for name, _ in parts} == {"scored"}
    assert parts[0][1].start == 1
    assert [s for _, found in parts for s in found.logprobs] == solo_prompt_logprobs(
        PROMPT, scored.params, config()
    )


def test_after_a_preemption_only_the_rest_of_a_prompt_is_scored() -> None:
    harness = Harness(config(max_batched_tokens=8))
    (request,) = harness.add("a", PROMPT, max_tokens=6, prompt_logprobs=0)
    harness.turn(1)  # eight tokens: positions 1 to 8 are scored
    harness.scheduler.preempt("a")
    harness.turn(1)
    assert request.cached_tokens == 8
    harness.turn(3)
    harness.scheduler.preempt("a")  # the prompt is scored: hits are free again
    harness.run()
    harness.check_answers()
    assert request.cached_tokens > 8 + 16
    parts = [found for _, found in harness.prompt_logprobs]
    assert [(found.start, len(found.logprobs)) for found in parts] == [(1, 8), (9, 8), (17, 3)]


def test_scores_outlive_the_answer_that_computed_them() -> None:
    harness = Harness(config(max_batched_tokens=64), depth=2)
    harness.add("a", PROMPT, n=3, prompt_logprobs=0, max_tokens=4)
    taken: dict[int, TokenLogprob] = {}
    harness.now += 1.0
    assert harness.core.step(harness.now) == []  # submitted, and not back yet
    harness.core.end("a/0", "abort", harness.now)
    while harness.core.has_work:
        harness.now += 1.0
        for update in harness.core.step(harness.now):
            assert update.request_id != "a/0"
            if update.prompt_logprobs is not None:
                taken.update(
                    enumerate(update.prompt_logprobs.logprobs, start=update.prompt_logprobs.start)
                )
    assert taken == dict(
        enumerate(solo_prompt_logprobs(PROMPT, SamplingParams(), config()), start=1)
    )


def test_best_of_makes_that_many_requests_that_are_scored() -> None:
    resolved = ResolvedTokens(((1,),))
    requests = make_requests("a", [1], SamplingParams(n=2, best_of=3, seed=7), 7, (), resolved)
    assert [request.request_id for request in requests] == ["a/0", "a/1", "a/2"]
    assert {(r.params.n, r.params.best_of, r.params.logprobs) for r in requests} == {(1, None, 0)}
    assert [request.seed for request in requests] == [7, 8, 9]
    assert all(request.resolved is resolved for request in requests)
    (alone,) = make_requests("a", [1], SamplingParams(best_of=1, logprobs=4), 7)
    assert (alone.request_id, alone.params.logprobs) == ("a", 4)


def test_what_text_means_in_tokens_reaches_the_runner() -> None:
    scheduler = Scheduler(config())
    resolved = ResolvedTokens(((1, 2),), (3,))
    for request in make_requests("a", [1, 2], SamplingParams(), 0, (), resolved):
        scheduler.add(request, 0.0)
    assert scheduler.schedule(0.0).admitted[0].resolved == resolved


@pytest.mark.parametrize("aborted", [False, True])
def test_scores_computed_after_a_failure_are_not_passed_on(aborted: bool) -> None:
    """Found by the simulator (seed 209670): one answer scores the first half of the prompt and is
    preempted, another goes through the prompt, fails in a step that scores nothing, and a step in
    flight scores the rest.
    """
    scheduler = Scheduler(config(max_batched_tokens=3, max_num_seqs=1, prefix_caching=False))
    for request in make_requests(
        "a", [3, 2, 1, 1, 3], SamplingParams(n=3, max_tokens=3, prompt_logprobs=0), 0
    ):
        scheduler.add(request, 0.0)
    score = TokenLogprob(1, -1.0, 1, ())
    first = scheduler.schedule(0.0)
    logprobs = PromptLogprobs(1, (score,) * 3)
    scheduler.commit(first, StepResult(first.step_id, {}, prompt_logprobs={"a/0": logprobs}), 0.0)
    scheduler.abort(["a/0"], 0.0)
    second, third = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert [entry.request_id for step in (second, third) for entry in step.scheduled] == [
        "a/1",
        "a/1",
    ]
    if aborted:
        scheduler.abort(["a/1"], 0.0)
    scheduler.commit(second, StepResult(second.step_id, {}, errors={"a/1": "broken"}), 0.0)
    rubbish = StepResult(
        third.step_id, {"a/1": (5,)}, prompt_logprobs={"a/1": PromptLogprobs(4, (score,))}
    )
    updates = scheduler.commit(third, rubbish, 0.0)
    assert all(update.prompt_logprobs is None for update in updates)
    assert scheduler.table.requests.keys() == {"a/2"}

"""The smallest case: fewest requests, shortest prompts and answers, fewest parameters."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import CapacityError
from quire.frontend.tokenizer import Tokenizer
from quire.sampling_params import SamplingParams
from quire.tools.verify.answers import Answer, Difference, Pair, differences
from quire.tools.verify.cases import KINDS, Case, draw_cases
from quire.tools.verify.shrink import shrink

SEEN = Difference(0, 0, "tokens", 0, 1, 2)
TOKENIZER = Tokenizer.of_bytes()


def test_what_is_left_is_what_it_takes() -> None:
    """The fault: two requests with the token 7 in their prompts, one of which draws three tokens."""
    cases = [
        Case("x", tuple(range(i, i + 40)), SamplingParams(max_tokens=16, top_k=5, n=2))
        for i in range(8)
    ]

    def first_difference(some: Sequence[Case]) -> Difference | None:
        guilty = [number for number, case in enumerate(some) if 7 in case.prompt]
        if len(guilty) < 2 or (some[guilty[1]].params.max_tokens or 0) < 3:
            return None
        return Difference(guilty[1], 0, "tokens", 2, 1, 2)

    found = shrink(cases, SEEN, first_difference, 20.0)
    assert found.is_reproduced
    assert len(found.cases) == 2
    assert all(len(case.prompt) <= 8 and case.prompt[-1] == 7 for case in found.cases)
    assert [case.params.max_tokens for case in found.cases] == [1, 3]
    assert all(case.params.top_k == 0 and case.params.n == 1 for case in found.cases)


def test_what_does_not_show_again_is_shown_as_it_was() -> None:
    cases = [Case("x", (1, 2), SamplingParams())]
    found = shrink(cases, SEEN, lambda some: None, 20.0)
    assert (found.cases, found.difference, found.is_reproduced) == (cases, SEEN, False)


def test_what_can_not_run_is_no_smaller_case() -> None:
    cases = [Case("x", (1, 2, 3, 4), SamplingParams(max_tokens=1, temperature=0.0))]

    def first_difference(some: Sequence[Case]) -> Difference | None:
        if len(some[0].prompt) < 4:
            raise CapacityError("too short")
        return SEEN

    assert shrink(cases, SEEN, first_difference, 20.0).cases == cases


def test_bits_are_compared_and_not_values() -> None:
    def count(one: Answer, other: Answer) -> int:
        return len(differences([Pair(0, 0, one, other)]))

    nan = float("nan")
    assert count(Answer({"logprobs": [nan, 1.0]}), Answer({"logprobs": [nan, 1.0]})) == 0
    assert count(Answer({"logprobs": [0.0]}), Answer({"logprobs": [-0.0]})) == 1
    assert count(Answer({"tokens": [1, 2, 3]}), Answer({"tokens": [1]})) == 2
    assert count(Answer(end="stop"), Answer(end="length")) == 1
    text = differences([Pair(3, 1, Answer({"logprobs": [0.5]}), Answer({"logprobs": [0.25]}))])[
        0
    ].describe()
    assert (
        text
        == "request 3, answer 1, logprobs[0]: 0.5 (0x1.0000000000000p-1) alone, 0.25 (0x1.0000000000000p-2) here"
    )


def test_every_kind_of_request_is_drawn_and_the_same_ones_again() -> None:
    cases = draw_cases(24, 3, TOKENIZER, 256)
    assert {case.kind for case in cases} == {name for name, _ in KINDS}
    assert cases == draw_cases(24, 3, TOKENIZER, 256)
    assert cases != draw_cases(24, 4, TOKENIZER, 256)
    assert all(case.prompt and max(case.prompt) < 256 for case in cases)
    assert all(
        "structured" not in case.as_json()["params"]
        for case in draw_cases(24, 3, TOKENIZER, 256, 96, False)
    )
    beginnings = {case.prompt[:16] for case in cases if len(case.prompt) >= 16}
    assert len(beginnings) < sum(len(case.prompt) >= 16 for case in cases)  # some are shared

"""Every field of SamplingParams refuses what it can't mean, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")
BAD: dict[str, list[Any]] = {
    "temperature": [NAN, INF, -0.1, 101, True, "1", None],
    "top_k": [-1, 1.5, True, "3", None, NAN],
    "top_p": [0, -0.5, 1.01, NAN, True, "0.9", None],
    "seed": [-1, 2**64, 1.0, True, "7"],
    "max_tokens": [0, -5, 1.5, True, "9", INF],
    "min_tokens": [-1, 1.5, True, None, 10_000],
    "ignore_eos": [1, "true", None],
    "stop_token_ids": [5, "5", [-1], [1.0], [True], list(range(1025))],
    "n": [0, -1, 129, 1.0, True, None],
    "priority": [1.5, True, "high", None, 2**40],
    "deadline": [0, -1, NAN, INF, True, "soon"],
    "cache_salt": [5, "x" * 1025, b"x"],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_every_field_is_tried_above() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(BAD)


def test_params_are_frozen_and_lists_become_tuples() -> None:
    params = SamplingParams(stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert params.stop_token_ids == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0  # type: ignore[misc]

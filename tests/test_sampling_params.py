"""Every field of SamplingParams refuses what it can't mean, by name."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.errors import InvalidRequestError
from quire.kernels.ops import FILTERS
from quire.sampling.filters import Filters
from quire.sampling.sampler import FEATURES
from quire.sampling_params import SamplingParams, StructuredOutput

NAN, INF = float("nan"), float("inf")
BAD: dict[str, list[Any]] = {
    "temperature": [NAN, INF, -0.1, 101, True, "1", None],
    "top_k": [-1, 1.5, True, "3", None, NAN],
    "top_p": [0, -0.5, 1.01, NAN, True, "0.9", None],
    "min_p": [-0.1, 1.1, NAN, INF, True, "0.1", None],
    "typical_p": [0, 1.1, NAN, True, "0.1", None],
    "top_n_sigma": [-1, 1001, NAN, INF, True, "1", None],
    "repetition_penalty": [0, -1, 101, NAN, INF, True, "1", None],
    "presence_penalty": [-2.1, 2.1, NAN, INF, True, "1", None],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, True, "1", None],
    "no_repeat_ngram_size": [-1, 65, 1.0, True, "1", None],
    "dry_multiplier": [-1, 101, NAN, INF, True, "1", None],
    "dry_base": [0.9, 101, NAN, INF, True, "1", None],
    "dry_allowed_length": [0, 65, 1.0, True, "1", None],
    "dry_sequence_breakers": [5, [""], [5], ["x" * 1025], ["x"] * 65, None],
    "xtc_probability": [-0.1, 1.1, NAN, True, "1", None],
    "xtc_threshold": [-0.1, 1.1, NAN, True, "1", None],
    "logit_bias": [
        5,
        "5",
        [5],
        {-1: 1.0},
        {1.5: 1.0},
        {"1": 1.0},
        {1: 101},
        {1: NAN},
        {1: INF},
        {1: "1"},
        ((1, 1.0), (1, 2.0)),
        dict.fromkeys(range(1025), 1.0),
    ],
    "allowed_token_ids": [[], 5, "5", [-1], [1.0], [True]],
    "bad_words": [5, [""], [5], ["x" * 1025], ["x"] * 1025, None],
    "seed": [-1, 2**64, 1.0, True, "7"],
    "max_tokens": [0, -5, 1.5, True, "9", INF],
    "min_tokens": [-1, 1.5, True, None, 10_000],
    "ignore_eos": [1, "true", None],
    "stop": [5, "", [""], [5], ["x" * 1025], ["x"] * 65, None],
    "stop_token_ids": [5, "5", [-1], [1.0], [True], list(range(1025))],
    "include_stop_str_in_output": [1, "true", None],
    "n": [0, -1, 129, 1.0, True, None],
    "best_of": [0, 129, 1.0, True],
    "logprobs": [-1, 101, 1.0, True],
    "prompt_logprobs": [-1, 101, 1.0, True],
    "logprob_token_ids": [5, "5", [-1], [1.0], [True], list(range(101)), [5]],
    "skip_special_tokens": [1, "true", None],
    "spaces_between_special_tokens": [1, "true", None],
    "cache_salt": [5, "x" * 1025, b"x"],
    "weights_version": [-1, 2**63, 1.5, True, "3"],
    "priority": [1.5, True, "high", None, 2**40],
    "tenant": [5, None, "x" * 1025, b"x"],
    "deadline": [0, -1, NAN, INF, True, "soon"],
    "structured": [5, "json", {}, {"regexp": "x"}, {"regex": "x", "grammar": "y"}],
    "speculation": [1, "true", None],
    "prediction": [5, "", b"x", "é" * 2**19 + "x"],
    "logits_processors": [5, [5], print, [print] * 17, None],
}
BAD_STRUCTURED: dict[str, list[Any]] = {
    "json_schema": [5, "", "x" * (256 * 1024 + 1), {"a": {1, 2}}, {"a": NAN}],
    "json_object": [1, "yes"],
    "regex": [5, "", "x" * (16 * 1024 + 1)],
    "choice": [5, [], [""], [5], ["x"] * 1025, ["é" * (128 * 1024), "x"]],
    "grammar": [5, "", "é" * (128 * 1024 + 1)],
    "control_tokens": [5, [""], [5], ["x"] * 1025],
}


EVERY_SAMPLE = ("temperature", "seed")
ELSEWHERE = {
    "sampling": ["logprobs", "prompt_logprobs", "logprob_token_ids"],
    "engine": [
        "max_tokens",
        "n",
        "best_of",
        "cache_salt",
        "weights_version",
        "priority",
        "tenant",
        "deadline",
    ],
    "frontend": ["stop", "include_stop_str_in_output", "skip_special_tokens", "prediction"],
    "speculate": ["speculation"],
    "nobody, as its docstring says": ["spaces_between_special_tokens"],
}
"""The fields that have no part in how a token is chosen, by the folder that reads them."""


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD.items() for value in values]
)
def test_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_every_field_is_tried_above() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(BAD)


def test_every_field_has_a_check_and_one_user() -> None:
    """A field that no feature of the sampler declares and nobody else reads would be accepted and
    ignored.
    """
    owners = [*((*feature.switches, *feature.settings) for feature in FEATURES), EVERY_SAMPLE]
    users = Counter(name for names in (*owners, *ELSEWHERE.values()) for name in names)
    fields = dataclasses.fields(SamplingParams)
    assert users == Counter(field.name for field in fields)
    assert all(
        callable(field.metadata["parameter"].values.check)
        for field in (*fields, *dataclasses.fields(StructuredOutput))
    )


@pytest.mark.parametrize("folder", ["sampling", "engine", "frontend", "speculate"])
def test_the_fields_of_no_feature_are_read(folder: str) -> None:
    """As `params.field`, or `self.params.field`."""
    read = set()
    for path in (Path(quire.__file__).parent / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                read |= {node.attr} if name.endswith("params") else set()
    assert set(ELSEWHERE[folder]) <= read


def test_the_order_in_the_docs_is_that_of_the_table() -> None:
    text = (Path(quire.__file__).parents[1] / "docs" / "sampling.md").read_text()
    rows = [line.split("|")[2:4] for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    documented = [
        (name.strip(" `"), tuple(re.findall(r"`(\w+)`", fields))) for name, fields in rows
    ]
    assert documented == [
        *((feature.__name__, feature.switches) for feature in FEATURES),
        ("the draw", EVERY_SAMPLE),
    ]
    by_kernels = [name.removeprefix("log_").replace("threshold", "probability") for name in FILTERS]
    assert by_kernels == ["temperature", *Filters.switches]


def test_params_are_frozen_and_lists_become_tuples() -> None:
    params = SamplingParams(stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert params.stop_token_ids == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0  # type: ignore[misc]


def test_best_of_is_at_least_n() -> None:
    assert SamplingParams(n=3, best_of=3).best_of == 3
    with pytest.raises(InvalidRequestError, match=r"^best_of: is 2, less than n"):
        SamplingParams(n=3, best_of=2)


def test_params_can_be_hashed_compared_and_copied() -> None:
    params = SamplingParams(
        logit_bias={7: 1, 3: -0.5},
        stop="end",
        bad_words=["a"],
        structured=StructuredOutput(json_schema={"type": "null"}),
    )
    assert params.logit_bias == ((3, -0.5), (7, 1.0))
    assert params.stop == ("end",)
    copy = dataclasses.replace(params, temperature=0.5)
    assert dataclasses.replace(copy, temperature=1.0) == params
    assert len({params, copy, dataclasses.replace(params)}) == 2


def test_ids_outside_the_vocabulary_are_refused_by_field() -> None:
    for field, value in (
        ("stop_token_ids", [9]),
        ("allowed_token_ids", [0, 9]),
        ("logit_bias", {9: 1.0}),
    ):
        params = SamplingParams(**{field: value})  # type: ignore[arg-type]
        params.check_token_ids(10)
        with pytest.raises(
            InvalidRequestError, match=f"^{field}: 9 is outside the vocabulary of 9"
        ):
            params.check_token_ids(9)


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in BAD_STRUCTURED.items() for value in values],
)
def test_bad_structured_output_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^structured\.{field}: "):
        StructuredOutput(**{field: value})
    assert {field.name for field in dataclasses.fields(StructuredOutput)} == set(BAD_STRUCTURED)


def test_a_structured_output_has_exactly_one_form() -> None:
    for fields in ({}, {"regex": "a", "json_object": True}, {"choice": ["a"], "grammar": "b"}):
        with pytest.raises(InvalidRequestError, match=r"^structured: must give exactly one"):
            StructuredOutput(**fields)  # type: ignore[arg-type]
    assert SamplingParams(structured={"choice": ["a", "b"]}).structured == StructuredOutput(  # type: ignore[arg-type]
        choice=("a", "b")
    )
    assert StructuredOutput(json_schema={"type": "null"}).json_schema == '{"type": "null"}'

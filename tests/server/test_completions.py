"""POST /v1/completions, field by field, against the offline API."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.server.harness import Server, error_of

PROMPT = "The capital of France is"


def test_tokens_and_text_are_those_of_the_offline_api(server: Server, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))[0]
    body = server.complete(prompt=PROMPT)
    choice = body["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (expected.text, list(expected.token_ids))
    assert choice["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16  # OpenAI's default
    assert body["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert body["usage"]["total_tokens"] == 16 + len(expected.prompt_token_ids)
    assert body["object"] == "text_completion"
    assert body["model"] == "smollm2"
    assert body["system_fingerprint"].startswith("fp_")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {
            "temperature": 1.0,
            "seed": 3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.2,
        },
        {"temperature": 0, "logit_bias": {"7042": -100}, "bad_words": ["Paris"]},
        {"temperature": 0, "min_tokens": 12, "stop_token_ids": [30], "ignore_eos": True},
        {"temperature": 0, "stop": ["\n"], "include_stop_str_in_output": True},
        {"temperature": 0, "stop": "."},
        {
            "temperature": 1.1,
            "seed": 1,
            "dry_multiplier": 0.8,
            "xtc_probability": 0.4,
            "typical_p": 0.9,
        },
        {"temperature": 1.0, "seed": 5, "no_repeat_ngram_size": 2, "top_n_sigma": 1.5},
        {"temperature": 1.0, "seed": 5, "allowed_token_ids": list(range(300, 400))},
    ],
)
def test_every_parameter_means_what_it_means_offline(
    server: Server, llm: LLM, fields: dict[str, Any]
) -> None:
    offline = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    if "logit_bias" in offline:
        offline["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    offline = {**llm.sampling_defaults, "max_tokens": 24, **offline}
    expected = llm.generate(PROMPT, SamplingParams(**offline))[0]
    choice = server.complete(prompt=PROMPT, max_tokens=24, **fields)["choices"][0]
    assert choice["token_ids"] == list(expected.token_ids)
    assert choice["text"] == expected.text
    assert choice["finish_reason"] == expected.finish_reason
    assert choice["stop_reason"] == expected.completions[0].stop_reason


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["."]},
        {},
        {"n": 3, "temperature": 1.0, "seed": 11},
        {"n": 2, "echo": True, "logprobs": 1, "seed": 1},
    ],
)
def test_a_stream_gives_the_same_in_pieces(server: Server, fields: dict[str, Any]) -> None:
    body = {
        "prompt": [PROMPT, "1, 2, 3,"],
        "temperature": 0,
        "max_tokens": 20,
        "return_token_ids": True,
        **fields,
    }
    whole = server.post("/v1/completions", body).json()
    chunks = list(
        server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    )
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    usage = chunks[-1]["usage"]
    assert {name: usage[name] for name in ("prompt_tokens", "completion_tokens")} == {
        name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    }
    for choice in whole["choices"]:
        pieces = [
            c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [t for piece in pieces for t in piece["token_ids"]] == choice["token_ids"]
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        assert len(pieces) > 1
        for name in choice["logprobs"] or ():
            assert [one for piece in pieces for one in piece["logprobs"][name]] == choice[
                "logprobs"
            ][name]


def test_prompts_of_every_kind_in_one_batch(server: Server) -> None:
    ids = server.complete(prompt=PROMPT, max_tokens=4)["choices"][0]["prompt_token_ids"]
    alone = server.complete(prompt=PROMPT, max_tokens=4)["choices"][0]["token_ids"]
    for prompt in (ids, [ids], [PROMPT], [PROMPT, ids], [ids, PROMPT]):
        body = server.complete(prompt=prompt, max_tokens=4)
        assert [choice["token_ids"] for choice in body["choices"]] == [alone] * len(body["choices"])
        assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
        assert body["usage"]["prompt_tokens"] == len(ids) * len(body["choices"])


def test_n_answers_and_the_best_of_them(server: Server, llm: LLM) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "seed": 4, "max_tokens": 6}
    body = server.complete(prompt=PROMPT, n=3, **fields)
    expected = llm.generate(PROMPT, SamplingParams(n=3, **fields))[0]
    assert [c["token_ids"] for c in body["choices"]] == [
        list(c.token_ids) for c in expected.completions
    ]
    assert body["usage"]["completion_tokens"] == sum(len(c.token_ids) for c in expected.completions)
    best = server.complete(prompt=PROMPT, n=2, best_of=5, **fields)["choices"]
    expected = llm.generate(PROMPT, SamplingParams(n=2, best_of=5, **fields))[0]
    assert [choice["token_ids"] for choice in best] == [
        list(c.token_ids) for c in expected.completions
    ]
    assert [choice["index"] for choice in best] == [0, 1]


def test_logprobs_and_echo(server: Server, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2)
    expected = llm.generate(PROMPT, params)[0]
    choice = server.complete(prompt=PROMPT, max_tokens=3, logprobs=2, echo=True)["choices"][0]
    assert choice["text"] == PROMPT + expected.text
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert expected.prompt_logprobs is not None
    assert expected.completions[0].logprobs is not None
    entries = [*expected.prompt_logprobs, *expected.completions[0].logprobs]
    assert logprobs["token_logprobs"] == [
        None if entry is None else entry.logprob for entry in entries
    ]
    assert logprobs["top_logprobs"][0] is None
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    assert all(
        list(top.values()) == sorted(top.values(), reverse=True)
        for top in logprobs["top_logprobs"][1:]
    )
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    chunks = list(
        server.stream(
            "/v1/completions",
            {"prompt": PROMPT, "temperature": 0, "max_tokens": 3, "logprobs": 2, "echo": True},
        )
    )
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for part in streamed for value in part[name]] == logprobs[name]


def test_the_token_itself_is_among_the_likeliest_even_if_none_of_those_is_asked_for(
    server: Server,
) -> None:
    logprobs = server.complete(prompt=PROMPT, max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    for token, logprob, top in zip(
        *(logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert top == {token: logprob}


@pytest.mark.parametrize("skips", [True, False])
def test_an_echo_shows_all_of_a_prompt_of_tokens_and_offsets_are_places_in_it(
    server: Server, skips: bool
) -> None:
    """With special tokens in it, which only answers leave out, and characters of several tokens."""
    ids = server.post(
        "/tokenize", {"messages": [{"role": "user", "content": "Grüße 🙂🦙!"}]}
    ).json()["tokens"]
    choice = server.complete(
        prompt=ids, max_tokens=4, logprobs=1, echo=True, skip_special_tokens=skips
    )["choices"][0]
    logprobs = choice["logprobs"]
    prompt = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert prompt.startswith("<|im_start|>")
    assert choice["text"].startswith(prompt)
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    places = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    shown = [
        (token, offset)
        for number, (token, offset) in enumerate(places)
        if (number < len(ids) or not token.startswith("<|")) and "\ufffd" not in token
    ]
    assert len(shown) > 10
    for token, offset in shown:
        assert choice["text"][offset:].startswith(token)


def test_what_was_not_asked_for_is_null(server: Server) -> None:
    """vLLM's clients read these fields without looking whether they are there."""
    choice = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).json()["choices"][
        0
    ]
    assert [choice[name] for name in ("prompt_logprobs", "prompt_token_ids", "token_ids")] == [
        None
    ] * 3
    chat = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    ).json()
    assert [chat["prompt_logprobs"], chat["prompt_token_ids"], chat["choices"][0]["token_ids"]] == [
        None
    ] * 3
    assert server.post("/tokenize", {"prompt": "a"}).json()["token_strs"] is None
    assert server.get("/tokenizer_info").json()["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_echo_without_an_answer_scores_the_prompt(server: Server) -> None:
    body = server.complete(prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    assert body["choices"][0]["text"] == PROMPT
    assert len(body["choices"][0]["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0
    response = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 0})
    error_of(response, 400, "max_tokens")


def test_prompt_logprobs_in_vllms_form(server: Server) -> None:
    body = server.complete(
        prompt=PROMPT, max_tokens=1, prompt_logprobs=1, return_tokens_as_token_ids=True, logprobs=0
    )
    entries = body["choices"][0]["prompt_logprobs"]
    ids = body["choices"][0]["prompt_token_ids"]
    assert entries[0] is None
    for token_id, entry in zip(ids[1:], entries[1:], strict=True):
        assert entry[str(token_id)]["logprob"] <= 0
        assert 1 <= len(entry) <= 2
    token = body["choices"][0]["logprobs"]["tokens"][0]
    assert token == f"token_id:{body['choices'][0]['token_ids'][0]}"


def test_cached_tokens_are_counted_and_kept_apart_by_salt(server: Server) -> None:
    prompt = "word " * 70 + "tell me more about the"

    def cached(salt: str | None) -> int:
        body = server.complete(
            prompt=prompt, max_tokens=1, **({"cache_salt": salt} if salt else {})
        )
        count: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert [cached("a") > 0 for _ in range(2)] == [False, True]
    assert cached("b") == 0
    assert cached(None) == 0
    assert cached(None) > 0


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"guided_regex": "[0-9]{4}"}, lambda text: text.isdigit() and len(text) == 4),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        (
            {
                "guided_json": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}},
                    "required": ["a"],
                }
            },
            lambda t: '"a"' in t,
        ),
        ({"guided_grammar": 'start: "x" "y"+\n'}, lambda text: text.startswith("xy")),
        ({"structured_outputs": {"regex": "(ab){2}"}}, lambda text: text == "abab"),
        (
            {"structured_outputs": {"choice": ["left", "right"]}},
            lambda text: text in ("left", "right"),
        ),
        ({"response_format": {"type": "json_object"}}, lambda text: text.startswith("{")),
    ],
)
def test_structured_answers(server: Server, fields: dict[str, Any], check: Any) -> None:
    text = server.complete(prompt="Answer: ", max_tokens=40, **fields)["choices"][0]["text"]
    assert check(text), text


def test_a_negative_seed_is_a_seed(server: Server) -> None:
    one, two = (
        server.complete(prompt=PROMPT, temperature=1.0, seed=-5)["choices"][0] for _ in range(2)
    )
    assert one["token_ids"] == two["token_ids"]


def test_truncation_keeps_the_end_of_the_prompt(
    server: Server, shared_small_server: Server
) -> None:
    ids = server.complete(prompt=PROMPT, max_tokens=1)["choices"][0]["prompt_token_ids"]
    body = server.complete(prompt="so " * 2000 + PROMPT, max_tokens=4, truncate_prompt_tokens=3)
    assert body["choices"][0]["prompt_token_ids"] == ids[-3:]
    echoed = server.complete(
        prompt=f"so {PROMPT}", max_tokens=1, truncate_prompt_tokens=3, echo=True, logprobs=0
    )
    choice = echoed["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["prompt_token_ids"] == ids[-3:]
    longest = shared_small_server.complete(
        prompt="so " * 2000, max_tokens=4, truncate_prompt_tokens=-1
    )
    assert longest["usage"]["prompt_tokens"] == 1020

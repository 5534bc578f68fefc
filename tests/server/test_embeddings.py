"""POST /v1/embeddings"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from quire.assemble import build_engine
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.sampling_params import SamplingParams
from quire.server.api.vectors import EmbedDtype, rounded, stored, unit
from quire.step import Pooling
from tests.server.harness import SMALL_ENGINE, Server, error_of, send, wait_for

TEXTS = ["The cat sat on the mat.", "A", "Long. " * 200, "Ünïcödé 文字 🙂", "one two three"]


def embed(server: Server, texts: Any, **fields: Any) -> list[bytes]:
    response = server.post(
        "/v1/embeddings", {"input": texts, "encoding_format": "base64", **fields}
    )
    assert response.status_code == 200, response.text
    body = response.json()
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    return [base64.b64decode(entry["embedding"]) for entry in body["data"]]


def offline(texts: list[str], pooling: Pooling) -> list[bytes]:
    """The engine by hand, one text at a time, with other chunks than the server's."""
    engine = build_engine(
        resolve("smollm2"), EngineConfig(max_batched_tokens=100, max_num_seqs=4, max_model_len=1024)
    )
    vectors = []
    for text in texts:
        (request,) = make_requests(
            "a", engine.tokenizer.encode(text), SamplingParams(max_tokens=1), 0, pooling=pooling
        )
        engine.core.add_request(request, 0.0)
        while engine.core.has_work:
            found = [update.pooled for update in engine.core.step(0.0) if update.pooled is not None]
            vectors += [unit(np.frombuffer(pooled, "<f4")).tobytes() for pooled in found]
    engine.runner.release()
    return vectors


@pytest.mark.few(1)
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_the_engine_bit_for_bit(server: Server, pooling: Pooling) -> None:
    vectors = embed(server, TEXTS, pooling=pooling)
    assert vectors == offline(TEXTS, pooling)
    assert vectors == [embed(server, text, pooling=pooling)[0] for text in TEXTS]
    for vector in vectors:
        numbers = np.frombuffer(vector, "<f4")
        assert len(numbers) == 576
        assert abs(float(np.linalg.norm(numbers)) - 1) < 1e-5


def test_every_form_of_input_and_output(server: Server) -> None:
    (expected,) = embed(server, TEXTS[0])
    token_ids = server.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    assert (
        embed(server, token_ids)
        == embed(server, [token_ids])
        == embed(server, [TEXTS[0]])
        == [expected]
    )
    body = server.post(
        "/v1/embeddings", {"input": TEXTS[0], "model": "smollm2", "user": "me"}
    ).json()
    assert body["object"] == "list"
    assert body["model"] == "smollm2"
    assert body["usage"] == {"prompt_tokens": len(token_ids), "total_tokens": len(token_ids)}
    assert np.array(body["data"][0]["embedding"], "<f4").tobytes() == expected
    (shorter,) = embed(server, TEXTS[0], dimensions=8)
    kept = np.frombuffer(expected, "<f4")[:8].astype(np.float64)
    np.testing.assert_allclose(
        np.frombuffer(shorter, "<f4"), kept / np.linalg.norm(kept), rtol=1e-6
    )


def test_vectors_keep_their_own_length_if_asked_to(server: Server) -> None:
    (raw,) = embed(server, TEXTS[0], normalize=False)
    numbers = np.frombuffer(raw, "<f4")
    assert abs(float(np.linalg.norm(numbers)) - 1) > 0.1
    assert (
        embed(server, TEXTS[0], normalize=True)
        == embed(server, TEXTS[0])
        == [unit(numbers).tobytes()]
    )
    assert embed(server, TEXTS[0], normalize=False, dimensions=8) == [numbers[:8].tobytes()]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_numbers_of_fewer_bits_are_those_of_torch(server: Server, dtype: EmbedDtype) -> None:
    (exact,) = embed(server, TEXTS[0])
    (found,) = embed(server, TEXTS[0], embed_dtype=dtype)
    kind = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(dtype) or getattr(
        torch, dtype
    )
    wanted = torch.frombuffer(bytearray(exact), dtype=torch.float32).to(kind)
    assert found == wanted.view(torch.uint8).numpy().tobytes()
    (big,) = embed(server, TEXTS[0], embed_dtype=dtype, endianness="big")
    assert (
        big
        == wanted.view(torch.uint8)
        .reshape(-1, kind.itemsize)
        .flip(1)
        .contiguous()
        .numpy()
        .tobytes()
    )
    body = server.post("/v1/embeddings", {"input": TEXTS[0], "embed_dtype": dtype}).json()
    assert np.array_equal(
        np.array(body["data"][0]["embedding"], np.float32), wanted.float().numpy()
    )
    assert body["id"].startswith("embd-")


def test_rounding_to_fewer_bits_is_right_at_the_ends_and_between() -> None:
    edges = [
        0.0,
        -0.0,
        448,
        464,
        465,
        480,
        57344,
        61439,
        61440,
        1e9,
        1e-9,
        2**-10,
        2**-9 * 1.5,
        2**-17,
        2**-16 * 1.5,
    ]
    drawn = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(
        -20, 20
    ).repeat(50)
    numbers = torch.cat([drawn, torch.tensor(edges), -torch.tensor(edges)])
    kinds: dict[EmbedDtype, torch.dtype] = {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
    for name, kind in kinds.items():
        wanted = numbers.to(kind)
        assert stored(numbers.numpy(), name, False) == wanted.view(torch.uint8).numpy().tobytes()
        np.testing.assert_array_equal(rounded(numbers.numpy(), name), wanted.float().numpy())


@pytest.mark.slow
def test_truncation_keeps_the_end_or_the_beginning(server: Server) -> None:
    long = "word " * 3000
    assert "context" in error_of(server.post("/v1/embeddings", {"input": long}), 400)
    tokens = server.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    assert embed(server, TEXTS[0], truncate_prompt_tokens=2) == embed(server, tokens[-2:])
    assert len(embed(server, long, truncate_prompt_tokens=-1)) == 1
    assert embed(server, TEXTS[0], truncate_prompt_tokens=2, truncation_side="right") == embed(
        server, tokens[:2]
    )


def test_more_texts_than_are_computed_at_once(server: Server) -> None:
    texts = [f"text number {number}" for number in range(100)]
    vectors = embed(server, texts)
    assert len(set(vectors)) == 100
    assert vectors[41] == embed(server, texts[41])[0]


@pytest.mark.slow
def test_embeddings_and_answers_share_the_engine(server: Server) -> None:
    expected = embed(server, TEXTS)
    with ThreadPoolExecutor(8) as pool:
        canaries = [pool.submit(server.canary) for _ in range(2)]
        runs = [pool.submit(embed, server, TEXTS) for _ in range(2)]
        assert all(run.result() == expected for run in runs)
        assert all(one.result() == server.baseline for one in canaries)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": "  \n"}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [1, -1]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": [[1], [10**6]]}, "input[1]"),
        ({"input": [True]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": 3}, "input"),
        ({"input": None}, "input"),
        ({}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 577}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "priority": 1}, "priority"),
        ({"input": "a", "normalize": "maybe"}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "model": "gpt-9"}, "model"),
    ],
)
def test_what_is_wrong_is_named(server: Server, fields: dict[str, Any], field: str) -> None:
    response = server.post("/v1/embeddings", fields)
    error_of(response, 404 if field == "model" else 400, field)


def test_unknown_fields_are_named_in_a_header(server: Server) -> None:
    response = server.post("/v1/embeddings", {"input": "a", "flavour": "mint"})
    assert response.headers["x-quire-ignored"] == "flavour"


@pytest.mark.slow
def test_a_client_that_leaves_takes_its_texts_with_it(server: Server) -> None:
    lost_before = server.metric("quire_answers_not_finished_total")
    with send(server, {"input": ["word " * 900] * 64}, "/v1/embeddings"):
        wait_for(lambda: server.metric("vllm:num_requests_running") > 0, "the texts")
    wait_for(
        lambda: server.metric("quire_answers_not_finished_total") > lost_before,
        "the engine to be told",
    )
    wait_for(lambda: server.is_idle, "the engine to be idle")


@pytest.fixture(scope="module")
def faulty(small_model: str) -> Iterator[Server]:
    with Server(faults=True, model=small_model, engine=SMALL_ENGINE) as server:
        server.assert_sound()
        yield server


def test_a_failed_step_fails_the_call_and_nobody_else(faulty: Server) -> None:
    faulty.fault_file.write_text("raise 1")
    response = faulty.post("/v1/embeddings", {"input": "a"})
    assert "log says why" in error_of(response, 500)
    faulty.assert_sound()


def test_vectors_outlive_the_engine(faulty: Server) -> None:
    """The one that takes its place computes them, with the same bits."""
    expected = embed(faulty, ["a", "b"])
    faulty.fault_file.write_text("exit")
    assert embed(faulty, ["a", "b"]) == expected
    faulty.assert_sound()

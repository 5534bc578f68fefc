"""schemathesis over our own OpenAPI: what fits the schema and what does not, for every endpoint
that takes a body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.late_import import LateModule
from tests.server.harness import PATIENCE, Server
from tests.server.test_weights import ROUTES as WEIGHTS_ROUTES

schemathesis: Any = LateModule("schemathesis")

PATHS = [
    "/api/chat",
    "/api/embed",
    "/api/generate",
    "/api/show",
    "/detokenize",
    "/tokenize",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
]
OTHERS = [
    "/invocations",
    "/ping",
    "/v1/responses/{response_id}/cancel",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    *WEIGHTS_ROUTES,
]
"""The first takes what `PATHS` take, the next two nothing; the last ones are in `test_adapters.py`
and `test_weights.py`.
"""
EXAMPLES = 12


@pytest.fixture(scope="module")
def small(small_model: str) -> Iterator[Server]:
    """A context so short that whatever is asked for ends soon."""
    engine = {
        "kv_cache_memory": "16MiB",
        "max_model_len": 96,
        "max_num_seqs": 8,
        "dtype": "float32",
    }
    with Server(model=small_model, engine=engine, served_model_names=["small"]) as server:
        server.assert_sound()
        yield server
        server.assert_sound()


@pytest.fixture(scope="module")
def api(small: Server) -> Any:
    return schemathesis.openapi.from_url(f"{small.url}/openapi.json")


def test_every_endpoint_is_here(api: Any) -> None:
    found = [result.ok() for result in api.get_all_operations()]
    assert sorted(operation.path for operation in found if operation.method == "post") == sorted(
        PATHS + OTHERS
    )
    others = {operation.path for operation in found if operation.method == "get"}
    assert {
        "/health",
        "/ready",
        "/version",
        "/metrics",
        "/v1/models",
        "/v1/requests/{request_id}",
    } <= others


def test_streams_are_documented(small: Server) -> None:
    """Which drawn bodies ask for one is up to schemathesis."""
    paths = small.get("/openapi.json").json()["paths"]
    kinds = {path: set(paths[path]["post"]["responses"]["200"]["content"]) for path in PATHS}
    streams = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
    assert {path for path, found in kinds.items() if "text/event-stream" in found} == streams
    assert all("application/json" in found for found in kinds.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_nothing_breaks_it(small: Server, api: Any, path: str, mode: str) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as known

    operation = api[path]["POST"]
    checks = [not_a_server_error, known.content_type_conformance, known.status_code_conformance]
    if mode == "negative":
        checks.append(known.negative_data_rejection)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def run(case: Any) -> None:
        if (
            isinstance(case.body, dict)
            and "model" in case.body
            and isinstance(case.body["model"], str)
        ):
            case.body["model"] = "small"  # or most would end at a name nobody can guess
        response = case.call(base_url=small.url, timeout=PATIENCE)
        assert response.headers["x-request-id"]
        case.validate_response(response, checks=checks)

    run()

"""The Grafana dashboard shows numbers that /metrics really has, and those are called what vLLM
calls them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.harness import ROOT, SMALL_ENGINE, Server, wait_for

DASHBOARD = ROOT / "deploy" / "grafana" / "quire.json"
# What a query says beside metrics and functions: labels, intervals, groups. A name before a bracket
# is a function.
BESIDE = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)")
LABEL = re.compile(r"(?<=\{)\w+(?==)|(?<=by \()\w+(?=\))")
NAME = re.compile(r"(?<![\w$:])[a-z_][a-z0-9_:]*(?![\w:]|\s*\()")
OF_VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
}


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def names_in(query: str) -> set[str]:
    """The metrics a query reads."""
    return set(NAME.findall(BESIDE.sub("", query)))


def test_names_are_found_in_queries() -> None:
    query = 'sum by (le) (rate(vllm:a_bucket{model_name=~"$model_name"}[$__rate_interval])) / max(process_x) * 2'
    assert names_in(query) == {"vllm:a_bucket", "process_x"}


@pytest.fixture(scope="module")
def server(small_model: str) -> Iterator[Server]:
    with Server(model=small_model, engine=SMALL_ENGINE, served_model_names=["small"]) as server:
        server.complete(
            prompt=["a b c " * 20, "d"], n=2, temperature=1.0, seed=1, max_tokens=3, ignore_eos=True
        )
        server.complete(prompt="a b c " * 20, max_tokens=7, ignore_eos=True)
        assert server.post("/v1/completions", {"prompt": ""}).status_code == 400
        wait_for(lambda: server.is_idle, "the last numbers")
        yield server


def test_every_panel_reads_what_is_there(server: Server) -> None:
    samples = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert len(dashboard["panels"]) >= 12
    for query in queries(dashboard):
        wanted = names_in(query)
        assert wanted, query
        assert wanted <= set(samples), (query, wanted - set(samples))
        for name in wanted:
            assert set(LABEL.findall(query)) <= samples[name], query
    (models,) = [one for one in dashboard["templating"]["list"] if one["name"] == "model_name"]
    assert models["definition"] == "label_values(vllm:num_requests_running, model_name)"


def test_names_and_kinds_are_those_of_vllm(server: Server) -> None:
    families = {
        one.name: one for one in text_string_to_metric_families(server.get("/metrics").text)
    }
    assert {name: families[name].type for name in OF_VLLM if name in families} == OF_VLLM
    for name in OF_VLLM:
        if name == "vllm:cache_config_info":
            continue
        for sample in families[name].samples:
            if not sample.name.endswith("_created"):
                assert sample.labels["model_name"] == "small", sample
                assert sample.labels["engine"] == "0", sample


def test_the_numbers_are_right(server: Server) -> None:
    """Five answers to three prompts: 4 times 3 tokens and one of 7."""
    assert server.metric("vllm:generation_tokens_total") == 19
    assert server.metric("vllm:request_success_total") == 5
    assert server.metric("vllm:request_generation_tokens_count") == 2
    assert server.metric("vllm:request_max_num_generation_tokens_sum") == 3 + 7
    assert server.metric("vllm:request_params_n_sum") == 2 + 1
    assert server.metric("vllm:time_to_first_token_seconds_count") == 5
    assert server.metric("vllm:inter_token_latency_seconds_count") == 14
    assert server.metric("vllm:time_per_output_token_seconds_count") == 14
    assert (
        0
        < server.metric("vllm:prefix_cache_hits_total")
        < server.metric("vllm:prefix_cache_queries_total")
    )
    assert server.metric("quire_http_requests_total") >= 3
    engine_blocks = re.search(
        r'vllm:cache_config_info\{block_size="16",engine="0",num_gpu_blocks="(\d+)"',
        server.get("/metrics").text,
    )
    assert engine_blocks is not None
    assert int(engine_blocks[1]) > 10
    memory = Path(f"/proc/{server.process.pid}/statm").read_text().split() if server.process else []
    assert server.metric("process_resident_memory_bytes") == pytest.approx(
        int(memory[1]) * 4096, rel=0.2
    )


def test_the_cache_is_counted_in_bytes_too(server: Server) -> None:
    total, used = (
        server.metric(name) for name in ("quire_kv_cache_bytes", "quire_kv_cache_used_bytes")
    )
    config = server.get("/server_info").json()["config"]
    assert total == config["num_blocks"] * config["bytes_per_block"] > 0
    assert used == server.metric("vllm:kv_cache_usage_perc") * total == 0  # nothing runs


def test_dashboard_and_docs_know_every_metric_of_our_own(server: Server) -> None:
    names = {
        one.name
        for one in text_string_to_metric_families(server.get("/metrics").text)
        # `_created` is when a counter began: no number of its own
        if one.name.startswith("quire_") and not one.name.endswith("_created")
    }
    shown = " ".join(queries(json.loads(DASHBOARD.read_text(encoding="utf-8"))))
    described = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")
    for name in names:
        assert re.search(rf"\b{name}", shown), name
        assert f"`{name}" in described, name


def test_the_engines_memory_is_there(server: Server) -> None:
    families = {
        one.name: one for one in text_string_to_metric_families(server.get("/metrics").text)
    }
    resident = families["quire_engine_resident_memory_bytes"].samples[0].value
    assert resident > 50 * 2**20  # torch alone takes more
    assert families["quire_gpu_memory_used_bytes"].samples[0].value >= 0

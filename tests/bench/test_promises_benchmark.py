"""The benchmark of promises, small, on a tiny model: it sends when it says, and counts what came."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire import LLM
from quire.tools.bench.gpu import promises
from quire.tools.bench.open_loop import Arrival, Mix, Played, play
from tests.frontend.templates import QWEN
from tests.server.random_model import write_model

SETTINGS = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_memory": "4MiB"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    write_model(made, QWEN)
    return str(made)


def test_requests_are_sent_in_time_and_only_the_wanted_are_waited_for(tiny: str) -> None:
    arrivals = [
        Arrival(0.0, "quiet", [1, 2, 3], 3),
        *[Arrival(0.0, "flood", [4, 5, number], 20) for number in range(6)],
        Arrival(0.1, "quiet", [6], 2),
    ]
    with LLM(tiny, policy="fair", **SETTINGS) as llm:
        played = play(llm.engine.core, arrivals, {"quiet"})
        assert not llm.has_work
        assert not llm.engine.core.scheduler.table.requests
    assert [len(played.token_times[name]) for name in ("0", "7")] == [3, 2]
    assert played.token_times["7"][0] > 0.1
    assert all(seconds > 0 for seconds in played.first_tokens({"quiet"}))
    assert len(played.gaps) >= 2 + 1
    assert played.seconds >= played.token_times["7"][-1]
    assert 0 < played.sender < played.seconds


def test_whoever_has_no_token_in_the_end_has_waited_until_then() -> None:
    arrivals = [Arrival(at, "a", [1], 1) for at in (0.0, 1.0, 9.0)]
    played = Played(arrivals, {"0": [0.5]}, seconds=4.0)
    assert played.first_tokens({"a"}) == [0.5, 3.0]  # the third has not come


def test_one_prompt_in_ten_of_each_tenant_is_long() -> None:
    mix = Mix((2, 5), 40, 3, vocab_size=7)
    arrivals = mix.arrivals(100.0, 2.0, seed=1, tenants=("a", "b"))
    assert arrivals == mix.arrivals(100.0, 2.0, seed=1, tenants=("a", "b"))
    assert 150 < len(arrivals) < 250
    for tenant in "ab":
        own = [len(one.prompt) for one in arrivals if one.tenant == tenant]
        assert [number for number, length in enumerate(own) if length == 40] == list(
            range(5, len(own), 10)
        )
    assert all(0 <= token < 7 for one in arrivals for token in one.prompt)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["random", "real"])
def test_it_prints_ratios(weights: str, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--shape", "tiny"] if weights == "random" else ["--model", tiny]
    assert not promises.main(
        [
            *model,
            *("--device", "cpu", "--kv-cache-memory", "8MiB", "--max-num-seqs", "2"),
            *("--short", "2-5", "--long", "40", "--answer", "4", "--target", "0", "--seconds", "0.3"),
        ]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert out.count("99th percentile of token gaps") == 3
    assert out.count("x without the flood") == 2
    assert "capacity" in out
    assert out.count("ms a step, with") == 6
    assert "ms for each token" in out


@pytest.mark.slow
def test_a_small_budget_is_kept_and_what_fails_is_said(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(promises, "compare_token_times", broken)
    options = [
        "--model",
        tiny,
        "--device",
        "cpu",
        "--kv-cache-memory",
        "8MiB",
        "--max-num-seqs",
        "2",
    ]
    sizes = ["--short", "2-5", "--long", "40", "--answer", "4", "--target", "0"]
    assert promises.main([*options, *sizes, "--seconds", "100", "--budget", "10"]) == 1
    out = capsys.readouterr().out
    assert "s of the budget are left" in out
    assert "token times failed" in out
    assert "planted" in out
    assert out.count("x without the flood") == 2


@pytest.mark.slow
def test_a_part_alone_has_the_whole_budget(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "compare_floods", lambda *arguments: None)
    monkeypatch.setattr(promises, "print_comparisons", lambda *arguments: None)
    options = ["--model", tiny, "--device", "cpu", "--kv-cache-memory", "8MiB"]
    sizes = ["--max-num-seqs", "2", "--short", "2-5", "--long", "40", "--answer", "4"]
    times = ["--target", "0", "--seconds", "100", "--budget", "21", "--only", "flood"]
    assert not promises.main([*options, *sizes, *times])
    found = re.search(r"requests come for ([\d.]+) s", capsys.readouterr().out)
    assert found is not None
    assert 1.5 < float(found[1]) <= 3.0  # of 21 s for both parts it would be 1


def test_lengths_are_read() -> None:
    assert promises.lengths("16-48") == (16, 48)
    assert promises.lengths("7") == (7, 7)


def test_the_command_of_the_docs_is_the_benchmark_s() -> None:
    page = Path(__file__).parents[2] / "docs" / "promises.md"
    assert "python -m quire.tools.bench.gpu.promises" in page.read_text()

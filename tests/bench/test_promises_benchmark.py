"""The benchmark of promises, small, on a tiny model: it sends when it says, and counts what came."""

from __future__ import annotations

from argparse import Namespace

import pytest

from quire import LLM
from quire.tools.bench.engine import promises
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
        promises.Arrival(0.0, "quiet", [1, 2, 3], 3),
        *[promises.Arrival(0.0, "flood", [4, 5, number], 20) for number in range(6)],
        promises.Arrival(0.1, "quiet", [6], 2),
    ]
    with LLM(tiny, policy="fair", **SETTINGS) as llm:
        played = promises.play(llm, arrivals, until="quiet")
        assert not llm.has_work
    assert [len(played.token_times[name]) for name in ("0", "7")] == [3, 2]
    assert played.token_times["7"][0] > 0.1
    assert all(seconds > 0 for seconds in played.first_tokens("quiet"))
    assert len(played.gaps) >= 2 + 1
    assert played.seconds >= played.token_times["7"][-1]


@pytest.mark.slow
def test_it_prints_ratios(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "LONG", 40)
    monkeypatch.setattr(promises, "SHORT", (2, 5))
    monkeypatch.setattr(promises, "ANSWER", 4)
    monkeypatch.setattr(
        promises, "some_prompt", lambda source, length: [source.randrange(5) for _ in range(length)]
    )
    options = Namespace(model=tiny, requests=6, target=None)
    promises.compare_token_times(options, SETTINGS)
    promises.compare_floods(options, SETTINGS)
    out = capsys.readouterr().out
    assert out.count("x without a target") == 3
    assert out.count("x without the flood") == 2

"""`quire replay --model`: the requests of a log again on the real engine, and a log that was
changed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import LLM, LoRARequest, SamplingParams
from quire.cli.main import app
from quire.errors import InvalidRequestError
from quire.observe.step_log import last_run, read_step_log
from tests.adapters import random_adapter
from tests.ladder.conftest import tiny_model as tiny_model


@pytest.fixture(scope="module")
def log(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "steps.jsonl"
    options = {
        "kv_cache_memory": "400KiB",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "device": "cpu",
    }
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(seed=3, max_tokens=30, n=2, repetition_penalty=1.2),
        SamplingParams(temperature=1.5, max_tokens=25, stop=("e",)),
        SamplingParams(temperature=1.5, top_k=9, max_tokens=40, ignore_eos=True),
    ]
    with LLM(tiny_model, step_log=path, **options) as llm:  # type: ignore[arg-type]
        llm.generate(
            ["some text", "more of it " * 4, "learn", "from the text " * 3] * 2,
            params * 2,
            progress=False,
        )
        llm.generate("x", SamplingParams(max_tokens=1))
    return path


def invoke(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["replay", *map(str, arguments), "--device", "cpu"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [(), ("--no-wait",)])
def test_the_same_requests_give_the_same_tokens(
    log: Path, tiny_model: Path, how: tuple[str, ...]
) -> None:
    code, text = invoke(log, "--model", tiny_model, "--json", *how)
    told = json.loads(text)
    assert code == 0
    assert told["different"] == []
    assert told["requests"] + told["skipped"] == 11
    assert told["tokens"] > 100
    assert "The same: " in invoke(log, "--model", tiny_model, *how)[1]


def test_the_log_says_what_rows_cost(log: Path) -> None:
    """As measured when the engine started, for what-ifs."""
    engine = last_run(log)[1]
    assert engine is not None
    costs = engine.costs
    assert costs.head_share > 0 < costs.pair_share
    assert costs.rows[:2] == (1, 2)
    assert len(costs.layers) == len(costs.rows) >= len(costs.head) > 1
    assert list(costs.layers) == sorted(costs.layers)
    assert costs.work(16, 16) > costs.work(2, 1) > 0


def test_a_token_that_was_changed_is_found(log: Path, tiny_model: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines()
    changed = json.loads(lines[4])
    tokens = changed["result"]["tokens"]
    place = next(place for place, token in enumerate(tokens) if isinstance(token, int))
    name = [one.request_id for one in read_step_log(log)[4].step.scheduled if one.samples][place]
    tokens[place] ^= 1
    lines[4] = json.dumps(changed)
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(lines) + "\n")
    code, text = invoke(other, "--model", tiny_model, "--no-wait")
    assert code == 1
    assert "NOT the same: 1 of" in text
    assert f"{name}: from token" in text


def test_another_model_is_noticed(log: Path, tiny_model: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        for admission in line["step"]["admitted"]:
            admission["token_ids"][0] = 10**6
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(InvalidRequestError, match="is it the same model"):
        invoke(other, "--model", tiny_model, "--no-wait")


@pytest.mark.slow
def test_what_if_measures_steps_that_the_log_does_not_have(
    log: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the log's own model, if it is here; else, or if nobody wants that, it says that figures
    are uncertain.
    """
    engine = last_run(log)[1]
    assert engine is not None
    assert engine.model is not None
    assert (engine.model.name, engine.model.device) == (str(tiny_model), "cpu")
    # steps of a tiny model are mostly noise
    monkeypatch.setattr("quire.tools.what_if.calibration._SPEEDS", (0.0, 1e9))
    change = ("--what-if", "max_num_seqs=16,max_batched_tokens=64")
    told = json.loads(invoke(log, "--json", *change)[1])
    assert told["calibration"]["model"] == str(tiny_model)
    assert told["calibration"]["sizes"] >= 1
    assert told["runs"][2]["share_outside"] < 0.01
    assert "were measured on" in told["notes"][0]
    code, text = invoke(log, "--no-calibrate", *change)
    assert code == 0
    assert "of its tokens are in steps of sizes that were never measured (up to" in text
    assert "so the figures are uncertain" in text
    gone = tmp_path / "gone.jsonl"
    gone.write_text(log.read_text().replace(str(tiny_model), "/no/such/model"))
    done = CliRunner().invoke(app, ["replay", str(gone), *change])
    assert "no file or folder /no/such/model" in done.stdout
    assert "could not be measured" in done.stderr
    assert "were measured on" in invoke(gone, *change, "--model", tiny_model)[1]


def test_requests_of_adapters_need_them_again(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tiny_model, step_log=log, device="cpu", kv_cache_memory="400KiB") as llm:
        paths = [random_adapter(tmp_path / f"a{i}", llm.engine.decoder, i) for i in range(2)]
        asked = [None, *(LoRARequest(path.name, 1, str(path)) for path in paths)]
        outputs = llm.generate(["some text"] * 3, params, lora_request=asked, progress=False)
    assert len({one.completions[0].token_ids for one in outputs}) == 3
    given = [f"--lora=a{i}={path}" for i, path in enumerate(paths)]
    with pytest.raises(InvalidRequestError, match=r"--lora.*had the adapters a1 \(content"):
        invoke(log, "--model", tiny_model, "--no-wait", given[0])
    code, text = invoke(log, "--model", tiny_model, "--no-wait", *given)
    assert code == 0, text
    assert "The same: 3 requests" in text

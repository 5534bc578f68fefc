"""Commands that nobody should type: each ends with a status and one message, never with a
traceback.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.in_process import quire_here

COMMANDS = [
    ["plan", "config.json", "--gpu", "h9000"],
    ["plan", "config.json", "--gpu", ""],
    ["plan", "config.json", "--gpus", "0"],
    ["plan", "config.json", "--gpu", "h100", "--gpus", "3", "--tensor-parallel-size", "2"],
    ["plan", "config.json", "--gpu", "h100", "--tensor-parallel-size", "64"],
    ["plan", "config.json", "--gpu", "h100", "--input", "0"],
    ["plan", "config.json", "--gpu", "h100", "--input", "1-"],
    ["plan", "config.json", "--gpu", "h100", "--input", "999999999"],
    ["plan", "config.json", "--gpu", "h100", "--input", "5-4"],
    ["plan", "config.json", "--gpu", "h100", "--output", "many"],
    ["plan", "config.json", "--gpu", "h100", "--output", "9" * 5000],
    ["plan", "config.json", "--gpu", "h100", "--requests", "0"],
    ["plan", "config.json", "--gpu", "h100", "--requests", "1" + "0" * 30],
    ["plan", "config.json", "--gpu", "h100", "--workload", "."],
    ["plan", "config.json", "--gpu", "h100", "--workload", "no such file"],
    ["plan", "config.json", "--gpu", "h100", "--workload", "config.json"],
    ["plan", "config.json", "--gpu", "h100", "--workload", "x" * 5000],
    ["plan", "config.json", "--gpu", "h100", "--rate", "nan"],
    ["plan", "config.json", "--gpu", "h100", "--rate", "-1"],
    ["plan", "no/such/config.json", "--gpu", "h100"],
    ["plan", "", "--gpu", "h100"],
    ["plan", "\0", "--gpu", "h100"],
    ["explain", "no-such-log.jsonl"],
    ["explain", "."],
    ["explain", "config.json"],
    ["explain", "empty"],
    ["explain", "empty", "request"],
    ["explain", "deep"],
    ["explain", "binary"],
    ["explain", "cut"],
    ["replay", "no-such-log.jsonl"],
    ["replay", "."],
    ["replay", "config.json"],
    ["replay", "empty"],
    ["replay", "deep"],
    ["replay", "binary"],
    ["replay", "numbers"],
    ["replay", "cut", "--what-if", "max_num_seqs=0"],
    ["replay", "cut", "--what-if", "=" * 100],
    ["inspect", "no/such/model"],
    ["inspect", "deep"],
    ["inspect", "."],
    ["quantize", "no/such/model", "--to", "int8"],
    ["run", "--model", "./no-such-model", "hello"],
    ["run", "--model", "binary", "hello"],
    ["verify", "--model", "./no-such-model"],
    ["batch", "no-such-requests.jsonl"],
    ["serve", "./no-such-model", "--port", "70000"],
    ["serve", "./no-such-model", "--http-workers", "0"],
    ["serve", "./no-such-model", "--replicas", "65"],
    ["serve", "./no-such-model", "--start-timeout", "-1"],
    ["serve", "./no-such-model", "--hang-timeout", "nan"],
    ["serve", "./no-such-model", "--config", "binary"],
    ["serve", "./no-such-model", "--tensor-parallel-size", "0"],
    ["no-such-command"],
    ["--no-such-option"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacks")
    (folder / "empty").touch()
    (folder / "deep").write_text("[" * 50_000)
    (folder / "binary").write_bytes(bytes(range(256)) * 20)
    (folder / "numbers").write_text('{"version": ' + "9" * 5000 + "}\n")
    (folder / "cut").write_text('{"version": 6, "step": {"step_id"')
    (folder / "config.json").write_text(
        '{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,'
        '"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 1000,'
        '"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}'
    )
    return folder


@pytest.mark.few(14)
@pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda command: " ".join(command)[:60].replace("\0", "NUL")
)
def test_it_is_refused_in_words(
    command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("QUIRE_HOME", str(folder / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = quire_here(*command)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.strip()
    assert len(done.stderr) < 20_000

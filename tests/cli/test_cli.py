"""The commands as a user runs them: output piped, with the real model. What needs no process of its
own (most of whose time goes into importing torch) runs in this one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.tools.bench.random_checkpoint import write_checkpoint
from tests.cli.in_process import quire_here


def quire(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire.cli.main", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )


def test_run_answers_a_prompt_with_the_chat_template(smollm2_gguf: Path) -> None:
    question = "What is the capital of France? Answer in one word."
    done = quire_here("run", question, "--temperature", "0", "-n", "12", "-m", smollm2_gguf)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr
    assert "float" in done.stderr  # which dtype auto picked


def test_run_raw_continues_the_text_and_json_tells_everything(smollm2_gguf: Path) -> None:
    done = quire_here(
        "run", "1, 2, 3,", "The capital of France is", "--raw", "--json", "--temperature", "0", "--max-tokens", "5",
        "--model", smollm2_gguf,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["prompt"] == "1, 2, 3,"
    assert "4" in first["text"]
    assert "Paris" in second["text"]
    assert second["finish_reason"] == "length"
    assert len(second["token_ids"]) == second["counts"]["output_tokens"] == 5
    assert second["counts"]["prompt_tokens"] == 5
    assert second["timings"]["total_seconds"] >= second["timings"]["first_token_seconds"] > 0
    assert "\x1b" not in done.stdout + done.stderr  # no bars, no colours in piped output


@pytest.mark.slow
def test_run_takes_prompts_from_a_file_and_from_stdin_and_repeats_itself(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("Say hello.\n\nSay goodbye.\n")
    arguments = ("run", "--json", "--max-tokens", "8", "--seed", "5", "--model", smollm2_gguf)
    from_file = quire_here(*arguments, "--file", tmp_path / "prompts.txt")
    from_stdin = quire_here(*arguments, stdin="Say goodbye.")
    lines = [json.loads(line) for line in from_file.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["Say hello.", "Say goodbye."]
    assert json.loads(from_stdin.stdout)["token_ids"] == lines[1]["token_ids"]


@pytest.mark.slow
def test_several_prompts_are_printed_below_each_other_in_order(smollm2_gguf: Path) -> None:
    done = quire_here(
        "run",
        "First?",
        "Second?",
        "--max-tokens",
        "4",
        "--priority",
        "1",
        "--priority",
        "0",
        "-m",
        smollm2_gguf,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("> First?") < done.stdout.index("> Second?")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "x", "--model", "smolm2"), "Did you mean smollm2"),
        (("run", "x", "--model", "./no-such-folder"), "no-such-folder"),
        (("run", "x", "--temperature", "nan"), "temperature"),
        (("run", "x", "--top-p", "0"), "top_p"),
        (("run", "x", "--device", "tpu"), "device: must be auto, cpu"),
        (("run", "x", "--dtype", "int3"), "dtype: must be one of auto"),
        (
            ("run", "x", "--quantization", "int3"),
            "quantization: must be one of auto, none, int8, int4",
        ),
        (("run", "x", "--quantization", "int8"), "quantised already (Q8_0, Q4_1): use auto"),
        (
            ("run", "x", "--kv-cache-dtype", "fp3"),
            "kv_cache_dtype: must be one of auto, model, int8, fp8",
        ),
        (("quantize", "smollm2", "out", "--to", "int8"), "quantised already (Q8_0, Q4_1)"),
        (("quantize", "smollm2", "out", "--to", "int2"), "--to: must be one of int8, int4, fp8"),
        (("run", "x", "--device", "cuda:99"), "cuda:99"),
        (("run", "x", "y", "--priority", "1", "--priority", "2", "--priority", "3"), "--priority"),
        (("run", "x", "--raw", "--system", "s"), "--system"),
        (("run", "--file", "no-such-file.txt"), "no-such-file.txt"),
        (("run",), 'quire run "Why is the sky blue?"'),
        (("run", " "), "is empty"),
        (("run", "smollm2", "Hello!"), 'PROMPT: smollm2 is a model: quire run "…" --model smollm2'),
        (
            ("serve", "smollm2", "-m", "other"),
            "--model: names other, the command smollm2: leave one of the two out",
        ),
        (("batch", "requests.jsonl", "--any-order", "--ray", "auto"), "--any-order: with --ray"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(
    arguments: tuple[str, ...], message: str
) -> None:
    done = quire_here(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_wrong_input_ends_a_process_of_its_own_too() -> None:
    done = quire("run", "x", "--model", "smolm2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_quantize_writes_a_folder_that_run_takes(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_checkpoint("tiny", tmp_path / "model")
    done = quire_here("quantize", tmp_path / "model", tmp_path / "small", "--to", "int4")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"small: [0-9.]+ [KM]iB of weights became [0-9.]+ [KM]iB \(int4\)", done.stdout
    )
    arguments = (
        "run",
        "hello",
        "--raw",
        "-n",
        "4",
        "--device",
        "cpu",
        "--model",
        tmp_path / "small",
    )
    answered = quire_here(*arguments)
    assert answered.returncode == 0, answered.stderr
    assert "Q4_0" in answered.stderr
    assert quire_here(*arguments, "--quantization", "none").stdout
    again = quire_here("quantize", tmp_path / "model", tmp_path / "small", "--to", "int8")
    assert again.returncode == 1
    assert "--force" in again.stderr
    assert (
        quire_here(
            "quantize", tmp_path / "model", tmp_path / "small", "--to", "int8", "--force"
        ).returncode
        == 0
    )


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_says_both_numbers(smollm2_gguf: Path) -> None:
    done = quire_here("run", "word " * 9000, "--raw", "--model", smollm2_gguf)
    assert done.returncode == 1
    assert "8192" in done.stderr.replace(",", "")
    assert "900" in done.stderr.replace(",", "")


@pytest.mark.slow
def test_ctrl_c_ends_cleanly(smollm2_gguf: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "quire.cli.main",
            "run",
            "Count to a million.",
            "-n",
            "4000",
            "-m",
            str(smollm2_gguf),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # the answer has begun
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.slow
def test_in_a_pipe_a_reader_that_leaves_early_is_no_error(smollm2_gguf: Path) -> None:
    command = f'"{sys.executable}" -m quire.cli.main run -n 100 -m "{smollm2_gguf}" | head -c 1'
    command = f'echo "Count to ten." | {command}'
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False
    )
    assert len(done.stdout) == 1
    assert "Traceback" not in done.stderr


def test_models_and_pull_show_what_is_here(smollm2_gguf: Path) -> None:
    assert str(smollm2_gguf) in quire_here("pull", "smollm2").stdout
    listed = quire_here("models").stdout
    assert "smollm2" in listed
    assert "gguf" in listed.lower()
    assert "93.8 MiB" in listed


def test_models_says_how_to_get_one_where_there_is_none(tmp_path: Path) -> None:
    done = quire("models", QUIRE_HOME=str(tmp_path), HF_HOME=str(tmp_path))
    assert done.returncode == 0
    assert "quire pull smollm2" in done.stdout


def test_help_has_examples_and_version_is_the_packages() -> None:
    from quire import __version__

    assert 'quire run "Why is the sky blue?"' in quire_here("run", "--help").stdout
    assert quire("--version").stdout == f"quire {__version__}\n"


def test_chat_keeps_the_conversation_and_knows_its_commands(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    script = "\n".join(
        [
            "/params temperature=0 max_tokens=20",
            "My name is Zanzibar.",
            '"""What is',
            'my name?"""',
            "/stats",
            "/regenerate",
            f"/save {tmp_path / 'kept.json'}",
            "/undo",
            "/system Answer briefly.",
            "/undo",
            "/params temperature=hot",
            "/nonsense",
            "/quit",
            "never reached",
        ]
    )
    done = quire_here("chat", "--model", smollm2_gguf, stdin=script)
    assert done.returncode == 0, done.stderr
    assert "temperature=0.0" in done.stderr
    assert "Zanzibar" in done.stdout
    assert "from the cache" in done.stderr
    assert "system message: Answer briefly." in done.stderr
    assert "temperature: must be a number" in done.stderr
    assert "there is no /nonsense" in done.stderr
    assert "never reached" not in done.stdout
    assert "forgotten" in done.stderr
    assert "there is nothing to undo" in done.stderr
    messages = json.loads((tmp_path / "kept.json").read_text())["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant"] * 2


@pytest.mark.slow
def test_ctrl_c_in_a_chat_stops_the_answer_and_not_the_program(smollm2_gguf: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "quire.cli.main",
            "chat",
            "-n",
            "4000",
            "--model",
            str(smollm2_gguf),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Count from one to ten thousand.\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate("/stats\n/quit\n", timeout=60)
    assert process.returncode == 0, errors
    assert "ended by abort" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_torchs_libraries_are_loaded_beside_python() -> None:
    """What is loaded in the thread is what torch then runs on, and a program that ends at once ends
    well.
    """
    script = (
        "import re, threading; from quire.process.preload import load_torch_libraries; load_torch_libraries()\n"
        "[thread.join() for thread in threading.enumerate() if thread is not threading.main_thread()]\n"
        "find = lambda: set(re.findall(r'\\S*/libtorch_\\w+\\.so', open('/proc/self/maps').read()))\n"
        "before = find(); import torch; assert torch.ones(2).sum() == 2\n"
        "print(any('torch_cpu' in name for name in before), before <= find())"
    )
    if Path("/proc/self/maps").exists():
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.split() == ["True", "True"]
    at_once = "from quire.process.preload import load_torch_libraries; load_torch_libraries()"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", at_once], timeout=60, check=True)

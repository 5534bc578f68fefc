"""Clients as their users run them, where they are installed (`make clients`): agents, frameworks,
libraries.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.client_packages import need_npm, need_python
from tests.server.harness import Server

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "clients"
HELLO = "Hello, this is a scripted model."
DONE = "I have seen what came back."


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What a program prints. It has a home of its own, so that nobody's settings count."""
    given = {
        **os.environ,
        "HOME": str(folder),
        "PWD": str(folder),
        "NO_PROXY": "127.0.0.1",
        **environment,
    }
    options: Any = {
        "capture_output": True,
        "text": True,
        "stdin": subprocess.DEVNULL,
        "timeout": 240,
    }
    done = subprocess.run(command, cwd=folder, env=given, check=False, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(("ask", "answer"), [("hi", HELLO), ("Please @shell", DONE)])
def test_codex(scripted: Server, tmp_path: Path, ask: str, answer: str) -> None:
    program = need_npm("@openai/codex") / "node_modules" / ".bin" / "codex"
    (tmp_path / "config.toml").write_text(
        f"""
model = "scripted"
model_provider = "quire"
[model_providers.quire]
name = "Quire"
base_url = "{scripted.url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
    )
    out = run(
        [str(program), "exec", "--skip-git-repo-check", ask], tmp_path, CODEX_HOME=str(tmp_path)
    )
    assert out.strip().endswith(answer)


@pytest.mark.parametrize(("ask", "answer"), [("hi", HELLO), ("Please @bash", DONE)])
def test_claude_code(scripted: Server, tmp_path: Path, ask: str, answer: str) -> None:
    program = need_npm("@anthropic-ai/claude-code") / "node_modules" / ".bin" / "claude"
    settings = {
        "ANTHROPIC_BASE_URL": scripted.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    out = run([str(program), "-p", ask, "--allowedTools", "Bash"], tmp_path, **settings)
    assert out.strip() == answer


def test_vercel_ai_sdk(scripted: Server, tmp_path: Path) -> None:
    folder = need_npm("@ai-sdk/openai")
    script = folder / "vercel.mjs"  # packages are found from where a script lies
    script.write_text((SCRIPTS / "vercel.mjs").read_text())
    found = json.loads(run(["node", str(script), f"{scripted.url}/v1"], tmp_path))
    assert found == {
        "first": HELLO,
        "second": HELLO,
        "third": "I look it up." + DONE,
        "results": ["sunny in Rome"],
    }


def run_module(name: str, package: str, folder: Path, url: str) -> Any:
    """What a script for node prints last; packages are found from where a script lies."""
    script = need_npm(package) / name
    script.write_text((SCRIPTS / name).read_text())
    return json.loads(run(["node", str(script), url], folder))


def test_langchain_for_javascript(scripted: Server, tmp_path: Path) -> None:
    found = run_module("langchain.mjs", "@langchain/openai", tmp_path, f"{scripted.url}/v1")
    assert found == {"chat": HELLO, "stream": HELLO, "results": ["sunny in Rome"], "after": DONE}


def test_ollama_for_javascript(scripted: Server, tmp_path: Path) -> None:
    found = run_module("ollama.mjs", "ollama", tmp_path, scripted.url)
    assert found == {"chat": HELLO, "stream": HELLO, "generate": HELLO, "models": ["scripted"]}


def test_ollama(scripted: Server, tmp_path: Path) -> None:
    python = need_python("ollama")
    found = json.loads(
        run([python, str(SCRIPTS / "ollama_calls.py"), scripted.url], tmp_path).splitlines()[-1]
    )
    assert found.pop("vector") > 0
    assert found == {
        "models": ["scripted"],
        **dict.fromkeys(("chat", "stream", "generate", "generated"), HELLO),
        "calls": [["weather", {"city": "Rome"}]],
        "after": DONE,
        "context": 16384,
        "running": ["scripted"],
        "missing": 404,
    }


@pytest.mark.parametrize(("ask", "answer"), [("hi", HELLO), ("Please @small-bash", DONE)])
def test_pi(scripted: Server, tmp_path: Path, ask: str, answer: str) -> None:
    program = need_npm("@earendil-works/pi-coding-agent") / "node_modules" / ".bin" / "pi"
    model = {"id": "scripted", "contextWindow": 16384, "maxTokens": 2048}
    provider = {
        "baseUrl": f"{scripted.url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [model],
    }
    settings = tmp_path / ".pi" / "agent" / "models.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"providers": {"quire": provider}}))
    out = run([str(program), "--provider", "quire", "--model", "scripted", "-p", ask], tmp_path)
    assert out.strip().endswith(answer)


@pytest.mark.parametrize(("ask", "answer"), [("hi", HELLO), ("Please @small-bash", DONE)])
def test_opencode(scripted: Server, tmp_path: Path, ask: str, answer: str) -> None:
    program = need_npm("opencode-ai") / "node_modules" / ".bin" / "opencode"
    options = {"baseURL": f"{scripted.url}/v1", "apiKey": "none"}
    models = {"scripted": {"name": "scripted", "limit": {"context": 16384, "output": 2048}}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Quire",
        "options": options,
        "models": models,
    }
    (tmp_path / "opencode.json").write_text(json.dumps({"provider": {"quire": provider}}))
    assert answer in run([str(program), "run", "-m", "quire/scripted", ask], tmp_path)


def test_continue(scripted: Server, tmp_path: Path) -> None:
    program = need_npm("@continuedev/cli") / "node_modules" / ".bin" / "cn"
    model = {
        "name": "scripted",
        "provider": "openai",
        "model": "scripted",
        "apiBase": f"{scripted.url}/v1",
    }
    models = [{**model, "apiKey": "none", "roles": ["chat"]}]
    config = tmp_path / "config.yaml"  # which JSON is as well
    config.write_text(
        json.dumps({"name": "quire", "version": "1.0.0", "schema": "v1", "models": models})
    )
    assert run([str(program), "-p", "hi", "--config", str(config)], tmp_path).strip() == HELLO


@pytest.mark.parametrize("name", ["inspect_ai", "autogen", "strands", "mirascope", "guidance"])
def test_frameworks(scripted: Server, tmp_path: Path, name: str) -> None:
    python = need_python({"autogen": "autogen_agentchat"}.get(name, name))
    out = run([python, str(SCRIPTS / "framework_calls.py"), name, scripted.url], tmp_path)
    found = json.loads(out.splitlines()[-1])
    if name == "guidance":
        assert found["choice"] in ("red", "blue")  # it sends its grammar under two names
    else:
        assert found == {"chat": HELLO, "tool": DONE}


def test_litellm(scripted: Server, tmp_path: Path) -> None:
    python = need_python("litellm")
    out = run(
        [python, str(SCRIPTS / "litellm_calls.py"), scripted.url],
        tmp_path,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert set(found.values()) == {HELLO}
    assert len(found) == 7


TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: FILE
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""
WRITING = """
task: local_writing
dataset_path: json
dataset_kwargs:
  data_files:
    test: FILE
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["END"]
  max_gen_toks: 4
metric_list:
  - metric: exact_match
"""
QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "London"], "answer": 0},
    {"question": "Two and two make", "choices": ["five", "four"], "answer": 1},
]


def test_lm_eval(scripted: Server, tmp_path: Path) -> None:
    """A task over a local file, tokenized here by the server; its loglikelihoods are the server's
    own.
    """
    python = need_python("lm_eval")
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, task in (("local_choice", TASK), ("local_writing", WRITING)):
        (tmp_path / f"{name}.yaml").write_text(task.replace("FILE", str(data)))
    url = f"base_url={scripted.url}/v1/completions"
    arguments = (
        f"model=scripted,{url},tokenizer_backend=remote,tokenized_requests=True,max_retries=1"
    )
    command = [python, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += [
        "--include_path",
        str(tmp_path),
        "--tasks",
        "local_choice,local_writing",
        "--log_samples",
    ]
    out = tmp_path / "out"
    run([*command, "--output_path", str(out)], tmp_path, OPENAI_API_KEY="none", HF_HUB_OFFLINE="1")
    (written,) = out.rglob("samples_local_writing*.jsonl")
    for line in map(json.loads, written.read_text().splitlines()):
        answer = scripted.complete(prompt=line["doc"]["question"], max_tokens=4, stop=["END"])
        assert line["resps"][0][0] == answer["choices"][0]["text"]
    (samples,) = out.rglob("samples_local_choice*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == len(QUESTIONS)
    for line in lines:
        for choice, (found, _) in zip(line["doc"]["choices"], line["filtered_resps"], strict=True):
            before, whole = line["doc"]["question"], f"{line['doc']['question']} {choice}"
            scored = scripted.complete(prompt=whole, echo=True, logprobs=1, max_tokens=0)[
                "choices"
            ][0]["logprobs"]
            skipped = scripted.post(
                "/tokenize", {"prompt": before, "add_special_tokens": False}
            ).json()["count"]
            assert math.isclose(float(found), sum(scored["token_logprobs"][skipped:]), abs_tol=1e-9)

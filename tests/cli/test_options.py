"""Options that commands share, files that set them, and what `run` and `chat` take."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import quire.cli.run as run_module
from quire import LLM
from quire.cli import options
from quire.cli.bench import app as bench
from quire.cli.main import app
from quire.config import EngineConfig
from quire.errors import InvalidRequestError, QuireError
from quire.process import native_library
from tests.cli.in_process import quire_here
from tests.frontend.templates import QWEN
from tests.server.random_model import write_model

SHARED = set(options.EngineOptions.options())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_model(made, QWEN)
    return made


@pytest.fixture
def invoke(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Runs a command in this process; what it wrote to stdout and stderr."""

    def call(*arguments: object, stdin: str | None = None) -> tuple[str, str]:
        done = CliRunner().invoke(app, [str(one) for one in arguments], input=stdin)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout, done.stderr

    return call


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """With which options `run` opens its engine: it goes no further."""
    calls: list[dict[str, Any]] = []

    def note(model: str, **given: Any) -> None:
        calls.append({"model": model, **given})
        raise QuireError("far enough")

    monkeypatch.setattr(run_module, "open_llm", note)
    return calls


def test_run_chat_and_serve_have_the_same_engine_options_and_all_of_them_are_the_engines() -> None:
    assert set(EngineConfig.__dataclass_fields__) == SHARED
    for command in ("run", "chat", "serve"):
        listed = CliRunner().invoke(app, [command, "--help"], terminal_width=200).stdout
        for name in SHARED | {"config", "print_config"}:
            assert f"--{name.replace('_', '-')}" in listed, (command, name)


def test_options_reach_the_engine(
    opened: list[dict[str, Any]], invoke: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(QuireError, match="far enough"):
        invoke("run", "x", "--max-num-seqs", 3, "--kv-cache-memory", "0.5", "--policy", "priority",
               "--step-log", tmp_path / "log", "-m", "somewhere")  # fmt: skip
    assert opened[0]["model"] == "somewhere"
    assert opened[0]["max_num_seqs"] == 3
    assert opened[0]["kv_cache_memory"] == 0.5
    assert opened[0]["policy"] == "priority"
    assert opened[0]["step_log"] == str(tmp_path / "log")


BY_PLACE = ["serve", "chat", "bench throughput", "bench latency", "bench ladder", "plan", "inspect"]


@pytest.mark.few(2)
@pytest.mark.parametrize("command", BY_PLACE)
def test_a_model_is_named_with_or_without_its_option(
    monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any], tmp_path: Path, command: str
) -> None:
    """`quire serve MODEL`, as with vLLM, and `quire serve --model MODEL`; both, if they are the
    same; and both before what a file says.
    """
    named: list[str] = []

    def note(model: str, *_: object, **__: object) -> None:
        named.append(model)
        raise QuireError("far enough")

    monkeypatch.setattr(
        "quire.cli.serve.ServerOptions.config", lambda _, model, __: note(model) if model else None
    )
    monkeypatch.setattr("quire.cli.chat.check_can_chat", note)
    monkeypatch.setattr("quire.tools.bench.offline.open_engine", note)
    monkeypatch.setattr("quire.tools.bench.ladder.engines.LadderEngines", note)
    monkeypatch.setattr("quire.tools.plan.model.open_planned", note)
    monkeypatch.setattr("quire.checkpoints.sources.resolve", note)
    words = command.split()
    (tmp_path / "settings.toml").write_text('model = "from a file"')
    has_file = command in ("serve", "chat")
    file = ("--config", tmp_path / "settings.toml") if has_file else ()
    for given in (("one",), ("--model", "one"), ("one", "-m", "one"), ("one", *file), ()):
        with pytest.raises(QuireError, match="far enough"):
            invoke(*words, *given)
    assert named == ["one"] * 4 + [options.DEFAULT_MODEL]
    with pytest.raises(InvalidRequestError, match="--model: names two, the command one"):
        invoke(*words, "one", "--model", "two")
    assert "[MODEL]" in CliRunner().invoke(app, [*words, "--help"]).stdout
    if has_file:
        with pytest.raises(QuireError, match="far enough"):
            invoke(*words, *file)
        assert named[-1] == "from a file"


def test_a_priority_turns_the_policy_on(
    opened: list[dict[str, Any]], invoke: Callable[..., Any]
) -> None:
    with pytest.raises(QuireError, match="far enough"):
        invoke("run", "x", "--priority", 2)
    assert opened[0]["policy"] == "priority"


def test_run_takes_stop_prompt_schema_and_the_rest(
    folder: Path, invoke: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"age": {"type": "integer"}}, '
                                          '"required": ["age"], "additionalProperties": false}')  # fmt: skip
    common = ("-m", folder, "--kv-cache-memory", "8MiB", "--max-num-seqs", 2, "--json")
    out, _ = invoke(
        "run", "-p", "one", "--prompt", "two", "--json-schema", tmp_path / "schema.json", *common
    )
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two"]
    for line in lines:
        assert line["finish_reason"] != "stop" or isinstance(json.loads(line["text"])["age"], int)
        assert line["text"].lstrip().startswith("{")
    whole = json.loads(invoke("run", "one", "--raw", "-n", 16, *common)[0])["text"]
    stop = whole[len(whole) // 2 :][:2]
    cut, _ = invoke("run", "one", "--raw", "-n", 16, "--stop", "never", "--stop", stop, "--step-log",
                    tmp_path / "steps.jsonl", "--verbose", *common)  # fmt: skip
    assert json.loads(cut)["text"] == whole[: whole.index(stop)]
    assert (tmp_path / "steps.jsonl").read_text().count("\n") > 3


def test_chat_takes_a_first_message_and_tells_more_when_asked(
    folder: Path, invoke: Callable[..., Any]
) -> None:
    out, err = invoke(
        "chat",
        "-m",
        folder,
        "--kv-cache-memory",
        "8MiB",
        "-p",
        "hello",
        "-n",
        4,
        "-v",
        stdin="/quit\n",
    )
    assert out.strip()
    assert "> hello" in err
    assert "prompt tokens from the cache" in err


def test_chat_with_a_base_model_says_so_before_it_loads_anything(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]
) -> None:
    for file in folder.iterdir():
        if "template" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("quire.cli.chat.open_llm", lambda *a, **k: pytest.fail("it was loaded"))
    with pytest.raises(QuireError, match=r"no chat template.*quire run --raw"):
        invoke("chat", "-m", tmp_path)


def test_what_print_config_writes_is_read_back_the_same(
    invoke: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    given = ("serve", "-m", "some where", "--port", 81, "--max-num-seqs", 7, "--kv-cache-memory", "0.5",
             "--no-prefix-caching", "--allowed-host", "a", "--allowed-host", 'b"c')  # fmt: skip
    first, _ = invoke(*given, "--api-key", "secret", "--print-config")
    assert "secret" not in first
    found = tomllib.loads(first)
    assert found["model"] == "some where"
    assert found["server"]["port"] == 81
    assert found["server"]["allowed_host"] == ["a", 'b"c']
    assert found["engine"]["max_num_seqs"] == 7
    assert found["engine"]["prefix_caching"] is False
    (tmp_path / "quire.toml").write_text(first)
    again, _ = invoke("serve", "--config", tmp_path / "quire.toml", "--print-config")
    assert again == first
    changed, _ = invoke(
        "serve", "--config", tmp_path / "quire.toml", "--port", 8000, "--print-config"
    )
    # even where it is the default that is given
    assert changed == first.replace("port = 81", "port = 8000")


def test_a_file_sets_what_the_command_line_leaves_open(
    opened: list[dict[str, Any]], invoke: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('model = "m"\n[engine]\nmax_num_seqs = 5\nblock_size = 32\nkv_cache_memory = 1073741824\n'
                    'step_log = "log"\n[server]\nport = 9\n')  # fmt: skip
    with pytest.raises(QuireError, match="far enough"):
        invoke("run", "x", "--config", file, "--max-num-seqs", 6)
    assert opened[0]["model"] == "m"
    assert opened[0]["max_num_seqs"] == 6
    assert opened[0]["block_size"] == 32
    assert opened[0]["kv_cache_memory"] == "1073741824"
    EngineConfig(**{name: value for name, value in opened[0].items() if name != "model"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[engine]\nmax_num_seqs = true",
            "max_num_seqs in .engine.: must be a whole number, not True",
        ),
        ("[engine]\nmax_seqs = 3", "max_seqs: is no engine option"),
        ("[engine]\ndtype = 'int3'", "dtype: must be one of"),
        ("[server]\nportt = 3", "portt in .server. is unknown"),
        ("[server]\nport = 'x'", "port in .server.: must be a whole number"),
        ("[server]\nallowed_host = 'x'", "allowed_host in .server.: must be a list of texts"),
        ("[server]\nport = 70000", "port: must be from 0 to 65535"),
        ("[sampling]\nseed = 3", "sampling is unknown; there are model, .engine. and .server."),
        ("model = 3", "model must be text"),
        ("[engine", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    text: str, message: str, invoke: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=message):
        invoke("serve", "--config", file, "--print-config")


def test_a_file_that_is_not_there(tmp_path: Path, invoke: Callable[..., Any]) -> None:
    with pytest.raises(InvalidRequestError, match="can't be read"):
        invoke("run", "x", "--config", tmp_path / "none.toml")


def test_an_llm_takes_the_same_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(
        f'model = "{folder}"\n[engine]\nmax_num_seqs = 5\nkv_cache_memory = "8MiB"\n[server]\nport = 9\n'
    )
    with LLM(config=file, block_size=32) as llm:
        config = llm.engine.core.scheduler.config
        assert (config.max_num_seqs, config.block_size) == (5, 32)
        assert llm.engine.plan.num_blocks > 1
    with pytest.raises(InvalidRequestError, match="max_num_seqs"):
        LLM(config=file, max_num_seqs=0)
    file.write_text("[engine]\nbits = 4\n")
    with pytest.raises(InvalidRequestError, match="bits: is no engine option"):
        LLM(config=file)


def test_examples_in_help_stand_on_lines_of_their_own() -> None:
    """A formatter that fills paragraphs may join what click leaves alone after a line with \\b."""
    commands = [*app.registered_commands, *bench.registered_commands]
    texts = [inspect.getdoc(one.callback) or "" for one in commands]
    assert sum("\b\n" in text for text in texts) > 10
    assert [text for text in texts if re.search("\b[^\n]", text)] == []


def test_a_parameter_reaches_the_answer_and_a_wrong_one_is_refused(
    folder: Path, invoke: Callable[..., tuple[str, str]]
) -> None:
    def text(*given: object) -> str:
        common = ("-m", folder, "--kv-cache-memory", "8MiB", "--max-num-seqs", 2, "--json")
        answer = invoke("run", "one", "--raw", "-n", 8, "--temperature", 5, *common, *given)[0]
        return str(json.loads(answer)["text"])

    assert text("--min-p", 1) == text("--temperature", 0)
    whole = text()
    stop = whole[3]
    cut = text("--stop", stop, "--include-stop-str-in-output")
    assert cut == whole[: whole.index(stop) + 1]
    with pytest.raises(InvalidRequestError, match="min_p: must be at least 0 and at most 1, not 2"):
        text("--min-p", 2)


def test_compiling_kernels_is_shown_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run on a machine takes half a minute for it, without a word it looked like a hang."""
    for name in ("long.cpp", "short.cpp"):
        (tmp_path / name).write_text(
            'extern "C" int f() { return 1; }\n' if name[0] == "l" else "\n"
        )
    script = (
        "import sys, pathlib, quire.process.native_library as build; from quire.frontend.progress import ModelBars\n"
        "with ModelBars('some model'):\n"
        "    folder = pathlib.Path(sys.argv[1])\n"
        "    sources = sorted(folder.glob('*.cpp'))\n"
        "    build.compile_library(build.find_compiler(), sources, folder / 'made' / 'x.so', 'CPU')\n"
    )
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "150"}
    done = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stderr=slave, env=environment
    )
    os.close(slave)
    seen = b""
    try:
        while piece := os.read(master, 4096):
            seen += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(master)
    assert done.wait(60) == 0
    assert b"Compiling kernels (once) for some model" in seen
    assert b"100%" in seen
    assert not native_library.progress


def test_help_groups_the_options_that_commands_share() -> None:
    shown = quire_here("run", "--help").stdout
    own, sampling, engine = (
        shown.index(f"\n{title}:") for title in ("Options", "Sampling options", "Engine options")
    )
    assert own < shown.rindex("--raw") < sampling < shown.rindex("--temperature") < engine
    assert engine < shown.rindex("--block-size")
    assert "Sampling options" not in quire_here("models", "--help").stdout


def test_a_file_that_is_not_there_is_named_in_words() -> None:
    done = quire_here("run", "--file", "nowhere.txt")
    assert done.returncode == 1
    assert "error: --file: nowhere.txt can't be read: no such file or directory" in done.stderr
    assert "Errno" not in done.stderr


def test_a_wrong_amount_of_memory_is_told_every_form() -> None:
    done = quire_here("run", "Hi", "--kv-cache-memory", "much")
    assert "512MiB or 2GB, not 'much'; or a fraction of free memory such as 0.5" in done.stderr


def test_a_shell_can_complete_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the script that a shell loads asks for: which shell runs this test makes no difference.
    for name, value in {
        "_QUIRE_COMPLETE": "complete_bash",
        "COMP_WORDS": "quire mod",
        "COMP_CWORD": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert quire_here().stdout.split() == ["models"]

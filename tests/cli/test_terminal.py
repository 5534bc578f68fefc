"""What people see: help at every width, answers that wrap, colours, what Ctrl-C and missing packages
say.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import quire.cli.run as run_module
from quire.cli.main import app
from quire.cli.models import print_table
from quire.cli.start import say_started
from quire.cli.terminal import AnswerPrinter, WrappedText, input_prompt
from quire.errors import InvalidRequestError, QuireError
from quire.outputs import RequestDelta
from tests.cli.in_process import quire_here


def all_commands() -> dict[str, Any]:
    """Every command of `quire --help`, by what is typed."""
    found: dict[str, Any] = {"quire": get_command(app)}
    for name, command in found["quire"].commands.items():
        found[f"quire {name}"] = command
        for inner, one in getattr(command, "commands", {}).items():
            found[f"quire {name} {inner}"] = one
    return found


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 20 columns."""
    made = Terminal()
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return made


def test_every_commands_help_fits_80_columns_and_loses_no_word_in_fewer_or_in_a_pipe() -> None:
    commands = all_commands()
    assert "quire bench ladder" in commands
    for name, command in commands.items():
        shown = {}
        for width in (200, 80, 50):
            settings = {"resilient_parsing": True, "terminal_width": width}
            shown[width] = command.get_help(command.make_context(name, [], **settings))
            assert "\x1b" not in shown[width], name
        assert len({"".join(text.split()) for text in shown.values()}) == 1, name
        for line in shown[80].splitlines():
            # Examples stand on one line, to be copied.
            assert len(line) <= 80 or line.startswith(("  quire ", "       ", "  curl ")), line


def test_a_table_is_whole_in_a_pipe_and_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    rows = [{"model": "a-long-name-of-a-model" * 4, "bytes": 1024, "path": "/a/path" * 20}]
    print_table(rows)
    shown = capsys.readouterr().out
    assert rows[0]["model"] in shown
    assert rows[0]["path"] in shown
    assert max(map(len, quire_here("models", "--available").stdout.splitlines())) > 80


def test_an_answer_breaks_between_words_however_it_is_streamed(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    text = "The quick brown fox jumps over the lazy dog.\n\nA verylongwordthatfitsnowhere and 漢字漢字漢字漢字 end"
    shown = set()
    for size in (1, 3, 200):
        terminal.seek(0)
        terminal.truncate()
        wrapped = WrappedText()
        for start in range(0, len(text), size):
            wrapped.write(text[start : start + size])
        wrapped.close()
        shown.add(terminal.getvalue())
    assert shown == {
        "The quick brown fox \njumps over the lazy \ndog.\n\nA \nverylongwordthatfitsnowhere\n"
        "and 漢字漢字漢字漢字\nend\n"
    }


def test_code_keeps_its_lines_and_is_in_colour_unless_no_color_says_otherwise(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    text = "So:\n```python\nprint('a line of more than twenty columns')\n```\nDone."
    wrapped = WrappedText()
    wrapped.write(text)
    wrapped.close()
    coloured = terminal.getvalue()
    assert re.sub(r"\x1b\[\d*m", "", coloured) == text + "\n"
    assert coloured.index("\x1b[36m") < coloured.index("print") < coloured.index("\x1b[0m")
    assert input_prompt("> ") != "> "
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.seek(0)
    terminal.truncate()
    wrapped = WrappedText()
    wrapped.write(text)
    wrapped.close()
    assert terminal.getvalue() == text + "\n"
    assert input_prompt("> ") == "> "


def test_in_a_pipe_an_answer_stays_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = "words and words and words and words \n```\ncode"
    delta = RequestDelta(
        request_id="a",
        index=0,
        text=text,
        token_ids=(),
        logprobs=(),
        finish_reason="stop",
        output=None,
    )
    printer = AnswerPrinter(["a"], ["?"])
    printer.take(delta)
    assert capsys.readouterr().out == text + "\n"


def test_a_start_is_one_short_line_and_v_tells_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    info = SimpleNamespace(
        device="cpu",
        num_parameters=134_500_000,
        dtype="float32",
        weight_bytes=1 << 20,
        weight_formats=("Q4_1", "Q8_0"),
    )
    whole = "smollm2: llama, a lot of it; cache of 100 tokens; attention by X, slowly: why"
    llm: Any = SimpleNamespace(info=info, description=whole)
    say_started(llm, 0.0, verbose=False)
    shown = capsys.readouterr().err
    assert shown.startswith("smollm2 on cpu, 134M parameters, float32, 1.0 MiB (Q4_1, Q8_0)")
    assert "slowly: why" in shown
    assert "cache of" not in shown
    say_started(llm, 0.0, verbose=True)
    assert whole in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_priority_is_refused_where_another_policy_was_asked_for(
    policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(model: str, **chosen: Any) -> None:
        raise QuireError(f"opened with {chosen['policy']}")

    monkeypatch.setattr(run_module, "open_llm", stop)
    message = rf"--priority: has no effect with --policy {policy}"
    with pytest.raises(InvalidRequestError, match=message):
        CliRunner().invoke(
            app, ["run", "x", "--priority", "1", "--policy", policy], catch_exceptions=False
        )
    file = tmp_path / "quire.toml"
    file.write_text(f'[engine]\npolicy = "{policy}"\n')
    with pytest.raises(InvalidRequestError, match=message):
        CliRunner().invoke(
            app, ["run", "x", "--priority", "1", "--config", str(file)], catch_exceptions=False
        )
    with pytest.raises(QuireError, match="opened with priority"):
        CliRunner().invoke(app, ["run", "x", "--priority", "1"], catch_exceptions=False)


def test_a_missing_package_is_named_before_a_model_is_loaded_and_quoted_for_zsh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("a model is loaded")

    monkeypatch.setattr(run_module, "open_llm", never)
    for name in ("llguidance", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    schema = tmp_path / "schema.json"
    schema.write_text("{}")
    done = quire_here("run", "x", "--json-schema", schema)
    assert "pip install 'quire[structured]'" in done.stderr
    for command in (("serve",), ("batch", str(schema))):
        done = quire_here(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert "needs uvicorn: pip install 'quire[server]'" in done.stderr


def test_every_pip_command_in_a_message_is_quoted() -> None:
    root = Path(run_module.__file__).parents[1]
    for path in root.rglob("*.py"):
        assert not re.search(r"pip install quire\[", path.read_text()), path


def test_pull_tells_scripts_where_a_model_is(smollm2_gguf: Path) -> None:
    found = json.loads(quire_here("pull", "smollm2", "--json").stdout)
    assert found["path"] == str(smollm2_gguf)

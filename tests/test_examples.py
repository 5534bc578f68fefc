"""The scripts in examples/ and the code in README.md run as they stand, on a tiny model where the
answer is not the point.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.frontend.templates import QWEN
from tests.server.random_model import write_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    write_model(made, QWEN)
    return str(made)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines whose cache is no quarter of the machine's memory."""
    import quire.config as config

    monkeypatch.setattr(config, "_CPU_LIMITS", config.EngineLimits(8, 512, "64MiB"))


def run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_listed_and_tested() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    tested = Path(__file__).read_text()
    names = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    assert len(names) == 10
    for name in names:
        assert f"[{name}.py]({name}.py)" in listed
        assert f'run("{name}"' in tested


@pytest.mark.usefixtures("small")
def test_first_answer(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("first_answer", monkeypatch, capsys, str(smollm2_gguf))
    assert "The capital of France is Paris" in out
    assert "12 tokens, ended by length" in out


@pytest.mark.usefixtures("small")
def test_batch(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("batch", monkeypatch, capsys, tiny)
    assert out.count(" -> ") == 4
    assert "alone the same: True" in out


@pytest.mark.usefixtures("small")
def test_stream(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(run("stream", monkeypatch, capsys, tiny)) > 10


@pytest.mark.usefixtures("small")
def test_chat(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("chat", monkeypatch, capsys, tiny)
    counts = re.findall(r"(\d+) prompt tokens, (\d+) of them", out)
    assert len(counts) == 2
    assert int(counts[1][1]) > 0


@pytest.mark.usefixtures("small")
def test_structured(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(
        r"\{'colour': '(red|green|blue)', 'price': \d+\}",
        run("structured", monkeypatch, capsys, tiny),
    )


@pytest.mark.slow
def test_openai_client(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "steps.jsonl"
    options = ("--kv-cache-memory", "8MiB", "--step-log", str(log))
    assert run("openai_client", monkeypatch, capsys, tiny, *options).endswith("\n")
    assert log.read_text().count("\n") > 10  # the answer was computed there


@pytest.mark.slow
def test_tiny_model_is_right_and_readable(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = run("tiny_model", monkeypatch, capfd)
    assert float(re.findall(r"logprob: (\S+)", out)[0]) < 1e-4
    assert "abcdefghijklmnopqrstuvwxyz abc" in out


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("usual", [False, True])
def test_grpo(
    usual: bool,
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--steps=2", "--group=2", "--max-tokens=6", "--layers=1", "--dtype=bfloat16")
    plot = tmp_path / "plot.svg"
    options = (*sizes, "--plot", str(plot), *(["--usual-way"] if usual else []))
    out = run("grpo", monkeypatch, capsys, tiny, *options)
    divergences = [float(text) for text in re.findall(r"KL (\S+),", out)]
    assert len(divergences) == 2
    assert plot.read_text().count("<polyline") == 2
    if usual:  # near, as it is the same model, but not the same bits
        assert 0 < max(map(abs, divergences)) < 0.05
    else:
        assert re.findall(r"KL (\S+),", out) == ["0.0", "0.0"]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("usual", [False, True])
def test_trl_grpo(
    usual: bool,
    dtype: str,
    tiny: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
    sizes = ("--steps=3", "--group=4", "--max-tokens=6", "--layers=2", f"--dtype={dtype}")
    out = run("trl_grpo", monkeypatch, capsys, tiny, *sizes, *(["--usual-way"] if usual else []))
    divergences = [float(text) for text in re.findall(r"sampling_kl (\S+)", out)]
    assert len(divergences) == 3
    assert len(set(re.findall(r"reward (\S+),", out))) > 1  # answers were rewarded
    if usual:  # near, as it is the same model, but not the same bits
        assert 0 < max(map(abs, divergences)) < 0.01
    else:
        assert divergences == [0.0, 0.0, 0.0]


@pytest.mark.usefixtures("small")
def test_measure(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("measure", monkeypatch, capsys, tiny, "1")
    assert "same answers: True" in out
    assert re.search(r"after is \d+\.\d\d x as fast", out)


@pytest.mark.usefixtures("small")
def test_the_readmes_code_runs(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block.replace('"smollm2"', repr(tiny)), {})  # noqa: S102
    assert "Hello" in capsys.readouterr().out


def documented_commands() -> list[tuple[str, str]]:
    """Every line of the README and the docs that is a command of Quire, and where it stands."""
    found: list[tuple[str, str]] = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text().replace("\\\n", " ")
        lines = re.findall(r"^(?: {4})?(?:\$ )?(quire [\w-].*)$", text, re.MULTILINE)
        found += [(path.relative_to(ROOT).as_posix(), line) for line in lines]
    return found


def test_every_documented_command_is_one_that_the_command_line_takes() -> None:
    """Names, options and the kinds of their values: the line is read as a shell and typer read it,
    and not carried out.
    """
    from typer.main import get_command

    from quire.cli.main import app

    root = get_command(app)
    commands = documented_commands()
    assert len({place for place, _ in commands}) > 8
    for place, line in commands:
        words = shlex.split(re.split(r" [>|&]|…", line)[0], comments=True)[1:]
        command, name = root, "quire"
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            name = words.pop(0)
            assert name in command.commands, f"{place}: {line}"
            command = command.commands[name]
        try:
            command.make_context(name, words)
        except Exception as error:
            pytest.fail(f"{place}: {line}: {error}")


@pytest.mark.parametrize("name", ["answers", "your_model"])
def test_the_docs_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / f"{name}.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, {})  # noqa: S102

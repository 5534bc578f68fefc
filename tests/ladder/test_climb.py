"""The whole climb: the numbers in its table are the ones that were measured."""

from __future__ import annotations

import json
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.models.decoder import Decoder
from quire.tools.bench.jobs import Lengths
from quire.tools.bench.ladder import settings as ladder_settings
from quire.tools.bench.ladder.climb import climb
from quire.tools.bench.ladder.engines import LadderEngines
from quire.tools.bench.ladder.settings import FULL, QUICK
from quire.tools.bench.report import Bytes, Factor, Table, cell_text
from quire.tools.bench.spread import Spread
from tests.cli.in_process import quire_here

NUMBER = r"[\d,]+(?:\.\d+)?"


def read_tables(markdown: str) -> dict[str, list[list[str]]]:
    """Title to rows of cells, the head first."""
    tables: dict[str, list[list[str]]] = {}
    for section in markdown.split("\n## ")[1:]:
        rows = [
            line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")
        ]
        tables[section.splitlines()[0]] = [row for row in rows if row[0] != "---"]
    return tables


def number(text: str) -> float:
    found = re.match(NUMBER, text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


def close(shown: str, value: float) -> bool:
    """Whether a number as shown is the value, rounded: three digits, or three places below one."""
    return abs(number(shown) - value) <= max(abs(value) * 0.005, 0.0005)


@pytest.fixture(scope="module")
def quick(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("climbed")
    done = quire_here(
        "bench", "ladder", "--quick", "--model", tiny_model, "--device", "cpu", "--output", folder
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


@pytest.mark.slow
def test_quick_writes_the_table_the_plot_and_the_raw_figures(quick: tuple[Path, str, str]) -> None:
    folder, shown, _ = quick
    tables = read_tables((folder / "results.md").read_text())
    ladder = tables["The ladder"]
    assert [row[0] for row in ladder[1:]] == [str(number) for number in range(1, 11)]
    assert all(row[3].endswith(")") for row in ladder[1:8])
    assert [row[2] == "not run" for row in ladder[1:]] == [False] * 7 + [True] * 2 + [False]
    missing = tables["Rungs that did not run here"]
    assert [row[0] for row in missing[1:]] == ["8", "9"]
    assert "needs a CUDA GPU" in missing[1][2]
    plot = (folder / "ladder.svg").read_text()
    assert plot.count("continuous batching") == 1
    for rate in json.loads((folder / "results.json").read_text())["tables"][0]["rows"][:7]:
        assert f"{statistics.median(rate[5]['values']):,.1f}" in plot
    assert "The ladder" in shown
    facts = (folder / "results.md").read_text().split("##")[0]
    for fact in (
        "command: quire bench ladder --quick",
        "machine: ",
        "versions: quire ",
        "date: 20",
    ):
        assert fact in facts
    assert "same tokens on all rungs: yes" in facts


@pytest.mark.slow
def test_the_numbers_in_the_tables_are_the_measured_ones(quick: tuple[Path, str, str]) -> None:
    folder, _, _ = quick
    raw = json.loads((folder / "results.json").read_text())
    written = read_tables((folder / "results.md").read_text())
    assert [table["title"] for table in raw["tables"]] == list(written)
    checked = 0
    for table in raw["tables"]:
        for shown_row, raw_row in zip(written[table["title"]][1:], table["rows"], strict=True):
            for shown, cell in zip(shown_row, raw_row, strict=False):
                assert shown.strip() == cell["text"].strip()
                if "values" in cell:
                    assert close(shown, statistics.median(cell["values"]))
                    low, high = re.findall(rf"\(({NUMBER}) to ({NUMBER})\)", shown)[0]
                    assert close(low, min(cell["values"]))
                    assert close(high, max(cell["values"]))
                    checked += 1
    assert checked > 40


@pytest.mark.slow
def test_factors_follow_from_the_times(quick: tuple[Path, str, str]) -> None:
    folder, _, _ = quick
    rows = json.loads((folder / "results.json").read_text())["tables"][0]["rows"][:7]
    times = [statistics.median(row[3]["values"]) for row in rows]
    assert rows[0][7]["value"] == rows[0][8]["value"] == 1
    for i in range(1, 7):
        assert rows[i][7]["value"] == pytest.approx(times[i - 1] / times[i])
        assert rows[i][8]["value"] == pytest.approx(times[0] / times[i])
        tokens = [
            t * rate for t, rate in zip(rows[i][3]["values"], rows[i][5]["values"], strict=True)
        ]
        assert tokens == pytest.approx([round(tokens[0])] * len(tokens))
        each = [1000 / rate for rate in rows[i][5]["values"]]
        assert rows[i][10]["values"] == pytest.approx(each)
        assert rows[i][10]["unit"] == "ms"
        assert rows[i][11]["value"] == rows[i][6]["value"] + rows[i][9]["value"]


@pytest.mark.slow
def test_the_memory_of_caches_is_what_they_really_take(quick: tuple[Path, str, str]) -> None:
    folder, _, _ = quick
    raw = json.loads((folder / "results.json").read_text())
    assert "process memory" in raw["facts"]
    table = next(table for table in raw["tables"] if table["title"].startswith("Memory of"))
    contiguous, large, small = (row[1]["value"] for row in table["rows"])
    used = table["rows"][0][2]["value"]
    assert contiguous > large > small > used
    assert used / small > 0.9


@pytest.mark.slow
def test_nothing_but_what_was_written_is_said_where_nobody_looks(
    quick: tuple[Path, str, str],
) -> None:
    folder, _, said = quick
    names = ("results.md", "results.json", "ladder.svg")
    assert said.splitlines() == [f"wrote {folder / name}" for name in names]


TINY = replace(
    QUICK, num_jobs=2, repeats=1, answer=Lengths(2, 3), hello_lengths=(2,), batch_jobs=2, prompt_lengths=(8,),
    prompt_new_tokens=2, attention_lengths=(16,), chat_requests=2, system_tokens=32, weights_new_tokens=2,
)  # fmt: skip
"""Where the figures do not matter."""


class TickingClock:
    """Every look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_what_the_clock_says_is_what_the_table_says(tiny_model: Path) -> None:
    """With a clock that counts looks, every duration is known: a rung looks once per request or
    group of them.
    """
    settings = replace(
        QUICK, num_jobs=4, max_num_seqs=2, answer=Lengths(2, 3), hello_lengths=(2, 4), batch_jobs=4, batch_seqs=2,
        prompt_lengths=(8,), prompt_new_tokens=2, attention_lengths=(16,), chat_requests=2, system_tokens=32,
    )  # fmt: skip
    with LadderEngines(str(tiny_model), "cpu", "float32", max_model_len=256) as engines:
        found = climb(engines, settings, TickingClock())
    assert found.differing == ()
    tables = {table.title: table for table in found.report.tables}
    times = [row[3] for row in tables["The ladder"].rows[:7]]
    # Rungs 1 and 2 look at the start and after each of four requests; rung 3 once more at the end;
    # 4 to 7 only once.
    assert times == [Spread((seconds, seconds), "s") for seconds in (4, 4, 5, 2, 2, 2, 2)]
    hello = tables["Naive loop and KV cache"].rows
    assert [(row[0], row[1], row[2]) for row in hello] == [
        (2, Spread((1, 1), "s"), Spread((1, 1), "s")),
        (4, Spread((2, 2), "s"), Spread((2, 2), "s")),
    ]
    assert {row[2].values for row in tables["Attention kernels"].rows} == {(1000.0, 1000.0)}  # type: ignore[union-attr]
    assert [name for name, _ in found.bars][3] == "4 continuous batching"
    shared = tables["Time to first token with a shared system prompt"]
    assert [row[1] for row in shared.rows] == [0, 32]


@pytest.mark.slow
def test_a_rung_that_says_something_else_is_found_out(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from quire.cli.bench.ladder import ladder
    from quire.errors import EngineError
    from quire.tools.bench.ladder import rungs

    real = rungs.generate_with_kv_cache

    def forgetful(*arguments: Any, **options: Any) -> list[int]:
        return [token ^ 1 for token in real(*arguments, **options)]

    monkeypatch.setattr(rungs, "generate_with_kv_cache", forgetful)
    monkeypatch.setattr(ladder_settings, "QUICK", TINY)
    with pytest.raises(EngineError, match="2 contiguous KV cache"):
        ladder.__wrapped__(
            str(tiny_model), device="cpu", dtype="float32", quick=True, output=tmp_path, plot="png"
        )
    assert (
        "same tokens on all rungs: no: 2 contiguous KV cache"
        in (tmp_path / "results.md").read_text()
    )
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_quantised_weights_are_held_against_the_naive_loop_with_the_same_weights(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.tools.bench.ladder import rungs

    real = rungs.generate_naive
    loops: list[set[str]] = []

    def forgetful(decoder: Decoder, *arguments: Any) -> list[int]:
        formats = {part.format.name for weight in decoder.weights.values() for part in weight.parts}
        loops.append(formats)
        return [token ^ ("cpu_packed_INT8" in formats) for token in real(decoder, *arguments)]

    monkeypatch.setattr(rungs, "generate_naive", forgetful)
    with LadderEngines(str(tiny_model), "cpu", "float32", max_model_len=256) as engines:
        assert climb(engines, TINY, TickingClock()).differing == ("7 quantised weights",)
    assert len(loops) == 2 + 2  # rung 1's, and those of rung 7


@pytest.mark.slow
def test_other_kernels_are_held_against_the_naive_loop_with_their_own(tiny_model: Path) -> None:
    """Where they round elsewhere: with fewer bits than float32 has."""
    from quire.tools.bench.ladder.rungs import find_rungs

    for dtype, expected in (("float32", [7]), ("bfloat16", [6, 7, 10])):
        with LadderEngines(str(tiny_model), "cpu", dtype, max_model_len=256) as engines:
            rungs = find_rungs(engines, [], 2)
        assert [rung.number for rung in rungs if rung.expected is not None] == expected
        assert [rung.number for rung in rungs if rung.has_other_weights] == [7]


def test_formats_of_weights_stand_side_by_side(quick: tuple[Path, str, str]) -> None:
    folder, _, _ = quick
    raw = json.loads((folder / "results.json").read_text())
    table = next(table for table in raw["tables"] if table["title"] == "Weights in other formats")
    rows = {row[0]["text"]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert list(rows) == ["float32", "bfloat16", "int8", "int4"]
    sizes = [row["size"]["value"] for row in rows.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 2 * sizes[1] > 3.5 * sizes[2]
    bits = [row["bits per weight"]["value"] for row in rows.values()]
    assert bits[:2] == [32, 16]
    assert 8 < bits[2] < 9
    assert 4.5 < bits[3] < 5.5  # norms stay plain
    perplexities = [row["perplexity"]["value"] for row in rows.values()]
    assert all(value == pytest.approx(perplexities[0], rel=0.2) for value in perplexities)
    divergence = [row["mean KL"]["value"] for row in list(rows.values())[1:]]
    assert 0 < divergence[0] < divergence[2]
    assert divergence[1] < divergence[2]
    ladder = raw["tables"][0]
    weights = [row[ladder["columns"].index("weights")].get("value") for row in ladder["rows"]]
    assert weights == [*[sizes[0]] * 6, sizes[2], None, None, sizes[0]]


@pytest.mark.slow
def test_without_matplotlib_the_plot_is_left_out_and_said_so(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from quire.cli.bench.ladder import ladder

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(ladder_settings, "QUICK", TINY)
    ladder.__wrapped__(
        str(tiny_model), device="cpu", dtype="float32", quick=True, output=tmp_path, plot="svg"
    )
    assert "pip install 'quire[plot]'" in capsys.readouterr().err
    assert (tmp_path / "results.md").exists()
    assert not (tmp_path / "ladder.svg").exists()


def test_the_full_climb_is_the_one_the_chapters_speak_of() -> None:
    assert (FULL.repeats, FULL.hello_lengths) == (3, (50, 100, 200))
    assert FULL.prompt_lengths[-1] >= 16 * FULL.prompt_lengths[0]
    assert FULL.memory_sequences == FULL.batch_jobs == 100
    assert FULL.batch_answer.low < FULL.batch_answer.high
    assert FULL.num_jobs > FULL.max_num_seqs  # somebody waits
    assert FULL.quality_windows > QUICK.quality_windows


def test_cells_are_rounded_for_people() -> None:
    assert cell_text(Spread((0.12345,), "s")) == "0.123 s"
    assert cell_text(Spread((2.0, 1.0, 30.0), "s")) == "2.00 s (1.00 to 30.0)"
    assert cell_text(Spread((123456.0,), "tok/s")) == "123,456 tok/s"
    assert cell_text(Factor(1.0)) == "1.00 ×"
    assert cell_text(Bytes(3 * 2**20)) == "3.0 MiB"
    table = Table("t", "n", ("a", "b"), ((1, "x|y"),))
    assert table.markdown() == ["| a | b |", "| --- | --- |", "| 1 | x\\|y |"]

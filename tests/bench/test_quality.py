"""`quire bench quality`: the figures are those of their definitions, and what can't be compared is
refused.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from quire.backends.select import select_kernels
from quire.cli.main import main
from quire.errors import EngineError, InvalidRequestError
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tokenizer_parts import TokenizerParts
from quire.models.decoder import Decoder
from quire.tools.bench.quality import (
    OWN_TEXT,
    measure_quality,
    perplexity,
    read_text,
    score,
    windows_of,
)
from quire.tools.bench.report import Number, cell_text
from tests.decoding import all_logits
from tests.random_models import SPECS, random_decoder

TEXT = "A small text, which is read in windows. " * 12


def make_decoder(dtype: torch.dtype, seed: int = 0, family: str = "llama") -> Decoder:
    return random_decoder(SPECS[family], select_kernels(torch.device("cpu"), dtype), dtype, seed)


def naive_scores(
    baseline: Decoder, model: Decoder, windows: list[list[int]]
) -> list[tuple[float, float, float, bool]]:
    """The definition: each token's distributions from everything before it in the window, one sum
    at a time.
    """
    found = []
    for window in windows:
        for i in range(1, len(window)):
            distributions = []
            for decoder in (baseline, model):
                logits = all_logits(decoder, window[:i])[-1].tolist()
                highest = max(logits)
                total = math.fsum(math.exp(value - highest) for value in logits)
                distributions.append([value - highest - math.log(total) for value in logits])
            p, q = distributions
            divergence = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
            found.append(
                (p[window[i]], q[window[i]], divergence, p.index(max(p)) == q.index(max(q)))
            )
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_scores_are_those_of_the_definition(family: str) -> None:
    baseline = make_decoder(torch.float32, family=family)
    model = make_decoder(torch.bfloat16, family=family)
    tokens = torch.randint(97, (125,), generator=torch.Generator().manual_seed(1)).tolist()
    # more rows than are scored at once, and a single one
    windows = [tokens[:70], tokens[70:120], tokens[120:122]]
    scores = score(baseline, model, windows)
    expected = naive_scores(baseline, model, windows)
    assert scores.num_tokens == 69 + 49 + 1
    for name, values in zip(
        ("baseline", "model", "divergence", "same_top"), zip(*expected, strict=True), strict=True
    ):
        torch.testing.assert_close(
            getattr(scores, name),
            torch.tensor(values, dtype=torch.float64),
            rtol=1e-9,
            atol=1e-12,
            msg=name,
        )
    # bfloat16 changes a little, but something
    assert 0 < scores.divergence.mean() < scores.divergence.max() < 1
    assert perplexity(scores.model) == pytest.approx(
        math.exp(-math.fsum(row[1] for row in expected) / len(expected))
    )


def test_a_model_is_at_no_distance_from_itself() -> None:
    scores = score(
        make_decoder(torch.float32), make_decoder(torch.float32), [[5, 6, 7, 8], [9, 10]]
    )
    assert torch.equal(scores.divergence, torch.zeros(4, dtype=torch.float64))
    assert torch.equal(scores.baseline, scores.model)
    assert scores.same_top.tolist() == [1, 1, 1, 1]


def test_another_model_is_far_away() -> None:
    scores = score(
        make_decoder(torch.float32), make_decoder(torch.float32, seed=1), [list(range(60))]
    )
    assert scores.divergence.min() > 0.1
    assert scores.same_top.mean() < 0.5


def test_weights_that_are_not_numbers_are_noticed() -> None:
    broken = make_decoder(torch.float32)
    broken.final_norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not all numbers"):
        score(make_decoder(torch.float32), broken, [[1, 2, 3]])


def test_windows_cover_the_text_and_begin_as_the_model_wants() -> None:
    plain = Tokenizer.of_bytes()
    text = bytes(range(97, 107)).decode()
    assert windows_of(text, plain, 4) == [[97, 98, 99, 100], [101, 102, 103, 104], [105, 106]]
    # nothing follows the ninth
    assert windows_of(text[:9], plain, 4) == [[97, 98, 99, 100], [101, 102, 103, 104]]
    with pytest.raises(
        InvalidRequestError, match=r"--text: is too short: nothing follows its 1 tokens"
    ):
        windows_of("a", plain, 4)
    vocabulary = {"a": 0, "b": 1, "<s>": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    with_start = Tokenizer(
        TokenizerParts(backend, 3, bos_token_id=2, eos_token_ids=(), unk_token_id=None)
    )
    assert windows_of("abbab", with_start, 3) == [[2, 0, 1], [2, 1, 0], [2, 1]]
    assert windows_of("a", with_start, 3) == [[2, 0]]


def test_our_text_is_long_enough_and_plain() -> None:
    text = read_text(OWN_TEXT)
    assert 1500 < len(text.split()) < 2500
    assert text.isascii()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (17.294, "17.29"),
        (1234.5, "1,234"),
        (0.0004217, "0.0004217"),
        (0.0, "0"),
        (1e-12, "0.000000000"),
    ],
)
def test_small_figures_keep_their_digits(value: float, text: str) -> None:
    assert cell_text(Number(value)) == text
    assert cell_text(Number(value, "%")) == f"{text} %"


def write_model(folder: Path, vocab_size: int, seed: int = 0) -> Path:
    """A tiny model whose tokens are bytes; further ones stand for nothing."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, vocab_size=vocab_size, initializer_range=0.2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), 256)


def run_command(*arguments: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["quire", "bench", "quality", *map(str, arguments), "--device", "cpu"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    if ended.value.code:
        raise AssertionError(f"ended with {ended.value.code}")


def test_the_command_has_a_line_for_each_kind_of_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    forms = ("--quantization", "bfloat16", "--quantization", "float32")
    run_command(
        "--model", model, *forms, "--text", tmp_path / "text.txt", "--window", "64", "--json", tmp_path / "found.json",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    table = found["tables"][0]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert [row["weights"]["text"] for row in rows] == ["float32 (baseline)", "bfloat16", "float32"]
    assert [row["format"]["text"] for row in rows] == ["F32", "BF16", "F32"]
    assert [row["bits per weight"]["text"] for row in rows] == ["32.00", "16.00", "32.00"]
    baseline, half, same = rows
    assert same["perplexity"] == baseline["perplexity"] != half["perplexity"]
    assert same["mean KL"]["value"] == same["worst KL"]["value"] == 0
    assert 0 < half["mean KL"]["value"] < half["worst KL"]["value"]
    assert same["same top token"]["text"] == "100.0 %"
    tokens = len(TEXT)
    assert {row["tokens"]["text"] for row in rows} == {str(tokens - -(-tokens // 64))}
    printed = capsys.readouterr().out
    assert all(cell["text"] in printed for row in rows for cell in row.values())


def test_two_models_are_compared_if_they_have_the_same_tokens(model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", 256, seed=1)
    report = measure_quality(str(model), ["float32"], str(other), "float32", TEXT, 128, "cpu")
    (_, row) = report.tables[0].rows
    assert isinstance(row[5], Number)
    assert row[5].value > 0.01
    wider = write_model(tmp_path / "wider", 300)
    with pytest.raises(
        InvalidRequestError,
        match=r"--against: .* vocabulary of 300 tokens and the model one of 256",
    ):
        measure_quality(str(model), ["float32"], str(wider), "float32", TEXT, 128, "cpu")


def test_texts_that_can_not_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.txt").write_bytes(b"\xff\xd8\xff")
    for name, message in (
        ("empty.txt", "is empty"),
        ("picture.txt", "can't be read"),
        ("none.txt", "can't be read"),
    ):
        with pytest.raises(InvalidRequestError, match=f"--text: .*{message}"):
            read_text(tmp_path / name)

"""The model of the first chapter computes what the decoder computes."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.errors import UnsupportedModelError
from quire.kernels.reference import ReferenceKernels
from quire.tools.ladder import model
from tests.decoding import all_logits
from tests.random_models import SPECS, random_decoder

TOKENS = [5, 17, 3, 90, 41, 8, 22]
SHOWN = ("mixtral", "qwen2", "qwen3", "qwen3_moe")


@pytest.mark.parametrize("family", SHOWN)
def test_the_chapters_model_gives_the_decoders_logits(family: str) -> None:
    decoder = random_decoder(SPECS[family], ReferenceKernels(), torch.float32)
    ours = model.forward(decoder, TOKENS)
    torch.testing.assert_close(ours, all_logits(decoder, TOKENS), atol=1e-4, rtol=0)
    difference, following = model.compare(decoder, TOKENS)
    assert difference < 1e-4
    assert following == int(all_logits(decoder, TOKENS)[-1].argmax())


@pytest.mark.parametrize("family", [name for name in SPECS if name not in SHOWN])
def test_what_the_chapter_does_not_show_is_refused(family: str) -> None:
    decoder = random_decoder(SPECS[family], ReferenceKernels(), torch.float32)
    with pytest.raises(UnsupportedModelError, match="more to it"):
        model.forward(decoder, TOKENS)


def test_large_scores_stay_finite() -> None:
    scores = torch.tensor([[1000.0, 999.0, -1000.0]])
    assert torch.allclose(model.softmax(scores), torch.softmax(scores, -1))
    assert torch.equal(model.rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-5), torch.zeros(1, 4))


def test_a_score_depends_on_the_distance_alone() -> None:
    query, key = (
        torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).unsqueeze(1).expand(2, 12, 8)
    )
    turned = [model.rotate(side.unsqueeze(1), 100.0)[:, 0] for side in (query, key)]
    scores = turned[0] @ turned[1].T
    for distance in range(5):
        found = scores.diagonal(-distance)
        assert torch.allclose(found, found[0].expand(12 - distance), atol=1e-5)


@pytest.mark.slow
def test_the_reader_can_run_it(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "quire.tools.ladder.model", str(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "goes on with" in done.stdout
    assert float(done.stdout.split()[-1]) < 1e-4


def test_the_walk_shows_every_stop_of_the_chapter(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[2]
    walk = runpy.run_path(str(root / "docs" / "walk.py"))["walk"]
    walk(str(tiny_model), "some text", 3)
    shown = capsys.readouterr().out
    stops = re.findall(r"^(quire/\S+\.py): ", shown, re.MULTILINE)
    assert all((root / file).exists() for file in stops)
    chapter = (root / "docs" / "life_of_a_request.md").read_text()
    for file in dict.fromkeys(stops):
        if file not in (
            "quire/outputs.py",
            "quire/engine/block_pool.py",
            "quire/runner/request_rows.py",
        ):
            assert f"(../{file})" in chapter, file
    assert stops.count("quire/engine/scheduler.py") == shown.count("is decided") == 3
    assert "finished: length" in shown
    free, in_all = re.findall(r"(?:free|in_all) +(\d+)", shown)[-2:]
    assert free == in_all

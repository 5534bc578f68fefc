"""The benchmark of layers with a state: what it compares has the same bytes, and it runs."""

from __future__ import annotations

import argparse
import re

import pytest

from quire.kernels.recurrent import GatedNormSpec, RecurrentSpec
from quire.models.config_parts import plain_attention
from quire.tools.bench.engine.recurrent import (
    SHAPES,
    HybridShape,
    plain_of_same_bytes,
    report,
    step_bytes,
)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 8])
def test_the_plain_decoder_reads_the_same_bytes(name: str, rows: int) -> None:
    spec = SHAPES[name].spec(4)
    plain = plain_of_same_bytes(SHAPES[name], spec, rows, 100, 2)
    assert step_bytes(plain, rows, 100, 2) == pytest.approx(
        step_bytes(spec, rows, 100, 2), rel=0.01
    )


@pytest.mark.slow
def test_it_prints_both_as_parts_of_the_bandwidth_and_their_ratio() -> None:
    tiny = HybridShape(
        64,
        96,
        RecurrentSpec(1, 2, 8, 8, taps=4, norm=GatedNormSpec(8)),
        plain_attention(2, 1, 32),
    )
    printed = report(tiny, argparse.Namespace(dtype="float32", layers=4, turns=3), rows=2)
    assert len(re.findall(r"(?:hybrid|plain) .* ms .* of the bandwidth", printed)) == 2
    assert re.search(r"hybrid / plain: \d+\.\d\d in the median of 3 turns", printed)

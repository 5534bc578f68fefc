"""The benchmark of adapters runs, and prints what each number of them costs by none."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from quire.tools.bench.engine.adapters import measure, report
from tests.random_models import SPECS


def test_it_prints_what_adapters_cost_by_a_batch_without_any(tmp_path: Path) -> None:
    options = argparse.Namespace(dtype="float32", rows=4, adapters=[1, 3], rank=2, turns=3)
    spec = replace(SPECS["qwen3"], vocab_size=16_384)
    printed = report(measure(spec, options, tmp_path))
    assert re.search(r"none: \d+\.\d ms a step", printed)
    assert re.findall(r"(\d) adapters: .* \d+\.\d+ of none", printed) == ["1", "3"]

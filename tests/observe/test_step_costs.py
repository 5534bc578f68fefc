"""What rows cost is measured for every kind of model: an engine that writes a log must start with
any.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from quire.backends.select import select_kernels
from quire.config import EngineConfig
from quire.observe import measure_costs
from quire.observe.measure_costs import about_model, costs_of_shapes, measured_costs
from quire.observe.step_log import LoggedModel
from tests.random_models import SPECS, random_decoder


def test_every_kind_of_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_costs, "_ROWS", (1, 2, 5))
    state = torch.random.get_rng_state()
    for number, (name, spec) in enumerate(SPECS.items()):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        kernels = select_kernels(torch.device("cpu"), dtype)
        costs = measured_costs(random_decoder(spec, kernels, dtype), costs_of_shapes(spec))
        assert costs.rows == (1, 2, 5), name
        assert len(costs.layers) == 3 >= len(costs.head) > 1, name
        assert list(costs.layers) == sorted(costs.layers), name
        assert costs.work(200, 20) >= costs.work(2, 1) >= 0, name
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's chance is touched


def test_without_a_measurement_the_shapes_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts count by those that a row has. And the model is named as it can be found again."""
    spec = SPECS["mixtral"]
    decoder = random_decoder(
        spec, select_kernels(torch.device("cpu"), torch.float32), torch.float32
    )
    about = about_model(
        "smollm2", EngineConfig(quantization="none"), spec, decoder, is_measured=False
    )
    assert about["model"] == LoggedModel("smollm2", "cpu", quantization="none")._asdict()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert about_model("mine", EngineConfig(), spec, decoder, False)["model"]["name"] == str(
        tmp_path / "mine"
    )
    costs = about["costs"]
    assert costs == asdict(costs_of_shapes(spec))
    assert costs["rows"] == ()
    hidden, rows = spec.hidden_size, 2 * (64 + 32) + 6  # queries, keys and values, output, router
    experts = 2 * 3 * 32 * hidden
    norms = 2 * hidden
    layers = 2 * (rows * hidden + experts + norms) + hidden
    assert costs["head_share"] == pytest.approx(spec.vocab_size * hidden / layers)
    assert costs["pair_share"] == pytest.approx(2 * 4 * 16 * 2 / layers)

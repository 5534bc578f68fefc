"""`quire verify` as a command: the table, JSON, exit status, and what it says to wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quire.assemble import Engine
from quire.backends.cpu.device import CpuDevice
from quire.backends.select import select_kernels
from quire.cli.main import app
from quire.config import EngineConfig
from quire.errors import CapacityError, InvalidRequestError
from quire.tools.verify import check, engines
from quire.tools.verify.axes import ModelSubject
from tests.ladder.conftest import tiny_model as tiny_model
from tests.verify.conftest import make_model


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few requests, however long it takes here."""
    monkeypatch.setattr(ModelSubject, "sizes", replace(ModelSubject.sizes, fewest=6, first=6))
    monkeypatch.setattr(check, "verify", partial(check.verify, max_rounds=1, shrink_seconds=0.1))


def invoke(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(
        app, ["verify", *map(str, arguments), "--seconds", "300", "--device", "cpu"]
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.mark.slow
def test_a_model_from_its_files_is_exact_on_all_axes(tiny_model: Path) -> None:
    code, text = invoke(tiny_model, "--json")
    told = json.loads(text)
    assert code == 0, text
    assert told["exact"]
    states = {axis["name"]: axis["state"] for axis in told["axes"]}
    assert states.pop("CUDA graphs") == "not applicable"
    states.pop("recorded steps")  # depends on the compiler
    assert set(states.values()) == {"equal"}  # a restart among them
    assert told["smallest"] is None


@pytest.mark.slow
def test_a_difference_is_shown_with_its_smallest_case(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import quire.sampling.sampler as sampler

    proper, calls = sampler.noise_keys, []

    def keys(seeds, positions):  # type: ignore[no-untyped-def]
        calls.append(1)
        return proper(seeds + len(calls), positions)

    monkeypatch.setattr(sampler, "noise_keys", keys)
    monkeypatch.setattr(
        engines.Model, "no_devices", lambda model, size: "other processes have a sound one"
    )
    code, text = invoke(tiny_model)
    assert code == 1
    assert "NOT EXACT: answers differ from those alone on repeated" in text
    assert "The smallest case found" in text
    assert "alone, " in text.splitlines()[-1]


def test_a_model_that_can_not_be_divided(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engines.Model(str(tiny_model), device="cpu")
    try:
        monkeypatch.setattr(engines, "num_cores", lambda: 2)
        assert model.no_devices(2) is None
        assert "query heads" in str(model.no_devices(100))
        model.num_devices = 100
        axes = {axis.name: axis.missing for axis in ModelSubject(model).axes()}
        assert "query heads" in str(axes["devices"])
        with monkeypatch.context() as little_memory:
            little_memory.setattr(
                CpuDevice, "free_memory", lambda device: model.first_engine.decoder.nbytes
            )
            assert "no room" in str(model.no_devices(2))
        monkeypatch.setattr(engines, "num_cores", lambda: 1)
        assert "cores" in str(model.no_devices(2))
    finally:
        model.close()
    assert "no files" in str(
        make_model(select_kernels(torch.device("cpu"), torch.float32)).no_devices(2)
    )


def test_wrong_input_is_refused(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="leave one out"):
        invoke(tiny_model, "--url", "http://127.0.0.1:9")
    with pytest.raises(InvalidRequestError, match="--url: must be an address"):
        invoke("--url", "localhost")
    with pytest.raises(InvalidRequestError, match="--model"):
        invoke(tiny_model, "--model", "smollm2")


@pytest.mark.slow
def test_engines_that_are_kept_give_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where making one takes seconds."""
    model = make_model(select_kernels(torch.device("cpu"), torch.float32))
    made: list[EngineConfig] = []
    proper = engines.Model._assemble

    def assemble(self: engines.Model, config: EngineConfig) -> Engine:
        made.append(config)
        if len(made) == 10:
            raise CapacityError("those that are kept have all the memory")
        return proper(self, config)

    monkeypatch.setattr(engines.Model, "keeps_engines", True)
    monkeypatch.setattr(engines.Model, "_assemble", assemble)
    assert check.verify(ModelSubject(model), 300.0).is_exact
    before = len(made)
    assert 8 < before < 30
    assert check.verify(ModelSubject(model), 300.0).is_exact
    assert len(made) - before < before

"""Planted faults: each shows on the axis it belongs to, and a sound engine shows none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quire.sampling.sampler as sampler
from quire.backends.select import select_kernels
from quire.engine import scheduler
from quire.errors import EngineError
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight
from quire.runner.request_rows import RequestRows
from quire.step import AdmittedRequest, Step
from quire.tools.verify.axes import ModelSubject
from quire.tools.verify.cases import Case
from quire.tools.verify.check import Verdict, verify
from quire.tools.verify.report import summary
from quire.tools.verify.subject import Answers, Axis, AxisComparison, pairs_of
from tests.verify.conftest import make_model

CPU = select_kernels(torch.device("cpu"), torch.float32)
NOT_HERE = {"CUDA graphs", "devices", "restarted"}


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few requests, however long it takes here: these tests are not about time."""
    sizes = replace(ModelSubject.sizes, fewest=6, first=6)
    monkeypatch.setattr(ModelSubject, "sizes", sizes)


def states(verdict: Verdict) -> dict[str, str]:
    missing = {axis.name for axis in verdict.axes if axis.state == "not applicable"}
    assert missing - {"recorded steps"} == NOT_HERE
    return {axis.name: axis.state for axis in verdict.axes if axis.state != "not applicable"}


@pytest.mark.slow
def test_a_sound_engine_has_no_difference() -> None:
    verdict = verify(ModelSubject(make_model(CPU)), 600.0, max_rounds=1)
    assert set(states(verdict).values()) == {"equal"}
    assert verdict.is_exact
    assert verdict.smallest is None
    assert all(
        axis.values > 0 and axis.requests > 0 for axis in verdict.axes if axis.state == "equal"
    )


class BatchedSums(ReferenceKernels):
    """Adds in another order when there are more rows: what a library that picks its split by the
    batch does.
    """

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if len(x) < 5 or weight.format is None:
            return super().linear(x, weight, bias, out)
        half = x.shape[1] // 2
        plain = weight.format.expand(*weight.parts[0].tensors)
        result = x[:, half:] @ plain[:, half:].T + x[:, :half] @ plain[:, :half].T
        result = result if bias is None else result + bias
        return result if out is None else out.copy_(result)


@pytest.mark.slow
def test_sums_that_depend_on_the_batch_show_in_batches() -> None:
    verdict = verify(
        ModelSubject(make_model(BatchedSums())), 600.0, max_rounds=1, shrink_seconds=60.0
    )
    found = states(verdict)
    assert found["repeated"] == found["seeds"] == "equal"
    assert found["together"] == found["chunks"] == found["scored again"] == "different"
    assert not verdict.is_exact
    smallest = verdict.smallest
    assert smallest is not None
    assert smallest.is_reproduced
    assert verdict.smallest_axis == "together"
    assert smallest.num_tries > 1
    assert 2 <= len(smallest.cases) <= 6  # five rows in one step: a request alone never has them


@pytest.mark.slow
def test_a_prefix_cache_that_gives_a_neighbours_block_shows_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def admit(**fields: Any) -> AdmittedRequest:
        blocks = fields["block_ids"]
        if fields["num_cached_tokens"] and blocks:
            fields["block_ids"] = (blocks[0] % 3 + 1, *blocks[1:])
        return AdmittedRequest(**fields)

    monkeypatch.setattr(scheduler, "AdmittedRequest", admit)
    verdict = verify(ModelSubject(make_model(CPU)), 600.0, max_rounds=1, shrink_seconds=60.0)
    different = {name for name, state in states(verdict).items() if state == "different"}
    assert "prefix cache" in different
    assert different <= {"prefix cache", "swapped"}  # the two that have a cache
    assert verdict.smallest is not None
    assert len(verdict.smallest.cases) <= 2


@pytest.mark.slow
def test_a_sampler_that_draws_its_own_chance_shows_when_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = np.random.default_rng(0)

    def keys(seeds: Any, positions: Any) -> Any:
        return source.integers(-(2**31), 2**31, (len(seeds), 2), dtype=np.int32)

    monkeypatch.setattr(sampler, "noise_keys", keys)
    verdict = verify(ModelSubject(make_model(CPU)), 600.0, max_rounds=1, shrink_seconds=60.0)
    assert states(verdict)["repeated"] == "different"
    assert verdict.smallest_axis == "repeated"
    assert verdict.smallest is not None
    assert len(verdict.smallest.cases) == 1


@pytest.mark.slow
def test_a_sampler_that_ignores_the_seed_shows_among_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    proper = sampler.noise_keys
    monkeypatch.setattr(
        sampler, "noise_keys", lambda seeds, positions: proper(np.zeros_like(seeds), positions)
    )
    apply = RequestRows.apply

    def forget_seeds(rows: RequestRows, step: Step) -> None:
        apply(rows, step)
        rows.seeds.zero_()  # which kernels read that draw by themselves

    monkeypatch.setattr(RequestRows, "apply", forget_seeds)
    verdict = verify(ModelSubject(make_model(CPU)), 600.0, max_rounds=1, shrink_seconds=0.1)
    found = states(verdict)
    assert found.pop("seeds") == "different"
    assert set(found.values()) == {"equal"}


def test_an_axis_that_breaks_is_a_difference() -> None:
    class Breaking(ModelSubject):
        def axes(self) -> list[Axis]:
            def fail(cases: Sequence[Case], alone: Answers) -> AxisComparison:
                raise EngineError("three are too many")

            return [
                Axis("rows", "", fail),
                Axis("chips", "", fail, "there is one"),
                *super().axes()[:1],
            ]

    verdict = verify(Breaking(make_model(CPU)), 600.0, max_rounds=1, shrink_seconds=0.1)
    assert [axis.state for axis in verdict.axes] == ["different", "not applicable", "equal"]
    assert verdict.axes[0].first is not None
    assert verdict.axes[0].first.got == "EngineError: three are too many"


def test_what_did_not_happen_or_was_not_reached_proves_nothing() -> None:
    class Idle(ModelSubject):
        def axes(self) -> list[Axis]:
            def idle(cases: Sequence[Case], alone: Answers) -> AxisComparison:
                return AxisComparison(pairs_of(alone, alone), "0 preemptions", happened=False)

            return [Axis("preempted", "", idle)]

    verdict = verify(Idle(make_model(CPU)), 600.0, max_rounds=1)
    assert verdict.axes[0].state == "did not happen"
    assert not verdict.is_exact
    assert "preempted could not be tried" in summary(verdict)
    verdict = verify(ModelSubject(make_model(CPU)), 1e-3)
    assert "not reached" in states(verdict).values()
    assert not verdict.is_exact

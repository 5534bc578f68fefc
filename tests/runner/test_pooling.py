"""Pooled hidden states on small random models: the definition, and the same bits under every
condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quire.backends.select import select_kernels
from quire.engine import make_requests
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.runner.pooling import PoolingRows
from quire.runner.step_outputs import StepOutputs
from quire.sampling_params import SamplingParams
from quire.step import AdmittedRequest, Pooling, ScheduledRequest
from tests.random_models import SPECS, Bench, random_decoder

PARAMS = SamplingParams(max_tokens=1, temperature=0)
PROMPTS = [
    [(7 * i + j) % 97 for i in range(length)] for j, length in enumerate((1, 5, 37, 100, 64))
]


def vectors(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    pooling: Pooling,
    company: int = 0,
    **knobs: Any,
) -> list[bytes]:
    bench = Bench(decoder, **knobs)
    for index in range(company):
        for request in make_requests(
            f"company-{index}", PROMPTS[3], SamplingParams(max_tokens=20, seed=index), index
        ):
            bench.core.add_request(request, 0.0)
    for index, prompt in enumerate(prompts):
        for request in make_requests(str(index), prompt, PARAMS, 0, pooling=pooling):
            bench.core.add_request(request, 0.0)
    found: dict[str, bytes] = {}
    turn = 0
    while bench.core.has_work:
        turn += 1
        preempted = knobs.get("preempt_every", 0)
        running = [r for r in bench.core.scheduler.table.requests.values() if r.row is not None]
        if preempted and turn % preempted == 0 and running:
            bench.core.scheduler.preempt(running[turn % len(running)].request_id)
        for update in bench.core.step(float(turn)):
            assert update.error is None, update.error
            if update.pooled is not None:
                found[update.request_id] = update.pooled
    return [found[str(index)] for index in range(len(prompts))]


@pytest.fixture(
    scope="module",
    params=[("llama", torch.float32), ("qwen3_moe", torch.bfloat16)],
    ids=["llama", "moe"],
)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    family, dtype = request.param
    return random_decoder(SPECS[family], select_kernels(torch.device("cpu"), dtype, "auto"), dtype)


@pytest.mark.few(2)
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_the_same_bits_whatever_happens(decoder: Decoder, pooling: Pooling) -> None:
    alone = [vectors(decoder, [prompt], pooling)[0] for prompt in PROMPTS]
    conditions: list[dict[str, Any]] = [
        {},
        {"max_batched_tokens": 9, "max_num_seqs": 9},
        {"company": 6, "max_batched_tokens": 32, "max_num_seqs": 16},
        {
            "company": 3,
            "preempt_every": 2,
            "max_batched_tokens": 24,
            "max_num_seqs": 8,
            "num_host_blocks": 64,
        },
        {"num_blocks": 9},
    ]
    for knobs in conditions:
        assert vectors(decoder, PROMPTS, pooling, **knobs) == alone, knobs


def test_the_vectors_are_what_they_are_defined_to_be() -> None:
    decoder = random_decoder(SPECS["llama"], ReferenceKernels(), torch.float32)
    seen: list[torch.Tensor] = []
    bench = Bench(decoder)
    original = bench.runner._pooling.add

    def spy(
        outputs: StepOutputs, scheduled: Sequence[ScheduledRequest], hidden: torch.Tensor
    ) -> None:
        seen.append(hidden.double().clone())
        original(outputs, scheduled, hidden)

    bench.runner._pooling.add = spy  # type: ignore[method-assign]
    bench.run([PROMPTS[3]], [PARAMS])
    states = seen[0]
    for pooling, raw in (("mean", states.mean(0)), ("last", states[-1])):
        (found,) = vectors(decoder, [PROMPTS[3]], pooling)  # type: ignore[arg-type]
        vector = np.frombuffer(found, "<f4")
        assert len(vector) == 64
        np.testing.assert_allclose(vector, raw.numpy(), rtol=2e-7, atol=1e-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_hidden_states_that_are_no_numbers_fail_their_request_alone(
    bad: float, pooling: Pooling
) -> None:
    rows = PoolingRows(torch.device("cpu"))
    for row in (0, 1):
        rows.admit(
            AdmittedRequest(str(row), row, (1, 2), 2, (), 0, 0, PARAMS, 0, (), 0.0, pooling=pooling)
        )
    hidden = torch.ones(4, 8)
    hidden[1] = bad
    scheduled = [ScheduledRequest(str(row), row, 0, 2, True, ()) for row in (0, 1)]
    outputs = StepOutputs(0)
    rows.add(outputs, scheduled, hidden)
    result = outputs.read(outputs.tensors)
    pooled, errors = result.pooled, result.errors
    if bad == 1e9 and pooling == "last":
        assert set(pooled) == {"0", "1"}  # one vector alone may be as large as it likes
    else:
        assert set(pooled) == {"1"}
        assert "hidden states" in errors["0"]
    assert not rows.has_rows  # both are done with

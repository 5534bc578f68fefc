"""Nothing between a step's logits and its tokens makes the host wait for the GPU, whatever is asked
for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.reference import ReferenceKernels
from quire.sampling.logprobs import PromptPart, logprobs_of_rows, read_logprobs
from quire.sampling.masks import AllowedTokens, BadWords
from quire.sampling.penalties import LogitBias
from quire.sampling.sampler import SampledTokens, Sampler
from quire.sampling.upload import Uploader
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import AdmittedRequest
from tests.quick_interpreter import quicken
from tests.runner.sampling_support import Batch, Job, RecordingKernels, make_batch
from tests.runner.test_sampler import mixed_jobs

pytest.importorskip("triton", reason="Triton is not installed")

from quire.backends.triton.kernels import TritonKernels

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    quicken()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
VOCAB = 8193 if ON_GPU else 301
JOBS = mixed_jobs(VOCAB, random.Random(1))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Operations that wait for the device raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def twice_without_waiting(function: Callable[[], object]) -> None:
    """Once to compile kernels, load them and get memory; then twice as in a running engine."""
    function()
    torch.cuda.synchronize()
    with no_waiting():
        function()
        function()


def on_device(jobs: list[Job]) -> Batch:
    return make_batch(jobs, VOCAB, TritonKernels(), device=DEVICE)


def draw(batch: Batch, logits: Tensor) -> SampledTokens:
    return batch.sample(logits.clone())


def logits_for(jobs: list[Job]) -> Tensor:
    return torch.randn(len(jobs), VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_kernels_choose_as_the_definition_does() -> None:
    """In the interpreter too: every mix of parameters, together and on the plain CPU kernels."""
    jobs = JOBS if ON_GPU else JOBS[::2]
    logits = logits_for(jobs)
    expected = make_batch(jobs, VOCAB, RecordingKernels()).sample(logits.clone())
    sampled = draw(on_device(jobs), logits.to(DEVICE))
    assert sampled.token_ids.tolist() == expected.token_ids.tolist()
    assert sampled.failures(sampled.tensor[1].tolist()) == expected.failures() == {}


@pytest.mark.gpu
def test_the_check_notices_waiting() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        torch.ones(1, device=DEVICE).item()


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(JOBS)))
def test_one_mix_of_parameters(index: int) -> None:
    batch, logits = on_device([JOBS[index]]), logits_for(JOBS)[index : index + 1].to(DEVICE)
    twice_without_waiting(lambda: draw(batch, logits))


@pytest.mark.gpu
def test_all_of_them_at_once_and_in_any_company() -> None:
    batch, logits = on_device(JOBS), logits_for(JOBS).to(DEVICE)
    twice_without_waiting(lambda: draw(batch, logits))
    together = draw(batch, logits).token_ids.tolist()
    for i, job in enumerate(JOBS):
        alone = draw(on_device([job]), logits[i : i + 1])
        assert alone.token_ids.tolist() == [together[i]], job.params


@pytest.mark.gpu
def test_processors_and_rows_without_a_choice() -> None:
    def poison(history: Tensor, scores: Tensor) -> Tensor:
        return scores / 0

    jobs = [
        Job(SamplingParams(logits_processors=(poison,))),
        Job(SamplingParams(allowed_token_ids=(1,)), resolved=ResolvedTokens(((1,),))),
        Job(SamplingParams(top_k=3)),
        Job(SamplingParams(top_p=0.5)),
    ]
    logits = logits_for(jobs).to(DEVICE)
    logits[3, 5] = float("nan")
    batch = on_device(jobs)
    twice_without_waiting(lambda: draw(batch, logits))
    failures = draw(batch, logits).failures()
    assert list(failures) == [0, 1, 3]
    assert [word in failures[i] for i, word in ((0, "processor"), (1, "no token"), (3, "NaN"))] == [
        True
    ] * 3


@pytest.mark.gpu
def test_scores() -> None:
    logits = logits_for(JOBS * 4).to(DEVICE)
    logits[3] = logits[3].round()
    tokens = torch.arange(len(logits), device=DEVICE)
    num_top = [i % 6 for i in range(len(logits))]
    kernels = TritonKernels()
    part = PromptPart("a", slice(2, 90), 1, 3, 5)
    rows = torch.zeros(2, 100, dtype=torch.int64, device=DEVICE)

    def score() -> list[Tensor]:
        part.score(logits, lambda hidden: hidden, rows, kernels)
        return logprobs_of_rows(logits, lambda hidden: hidden, tokens, max(num_top), kernels)

    twice_without_waiting(score)
    got = read_logprobs([tensor.cpu() for tensor in score()], num_top)
    scored = logprobs_of_rows(
        logits.cpu(), lambda hidden: hidden, tokens.cpu(), max(num_top), ReferenceKernels()
    )
    for mine, expected in zip(got, read_logprobs(scored, num_top), strict=True):
        assert (mine.token_id, mine.rank) == (expected.token_id, expected.rank)
        assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in expected.top]
        assert abs(mine.logprob - expected.logprob) < 1e-5


@pytest.mark.gpu
def test_admission() -> None:
    params = SamplingParams(logit_bias={1: 1.0, 5: -2.0}, allowed_token_ids=(1, 2, 3))
    words = ResolvedTokens(((1, 2), (3, 4, 5)))
    admission = AdmittedRequest("a", 0, (1,), 1, (), 0, 0, params, 0, (2,), 0.0, resolved=words)
    sampler = Sampler(1, VOCAB, TritonKernels(), DEVICE)
    twice_without_waiting(lambda: sampler.admit(admission))
    prepared = {type(feature): feature.prepared.get(0) for feature in sampler._features}
    assert prepared[AllowedTokens].tolist() == [1, 2, 3]
    assert prepared[LogitBias][1].tolist() == [1.0, -2.0]
    assert prepared[BadWords][0].tolist() == [[-1, 1], [3, 4]]


@pytest.mark.gpu
def test_uploads() -> None:
    arrays = [
        np.arange(5),
        np.zeros((0, 3), np.float32),
        np.array([True, False]),
        np.arange(6.0).reshape(2, 3).T,
    ]
    uploader = Uploader(DEVICE)
    twice_without_waiting(lambda: [uploader.upload(*arrays), uploader.upload(arrays[0])])
    for array, tensor in zip(arrays, uploader.upload(*arrays), strict=True):
        assert tensor.device.type == "cuda"
        assert tensor.data_ptr() % 16 == 0
        assert np.array_equal(tensor.cpu().numpy(), array)


def test_uploads_keep_shapes_and_values() -> None:
    records = np.zeros(1, dtype=[("flag", np.bool_), ("number", np.float32)])
    arrays = [
        np.arange(5),
        np.zeros((0, 3), np.float32),
        records["number"][:, None],
        np.arange(6.0).reshape(2, 3).T,
    ]
    for array, tensor in zip(arrays, Uploader(torch.device("cpu")).upload(*arrays), strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.is_contiguous()

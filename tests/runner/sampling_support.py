"""Rows to sample, built from requests as the runner builds them, and what the filters made of their
scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.ops import Kernels
from quire.runner.request_rows import RequestRows
from quire.sampling.metadata import SamplingMetadata
from quire.sampling.sampler import SampledTokens, Sampler
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import AdmittedRequest, Step

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """A request at the moment its next token is chosen."""

    params: SamplingParams
    prompt: Sequence[int] = (0,)
    answer: Sequence[int] = ()
    resolved: ResolvedTokens = field(default_factory=ResolvedTokens)
    eos: tuple[int, ...] = ()
    mask: Tensor | None = None
    """bool [vocab]: what a grammar allows."""

    @property
    def history(self) -> list[int]:
        return [*self.prompt, *self.answer]


class RecordingKernels(CpuKernels):
    """The real kernels; keeps the scores they choose from."""

    scores: Tensor

    def gumbel_argmax(
        self, logits: Tensor, temperature: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.scores = logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
        return super().gumbel_argmax(logits, temperature, keys)


def pack(mask: Tensor) -> Tensor:
    """bool [vocab] as int32 words, the lowest bit first."""
    bits = np.packbits(mask.numpy(), bitorder="little")
    words = -(-len(mask) // 32)
    return torch.from_numpy(np.pad(bits, (0, words * 4 - len(bits))).view(np.int32))


@dataclass(frozen=True)
class Batch:
    """A sampler that has admitted requests, and a draw for each of them."""

    sampler: Sampler
    metadata: SamplingMetadata

    @property
    def is_plain(self) -> bool:
        return self.sampler.is_plain(self.metadata)

    def sample(self, logits: Tensor) -> SampledTokens:
        return self.sampler.sample(logits, self.metadata)


def make_batch(
    jobs: Sequence[Job],
    vocab_size: int,
    kernels: Kernels | None = None,
    first_row: int = 0,
    device: torch.device = CPU,
) -> Batch:
    """As the runner makes it; request rows are not the rows of logits, and were someone else's
    before.
    """
    longest = max(len(job.history) for job in jobs)
    rows = RequestRows(len(jobs) + first_row, longest + 8, 16, device)
    rows.token_ids.fill_(vocab_size - 1)
    order = list(range(first_row, first_row + len(jobs)))[::-1]
    admitted = [
        AdmittedRequest(
            request_id=str(row),
            row=row,
            token_ids=tuple(job.history),
            num_prompt_tokens=len(job.prompt),
            block_ids=(),
            num_cached_tokens=0,
            num_host_tokens=0,
            params=job.params,
            seed=job.params.seed or 0,
            eos_token_ids=job.eos,
            arrival=0.0,
            resolved=job.resolved,
        )
        for row, job in zip(order, jobs, strict=True)
    ]
    rows.apply(Step(0, 0.0, admitted=tuple(admitted)))
    sampler = Sampler(len(rows.token_ids), vocab_size, kernels or CpuKernels(), device)
    for admission in admitted:
        sampler.admit(admission)
    masks = None
    if any(job.mask is not None for job in jobs):
        everything = torch.ones(vocab_size, dtype=torch.bool)
        masks = torch.stack(
            [pack(everything if job.mask is None else job.mask) for job in jobs]
        ).to(device)
    metadata = sampler.metadata(
        np.array(order), np.array([len(job.history) for job in jobs]), rows.token_ids
    )
    return Batch(sampler, replace(metadata, masks=masks))


def run(
    logits: Tensor, jobs: Sequence[Job], kernels: RecordingKernels
) -> tuple[SampledTokens, Tensor]:
    """The tokens and the scores they were chosen from (divided by the temperature)."""
    tokens = make_batch(jobs, logits.shape[1], kernels).sample(logits.clone())
    return tokens, kernels.scores

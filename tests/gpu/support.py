"""Engines on the GPU as users get them, run under every condition that must not matter."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quire.assemble import Engine, assemble
from quire.backends.select import select_kernels
from quire.config import EngineConfig
from quire.engine import Request, make_requests
from quire.engine.invariants import check_invariants
from quire.kernels.ops import LayerCache, MixerCache
from quire.kernels.recurrent import RecurrentCache
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.runner.kv_cache import token_bytes
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import TokenLogprob
from quire.tools.bench.random_engine import random_decoder
from quire.tools.bench.shapes import spec_of

DEVICE = torch.device("cuda")
NAN = float("nan")
MAX_MODEL_LEN = 1024


def shape_of(name: str, num_layers: int | None = None) -> ModelSpec:
    """A true shape, perhaps with fewer layers (the same kernels, sooner done)."""
    spec = spec_of(name)
    return replace(spec, layers=spec.layers[:num_layers], max_position=4096)


def decoder_of(
    spec: ModelSpec, dtype: torch.dtype = torch.bfloat16, seed: int = 0, formats: Sequence[str] = ()
) -> Decoder:
    """Random weights large enough that answers wander."""
    std = 2.0 / spec.hidden_size**0.5
    return random_decoder(
        spec, select_kernels(DEVICE, dtype), dtype, DEVICE, std=std, seed=seed, formats=formats
    )


@dataclass(frozen=True)
class Job:
    """A call: one prompt, one or several answers."""

    prompt: list[int]
    params: SamplingParams
    resolved: ResolvedTokens = field(default_factory=ResolvedTokens)


@dataclass
class Answers:
    """What became of the jobs, by request; prompt scores by job."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[str, dict[int, TokenLogprob]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0

    def of(self, jobs: Sequence[int]) -> dict[str, tuple[Any, ...]]:
        """All that must be the same, of some of the jobs."""
        wanted = {str(job) for job in jobs}
        return {
            name: (
                tokens,
                self.logprobs.get(name),
                self.prompt_logprobs.get(name.split("/")[0]),
                self.errors.get(name),
            )
            for name, tokens in self.tokens.items()
            if name.split("/")[0] in wanted
        }


def written_by(layer: MixerCache) -> list[Tensor]:
    """The memory of one mixer's cache."""
    if isinstance(layer, LayerCache):
        return [layer.keys, layer.values]
    parts = [layer.state] if isinstance(layer, RecurrentCache) else []
    convolution = layer.convolution if isinstance(layer, RecurrentCache) else layer
    parts += [] if convolution.tail is None else [convolution.tail]
    sides = [memory for part in parts for _, memory in part.runs] + [convolution.inputs]
    if isinstance(layer, RecurrentCache):
        sides += [layer.keys, layer.changes, layer.decays]
    return sides


class GpuEngine:
    """An engine with a cache full of NaN, so that whoever reads what nobody wrote is found out."""

    def __init__(
        self,
        decoder: Decoder,
        depth: int | None = None,
        cache_tokens: int | None = None,
        **options: Any,
    ) -> None:
        """`cache_tokens` is a cache size that is as small for one model as for another."""
        if cache_tokens is not None:
            options["kv_cache_memory"] = cache_tokens * token_bytes(decoder.spec, 1, decoder.dtype)
        options = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory": "12GiB", **options}
        config = EngineConfig(device=str(DEVICE), **options)
        self.engine: Engine = assemble(
            decoder, config, name="test", eos_token_ids=(decoder.spec.vocab_size - 1,)
        )
        for layer in self.engine.runner._kv_cache.layers:
            for side in written_by(layer):
                side.fill_(NAN)
        if depth is not None:
            self.engine.core.depth = depth

    def run(
        self,
        jobs: Sequence[Job],
        order: Sequence[int] | None = None,
        *,
        arrivals_per_step: int = 10_000,
        preempt_every: int = 0,
    ) -> Answers:
        """The jobs in `order` (all of them, in theirs, by default), a few at a time; a running
        request loses its place every so many steps.
        """
        core = self.engine.core
        answers = Answers()
        live: dict[str, Request] = {}
        waiting = list(range(len(jobs)) if order is None else order)[::-1]
        while waiting or core.has_work:
            answers.steps += 1
            assert answers.steps < 20_000
            for _ in range(min(arrivals_per_step, len(waiting))):
                number = waiting.pop()
                job = jobs[number]
                seed, ends = job.params.seed or 0, self.engine.eos_token_ids
                for request in make_requests(
                    str(number), job.prompt, job.params, seed, ends, job.resolved
                ):
                    live[request.request_id] = request
                    answers.tokens[request.request_id] = []
                    core.add_request(request, 0.0)
            if preempt_every and answers.steps % preempt_every == 0:
                running = [request for request in live.values() if request.row is not None]
                if running:
                    core.scheduler.preempt(running[answers.steps * 7 % len(running)].request_id)
            for update in core.step(float(answers.steps)):
                answers.tokens[update.request_id].extend(update.new_token_ids)
                answers.logprobs.setdefault(update.request_id, []).extend(update.logprobs)
                if update.error is not None:
                    answers.errors[update.request_id] = update.error
                if update.prompt_logprobs is not None:
                    known = answers.prompt_logprobs.setdefault(update.request_id.split("/")[0], {})
                    known.update(
                        enumerate(
                            update.prompt_logprobs.logprobs, start=update.prompt_logprobs.start
                        )
                    )
            if answers.steps % 8 == 0:
                check_invariants(core.scheduler)
        for request in live.values():
            answers.preemptions += request.preemptions
            answers.cached_tokens += request.cached_tokens
            answers.host_tokens += request.host_tokens
        return answers


def run_jobs(
    decoder: Decoder,
    jobs: Sequence[Job],
    order: Sequence[int] | None = None,
    *,
    depth: int | None = None,
    arrivals_per_step: int = 10_000,
    preempt_every: int = 0,
    **options: Any,
) -> Answers:
    """In an engine of its own (made with the `options` of GpuEngine), whose memory is given back."""
    engine = GpuEngine(decoder, depth, **options)
    answers = engine.run(
        jobs, order, arrivals_per_step=arrivals_per_step, preempt_every=preempt_every
    )
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return answers


def plain_jobs(count: int, vocab_size: int, seed: int, longest: int = 700) -> list[Job]:
    """Mixed lengths, some common beginnings, nothing but a temperature: what decode graphs sample
    by themselves.
    """
    source = random.Random(seed)
    shared = [source.randrange(vocab_size) for _ in range(longest)]
    jobs = []
    for _ in range(count):
        length = source.choice(
            [1, 2, 15, 16, 17, 63, 64, 65, 200, source.randint(1, longest), longest]
        )
        common = source.choice([0, 0, 16, 100]) % (length + 1)
        prompt = shared[:common] + [source.randrange(vocab_size) for _ in range(length - common)]
        params = SamplingParams(
            temperature=source.choice([0.0, 0.6, 1.3]),
            seed=source.randrange(2**64),
            max_tokens=source.choice([1, 2, 16, 17, 40, 64]),
            ignore_eos=True,
        )
        jobs.append(Job(prompt, params))
    return jobs


MIXES: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 0.0},
    {"top_k": 20, "top_p": 0.9, "logprobs": 1},
    {"min_p": 0.02, "typical_p": 0.9},
    {"top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logprobs": 2},
    {"no_repeat_ngram_size": 2, "dry_multiplier": 0.8},
    {"logit_bias": {5: 4.0, 9: -4.0}, "bad_words": ("x",), "min_tokens": 1, "stop_token_ids": (7,)},
    {"allowed_token_ids": tuple(range(0, 400, 3)), "logprobs": 5},
    {"prompt_logprobs": 2, "logprobs": 2},
    {"n": 3, "logprobs": 1},
)
"""What requests may ask for; all but structured output, which needs a tokenizer and llguidance."""


def mixed_jobs(count: int, vocab_size: int, seed: int, longest: int = 400) -> list[Job]:
    """The same with every kind of sampling among them, and scores for many."""
    resolved = ResolvedTokens(bad_word_ids=((3,), (4, 5)), dry_breaker_ids=(11, 13))
    return [
        Job(job.prompt, replace(job.params, **MIXES[i % len(MIXES)]), resolved)
        for i, job in enumerate(plain_jobs(count, vocab_size, seed, longest))
    ]


def assert_same(got: Answers, expected: Answers, jobs: Sequence[int]) -> None:
    """Tokens, logprobs and ends of these jobs, to the last bit."""
    ours, theirs = got.of(jobs), expected.of(jobs)
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if ours[name] != theirs[name]]
    assert not different, f"{len(different)} of {len(theirs)} answers differ: {different[:10]}"

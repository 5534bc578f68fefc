"""Small decoders with random weights, one per family, and a way to run requests on them that keeps
the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.engine import EngineCore, Request, Scheduler, SchedulerConfig, make_requests
from quire.engine.draft_tokens import Propose
from quire.engine.invariants import check_invariants
from quire.kernels.latent import LatentSpec, latent_heads
from quire.kernels.ops import Activation, Kernels, MoeSpec
from quire.kernels.recurrent import ConvolutionSpec, GatedNormSpec, RecurrentSpec
from quire.kernels.weights import Weight
from quire.models.adapters import AdapterLoader
from quire.models.config_parts import plain_attention
from quire.models.decoder import Decoder
from quire.models.prediction import Predictor
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec, RopeSpec, SideBySide
from quire.observe.step_log import StepLog
from quire.runner.adapters import AdapterSlots
from quire.runner.kv_cache import KVCache
from quire.runner.layer_groups import LayerGroups
from quire.runner.prediction import PredictingDrafter
from quire.runner.recorded import RecordedSteps
from quire.runner.request_rows import RequestRows
from quire.runner.runner import Runner
from quire.sampling.metadata import Indices
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.speculate.speculator import Speculator
from quire.step import ScheduledRequest, TokenLogprob

_LAYER = LayerSpec(plain_attention(4, 2, 16), RopeSpec(), MlpSpec(96))
_PLAIN = ModelSpec(
    family="llama",
    vocab_size=97,
    hidden_size=64,
    rms_norm_eps=1e-5,
    layers=(_LAYER,) * 2,
    max_position=2048,
)
_WINDOW = replace(_LAYER, mixer=plain_attention(4, 2, 16, window=24))
_EXPERTS = MoeSpec(num_experts=6, top_k=2, intermediate_size=32, normalize_weights=True)
_SPARSE = replace(_LAYER, mlp=_EXPERTS)
_SIGMOID_EXPERTS = replace(
    _EXPERTS,
    sigmoid_scores=True,
    choice_bias=True,
    weight_scale=1.7,
    shared_intermediate_size=48,
    shared_gate=False,
)
_CAPPED = replace(
    _LAYER,
    mixer=replace(_LAYER.mixer, soft_cap=2.0),
    mlp=MlpSpec(96, Activation.GELU_TANH),
    post_norms=True,
)

_DELTA = RecurrentSpec(2, 4, 8, 12, taps=4, norm=GatedNormSpec(12), beta_scale=2.0)
_CHANNELS = RecurrentSpec(4, 4, 12, 8, taps=4, norm=GatedNormSpec(8, sigmoid=True), gate_rank=6)
_STATE_SPACE = RecurrentSpec(
    1, 4, 8, 32, taps=4, conv_bias=True, is_delta=False, norm=GatedNormSpec(64, gate_first=True)
)
_PLAIN_EXPERTS = replace(_SIGMOID_EXPERTS, activation=Activation.RELU2, gated=False)
_CONVOLUTION = ConvolutionSpec(64, 3, silu=False)
_GATED = replace(_LAYER, gated_attention=True, qk_norm=True)

_LATENT = LatentSpec(
    latent_heads(4, 24, 8), 0.2, nope_dim=12, rope_dim=8, value_dim=10, query_rank=20
)

WITH_STATES: dict[str, ModelSpec] = {
    "delta rule": replace(
        _PLAIN, family="qwen3_5_text", layers=(replace(_LAYER, mixer=_DELTA), _GATED)
    ),
    "decays of channels": replace(
        _PLAIN,
        family="kimi_linear",
        layers=(
            replace(_LAYER, mixer=_CHANNELS),
            replace(_LAYER, mixer=_LATENT, rope=None),
        ),
    ),
    "state space": replace(
        _PLAIN, family="granitemoehybrid", layers=(replace(_LAYER, mixer=_STATE_SPACE), _LAYER)
    ),
    "convolution": replace(
        _PLAIN, family="lfm2", layers=(replace(_LAYER, mixer=_CONVOLUTION), _LAYER)
    ),
    "side by side": replace(
        _PLAIN,
        family="falcon_h1",
        layers=(
            replace(
                _LAYER,
                mixer=SideBySide(
                    (_LAYER.mixer, replace(_STATE_SPACE, input_scales=(0.7, 1.3, 0.9, 1.1, 0.8))),
                    scales=((0.8, 1.2), (1.1, 0.6)),
                ),
                mlp=MlpSpec(96, input_scale=0.7, output_scale=1.4),
            ),
        )
        * 2,
    ),
    "blocks": replace(
        _PLAIN,
        family="nemotron_h",
        layers=(
            LayerSpec(SideBySide(()), None, MlpSpec(96, Activation.RELU2, gated=False)),
            LayerSpec(_STATE_SPACE, None, _PLAIN_EXPERTS),
            replace(_LAYER, rope=None, mlp=None),
        ),
    ),
}
"""Layers that know earlier tokens by a state, or by their last few inputs."""

SPECS: dict[str, ModelSpec] = {
    "llama": replace(_PLAIN, tie_embeddings=True).with_layers(mlp=MlpSpec(96, bias=True)),
    "smollm3": replace(_PLAIN, family="smollm3", layers=(_WINDOW, replace(_LAYER, rope=None))),
    "mistral": replace(_PLAIN, family="mistral", layers=(_WINDOW,) * 2),
    "mixtral": replace(_PLAIN, family="mixtral", layers=(_SPARSE,) * 2),
    "qwen2": replace(_PLAIN, family="qwen2").with_layers(qkv_bias=True),
    "qwen2_moe": replace(_PLAIN, family="qwen2_moe").with_layers(
        mlp=replace(_EXPERTS, shared_intermediate_size=48)
    ),
    "qwen3": replace(_PLAIN, family="qwen3").with_layers(
        qk_norm=True, mixer=plain_attention(4, 2, 24)
    ),
    "qwen3_moe": replace(_PLAIN, family="qwen3_moe", layers=(_LAYER, _SPARSE)).with_layers(
        qk_norm=True
    ),
    "gemma2": replace(
        _PLAIN,
        family="gemma2",
        layers=(replace(_CAPPED, mixer=replace(_CAPPED.mixer, sliding_window=24)), _CAPPED),
        norm_offset=1.0,
        embedding_scale=8.0,
        logit_cap=10.0,
    ),
    "gemma3_text": replace(
        _PLAIN,
        family="gemma3_text",
        layers=(replace(_WINDOW, rope=RopeSpec(500.0)), _LAYER),
        norm_offset=1.0,
    ).with_layers(qk_norm=True, post_norms=True, mlp=MlpSpec(96, Activation.GELU_TANH)),
    "phi3": replace(_PLAIN, family="phi3").with_layers(
        rope=RopeSpec(kind="factors", freq_factors=(1.0, 2.0, 3.0), rotated=6, attention_factor=1.2)
    ),
    "olmo2": replace(_PLAIN, family="olmo2").with_layers(
        pre_norms=False, post_norms=True, qk_norm=True, qk_norm_is_whole=True
    ),
    "granite": replace(
        _PLAIN, family="granite", embedding_scale=3.0, residual_scale=0.3, logit_scale=0.25
    ),
    "cohere2": replace(
        _PLAIN, family="cohere2", layers=(_WINDOW, replace(_LAYER, rope=None)), layer_norm=True
    ).with_layers(parallel=True),
    "starcoder2": replace(_PLAIN, family="starcoder2", layer_norm=True, norm_bias=True).with_layers(
        mlp=MlpSpec(96, Activation.GELU_TANH, bias=True, gated=False),
        qkv_bias=True,
        output_bias=True,
    ),
    "hunyuan": replace(_PLAIN, family="hunyuan_v1_dense").with_layers(
        qk_norm=True, qk_norm_after_rope=True
    ),
    "glm4_moe": replace(
        _PLAIN, family="glm4_moe", layers=(_LAYER, replace(_LAYER, mlp=_SIGMOID_EXPERTS))
    ),
    "deepseek_v3": replace(
        _PLAIN,
        family="deepseek_v3",
        layers=(
            replace(_LAYER, mixer=replace(_LATENT, query_rank=0)),
            replace(
                _LAYER,
                mixer=_LATENT,
                mlp=replace(_SIGMOID_EXPERTS, num_groups=2),
                qkv_bias=True,
                output_bias=True,
            ),
        ),
    ),
    "mpt": replace(
        _PLAIN,
        family="mpt",
        layer_norm=True,
        layers=(_LAYER.with_attention(slopes=(0.25, 0.0625, 0.5, 0.125)),) * 2,
    ).with_layers(rope=None, qkv_limit=1.5, mlp=MlpSpec(96, Activation.GELU, gated=False)),
    "gpt_oss": replace(_PLAIN, family="gpt_oss", layers=(_WINDOW, _LAYER)).with_layers(
        sinks=True,
        qkv_bias=True,
        output_bias=True,
        mlp=replace(_EXPERTS, activation=Activation.CLAMPED_SWIGLU, bias=True),
    ),
}
"""One for each thing that families do differently; those that compute what another one does are not
here.
"""


def random_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cpu",
    quantize: Callable[[Tensor], Weight] | None = None,
) -> dict[str, Weight]:
    """Weights large enough that answers wander and no two tokens look alike. Matrices are quantised
    on request.
    """
    generator = torch.Generator().manual_seed(seed)
    loaded: dict[str, Weight] = {}
    for name, parameter in spec.parameters().items():
        value = torch.randn(parameter.shape, generator=generator)
        value = 1 + 0.1 * value if "norm" in name else value * (2.0 / parameter.shape[-1] ** 0.5)
        is_matrix = len(parameter.shape) > 1 and "router" not in name and "bias" not in name
        is_matrix = is_matrix and not parameter.stays_plain
        plain = value if parameter.keep_float32 else value.to(dtype)
        loaded[name] = quantize(value) if quantize and is_matrix else Weight.dense(plain.to(device))
    return loaded


def random_decoder(
    spec: ModelSpec,
    kernels: Kernels,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cpu",
    quantize: Callable[[Tensor], Weight] | None = None,
) -> Decoder:
    return Decoder(spec, kernels, random_weights(spec, dtype, seed, device, quantize), dtype)


@dataclass
class Transcript:
    """What became of a set of requests."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """By request and the position the logits predict."""
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[str, dict[int, TokenLogprob]] = field(default_factory=dict)
    """By the name of the call (all its answers share them) and position."""
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0


class Bench:
    """An engine around a decoder, with all the knobs that must not matter."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int = 512,
        num_host_blocks: int = 0,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_batched_tokens: int = 512,
        prefix_caching: bool = True,
        preempt_every: int = 0,
        depth: int = 1,
        propose: Propose | None = None,
        observes: bool = True,
        recorded: bool = True,
        cache_dtype: torch.dtype | None = None,
        adapters: Sequence[Path] = (),
        max_loras: int = 3,
        loader: AdapterLoader | None = None,
        predictor: Predictor | None = None,
        num_drafts: int = 0,
    ) -> None:
        dtype = cache_dtype or decoder.dtype
        spec, device = decoder.spec, decoder.device
        if predictor is not None:
            spec = replace(spec, layers=(*spec.layers, *predictor.spec.layers))
        groups = LayerGroups.of(
            spec, block_size, dtype, decoder.kernels.keys_at_once, 1024, decoder.dtype
        )
        if groups.state is not None:  # often enough to be met, and room for some
            groups = replace(groups, state=groups.state._replace(interval=2 * groups.state.chunk))
            num_blocks += 4 * max_num_seqs * groups.state.num_blocks
        count = len(groups.members)
        num_blocks, num_host_blocks = 1 + (num_blocks - 1) * count, num_host_blocks * count
        config = SchedulerConfig(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max(max_batched_tokens, max_num_seqs),
            max_model_len=1024,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            prefix_caching=prefix_caching,
            groups=groups.kept,
            bytes_per_block=groups.block_bytes,
            state=groups.state,
            max_loras=max_loras,
        )
        by_dimension = decoder.kernels.keys_by_dimension(dtype, block_size)
        cache = KVCache(
            spec, num_blocks, num_host_blocks, block_size, dtype, device, by_dimension, groups
        )
        for parts in cache.places.values():  # whoever reads what nobody wrote is found out
            for part in parts:
                if part.dtype.is_floating_point:
                    part.fill_(float("nan"))
        for number, stored in enumerate(groups.carried):
            for head in range(stored.heads):
                cache.state_head(number, head)[1].fill_(float("nan"))
        num_state_blocks = 0 if groups.state is None else groups.state.num_blocks
        rows = RequestRows(max_num_seqs, 1024, block_size, device, groups.heads, num_state_blocks)
        graphs = (
            RecordedSteps(decoder, cache.layers, rows)
            if recorded and RecordedSteps.fit(decoder)
            else None
        )
        slots = None
        if adapters:
            loader = loader or AdapterLoader(decoder, spec)
            slots = AdapterSlots(decoder, max_loras, max_num_seqs, loader)
        drafter: PredictingDrafter | None = None
        if predictor is not None:
            behind = cache.layers[len(decoder.spec.mixers) :]
            drafter = PredictingDrafter(predictor, decoder, behind, rows)
            propose = Speculator(spec.vocab_size, runner_drafts=True, num_tokens=num_drafts).propose
        self.runner = Runner(decoder, cache, rows, graphs=graphs, drafter=drafter, adapters=slots)
        self.adapters = ["", *(self.runner.load_adapter(one).digest for one in adapters)]
        """Digests; the first is none."""
        self.log = StepLog()
        self.core = EngineCore(
            Scheduler(
                config, propose=propose, num_drafts=(lambda _: num_drafts) if num_drafts else None
            ),
            self.runner,
            depth,
            on_step=self.log.append,
        )
        self._preempt_every = preempt_every
        self._observes = observes

    def run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **names: Any
    ) -> Transcript:
        """All the prompts at once, in this order; request i is called `names["ids"][i]` or just i,
        and has the adapter number `names["adapters"][i]`, 0 being none.
        """
        transcript = Transcript()
        live: dict[str, Request] = {}
        ids = names.get("ids", range(len(prompts)))
        chosen = names.get("adapters", [0] * len(prompts))
        for request_id, prompt, one, number in zip(ids, prompts, params, chosen, strict=True):
            seed = one.seed if one.seed is not None else 0
            resolved = ResolvedTokens(adapter=self.adapters[number])
            made = make_requests(str(request_id), list(prompt), one, seed, resolved=resolved)
            for request in made:
                live[request.request_id] = request
                self.core.add_request(request, 0.0)
        self.drive(transcript)
        for request in live.values():
            transcript.preemptions += request.preemptions
            transcript.cached_tokens += request.cached_tokens
            transcript.host_tokens += request.host_tokens
        return transcript

    def drive(self, transcript: Transcript) -> None:
        """Runs whatever is in the engine to its end and writes down what comes out."""

        def observe(
            scheduled: Sequence[ScheduledRequest], positions: Indices, logits: Tensor
        ) -> None:
            for entry, position, row in zip(scheduled, positions.tolist(), logits, strict=True):
                transcript.logits[entry.request_id, position] = row.clone()

        self.runner.observe_logits = observe if self._observes else None
        scheduler = self.core.scheduler
        while self.core.has_work:
            transcript.steps += 1
            assert transcript.steps < 20_000
            if self._preempt_every and transcript.steps % self._preempt_every == 0:
                running = [
                    request
                    for request in scheduler.table.requests.values()
                    if request.row is not None
                ]
                if running:
                    scheduler.preempt(running[transcript.steps % len(running)].request_id)
            for update in self.core.step(float(transcript.steps)):
                transcript.tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
                transcript.logprobs.setdefault(update.request_id, []).extend(update.logprobs)
                if update.prompt_logprobs is not None:
                    known = transcript.prompt_logprobs.setdefault(
                        update.request_id.split("/")[0], {}
                    )
                    known.update(
                        enumerate(
                            update.prompt_logprobs.logprobs, start=update.prompt_logprobs.start
                        )
                    )
                assert update.error is None, update.error
            check_invariants(scheduler)

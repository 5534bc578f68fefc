"""What Llama 4, Gemma 4, GPT-2 and their relatives have in their layers: exact in every batch, in
recorded steps and on several ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.ops import Activation, LayerCache, MoeSpec
from quire.kernels.reference import ReferenceKernels
from quire.models.config_parts import plain_attention
from quire.models.decoder import Decoder
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec, QueryScale, RopeSpec
from quire.runner.layer_groups import LayerGroups
from quire.runner.recorded import RecordedSteps
from tests.decoding import paged_batch
from tests.models.test_mixers import FP32, PARAMS, PROMPTS, SCENARIOS, alone, assert_same
from tests.parallel.ranks import Ranks, rank_decoder, whole_weights
from tests.random_models import Bench, random_decoder

_LAYER = LayerSpec(plain_attention(4, 2, 16), RopeSpec(), MlpSpec(48))
_PLAIN = ModelSpec("llama", 97, 32, 1e-5, (_LAYER,), max_position=1024)
_CHUNKED = replace(_LAYER.with_attention(chunk=9), qk_norm=True, qk_norm_weights=False)
_UNGATED = MlpSpec(48, Activation.RELU, bias=True, gated=False)
_NORMED = replace(_LAYER, qk_norm=True, value_norm=True, post_norms=True, stream_scale=True)
_SHARED = replace(_NORMED, keys_are_values=True, mixer=plain_attention(4, 1, 24))

SPECS = {
    "chunks and scaled queries": replace(
        _PLAIN,
        layers=(
            _CHUNKED,
            replace(_LAYER, rope=None, query_scale=QueryScale(0.5, 4, 1)),
            replace(_CHUNKED, mlp=MoeSpec(4, 2, 16, False, 16, scales_inputs=True)),
        ),
    ),
    "learned positions and norms with biases": replace(
        _PLAIN,
        layer_norm=True,
        norm_bias=True,
        embedding_norm=True,
        num_learned_positions=1024,
        head_bias=True,
        layers=(
            replace(_LAYER, rope=None, mlp=_UNGATED, parallel=True, parallel_norms=True),
            replace(_LAYER, rope=None, mlp=_UNGATED, qkv_bias=True, output_bias=True),
        ),
    ),
    "slopes and a limit": replace(
        _PLAIN,
        layer_norm=True,
        layers=(
            replace(_LAYER.with_attention(slopes=(0.5, 0.25, 0.1, 0.03)), rope=None, qkv_limit=0.5),
        )
        * 2,
    ),
    "norms without weights and xIELU": replace(
        _PLAIN,
        norm_weights=False,
        layers=(
            replace(
                _LAYER,
                rope=RopeSpec(backwards=True),
                mlp=MlpSpec(48, gated=False, xielu=True),
                query_scale=QueryScale(0.1, 8),
            ),
        )
        * 2,
    ),
    "vectors for each layer and experts beside the MLP": replace(
        _PLAIN,
        per_layer_size=8,
        per_layer_vocab=97,
        layers=(
            replace(_NORMED, mixer=plain_attention(4, 2, 16, window=9)),
            replace(_SHARED, experts=MoeSpec(4, 2, 16, True, expert_scales=True)),
            replace(_SHARED, reads_layer=1),
        ),
    ),
}
RECORDED = (
    "slopes and a limit",
    "learned positions and norms with biases",
    "norms without weights and xIELU",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SPECS)
def test_nothing_around_a_request_changes_its_bits(name: str) -> None:
    decoder = random_decoder(SPECS[name], CpuKernels(), FP32)
    assert RecordedSteps.fit(decoder) == (name in RECORDED)
    expected = alone(decoder, recorded=False)
    for options in ({}, *(SCENARIOS[one] for one in ("chunks of 7", "swapped"))):
        bench = Bench(decoder, **options)
        assert_same(bench.run(PROMPTS, PARAMS), expected)
        if not options:  # once more, from the cache
            assert_same(bench.run(PROMPTS, PARAMS), expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SPECS)
def test_two_ranks_give_the_same_bits(name: str) -> None:
    spec = SPECS[name]
    weights = whole_weights(spec, FP32)
    expected = alone(Decoder(spec, CpuKernels(), dict(weights), FP32), recorded=False)
    for found in Ranks(2).run(
        lambda group: alone(rank_decoder(spec, weights, CpuKernels(), FP32, group), recorded=False)
    ):
        assert_same(found, expected)


def test_blocks_before_a_chunk_are_given_back() -> None:
    groups = LayerGroups.of(SPECS["chunks and scaled queries"], 16, FP32)
    kept = {(one.keeps, one.size) for one in groups.kept}
    assert kept == {("all", 0), ("chunk", 9)}
    chunked = next(one for one in groups.kept if one.keeps == "chunk")
    assert [chunked.first_token(position) for position in (8, 9, 20)] == [0, 9, 18]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [9, 64, 70])
def test_attention_in_chunks_is_that_of_the_reference(dtype: torch.dtype, chunk: int) -> None:
    generator = torch.Generator().manual_seed(chunk)
    spec = replace(plain_attention(4, 2, 16), chunk=chunk)
    keys, values = (torch.randn(12, 2, 16, 16, generator=generator).to(dtype) for _ in range(2))
    # from a chunk's midst over its end, a single token, a whole prompt
    batch = paged_batch([(60, 30, range(1, 7)), (133, 1, range(2, 11)), (0, 20, (7, 3))], 16)
    query = torch.randn(51, 4, 16, generator=generator).to(dtype)
    cache = LayerCache(keys, values)
    found = CpuKernels().attention(query, cache, batch, spec)
    expected = ReferenceKernels().attention(query, cache, batch, spec)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    # by hand: the single token sees the keys of its chunk
    seen = range(133 // chunk * chunk, 134)
    places = [(2 + token // 16, token % 16) for token in seen]
    own_keys, own_values = (
        torch.stack([side[block, :, offset] for block, offset in places], 1).double()
        for side in (keys, values)
    )
    scores = torch.einsum("hgd,hkd->hgk", query[30].view(2, 2, 16).double(), own_keys) * spec.scale
    output = (scores.softmax(-1) @ own_values).view(4, 16)
    torch.testing.assert_close(found[30].double(), output, atol=tolerance, rtol=tolerance)


def test_a_query_sees_its_own_chunk_and_costs_what_that_costs() -> None:
    attention = _CHUNKED.attention
    assert attention is not None
    per_key = 4.0 * attention.output_size
    assert [attention.flops(context) / per_key for context in (1, 9, 10, 20)] == [1, 9, 1, 2]
    assert attention.prompt_flops(20) == sum(attention.flops(i + 1) for i in range(20))
    assert attention.bytes_read(9, 2) == attention.bytes_read(18, 2)

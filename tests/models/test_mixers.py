"""Layers that differ in head sizes, MLPs and caches, and mixers side by side: as plain torch has
them, and exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.ops import Kernels, LayerCache, PagedBatch
from quire.kernels.reference import ReferenceKernels
from quire.models.config_parts import plain_attention
from quire.models.decoder import Decoder
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec, RopeSpec, SideBySide, mixer_names
from quire.parallel.division import Division
from quire.runner.kv_cache import KVCache
from quire.runner.layer_groups import LayerGroups
from quire.sampling_params import SamplingParams
from tests.parallel.ranks import Ranks, rank_decoder, whole_weights
from tests.random_models import Bench, Transcript, random_decoder

FP32 = torch.float32
_SMALL = LayerSpec(plain_attention(4, 2, 16), RopeSpec(), MlpSpec(48))
_LARGE = replace(_SMALL, mixer=plain_attention(4, 1, 32), rope=RopeSpec(500.0), qk_norm=True)
_WINDOW = replace(_SMALL, mixer=plain_attention(4, 2, 16, window=9))
_BOTH = replace(
    _SMALL, mixer=SideBySide((plain_attention(4, 2, 16), plain_attention(4, 1, 24, window=9)))
)
_PLAIN = ModelSpec("llama", 97, 32, 1e-5, (_SMALL,), max_position=1024)

SPECS = {
    "two head sizes": replace(_PLAIN, layers=(_SMALL, _LARGE, _WINDOW)),
    "a layer without an MLP": replace(_PLAIN, layers=(replace(_SMALL, mlp=None), _SMALL)),
    "only layers without an MLP": replace(_PLAIN, layers=(replace(_SMALL, mlp=None),) * 2),
    "a layer that reads another's cache": replace(
        _PLAIN,
        layers=(_SMALL, _WINDOW, replace(_SMALL, reads_layer=0), replace(_WINDOW, reads_layer=1)),
    ),
    "normed queries on another's keys": replace(
        _PLAIN, layers=(_LARGE, replace(_LARGE, reads_layer=0))
    ),
    "side by side": replace(_PLAIN, layers=(_BOTH, _SMALL)),
    "side by side, of one shape": replace(
        _PLAIN, layers=(replace(_SMALL, mixer=SideBySide((plain_attention(4, 2, 16),) * 2)),) * 2
    ),
    "all of it": replace(
        _PLAIN,
        layers=(
            _BOTH,
            _LARGE,
            replace(_BOTH, reads_layer=0),
            replace(_LARGE, mlp=None, reads_layer=1),
            _WINDOW,
        ),
    ),
}
KERNELS: dict[str, Callable[[], Kernels]] = {
    "reference": ReferenceKernels,
    "cpu": cache(CpuKernels),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Products are small: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x: Tensor, theta: float) -> Tensor:
    """x [tokens, heads, size]: each number of the first half turns with its partner in the second."""
    half = x.shape[2] // 2
    angles = torch.arange(len(x)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def plain_logits(spec: ModelSpec, tensors: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """All logits of a sequence: no cache, no batch, in float64."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    x = weights["embedding"][tokens]
    ahead = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    for index, layer in enumerate(spec.layers):
        name = f"layers.{index}"
        normed, total = norm(x, weights[f"{name}.attention_norm"]), torch.zeros_like(x)
        for number, mixer in enumerate(layer.mixers):
            own, heads = f"{name}.attention" + (f"_{number}" if number else ""), mixer.heads
            assert layer.rope is not None
            packed = (normed @ weights[f"{own}.qkv.weight"].T).view(len(tokens), -1, heads.head_dim)
            query = packed[:, : heads.num_heads]
            query = norm(query, weights[f"{own}.query_norm"]) if layer.qk_norm else query
            if layer.reads_layer is None:
                key, value = packed[:, heads.num_heads :].chunk(2, 1)
                key = norm(key, weights[f"{own}.key_norm"]) if layer.qk_norm else key
                kept[index, number] = rotated(key, layer.rope.theta), value
            keys, values = kept[index if layer.reads_layer is None else layer.reads_layer, number]
            group = heads.num_heads // heads.num_kv_heads
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = (
                torch.einsum("qhd,khd->hqk", rotated(query, layer.rope.theta), keys)
                * heads.head_dim**-0.5
            )
            seen = (ahead >= 0) & (ahead < (mixer.sliding_window or len(tokens)))
            attended = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            total += (
                torch.einsum("hqk,khd->qhd", attended, values).flatten(1)
                @ weights[f"{own}.output.weight"].T
            )
        x = x + total
        if layer.mlp is not None:
            gate, up = (
                norm(x, weights[f"{name}.mlp_norm"]) @ weights[f"{name}.mlp.gate_up.weight"].T
            ).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ weights[f"{name}.mlp.down.weight"].T
    return norm(x, weights["final_norm"]) @ weights["head"].T


PROMPTS = [
    [(7 * i + 3) % 97 for i in range(35)],
    [5, 3],
    [(7 * i + 3) % 97 for i in range(17)] + [1, 2],
]
PARAMS = [
    SamplingParams(max_tokens=5, temperature=0.0),
    *(SamplingParams(max_tokens=3, seed=i) for i in range(2)),
]


def alone(decoder: Decoder, **options: Any) -> Transcript:
    found = Transcript()
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        one = Bench(decoder, num_blocks=20, max_num_seqs=1, **options).run(
            [prompt], [params], ids=[i]
        )
        found.tokens |= one.tokens
        found.logits |= one.logits
    return found


def assert_same(got: Transcript, expected: Transcript) -> None:
    assert got.tokens == expected.tokens
    for key, logits in expected.logits.items():
        assert torch.equal(got.logits[key], logits), key


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_plain_torch(name: str, kernels: str) -> None:
    spec = SPECS[name]
    weights = whole_weights(spec, FP32)
    tensors = {name: weight.tensor.clone() for name, weight in weights.items()}
    decoder = Decoder(spec, KERNELS[kernels](), weights, FP32)
    count = 3 if kernels == "cpu" else 1
    found = Bench(decoder, max_num_seqs=4).run(PROMPTS[:count], PARAMS[:count])
    for i, prompt in enumerate(PROMPTS[:count]):
        tokens = prompt + found.tokens[str(i)]
        expected = plain_logits(spec, tensors, tokens).float()
        for position in range(len(prompt), len(tokens)):
            torch.testing.assert_close(
                found.logits[str(i), position], expected[position - 1], atol=1e-4, rtol=1e-4
            )


SCENARIOS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 7": {"max_num_seqs": 4, "max_batched_tokens": 7},
    "blocks of 4": {"block_size": 4},
    "preempted": {"preempt_every": 2, "prefix_caching": False},
    "swapped": {"preempt_every": 2, "num_host_blocks": 40, "depth": 2},
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "kernels"), [*((name, "cpu") for name in SPECS), ("all of it", "reference")]
)
def test_nothing_around_a_request_changes_its_bits(name: str, kernels: str) -> None:
    decoder = random_decoder(SPECS[name], KERNELS[kernels](), FP32)
    expected = alone(decoder)
    for options in SCENARIOS.values():
        bench = Bench(decoder, **options)
        got = bench.run(PROMPTS, PARAMS)
        assert_same(got, expected)
        assert got.preemptions > 0 or "preempt_every" not in options
        if not options:  # once more, from the cache
            again = bench.run(PROMPTS, PARAMS)
            assert_same(again, expected)
            assert again.cached_tokens >= 32 + 16


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_caches_of_8_bits_and_two_head_sizes_are_exact(stored: torch.dtype) -> None:
    decoder = random_decoder(SPECS["two head sizes"], KERNELS["cpu"](), FP32)
    expected, plain = alone(decoder, cache_dtype=stored), alone(decoder)
    for name in ("one batch", "swapped"):
        assert_same(
            Bench(decoder, cache_dtype=stored, **SCENARIOS[name]).run(PROMPTS, PARAMS), expected
        )
    first = ("0", len(PROMPTS[0]))
    assert (
        0
        < (expected.logits[first] - plain.logits[first]).abs().max()
        < 0.2 * plain.logits[first].abs().max()
    )


def test_parameters_are_those_of_each_layers_mixers() -> None:
    shapes = {name: one.shape for name, one in SPECS["all of it"].parameters().items()}

    def of(layer: int) -> dict[str, tuple[int, ...]]:
        start = f"layers.{layer}."
        return {
            name.removeprefix(start): shape
            for name, shape in shapes.items()
            if name.startswith(start)
        }

    mlp = {"mlp.gate_up.weight": (96, 32), "mlp.down.weight": (32, 48)}
    norms = {"attention_norm": (32,), "mlp_norm": (32,)}
    outputs = {"attention.output.weight": (32, 64), "attention_1.output.weight": (32, 96)}
    both = {"attention.qkv.weight": (128, 32), "attention_1.qkv.weight": (144, 32)}
    queries = {"attention.qkv.weight": (64, 32), "attention_1.qkv.weight": (96, 32)}
    assert of(0) == {**norms, **mlp, **outputs, **both}
    assert of(2) == {**norms, **mlp, **outputs, **queries}
    assert of(3) == {
        "attention_norm": (32,),
        "attention.query_norm": (32,),
        "attention.qkv.weight": (128, 32),
        "attention.output.weight": (32, 128),
    }
    assert of(1)["attention.key_norm"] == (32,)
    assert mixer_names(_BOTH) == ("attention", "attention_1")
    assert len(SPECS["all of it"].head_shapes) == 3


def test_a_layer_without_keys_of_its_own_keeps_nothing() -> None:
    spec = SPECS["all of it"]
    groups = LayerGroups.of(spec, 16, FP32)
    # 3 to 5 read 0 to 2
    assert sorted(place for own in groups.members for place in own) == [0, 1, 2, 6]
    caches = KVCache(spec, 2, 0, 16, FP32, torch.device("cpu"), groups=groups).layers
    assert all(caches[place] is caches[place - 3] for place in (3, 4, 5))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_what_ranks_have_adds_up(name: str, size: int) -> None:
    spec = SPECS[name]
    divisions = [Division(spec, rank, size) for rank in range(size)]
    for one in divisions:
        own = one.local_spec.parameters()
        for key, parameter in spec.parameters().items():
            if ".qkv." in key:  # the decoder's shapes are those of the rows that the rank has
                assert own[key] == one.parameter(key, parameter), key
    for key, parameter in spec.parameters().items():
        runs = [run for one in divisions for run in one.segments(key, parameter)]
        rows = [row for run in runs for row in range(run.start, run.stop)]
        assert set(rows) == set(range(parameter.shape[0])), key
        if "norm" not in key and ".qkv." not in key:
            assert len(rows) == parameter.shape[0], key  # each has one owner


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["side by side", "all of it"])
def test_two_ranks_give_the_same_bits(name: str) -> None:
    spec = SPECS[name]
    weights = whole_weights(spec, FP32)
    expected = alone(Decoder(spec, CpuKernels(), dict(weights), FP32), recorded=False)
    for found in Ranks(2).run(
        lambda group: alone(rank_decoder(spec, weights, CpuKernels(), FP32, group), recorded=False)
    ):
        assert_same(found, expected)


def strided(keys: Tensor, values: Tensor, by_dimension: bool) -> LayerCache:
    """The same numbers in blocks that are apart from each other."""
    blocks = torch.full((len(keys), keys[0].numel() + values[0].numel() + 24), float("nan"))
    middle = keys[0].numel()
    shape = keys.shape[:2] + keys.shape[:1:-1] if by_dimension else keys.shape
    own = blocks[:, :middle].view(shape)
    own = own.mT if by_dimension else own
    own.copy_(keys)
    others = blocks[:, middle : middle + values[0].numel()].view(values.shape)
    others.copy_(values)
    return LayerCache(own, others)


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("head_dim", [16, 20, 512])
def test_cpu_kernels_read_and_write_blocks_that_are_apart(
    by_dimension: bool, head_dim: int
) -> None:
    """Of heads that the C++ code takes, and of others, which the definition computes there."""
    source = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 6, 2, 16, head_dim, generator=source)
    found, expected = strided(keys, values, by_dimension), LayerCache(keys.clone(), values.clone())
    batch = PagedBatch(
        query_start=torch.tensor([0, 3], dtype=torch.int32),
        context_lens=torch.tensor([37], dtype=torch.int32),
        block_tables=torch.tensor([[4, 1, 5]], dtype=torch.int32),
        table_rows=torch.zeros(1, dtype=torch.int32),
        slot_mapping=torch.tensor([82, 83, 84]),
        max_context_len=37,
    )
    new = torch.randn(2, 3, 2, head_dim, generator=source)
    query = torch.randn(3, 4, head_dim, generator=source)
    spec = plain_attention(4, 2, head_dim)
    results = []
    whole = KERNELS["cpu"]() if head_dim == 16 else ReferenceKernels()
    for kernels, one in ((KERNELS["cpu"](), found), (whole, expected)):
        kernels.write_kv_(*new, one, batch.slot_mapping)
        results.append(kernels.attention(query, one, batch, spec))
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(*results)
    assert KERNELS["cpu"]().captures(spec) == (head_dim == 16)

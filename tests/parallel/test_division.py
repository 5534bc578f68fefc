"""The number of ranks changes no bit: logits of one, two, three and four ranks, for every family
and format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.errors import InvalidRequestError
from quire.kernels.recurrent import RecurrentSpec
from quire.kernels.weights import Weight
from quire.models.config_parts import plain_attention
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.parallel.division import Division
from quire.parallel.group import Group
from quire.sampling_params import SamplingParams
from tests.decoding import all_logits, make_caches, run_tokens
from tests.parallel.ranks import Ranks, rank_decoder, whole_weights
from tests.random_models import SPECS, WITH_STATES, Bench, Transcript
from tests.test_quantized_exactness import in_format, widened

PROMPT = [(7 * i + 3) % 97 for i in range(50)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield cache(Ranks)
    torch.set_num_threads(threads)


def logits(decoder: Decoder) -> Tensor:
    """A prompt in one piece, and what follows a token at a time."""
    caches = make_caches(decoder, 8)
    parts = [run_tokens(decoder, caches, PROMPT[:47], 0)]
    parts += [run_tokens(decoder, caches, PROMPT[: end + 1], end) for end in range(47, 50)]
    return torch.cat(parts)


def check(
    ranks: Callable[[int], Ranks],
    spec: ModelSpec,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    quantize: Callable[[Tensor], Weight] | None = None,
) -> None:
    weights = whole_weights(spec, dtype, quantize)
    expected = logits(Decoder(spec, CpuKernels(), dict(weights), dtype))
    assert not expected.isnan().any()
    assert len(expected.unique(dim=0)) > 40

    def compute(group: Group) -> Tensor:
        return logits(rank_decoder(spec, weights, CpuKernels(), dtype, group))

    for size in sizes:
        for found in ranks(size).run(compute):
            assert torch.equal(found, expected), f"{spec.family} on {size} ranks"


def check_states(ranks: Callable[[int], Ranks], spec: ModelSpec, dtype: torch.dtype) -> None:
    """Through the engine: prompts over several chunks, in pieces, preempted, and answers."""
    weights = whole_weights(spec, dtype)
    prompts = [PROMPT * 3, PROMPT[:21]]
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)] * 2

    def run(decoder: Decoder) -> Transcript:
        bench = Bench(decoder, max_num_seqs=2, max_batched_tokens=60, preempt_every=4)
        return bench.run(prompts, params)

    def compute(group: Group) -> Transcript:
        return run(rank_decoder(spec, weights, CpuKernels(), dtype, group))

    expected = run(Decoder(spec, CpuKernels(), dict(weights), dtype))
    assert expected.preemptions > 0
    for size in (2, 4):
        for found in ranks(size).run(compute):
            assert found.tokens == expected.tokens
            for key, rows in expected.logits.items():
                assert torch.equal(found.logits[key], rows), f"{key} on {size} ranks"


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", SPECS)
def test_every_family_gives_the_same_bits_on_any_number_of_ranks(
    ranks: Callable[[int], Ranks], family: str, dtype: torch.dtype
) -> None:
    check(ranks, SPECS[family], dtype, (2, 4) if family != "llama" else (1, 2, 4))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", WITH_STATES)
def test_layers_with_states_give_the_same_bits_on_any_number_of_ranks(
    ranks: Callable[[int], Ranks], kind: str, dtype: torch.dtype
) -> None:
    check_states(ranks, WITH_STATES[kind], dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize("kind", ["delta rule", "state space"])
def test_recurrent_heads_share_keys_on_any_number_of_ranks(
    ranks: Callable[[int], Ranks], kind: str, keys: int
) -> None:
    """Key heads are divided, or several ranks keep the same one; norms over the values of a key
    head are within a rank, or over several.
    """
    spec = WITH_STATES[kind]
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, RecurrentSpec)
    values = mixer.value_dim * (1 if mixer.is_delta else 4 // keys)
    mixer = replace(
        mixer, num_key_heads=keys, num_value_heads=4, norm=replace(mixer.norm, group_size=values)
    )
    layers = (replace(spec.layers[0], mixer=mixer), *spec.layers[1:])
    check_states(ranks, replace(spec, layers=layers), torch.float32)


def test_states_that_do_not_come_out_even_are_refused_with_what_is_possible() -> None:
    with pytest.raises(InvalidRequestError, match=r"is 3, .* even only with 1, 2, 4"):
        Division(WITH_STATES["delta rule"], 0, 3)
    with pytest.raises(InvalidRequestError, match=r"is 3, but must divide the 64 channels"):
        Division(WITH_STATES["convolution"], 0, 3)
    attention = plain_attention(3, 3, 16)
    spec = WITH_STATES["convolution"]
    uneven = replace(spec, layers=(spec.layers[0], replace(spec.layers[1], mixer=attention)))
    with pytest.raises(InvalidRequestError, match=r"is 2, .* attention don't .* possible: 1$"):
        Division(uneven, 0, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "olmo2"])
def test_what_does_not_come_out_even(ranks: Callable[[int], Ranks], family: str) -> None:
    """Nine query and three key heads, as SmolLM2 has them: two ranks get two and one, four share
    one of them.
    """
    spec = SPECS[family].with_layers(mixer=plain_attention(9, 3, 16))
    check(ranks, spec, torch.float32, (2, 3, 4))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "glm4_moe", "gpt_oss"])
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "INT8", "MXFP4"])
def test_quantised_weights_are_divided_by_rows(
    ranks: Callable[[int], Ranks], name: str, family: str
) -> None:
    check(ranks, widened(family), torch.float32, (2, 4), lambda value: in_format(name, value))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 2, 4), (9, 3, 4), (9, 3, 2), (4, 4, 3), (6, 1, 5)]
)
def test_every_head_and_row_has_one_owner(heads: int, kv_heads: int, size: int) -> None:
    spec = SPECS["qwen2"].with_layers(mixer=plain_attention(heads, kv_heads, 16))
    (shape,) = spec.head_shapes
    shares = [shape.share(rank, size) for rank in range(size)]
    assert [head for one in shares for head in range(one.query.start, one.query.stop)] == list(
        range(heads)
    )
    group = heads // kv_heads
    for one in shares:
        seen = {head // group for head in range(one.query.start, one.query.stop)}
        assert seen == set(range(one.kv.start, one.kv.stop))
        assert one.shape.num_heads % one.shape.num_kv_heads == 0
    for name, parameter in spec.parameters().items():
        if ".qkv." not in name and "norm" not in name:
            runs = [Division(spec, rank, size).segments(name, parameter) for rank in range(size)]
            rows = sorted(
                row for run in runs for part in run for row in range(part.start, part.stop)
            )
            assert rows == list(range(parameter.shape[0])), name


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="4 query heads"):
        Division(SPECS["llama"], 0, 5)
    uneven = SPECS["llama"].with_layers(mixer=plain_attention(6, 6, 16))
    assert Division(uneven, 5, 6).local_spec.head_shapes[0].num_heads == 1


def test_collectives_are_few(ranks: Callable[[int], Ranks]) -> None:
    """What docs/tensor_parallel.md says: four gathers per layer, one for the embedding, one for the
    head.
    """
    for family, per_layer in {
        "qwen2": 4,
        "qwen3_moe": 4,
        "qwen2_moe": 6,
        "olmo2": 6,
        "cohere2": 4,
    }.items():
        spec = replace(SPECS[family], tie_embeddings=False)
        weights = whole_weights(spec, torch.float32)

        def compute(
            group: Group, spec: ModelSpec = spec, weights: dict[str, Weight] = weights
        ) -> int:
            decoder = rank_decoder(spec, weights, CpuKernels(), torch.float32, group)
            before = group.num_gathers
            all_logits(decoder, PROMPT)
            return group.num_gathers - before

        assert ranks(2).run(compute) == [per_layer * spec.num_layers + 2] * 2, family

"""Products of experts with many rows in CUDA C++ (`quire/backends/cuda/experts.cu`): the bits of the
kernel for all, on a Hopper GPU; and everywhere what is left to others.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire.errors import DeviceError
from quire.kernels.ops import Activation, ExpertWeights, MoeSpec
from quire.kernels.weights import Weight
from tests.kernels.triton.support import DEVICE, MARKS, ON_GPU, random
from tests.kernels.triton.test_moe import make_layer

from quire.backends.cuda import experts as many_rows  # isort: skip  (after the check for Triton)
from quire.backends.triton import moe as experts_kernels  # isort: skip
from quire.backends.triton.grouping import group_pairs  # isort: skip
from quire.backends.triton.linear import Tile  # isort: skip
from quire.backends.triton.tile_product import tile_product  # isort: skip

pytestmark = MARKS
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")

COUNTS = {
    "uneven": [1, 700, 0, 63, 64, 65, 128, 129, 191, 256, 257],
    "one expert has all": [0, 0, 901, 0],
    "several tiles for each block": [900, 600] * 25,
}
"""Pairs of each expert."""


def drawn_ids(counts: list[int]) -> Tensor:
    """The expert of each pair, int32, in an order that is drawn."""
    ids = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Where 0 and -0 differ."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "plain"])
def test_products_have_the_bits_of_the_kernel_for_all(
    dtype: torch.dtype, counts: list[int], is_gated: bool
) -> None:
    inner, outputs, top_k = 320, 768, 2 if is_gated else 1  # neither is a power of 2
    ids = drawn_ids(counts).to(DEVICE)
    pairs, experts = len(ids), len(counts)
    rows = -(-pairs // top_k)
    # the rows lie in wider ones, and every fifth is zero
    x = random(rows, inner + 64, dtype=dtype, seed=2)[:, :inner]
    x[::5] = 0.0
    weight = random(experts, outputs, inner, dtype=dtype, seed=3) * inner**-0.5
    few = group_pairs(ids, experts, pairs, 128)
    activation = Activation.SILU if is_gated else None
    tile = Tile(128, 64, 64, 3, 8)
    expected = tile_product(x, Weight.dense(weight), None, few, tile, dtype, top_k, activation)
    for width in many_rows.WIDTHS:
        tiles = group_pairs(ids, experts, pairs, width)
        for _ in range(3):  # each leaves the counters as it found them
            found = many_rows.experts_product(x, weight, tiles, top_k, is_gated)
            assert has_same_bits(found, expected)
        assert tiles.counts[-2:].tolist() == [0, 0]


@on_hopper
@pytest.mark.parametrize(("rows", "width"), [(300, 128), (700, 256), (4100, 256)])
def test_a_layer_has_the_bits_it_has_without_them(
    rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and in a CUDA graph that is replayed."""
    x, router_logits, experts = make_layer(rows, 8, 512, 384, torch.bfloat16)
    spec = MoeSpec(8, 2, 384, True)
    assert many_rows.takes(x, experts, spec.activation, 2 * rows)
    assert many_rows.tile_width(2 * rows, 8) == width
    router_logits[:, 3] -= 100.0  # an expert without rows
    found = experts_kernels.moe(x, router_logits, experts, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts_kernels.moe(x, router_logits, experts, spec)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert has_same_bits(captured, found)
    few = experts_kernels.moe(x[5:12], router_logits[5:12], experts, spec)
    assert has_same_bits(few, found[5:12])
    monkeypatch.setattr(many_rows, "takes", lambda *_: False)
    assert has_same_bits(experts_kernels.moe(x, router_logits, experts, spec), found)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_they_are_exact_here(dtype: torch.dtype) -> None:
    assert many_rows.are_exact(DEVICE, dtype)


@on_hopper
def test_where_they_can_t_be_compiled_others_compute_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DeviceError("No CUDA compiler was found")

    monkeypatch.setattr(many_rows, "experts_product", fail)
    monkeypatch.setattr(many_rows, "are_exact", many_rows.are_exact.__wrapped__)
    x, router_logits, experts = make_layer(300, 8, 512, 384, torch.bfloat16)
    found = experts_kernels.moe(x, router_logits, experts, MoeSpec(8, 2, 384, True))
    assert found.isfinite().all()
    assert "prompts through experts take longer" in caplog.text
    assert "No CUDA compiler was found" in caplog.text


def test_other_devices_do_without() -> None:
    assert not many_rows.are_exact(torch.device("cpu"), torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """Of 8 experts with two for each row."""

    rows: int = 256
    hidden: int = 512
    intermediate: int = 384
    dtype: torch.dtype = torch.bfloat16
    activation: Activation = Activation.SILU
    has_biases: bool = False
    row_size: int = 512
    """Numbers from one row to the next."""


@pytest.mark.parametrize(
    ("case", "is_taken"),
    [
        (Case(), True),
        (Case(row_size=520), True),
        (Case(rows=255), False),
        (Case(hidden=320, row_size=320), False),
        (Case(intermediate=320), False),
        (Case(intermediate=352), False),
        (Case(dtype=torch.float32), False),
        (Case(activation=Activation.GELU), False),
        (Case(has_biases=True), False),
        (Case(row_size=513), False),
    ],
    ids=str,
)
def test_what_they_take(case: Case, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_rows, "are_exact", lambda *_: True)
    sizes = (case.rows, 8, case.hidden, case.intermediate, case.dtype)
    x, _, experts = make_layer(*sizes, biases=case.has_biases)
    x = torch.nn.functional.pad(x, (0, case.row_size - case.hidden))[:, : case.hidden]
    assert many_rows.takes(x, experts, case.activation, 2 * case.rows) == is_taken
    unaligned = torch.empty(experts.down.tensor.numel() + 1, dtype=case.dtype, device=DEVICE)[1:]
    moved = ExpertWeights(experts.gate_up, Weight.dense(unaligned.view(experts.down.shape)))
    assert not many_rows.takes(x, moved, case.activation, 2 * case.rows)


@pytest.mark.parametrize("width", many_rows.WIDTHS)
def test_tiles_made_on_the_host_are_those_of_the_kernels(width: int) -> None:
    counts = COUNTS["uneven"]
    ids = drawn_ids(counts)
    own = many_rows.tiles_of(ids, counts, width, DEVICE)
    grouped = group_pairs(ids.to(DEVICE), len(counts), len(ids), width)
    number = own.bound
    assert grouped.counts[grouped.bound :].tolist() == [number, 0, 0]
    assert own.counts.tolist() == [*grouped.counts[:number].tolist(), number, 0, 0]
    assert own.experts.tolist() == grouped.experts[:number].tolist()
    for tile, count in enumerate(own.counts[:number].tolist()):
        place = slice(tile * width, tile * width + count)
        assert own.order[place].tolist() == grouped.order[place].tolist()

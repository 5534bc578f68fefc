"""From attention's output to the end of a layer for one row, in one kernel: the bits of one kernel for
each operation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.backends.triton.kernels import TritonKernels
from quire.kernels.ops import Activation, LayerEnd
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight
from tests.gpu.support import DEVICE, GpuEngine, assert_same, decoder_of, plain_jobs, shape_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

SHAPES = {
    "qwen3-0.6b": (1024, 2048, 3072),
    "qwen3-1.7b": (2048, 2048, 6144),
    "llama-3.2-1b": (2048, 2048, 8192),
    "fewer parts than warps": (512, 512, 1536),
}
REPLAYS = 300


def random(*shape: int, factor: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * factor).to(torch.bfloat16)


def ends_of(shape: tuple[int, int, int], count: int) -> list[LayerEnd]:
    hidden, attended, size = shape

    def weight(rows: int, inner: int) -> Weight:
        return Weight.dense(random(rows, inner, factor=inner**-0.5))

    return [
        LayerEnd(
            weight(hidden, attended),
            random(hidden),
            1e-5,
            weight(2 * size, hidden),
            weight(hidden, size),
            Activation.SILU,
        )
        for _ in range(count)
    ]


def kernels_for(ends: list[LayerEnd]) -> TritonKernels:
    kernels = TritonKernels(torch.bfloat16)
    kernels.prepare_layer_end(ends[0])
    x, residual = random(1, ends[0].output.shape[1]), random(1, len(ends[0].norm))
    assert kernels._single_row_layers.takes(x, residual, ends[0])
    return kernels


def chain(
    kernels: TritonKernels, ends: list[LayerEnd], attended: Tensor, residual: Tensor
) -> list[Tensor]:
    """Layers after each other, each of which attends to nothing but what it is given."""
    results = []
    for end in ends:
        output, residual = kernels.finish_layer(attended, residual, end)
        normed, residual = kernels.add_rms_norm(output, residual, end.norm, end.eps)
        results += [output, residual]
        attended = torch.cat((normed, attended), 1)[:, : attended.shape[1]].contiguous()
    return results


class OneByOne(TritonKernels):
    finish_layer = ReferenceKernels.finish_layer


@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_single_operations_also_in_graphs(name: str) -> None:
    torch.manual_seed(0)
    ends = ends_of(SHAPES[name], 4)
    kernels, attended = kernels_for(ends), random(1, SHAPES[name][1])
    residual = random(1, SHAPES[name][0], factor=3.0)
    for _ in range(3):
        found = chain(kernels, ends, attended, residual)
        expected = chain(OneByOne(), ends, attended, residual)
        assert all(map(torch.equal, found, expected))
        attended.normal_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(kernels, ends, attended, residual)
    for number in range(REPLAYS):
        if number % 30 == 0:
            attended.normal_()
            residual.normal_()
            expected = chain(OneByOne(), ends, attended, residual)
        graph.replay()
        if number % 10 == 9:
            assert all(map(torch.equal, found, expected))


def test_what_is_no_number_stays_in_its_row() -> None:
    torch.manual_seed(0)
    shape = SHAPES["qwen3-0.6b"]
    ends = ends_of(shape, 2)
    kernels, residual = kernels_for(ends), random(1, shape[0])
    attended = random(1, shape[1])
    expected = chain(kernels, ends, attended, residual)
    poisoned = attended.clone()
    poisoned[0, 7] = float("nan")
    assert all(one.isnan().all() for one in chain(kernels, ends, poisoned, residual))
    assert all(map(torch.equal, chain(kernels, ends, attended, residual), expected))


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b"])
def test_two_engines_at_once_do_not_wait_for_each_other_for_ever(name: str) -> None:
    """Both kernels need most of the GPU: if each began with a part of its programs, neither ended."""
    torch.manual_seed(0)
    ends = ends_of(SHAPES[name], 4)
    attended, residual = random(1, SHAPES[name][1]), random(1, SHAPES[name][0])
    expected = chain(OneByOne(), ends, attended, residual)
    owners = [kernels_for(ends) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in owners]
    graphs, results = [], []
    for kernels in owners:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(chain(kernels, ends, attended, residual))
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(REPLAYS):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    eager: list[list[Tensor]] = []
    for _ in range(20):
        for stream, kernels in zip(streams, owners, strict=True):
            with torch.cuda.stream(stream):
                eager.append(chain(kernels, ends, attended, residual))
    torch.cuda.synchronize()
    for found in results + eager:
        assert all(map(torch.equal, found, expected))


def test_others_may_keep_the_gpu_busy() -> None:
    torch.manual_seed(0)
    shape = SHAPES["llama-3.2-1b"]
    ends = ends_of(shape, 4)
    kernels, attended, residual = kernels_for(ends), random(1, shape[1]), random(1, shape[0])
    expected = chain(OneByOne(), ends, attended, residual)
    large, other = random(4096, 4096), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(100):
            large @ large
    for _ in range(20):
        found = chain(kernels, ends, attended, residual)
        assert all(map(torch.equal, found, expected))


def test_other_layers_are_computed_by_single_operations() -> None:
    shape = SHAPES["qwen3-0.6b"]
    (end,) = ends_of(shape, 1)
    kernels, attended, residual = kernels_for([end]), random(1, shape[1]), random(1, shape[0])
    takes = kernels._single_row_layers.takes
    assert takes(attended, residual, end)
    half = Weight.dense(end.output.tensor.half())
    others = [
        (attended.expand(2, -1), residual.expand(2, -1), end),
        (attended.float(), residual.float(), end),
        (attended, residual, end._replace(activation=Activation.GELU_TANH)),
        (attended, residual, end._replace(output=half)),
        (attended, residual, ends_of((1024, 2048, 2048), 1)[0]),  # not prepared
    ]
    assert not any(takes(*one) for one in others)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b"])
def test_a_request_alone_has_the_bits_it_has_beside_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of(shape_of(name, 3))
    layers = decoder.kernels._single_row_layers  # type: ignore[attr-defined]
    assert any(words is not None for words in layers._words.values())
    calls: list[int] = []
    launch = type(layers).__call__

    def counted(self: object, *arguments: object) -> object:
        calls.append(1)
        return launch(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(layers), "__call__", counted)
    jobs = plain_jobs(9, decoder.spec.vocab_size, seed=3)
    jobs = [replace(job, params=replace(job.params, logprobs=2, max_tokens=40)) for job in jobs]
    for graphs in (True, False):
        engine = GpuEngine(decoder, cuda_graphs=graphs)
        for job, counts in ((0, (2, 9)), (4, (3, 5)), (8, (2, 4))):
            alone = engine.run(jobs, [job])
            for count in counts:
                beside = engine.run(jobs, [(job + i) % len(jobs) for i in range(count)])
                assert_same(beside, alone, [job])
        assert calls
        calls.clear()

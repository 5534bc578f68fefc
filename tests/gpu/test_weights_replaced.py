"""On the GPU: weights replaced under captured graphs, and memory that is given back while an engine
sleeps.
"""

from __future__ import annotations

import gc

import pytest
import torch

from quire.backends.select import select_kernels
from quire.errors import CapacityError, EngineError
from quire.kernels.formats import FORMATS
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.tools.bench.random_engine import quantized
from tests.gpu.support import DEVICE, GpuEngine, Job, decoder_of, mixed_jobs, plain_jobs, shape_of

pytestmark = pytest.mark.gpu

GIB = 2**30
CACHE = 4 * GIB


def weights_of(
    spec: ModelSpec, seed: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Weight]:
    """Another model's, in a memory of their own. Norms differ too."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    found: dict[str, Weight] = {}
    for name, parameter in spec.parameters().items():
        # Drawn where it stays: memory of larger numbers before they are rounded would be shared
        # with what comes later.
        value = torch.empty(
            parameter.shape, dtype=torch.float32 if parameter.keep_float32 else dtype, device=DEVICE
        )
        is_norm = "norm" in name.rpartition(".")[2]
        mean, std = (1.0, 0.1) if is_norm else (0.0, 2.0 / spec.hidden_size**0.5)
        found[name] = Weight.dense(value.normal_(mean, std, generator=generator))
    return found


def jobs_of(spec: ModelSpec) -> list[Job]:
    """Enough steps that all graphs are captured and replayed."""
    return [
        *plain_jobs(24, spec.vocab_size - 1, seed=3, longest=200),
        *mixed_jobs(12, spec.vocab_size - 1, seed=4),
    ]


@pytest.mark.parametrize("shape", ["qwen3-8b", "qwen3-30b-a3b"])
def test_graphs_compute_with_weights_that_were_replaced(shape: str) -> None:
    spec = shape_of(shape, num_layers=2)
    jobs = jobs_of(spec)
    fresh = GpuEngine(
        Decoder(
            spec, select_kernels(DEVICE, torch.bfloat16), weights_of(spec, 7), torch.bfloat16, 4096
        )
    )
    expected = fresh.run(jobs)
    del fresh
    gc.collect()
    engine = GpuEngine(decoder_of(spec))
    old = engine.run(jobs)
    decoder = engine.engine.decoder
    places = [
        tensor.data_ptr()
        for one in decoder.weights.values()
        for part in one.parts
        for tensor in part.tensors
    ]
    engine.engine.update_weights(weights_of(spec, 7))
    torch.cuda.synchronize()
    found = [
        tensor.data_ptr()
        for one in decoder.weights.values()
        for part in one.parts
        for tensor in part.tensors
    ]
    assert found == places
    new = engine.run(jobs)
    assert not new.errors
    assert new.of(range(len(jobs))) == expected.of(range(len(jobs)))
    assert new.of(range(len(jobs))) != old.of(range(len(jobs)))
    from_host = {name: Weight.dense(one.tensor.cpu()) for name, one in weights_of(spec, 7).items()}
    engine.engine.update_weights(from_host)
    assert engine.run(jobs).of(range(len(jobs))) == expected.of(range(len(jobs)))


@pytest.mark.parametrize(
    "name", [name for name, format in FORMATS.items() if format.dtype is None] + ["BF16"]
)
def test_every_layout_is_replaced_where_it_lies(name: str) -> None:
    """Layouts of the streamed kernels, of tiles, of cuBLAS in FP8; and in a graph that was captured
    before.
    """
    kernels, format, shape = select_kernels(DEVICE, torch.bfloat16), FORMATS[name], (256, 1024)

    def loaded(seed: int) -> Weight:
        torch.manual_seed(seed)  # of formats for which `quantized` draws its bits
        numbers = torch.randn(shape, device=DEVICE) * 0.02
        return (
            Weight.of(format, shape, *quantized(format, numbers))
            if name != "BF16"
            else Weight.dense(numbers.bfloat16())
        )

    packed, fresh = kernels.pack(loaded(1)), kernels.pack(loaded(2))
    places = [tensor.data_ptr() for part in packed.parts for tensor in part.tensors]
    x = torch.randn(300, shape[1], device=DEVICE).bfloat16()
    stale = kernels.linear(x, packed)
    graph, out = (
        torch.cuda.CUDAGraph(),
        torch.empty(7, shape[0], dtype=torch.bfloat16, device=DEVICE),
    )
    kernels.linear(x[:7], packed, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kernels.linear(x[:7], packed, out=out)
    kernels.pack_into(packed, loaded(2))
    assert [tensor.data_ptr() for part in packed.parts for tensor in part.tensors] == places
    for rows in (1, 7, 40, 300):
        assert torch.equal(kernels.linear(x[:rows], packed), kernels.linear(x[:rows], fresh))
    assert not torch.equal(kernels.linear(x, packed), stale)
    graph.replay()
    assert torch.equal(out, kernels.linear(x[:7], fresh))


@pytest.mark.parametrize("shape", ["qwen3-8b", "qwen3-30b-a3b"])
def test_a_sleeping_engine_has_given_its_memory_back(shape: str) -> None:
    spec = shape_of(shape, num_layers=2)
    jobs = jobs_of(spec)
    gc.collect()
    torch.cuda.empty_cache()
    empty = torch.cuda.memory_allocated()
    decoder = Decoder(
        spec, select_kernels(DEVICE, torch.bfloat16), weights_of(spec, 7), torch.bfloat16, 4096
    )
    engine = GpuEngine(decoder, kv_cache_memory=CACHE, host_cache_memory="256MiB")
    before, weights, cache = engine.run(jobs), decoder.nbytes, engine.engine.plan.nbytes
    torch.cuda.synchronize()
    reserved, awake = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    assert awake - empty > weights + 0.9 * cache
    for level in (1, 2):
        engine.engine.sleep(level)
        # What stays: request rows, the sampler's columns, workspaces of kernels.
        assert torch.cuda.memory_allocated() - empty < 0.5 * GIB
        # And not kept by torch; what is free on the card says less, since others of these tests run
        # beside this one.
        assert reserved - torch.cuda.memory_reserved() > 0.8 * (weights + cache)
        with pytest.raises(EngineError, match="asleep"):
            engine.run(jobs)
        engine.engine.wake_up()
        if level == 2:
            engine.engine.update_weights(weights_of(spec, 7))
        assert abs(torch.cuda.memory_allocated() - awake) < 0.5 * GIB
        # the first steps without graphs, the later ones in those that are captured anew
        again = engine.run(jobs)
        assert not again.errors
        assert again.of(range(len(jobs))) == before.of(range(len(jobs)))


def test_an_engine_that_finds_no_memory_stays_asleep_and_wakes_later() -> None:
    spec = shape_of("qwen3-8b", num_layers=2)
    jobs = plain_jobs(6, spec.vocab_size - 1, seed=3, longest=100)
    engine = GpuEngine(decoder_of(spec), kv_cache_memory=CACHE)
    before = engine.run(jobs)
    engine.engine.sleep()
    # This process alone may take no more: other tests use the card beside this one.
    allowed = torch.cuda.memory_reserved() + 2 * GIB
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(CapacityError, match="too little free memory to wake up"):
            engine.engine.wake_up()
        with pytest.raises(EngineError, match="asleep"):
            engine.run(jobs)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    engine.engine.wake_up()
    assert engine.run(jobs).of(range(len(jobs))) == before.of(range(len(jobs)))

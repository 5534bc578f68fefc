"""What a decode step launches, counted for models of true shapes: kernels are only noted and not
run, and operations of torch that would be a kernel of their own are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from quire.backends import select
from quire.backends.cpu.device import CpuDevice
from quire.backends.triton import cublas
from quire.backends.triton.attention_splits import counters
from quire.backends.triton.kernels import TritonKernels
from quire.kernels.formats import FORMATS
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.runner.kv_cache import KVCache
from quire.runner.layer_groups import LayerGroups
from quire.runner.request_rows import RequestRows
from quire.tools.bench.shapes import spec_of
from tests.kernels.triton.support import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="kernels are not run")

META = torch.device("meta")
WITHOUT_WORK = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "detach_"}


def memory_of(values: Any) -> set[int]:
    """Of the tensors among them."""
    tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return {one.untyped_storage()._cdata for one in tensors}


class Launches(TorchDispatchMode):
    """Counts kernels by name, and torch's operations that make or change numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        found = function(*arguments, **(options or {}))
        # an operation that is made of others gives its input back where it has nothing to do
        is_view = not function._schema.is_mutable and memory_of(found) <= memory_of(arguments)
        if not is_view and name not in WITHOUT_WORK:
            self.counts[f"torch.{name}"] += 1
        return found


def decoder_of(spec: ModelSpec, kernels: TritonKernels) -> Decoder:
    loaded = {}
    for name, parameter in spec.parameters().items():
        format = FORMATS["F32" if parameter.keep_float32 else "BF16"]
        shape = tuple(parameter.shape)
        loaded[name] = Weight.of(format, shape, *format.empty(shape, META))
    return Decoder(spec, kernels, loaded, torch.bfloat16, 4096)


LaunchesOf = Callable[[str, int], Counter[str]]


@pytest.fixture
def launches_of(monkeypatch: pytest.MonkeyPatch) -> LaunchesOf:
    """What one decode step of so many requests launches, as a graph has it."""
    launches = Launches()

    def product(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        launches.counts["cublas"] += 1
        return out

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*_: Any, **__: Any) -> None:
            launches.counts[kernel.fn.__name__] += 1

        return launch

    monkeypatch.setitem(select.DEVICES, META.type, CpuDevice)
    monkeypatch.setattr(TritonKernels, "_check", lambda self, weight, has_bias: True)
    monkeypatch.setattr(cublas, "product", product)
    monkeypatch.setattr(KernelInterface, "__getitem__", launcher)
    return lambda shape, rows: step_of(shape, rows, launches)


def step_of(shape: str, rows: int, launches: Launches) -> Counter[str]:
    spec = spec_of(shape)
    kernels = TritonKernels()
    decoder = decoder_of(spec, kernels)
    groups = LayerGroups.of(spec, 16, torch.bfloat16, kernels.keys_at_once, 1)
    cache = KVCache(spec, 64, 0, 16, torch.bfloat16, META, groups=groups)
    blocks = 0 if groups.state is None else groups.state.num_blocks
    table = RequestRows(256, 4096, 16, META, groups.heads, blocks)
    (heads,) = spec.head_shapes
    ((name, size),) = kernels.decode_lists(rows, rows, 4096, heads).items()
    inputs = torch.zeros(3, rows, dtype=torch.int32, device=META)
    work = {heads: {name: torch.zeros(1 + size, 8, dtype=torch.int32, device=META)}}
    counters(META, heads.num_kv_heads)  # made once
    launches.counts = Counter()
    with torch.inference_mode(), launches:
        token_ids, places, paged = table.inputs(
            kernels,
            inputs[0],
            inputs[1],
            query_start=inputs[0],
            context_lens=inputs[0],
            table_rows=inputs[0],
            max_context_len=4096,
            work=work,
        )
        hidden = decoder(token_ids, places, paged, cache.layers)
        logits = decoder.logits(hidden)
        table.sample(kernels, logits, inputs[0], inputs[2])
    return launches.counts


QWEN = "qwen3.5-35b-a3b"
"""30 layers with the delta rule, 10 with attention; all have experts and a shared one."""
GLM = "glm-4.7-flash"
"""47 layers with latent attention; all but one have experts and a shared one."""
AROUND = Counter(_embedding_kernel=1, _scan_kernel=1, _fold_kernel=1)
"""Of every step, beside inputs, the last norm and the head."""
EXPERTS = ("_route_kernel", "_product_kernel", "_product_kernel", "_combine_kernel")


def times(count: int, *names: str) -> Counter[str]:
    return Counter({name: count * names.count(name) for name in names})


def test_a_step_of_layers_with_a_state_and_shared_experts(launches_of: LaunchesOf) -> None:
    delta = ("_convolve_kernel", "scores_kernel", "_recur_kernel", "_gated_norm_kernel")
    attention = ("_qkv_to_cache_kernel", "_decode_kernel", "_sigmoid_mul_kernel")
    expected = times(40, *EXPERTS) + times(30, *delta) + times(10, *attention) + AROUND
    expected += Counter(_linear_kernel=81, _rms_norm_kernel=81, _gather_inputs_kernel=7)
    expected += Counter(_pair_kernel=40)
    assert launches_of(QWEN, 1) == expected
    assert launches_of(QWEN, 32) == expected + Counter(_group_few_kernel=40)


def test_a_step_of_latent_attention(launches_of: LaunchesOf) -> None:
    latent = ("_latent_query_kernel", "_latent_kernel", "_heads_kernel")
    expected = times(46, *EXPERTS) + times(47, *latent) + AROUND
    expected += Counter(_linear_kernel=49, _rms_norm_kernel=142, _gather_inputs_kernel=1)
    expected += Counter(
        _pair_kernel=47, _router_kernel=46, cublas=48
    )  # inner dimensions above 4,096
    assert launches_of(GLM, 1) == expected
    assert launches_of(GLM, 32) == expected + Counter(_group_few_kernel=46)


def test_a_step_of_a_dense_model_has_five_launches_and_two_norms_a_layer(
    launches_of: LaunchesOf,
) -> None:
    layer = times(28, "_qkv_to_cache_kernel", "_decode_kernel")
    expected = layer + AROUND
    expected += Counter(_linear_kernel=113, _rms_norm_kernel=57, _gather_inputs_kernel=1)
    assert launches_of("qwen3-0.6b", 1) == expected


@pytest.mark.parametrize("rows", [256, 300])
@pytest.mark.parametrize("shape", [QWEN, GLM])
def test_a_step_of_many_rows_has_no_operations_of_torch(
    shape: str, rows: int, launches_of: LaunchesOf
) -> None:
    counts = launches_of(shape, rows)
    assert [name for name in counts if name.startswith("torch")] == []

"""A worker: everything that computes steps on one device, from the weights to the runner.

What schedules the steps and understands text is put together in `quire.assemble`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quire.backends.select import device_of, select_kernels
from quire.config import EngineConfig, format_bytes, parse_bytes
from quire.constrain import GrammarCompiler
from quire.constrain.masks import Constrainer
from quire.kernels.device import Device
from quire.kernels.ops import AttentionSpec, MoeSpec
from quire.models.adapters import AdapterLoader
from quire.models.decoder import Decoder
from quire.models.prediction import Predictor
from quire.models.weight_plan import ModelFiles, WeightPlan, plan_weights
from quire.runner.adapters import AdapterSlots
from quire.runner.drafting import Graphs, ModelDrafter
from quire.runner.dtypes import pick_cache_dtype, pick_dtype
from quire.runner.graphs import DecodeGraphs
from quire.runner.kv_cache import KVCache, token_bytes
from quire.runner.layer_groups import LayerGroups
from quire.runner.memory import CachePlan, Needs, check_weights_fit, measure_needs, plan_cache
from quire.runner.prediction import PredictingDrafter
from quire.runner.recorded import RecordedSteps
from quire.runner.request_rows import RequestRows
from quire.runner.runner import Runner


@dataclass(frozen=True, slots=True)
class Worker:
    """One device, ready to compute."""

    runner: Runner
    plan: CachePlan
    depth: int
    """How many steps should be in flight: on a GPU the host prepares one while the device computes
    the last; drafting needs its tokens first.
    """
    description: str
    """What was loaded, where, and what fits: for the start-up message."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What makes draft tokens for the main decoder: a second one, or a layer of its checkpoint for
    multi-token prediction.
    """

    decoder: Decoder | Predictor
    has_own_cache: bool
    """False for the same model in fewer bits, which reads the main decoder's keys and values, and for
    a layer whose keys lie in the blocks of the main decoder's.
    """
    description: str


def choose_weights(files: ModelFiles, config: EngineConfig, device: Device) -> WeightPlan:
    """The kernels for a model, its number format, and the formats its weights are kept in."""
    dtype = pick_dtype(config.dtype, device, files.are_quantized(config.quantization))
    kernels = select_kernels(device.torch_device, dtype, config.kernels)
    return plan_weights(files, kernels, dtype, device.torch_device, config.quantization)


def expected_plan(weights: WeightPlan, config: EngineConfig) -> CachePlan:
    """An estimate before the weights are read, to raise errors early; the real plan is made when
    they are loaded.
    """
    device = device_of(weights.device)
    free = device.free_memory()
    needs = Needs(weights=check_weights_fit(weights, free), adapters=_slot_memory(config, device))
    limits = config.limits(on_gpu=device.is_gpu)
    spec = weights.files.spec
    dtype = pick_cache_dtype(config.kv_cache_dtype, weights.dtype, device, spec.cache)
    groups = LayerGroups.of(
        spec, config.block_size, dtype, weights.kernels.keys_at_once, config.max_model_len
    )
    return plan_cache(spec, config, limits, dtype, free - needs.weights, needs, groups)


def start_worker(
    decoder: Decoder,
    config: EngineConfig,
    grammars: GrammarCompiler,
    formats: str = "",
    draft: Draft | None = None,
    agree: Callable[[CachePlan], CachePlan] | None = None,
    loader: AdapterLoader | None = None,
) -> Worker:
    """A worker around a decoder whose weights are loaded; memory that is left becomes the cache.
    `formats` names the weights' formats for the start-up message. With tensor parallelism, `agree`
    returns the plan that fits all ranks. `loader` reads adapters; None: there are none.
    """
    spec, dtype, place, kernels = decoder.spec, decoder.dtype, decoder.device, decoder.kernels
    device = device_of(place)
    limits = config.limits(on_gpu=device.is_gpu)
    cache_dtype = pick_cache_dtype(config.kv_cache_dtype, dtype, device, spec.cache)
    needs = measure_needs(decoder, limits, config.block_size, cache_dtype)
    needs = replace(needs, adapters=_slot_memory(config, device))
    if draft is not None:
        needs = replace(needs, weights=needs.weights + draft.decoder.nbytes)
        if draft.has_own_cache:
            needs = replace(
                needs, draft_block=token_bytes(draft.decoder.spec, config.block_size, cache_dtype)
            )
    predictor = draft.decoder if draft and isinstance(draft.decoder, Predictor) else None
    cached = spec
    if predictor is not None:
        cached = replace(spec, layers=(*spec.layers, *predictor.spec.layers))
    # A draft model uses the same block tables and may have other windows: then no block is freed by
    # a window.
    longest = config.max_model_len if draft is None or predictor is not None else 1
    groups = LayerGroups.of(
        cached, config.block_size, cache_dtype, kernels.keys_at_once, longest, dtype
    )
    plan = plan_cache(spec, config, limits, cache_dtype, device.free_memory(), needs, groups)
    plan = plan if agree is None else agree(plan)
    by_dimension = kernels.keys_by_dimension(cache_dtype, plan.block_size)
    sizes = plan.num_blocks, plan.num_host_blocks, plan.block_size
    cache = KVCache(cached, *sizes, cache_dtype, place, by_dimension, plan.groups)
    num_state_blocks = 0 if plan.groups.state is None else plan.groups.state.num_blocks
    rows = RequestRows(
        limits.max_num_seqs,
        plan.max_model_len,
        plan.block_size,
        place,
        plan.groups.heads,
        num_state_blocks,
    )
    constrainer = Constrainer(grammars, limits.max_num_seqs, spec.vocab_size, place)
    graphs = _make_graphs(decoder, config, cache, rows)
    drafter: ModelDrafter | PredictingDrafter | None = None
    if predictor is not None:
        behind = cache.layers[len(spec.mixers) :]
        drafter = PredictingDrafter(predictor, decoder, behind, rows)
    elif draft is not None:
        assert isinstance(draft.decoder, Decoder)
        own = (
            KVCache(draft.decoder.spec, *sizes, cache_dtype, place)
            if draft.has_own_cache
            else cache
        )
        own_graphs = _make_graphs(draft.decoder, config, own, rows)
        drafter = ModelDrafter(draft.decoder, own, draft.has_own_cache, rows, own_graphs)
    rejects = config.acceptance == "rejection"
    adapters: AdapterSlots | None = None
    if loader is not None and config.max_loras and kernels.takes_adapters:
        room = needs.adapters + plan.spare // 2 if device.is_gpu else None
        adapters = AdapterSlots(decoder, config.max_loras, limits.max_num_seqs, loader, room)
    runner = Runner(decoder, cache, rows, constrainer, graphs, drafter, rejects, adapters)
    weights = (
        f"{format_bytes(needs.weights)}: {formats}" if formats else format_bytes(needs.weights)
    )
    description = (
        f"{spec.family}, {decoder.num_parameters / 1e6:,.0f}M parameters ({weights}) "
        f"on {device.name}, {str(dtype).removeprefix('torch.')}, {kernels.name} kernels; {plan.describe()}"
    )
    if slow := _slow_head_sizes(decoder):
        description += (
            f"; attention by the reference kernels, slowly: the {kernels.name} kernels have none for "
            f"heads of {', '.join(map(str, slow))}"
        )
    if spec.cache.scales:
        use = "with" if cache_dtype == torch.float8_e4m3fn else "without"
        description += f"; {use} the checkpoint's scales for FP8 keys and values"
    if draft is not None:
        description += f"; {draft.description}"
    depth = 2 if device.is_gpu and draft is None else 1
    return Worker(runner, plan, depth, description)


def _slot_memory(config: EngineConfig, device: Device) -> int:
    """Bytes that are kept for adapters in slots: on a GPU, where they lie in memory of their own."""
    if not (device.is_gpu and config.max_loras and config.lora_slot_memory):
        return 0
    return parse_bytes("lora_slot_memory", config.lora_slot_memory)


def _slow_head_sizes(decoder: Decoder) -> list[int]:
    """Of heads that the kernels compute as the reference does."""
    attention = (one for one in decoder.spec.mixers if isinstance(one, AttentionSpec))
    slow = (one.heads.head_dim for one in attention if not decoder.kernels.captures(one))
    return list(dict.fromkeys(slow))


def _make_graphs(
    decoder: Decoder, config: EngineConfig, cache: KVCache, rows: RequestRows
) -> Graphs | None:
    kernels = decoder.kernels
    if config.cuda_graphs and RecordedSteps.fit(decoder):
        return RecordedSteps(decoder, cache.layers, rows)
    shapes = decoder.spec.head_shapes  # a graph has one list of attention's work
    has_lists = len(shapes) == 1 and bool(kernels.decode_lists(1, 1, 1, shapes[0]))
    experts = (layer.mlp for layer in decoder.spec.layers if isinstance(layer.mlp, MoeSpec))
    can_capture = all(map(kernels.captures, (*decoder.spec.mixers, *experts)))
    can_decode = has_lists and can_capture and kernels.sample_rows is not None
    device = device_of(decoder.device)
    if config.cuda_graphs and can_decode and (pool := device.graph_pool()) is not None:
        most_tokens = config.limits(on_gpu=device.is_gpu).graph_tokens
        graphs = DecodeGraphs(decoder, cache.layers, rows, most_tokens, pool)
        graphs.warm_up()
        return graphs
    return None

"""What one rank loads and how much memory it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from quire.backends.select import device_class, pick_device
from quire.config import EngineConfig, parse_bytes
from quire.errors import DeviceError
from quire.kernels.device import Device
from quire.load import Share
from quire.models.parameters import WeightSource
from quire.models.spec import ModelSpec
from quire.models.vocabulary_adapters import Segments
from quire.models.weight_plan import ModelFiles, WeightPlan
from quire.parallel.division import Division
from quire.parallel.files import divide_files
from quire.parallel.group import Group
from quire.parallel.kernels import DividedSource, parallel_kernels
from quire.runner.memory import CachePlan


class RankShare(Share):
    """A rank's part of every model it loads (a draft model is divided, too)."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def files(self, files: ModelFiles) -> ModelFiles:
        return divide_files(files, self._division(files.spec))

    def plan(self, plan: WeightPlan, whole: ModelSpec) -> WeightPlan:
        return replace(
            plan, kernels=parallel_kernels(plan.kernels, self._group, self._division(whole))
        )

    def source_of(self, whole: ModelSpec) -> Callable[[WeightSource], WeightSource]:
        return partial(DividedSource, division=self._division(whole))

    def segments_of(self, whole: ModelSpec) -> Segments | None:
        return self._division(whole).segments

    def agree(self, plan: CachePlan) -> CachePlan:
        """The cache that fits on every rank."""
        sizes = self._group.lowest((plan.num_blocks, plan.num_host_blocks, plan.max_model_len))
        return replace(plan, num_blocks=sizes[0], num_host_blocks=sizes[1], max_model_len=sizes[2])

    def _division(self, whole: ModelSpec) -> Division:
        return Division(whole, self._group.rank, self._group.size)


def rank_device(name: str, rank: int, size: int) -> tuple[Device, bool]:
    """Where a rank computes, and whether it shares a GPU with the others (as a test may want it
    to).
    """
    if ":" in name:
        return pick_device(name), True
    kind = device_class(name)
    if not kind.is_gpu:
        return pick_device(kind.kind), False
    num_gpus = kind.count()
    if num_gpus < size:
        raise DeviceError(
            f"tensor_parallel_size is {size}, but torch sees {num_gpus} GPUs here. Use fewer ranks, or --device cpu, "
            "where ranks share the cores."
        )
    return pick_device(f"{kind.kind}:{rank}"), False


def rank_config(config: EngineConfig, device: Device, is_shared: bool) -> EngineConfig:
    """The engine's options as one rank must see them: with its part of the memory."""
    size = config.tensor_parallel_size
    wanted = config.limits(on_gpu=device.is_gpu).kv_cache_memory
    if isinstance(wanted, float):
        wanted = wanted / size if is_shared or not device.is_gpu else wanted
    else:
        wanted = parse_bytes("kv_cache_memory", wanted) // size
    host = parse_bytes("host_cache_memory", config.host_cache_memory) // size
    return replace(config, device=str(device), kv_cache_memory=wanted, host_cache_memory=host)

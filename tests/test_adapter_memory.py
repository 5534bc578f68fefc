"""Adapters in slots take memory of a GPU: it is kept for those given at the start, and more adapters
than fit there are refused before a request has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from quire.assemble import assemble
from quire.config import EngineConfig, parse_bytes
from quire.errors import CapacityError, NoRoomNowError
from quire.frontend.adapter_names import slot_memory_of
from quire.frontend.adapters import AdapterRegistry, SlotMemory
from quire.kernels.reference import ReferenceKernels
from quire.models.adapters import Adapter
from quire.models.linear import AdapterPart
from quire.runner.adapters import AdapterSlots
from quire.server.adapters import slot_memory
from quire.server.config import ServerConfig
from tests.adapters import save_adapter
from tests.late_device import use_late_device
from tests.random_models import SPECS, random_decoder

NUM_SLOTS = 2


class Holder:
    """Adapters whose folders are called by their sizes, such as 40-b."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def read_adapter(self, folder: Path) -> Adapter:
        part = cast(AdapterPart, SimpleNamespace(nbytes=int(folder.name.split("-")[0])))
        return Adapter(folder.name, {"product": part}, rank=1)

    def load_adapter(self, folder: Path, adapter: Adapter | None = None) -> Adapter:
        adapter = self.read_adapter(folder) if adapter is None else adapter
        self.held.add(adapter.digest)
        return adapter

    def remove_adapter(self, digest: str) -> None:
        self.held.discard(digest)


def make_registry(
    folder: Path, in_use: set[str], names: Sequence[str]
) -> tuple[AdapterRegistry, Holder]:
    """With memory of 100 for two slots, and for 300 on the host."""
    holder = Holder()
    registry = AdapterRegistry(
        holder, 300, lambda: frozenset(in_use), slot_memory=SlotMemory(100, NUM_SLOTS)
    )
    for name in names:
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text("{}")
        (folder / name / "adapter_model.safetensors").write_text("")
    return registry, holder


def test_as_many_adapters_are_loaded_as_fit_whichever_are_in_slots(tmp_path: Path) -> None:
    names = ["40-a", "30-b", "50-c", "50-d", "51-e"]
    registry, holder = make_registry(tmp_path, set(), names)
    for name in names[:4]:
        registry.add(name, tmp_path / name)
    assert holder.held == set(names[:4])  # 170 in all, but no two are more than 100
    registry.add("51-e", tmp_path / "51-e")
    assert holder.held == {"51-e"}  # beside it 49 would fit: the others leave by age
    assert registry.digest_of("40-a") == "40-a"  # and are read again
    assert holder.held == {"51-e", "40-a"}


def test_what_never_fits_is_refused_and_what_does_not_fit_now_may_come_again(
    tmp_path: Path,
) -> None:
    in_use = {"60-a"}
    registry, holder = make_registry(tmp_path, in_use, ["60-a", "101-b", "50-c"])
    registry.add("60-a", tmp_path / "60-a")
    with pytest.raises(CapacityError, match=r"101-b takes .* the GPU's memory .*lora_slot_memory"):
        registry.add("101-b", tmp_path / "101-b")
    with pytest.raises(NoRoomNowError, match=r"50-c takes .* the GPU's memory .*try again later"):
        registry.add("50-c", tmp_path / "50-c")
    assert holder.held == {"60-a"}
    in_use.clear()
    registry.add("50-c", tmp_path / "50-c")
    assert holder.held == {"50-c"}


def test_files_given_at_the_start_are_counted(tmp_path: Path) -> None:
    tensors = [{"a": torch.zeros(size)} for size in (100, 900, 300)]
    paths = [save_adapter(tmp_path / str(i), one) for i, one in enumerate(tensors)]
    sizes = [(path / "adapter_model.safetensors").stat().st_size for path in paths]
    found = slot_memory_of([*map(str, paths), str(tmp_path / "none")], NUM_SLOTS)
    assert found == sizes[1] + sizes[2] >= 4 * 1200
    given = tuple((f"a{i}", str(path)) for i, path in enumerate(paths))

    def of_server(**engine: object) -> dict[str, int]:
        return slot_memory(ServerConfig(model="model", engine=engine, adapters=given))

    assert of_server(max_loras=NUM_SLOTS) == {"lora_slot_memory": found}
    assert of_server() == {"lora_slot_memory": sum(sizes)}
    assert of_server(max_loras=0) == of_server(lora_slot_memory="1MiB") == {}


def test_a_gpu_has_memory_for_slots_beside_its_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_late_device(monkeypatch)
    spec = SPECS["llama"]
    decoder = random_decoder(spec, ReferenceKernels(), torch.float32)

    def engine_with(**options: object) -> tuple[int, AdapterSlots | None, str]:
        config = EngineConfig(
            device="cpu", max_num_seqs=4, max_batched_tokens=64, cuda_graphs=False, **options
        )
        engine = assemble(decoder, config, name="test", eos_token_ids=(1,))
        return engine.plan.nbytes, engine.runner.adapters, engine.description

    cache, slots, words = engine_with(kv_cache_memory=1.0, max_model_len=2**11)
    assert slots is not None
    assert slots.room is not None
    assert "adapters" not in words
    kept = parse_bytes("", "253MiB")
    less, other, words = engine_with(
        kv_cache_memory=1.0, max_model_len=2**11, lora_slot_memory="253MiB"
    )
    assert other is not None
    assert other.room is not None
    assert less < cache
    assert kept <= other.room < slots.room + kept
    assert "adapters 253" in words
    assert engine_with(max_loras=0, lora_slot_memory="253MiB")[:2] == (
        engine_with(max_loras=0)[0],
        None,
    )

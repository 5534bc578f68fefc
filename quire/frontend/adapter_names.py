"""How callers name adapters; for processes that compute nothing, too."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.checkpoints.files import is_gguf
from quire.errors import InvalidRequestError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"[\w][\w.:@+-]{0,199}")


@dataclass(frozen=True)
class LoRARequest:
    """Which adapter a request has: a name, and the folder that PEFT wrote it to, or a GGUF file. `lora_int_id` is
    vLLM's number for it; Quire knows adapters by their content and needs none.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


LoraChoice = LoRARequest | str | None
"""An adapter for a request: by name if it was loaded before; None: the model itself."""


def as_lora_requests(choice: LoraChoice | Sequence[LoraChoice], count: int) -> Sequence[LoraChoice]:
    """One for each prompt."""
    if not isinstance(choice, list | tuple):
        return [choice] * count  # type: ignore[list-item]
    if len(choice) != count:
        raise InvalidRequestError(
            "lora_request",
            f"has {len(choice)} entries for {count} prompts: give one, or one for each",
        )
    return choice


def check_name(name: object) -> str:
    """Names are plain: they can't lead out of a folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        shown = name[:64] if isinstance(name, str) else name
        raise InvalidRequestError(
            "lora_name", f"must be letters, digits and . _ - : @ + (at most 200), not {shown!r}"
        )
    return name


def is_adapter(path: Path) -> bool:
    """Whether something lies there that may be one: a folder of PEFT's, or a GGUF file."""
    return os.path.isfile(path if is_gguf(path) else path / CONFIG_FILE)


def slot_memory_of(paths: Iterable[str], num_slots: int) -> int:
    """Bytes of those that may be in slots at once, by the sizes of their files: what is float32 there
    takes half of that in most models. Of files that are missing it knows nothing.
    """
    sizes = []
    for path in map(Path, paths):
        with suppress(OSError):
            sizes.append(os.stat(path if is_gguf(path) else path / WEIGHTS_FILE).st_size)
    return sum(heapq.nlargest(num_slots, sizes))


def parse_lora(given: str, option: str = "--lora") -> LoRARequest:
    """`name=path`, as a command takes it; the folder or file must be there."""
    name, separator, path = given.partition("=")
    if not separator or not path:
        raise InvalidRequestError(option, f"must be name=path, not {given[:100]!r}")
    folder = Path(path).expanduser().absolute()
    if not is_adapter(folder):
        raise InvalidRequestError(
            option, f"{path[:200]} is no adapter: it has no {CONFIG_FILE}, and is no .gguf file"
        )
    return LoRARequest(check_name(name), lora_path=str(folder))

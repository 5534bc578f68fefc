"""PEFT's folders: `adapter_config.json` and `adapter_model.safetensors`.

What the settings say is checked in full here; whether the tensors fit a model, where it is known
(`quire.models.adapters`). Settings that change what an adapter computes and that Quire lacks are
refused by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.fields import Fields
from quire.checkpoints.files import open_checked, quote, read_json, safe_member
from quire.checkpoints.safetensors_checkpoint import open_shards
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.field_checks import as_float
from quire.kernels.low_rank import MAX_RANK

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
_MAX_CONFIG_BYTES = 2**20
_MAX_PATTERNS = 4096
_MAX_REPEATING = 64
"""Of these, regular expressions that repeat something: each is tried with every module's name."""
_HASHED_AT_ONCE = 2**20

_REFUSED: Mapping[str, tuple[object, ...]] = {
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "megatron_config": (None,),
    "ensure_weight_tying": (None, False),
}
"""Settings that Quire lacks, and the values with which they change nothing."""
_KNOWN = frozenset(
    {
        *("peft_type", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern"),
        *("use_rslora", "use_dora", "base_model_name_or_path", "init_lora_weights"),
        # where it was put (fan_in_fan_out: on weights that lie the other way round) and how it was
        # trained: the tensors say the rest
        "fan_in_fan_out",
        *(
            "target_modules",
            "target_parameters",
            "exclude_modules",
            "layers_to_transform",
            "layers_pattern",
        ),
        *("auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout"),
        *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("qalora_group_size", "runtime_config"),
        *("modules_to_save", "trainable_token_indices"),
    }
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to initialise that also change the base model's weights."""
_PATTERN = re.compile(r"[\w.\\|()\[\]^$*+?-]{1,300}")
_QUANTIFIERS = re.compile(r"[*+?]")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What `adapter_config.json` says of ranks and scales."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    """rsLoRA: alpha is divided by the root of the rank."""
    is_dora: bool
    base_model: str
    peft_version: tuple[int, int] | None = None
    """Versions lay A and B of stacked experts out differently."""
    modules_to_save: tuple[str, ...] = ()
    """How the names end of modules of which the adapter has trained copies."""
    trained_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tokens whose rows were trained, by how the module's name ends; "": of the embedding."""

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What the product with A is multiplied by."""
        rank = self.rank_of(module)
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An opened adapter: checked, its numbers still on disk."""

    settings: AdapterSettings
    checkpoint: Checkpoint
    digest: str
    """Of its content: of the numbers, and of the settings that change what it computes."""
    num_bytes: int
    config: Path
    weights: Path


def open_adapter(folder: Path) -> AdapterFiles:
    """Opens a folder that PEFT wrote; ModelFormatError or UnsupportedModelError says what is wrong
    with it.
    """
    try:
        is_folder = folder.is_dir()
    except OSError:  # a name that is too long, a folder that may not be looked into
        is_folder = False
    if not is_folder:
        raise ModelFormatError(
            f"{folder}: there is no such folder; an adapter is one with {CONFIG_FILE}"
        )
    if (folder / PICKLED_FILE).exists() and not (folder / WEIGHTS_FILE).exists():
        raise UnsupportedModelError(
            f"{folder}: {PICKLED_FILE} is a pickle, which can run code: save the adapter again as {WEIGHTS_FILE}"
        )
    config, weights = safe_member(folder, CONFIG_FILE), safe_member(folder, WEIGHTS_FILE)
    settings = read_adapter_settings(read_json(config, _MAX_CONFIG_BYTES), str(config))
    checkpoint = open_shards([weights], is_quantized=False)
    if not checkpoint.tensors:
        raise ModelFormatError(f"{weights}: the adapter has no tensors")
    digest, size = _digest(settings, weights, checkpoint), weights.stat().st_size
    return AdapterFiles(settings, checkpoint, digest, size, config, weights)


def read_adapter_settings(values: Mapping[str, Any], file: str) -> AdapterSettings:
    fields = Fields(values, file)
    kind = fields.raw("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"{file}: peft_type is {quote(kind)}; Quire runs LORA adapters")
    task = fields.raw("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise UnsupportedModelError(
            f"{file}: task_type is {quote(task)}; Quire runs adapters for CAUSAL_LM"
        )
    for name, neutral in _REFUSED.items():
        value = fields.raw(name)
        if not any(type(value) is type(one) and value == one for one in neutral):
            raise UnsupportedModelError(
                f"{file}: {name} is {quote(value)}, which Quire does not compute; train or save the adapter without it"
            )
    for name in fields.names():
        value = fields.raw(name)
        if name not in _KNOWN and name not in _REFUSED and value not in (None, False, "", [], {}):
            raise UnsupportedModelError(
                f"{file}: {quote(name)} is {quote(value)}, which Quire does not know: save the adapter without it"
            )
    start = fields.raw("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise UnsupportedModelError(
            f"{file}: init_lora_weights is {quote(start)}, with which the base model's weights are changed, too: "
            "convert the adapter to a plain LoRA with PEFT"
        )
    return AdapterSettings(
        rank=fields.integer("r", high=MAX_RANK),
        alpha=fields.number("lora_alpha"),
        rank_pattern=_patterns(fields, "rank_pattern", 1, MAX_RANK, whole=True),
        alpha_pattern=_patterns(fields, "alpha_pattern", 0, math.inf),
        rank_stabilized=fields.boolean("use_rslora", False),
        is_dora=fields.boolean("use_dora", False),
        base_model=str(fields.raw("base_model_name_or_path") or ""),
        peft_version=_version(fields.raw("peft_version")),
        modules_to_save=_names(fields, "modules_to_save"),
        trained_tokens=_trained_tokens(fields, "trainable_token_indices"),
    )


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    found = fields.raw(name) or []
    is_list = isinstance(found, list) and len(found) <= _MAX_PATTERNS
    if not is_list or not all(isinstance(one, str) and one for one in found):
        raise fields.error(name, f"a list of at most {_MAX_PATTERNS} modules' names", found)
    return tuple(dict.fromkeys(found))


def _trained_tokens(fields: Fields, name: str) -> dict[str, tuple[int, ...]]:
    found = fields.raw(name) or {}
    by_module = {"": found} if isinstance(found, list) else found
    if not isinstance(by_module, dict) or len(by_module) > _MAX_PATTERNS:
        raise fields.error(name, "a list of token ids, or such lists by modules' names", found)
    for tokens in by_module.values():
        is_list = isinstance(tokens, list) and all(type(one) is int for one in tokens)
        if not is_list or not tokens or min(tokens) < 0 or len(set(tokens)) < len(tokens):
            raise fields.error(name, "lists of token ids, each from 0 on and once", tokens)
    return {module: tuple(tokens) for module, tokens in by_module.items()}


def _version(value: object) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,6})\.(\d{1,6})", value) if isinstance(value, str) else None
    return None if match is None else (int(match[1]), int(match[2]))


def _patterns(
    fields: Fields, name: str, low: float, high: float, whole: bool = False
) -> dict[str, Any]:
    """Numbers by modules' names. Names may be regular expressions, of which only simple ones are
    taken: others can take hours.
    """
    found = fields.raw(name) or {}
    if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
        raise fields.error(name, f"at most {_MAX_PATTERNS} numbers by modules' names", found)
    for key, value in found.items():
        is_number = isinstance(value, int if whole else (int, float)) and type(value) is not bool
        if not is_number or not low <= value <= high or not math.isfinite(as_float(value)):
            raise fields.error(f"{name}[{quote(key)}]", f"a number from {low:g} to {high:g}", value)
        if not _is_simple(key):
            raise fields.error(name, "names of modules, or simple patterns of them", key)
    repeating = sum(_QUANTIFIERS.search(key) is not None for key in found)
    if repeating > _MAX_REPEATING:
        raise fields.error(
            name,
            f"names of modules, and at most {_MAX_REPEATING} patterns with * + or ?",
            repeating,
        )
    return found


def _is_simple(pattern: str) -> bool:
    """Whether a regular expression is one whose search can't take long: few repetitions, none of a
    group.
    """
    if not _PATTERN.fullmatch(pattern) or len(_QUANTIFIERS.findall(pattern)) > 3:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return re.search(r"\)[*+?]", pattern) is None


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The number of the first pattern that the module's name ends with, as PEFT finds it."""
    for pattern, value in patterns.items():
        if _compiled(pattern).fullmatch(module):
            return value
    return default


@lru_cache(maxsize=2 * _MAX_PATTERNS)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Each is tried with every module: `re` remembers a few hundred only."""
    return re.compile(rf"(.*\.)?({pattern})")


def _digest(settings: AdapterSettings, weights: Path, checkpoint: Checkpoint) -> str:
    """sha256 of the file of weights, and of what the settings make of it."""
    content = hashlib.sha256()
    described = [
        settings.rank,
        settings.alpha,
        sorted(settings.rank_pattern.items()),
        sorted(settings.alpha_pattern.items()),
        settings.rank_stabilized,
        settings.is_dora,
        settings.peft_version,
    ]
    if settings.modules_to_save or settings.trained_tokens:
        described += [settings.modules_to_save, sorted(settings.trained_tokens.items())]
    content.update(json.dumps(described).encode())
    with open_checked(weights, checkpoint.stamp_of(weights)) as file:
        while data := file.read(_HASHED_AT_ONCE):
            content.update(data)
    return content.hexdigest()

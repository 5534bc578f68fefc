"""Short names for the families' common checkpoints on the Hugging Face hub: what `quire models
--available` lists and `quire pull` takes.

Sizes and licences are for orientation and were not compared with the models' cards; these are what
counts. Whoever downloads a model accepts its licence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BYTES_PER_WEIGHT = {"none": 2.0, "int8": 1.0625, "int4": 0.5625}
"""In the order in which one would try them: int8 has a scale for 32 weights, and so has int4."""
_BESIDE_WEIGHTS = 1.1
"""Activations, buffers and a small cache, beside the weights."""

Fit = Literal["fits", "int8", "int4", "no"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint."""

    name: str
    repo: str
    billions: float
    """Parameters, of all experts."""
    licence: str
    format: str = "bfloat16"
    is_gated: bool = False
    """Whether the hub wants a token of somebody who has accepted the licence."""

    @property
    def num_bytes(self) -> int:
        """To download, about."""
        per_weight = 0.64 if self.format == "mxfp4" else 2.0
        return int(self.billions * 1e9 * per_weight)

    def fit(self, memory: int) -> Fit:
        """How it runs in so many bytes: as it is, quantised while it is loaded, or not at all."""
        if self.num_bytes * _BESIDE_WEIGHTS <= memory:
            return "fits"
        if self.format == "bfloat16":
            for quantization in ("int8", "int4"):
                needed = self.billions * 1e9 * BYTES_PER_WEIGHT[quantization]
                if needed * _BESIDE_WEIGHTS <= memory:
                    return quantization
        return "no"


_APACHE = "Apache-2.0"
_LISTED = [
    Entry("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", 0.135, _APACHE),
    Entry("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", 0.362, _APACHE),
    Entry("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.71, _APACHE),
    Entry("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", 3.08, _APACHE),
    Entry("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", 0.494, _APACHE),
    Entry("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", 1.54, _APACHE),
    Entry("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", 7.62, _APACHE),
    Entry("qwen3-0.6b", "Qwen/Qwen3-0.6B", 0.752, _APACHE),
    Entry("qwen3-1.7b", "Qwen/Qwen3-1.7B", 2.03, _APACHE),
    Entry("qwen3-4b", "Qwen/Qwen3-4B", 4.02, _APACHE),
    Entry("qwen3-8b", "Qwen/Qwen3-8B", 8.19, _APACHE),
    Entry("qwen3-14b", "Qwen/Qwen3-14B", 14.8, _APACHE),
    Entry("qwen3-32b", "Qwen/Qwen3-32B", 32.8, _APACHE),
    Entry("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 30.5, _APACHE),
    Entry("llama3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", 1.24, "Llama 3.2", is_gated=True),
    Entry("llama3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", 3.21, "Llama 3.2", is_gated=True),
    Entry("llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", 8.03, "Llama 3.1", is_gated=True),
    Entry("llama3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 70.6, "Llama 3.3", is_gated=True),
    Entry("gemma2-2b", "google/gemma-2-2b-it", 2.61, "Gemma", is_gated=True),
    Entry("gemma2-9b", "google/gemma-2-9b-it", 9.24, "Gemma", is_gated=True),
    Entry("gemma3-1b", "google/gemma-3-1b-it", 1.0, "Gemma", is_gated=True),
    Entry("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", 7.25, _APACHE),
    Entry("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1", 46.7, _APACHE),
    Entry("phi4-mini", "microsoft/Phi-4-mini-instruct", 3.84, "MIT"),
    Entry("phi4", "microsoft/phi-4", 14.7, "MIT"),
    Entry("olmo2-1b", "allenai/OLMo-2-0425-1B-Instruct", 1.48, _APACHE),
    Entry("olmo2-7b", "allenai/OLMo-2-1124-7B-Instruct", 7.3, _APACHE),
    Entry("granite3.3-2b", "ibm-granite/granite-3.3-2b-instruct", 2.53, _APACHE),
    Entry("granite3.3-8b", "ibm-granite/granite-3.3-8b-instruct", 8.17, _APACHE),
    Entry("gpt-oss-20b", "openai/gpt-oss-20b", 21.5, _APACHE, "mxfp4"),
    Entry("gpt-oss-120b", "openai/gpt-oss-120b", 117.0, _APACHE, "mxfp4"),
    Entry("glm4-9b", "zai-org/GLM-4-9B-0414", 9.4, "MIT"),
    Entry("lfm2-1.2b", "LiquidAI/LFM2-1.2B", 1.17, "LFM Open 1.0"),
    Entry("starcoder2-3b", "bigcode/starcoder2-3b", 3.03, "BigCode OpenRAIL-M"),
    Entry(
        "command-r7b", "CohereLabs/c4ai-command-r7b-12-2024", 8.03, "CC-BY-NC-4.0", is_gated=True
    ),
]
CATALOGUE = {entry.name: entry for entry in _LISTED}

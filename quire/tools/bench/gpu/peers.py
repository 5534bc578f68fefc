"""What other engines reached on an H200 with the same workloads, and what Quire aims at there; in
bfloat16, unless a format follows the model's name.

Measured 2026-11-15 (gpt-oss: 2026-11-18) with random weights, the best of two runs; the exact one
is vLLM in its batch-invariant mode.
"""

from __future__ import annotations

from dataclasses import dataclass

VLLM = "vLLM 0.26"
VLLM_EXACT = "vLLM, exact"
NANO_VLLM = "nano-vllm"
GOAL = "goal"

Figures = dict[str, float]
"""By measure: tokens/s of `throughput` and `prefill`, ms per step of `decode N`, seconds of
`startup`.
"""


def _figures(
    throughput: float, decode: tuple[float, ...], prefill: float | None, startup: float | None
) -> Figures:
    figures = {"throughput": throughput}
    figures |= {
        f"decode {batch}": ms for batch, ms in zip((1, 8, 32, 128, 256), decode, strict=True)
    }
    if prefill is not None:
        figures["prefill"] = prefill
    if startup is not None:
        figures["startup"] = startup
    return figures


PEERS: dict[str, dict[str, Figures]] = {
    "qwen3-0.6b": {
        GOAL: {
            "throughput": 29_000,
            "decode 1": 0.50,
            "decode 8": 0.60,
            "decode 32": 0.90,
            "decode 256": 3.6,
            "prefill": 324_000,
            "startup": 5,
        },
        VLLM: _figures(21_778, (2.19, 2.55, 2.94, 4.69, 7.91), 324_000, 84),
        VLLM_EXACT: _figures(18_295, (3.77, 3.71, 3.77, 5.10, 7.77), 278_000, 129),
        NANO_VLLM: _figures(18_435, (2.26, 2.31, 2.75, 4.47, 6.57), None, 25),
    },
    "qwen3-8b": {
        GOAL: {
            "throughput": 11_000,
            "decode 1": 3.9,
            "decode 128": 6.0,
            "decode 256": 8.8,
            "prefill": 45_000,
        },
        VLLM: _figures(9367, (5.11, 5.57, 5.66, 7.55, 11.5), 42_600, 66),
    },
    "llama-3.2-1b": {
        GOAL: {"decode 1": 0.68, "decode 32": 0.85},
        VLLM: _figures(22_694, (2.04, 2.28, 2.80, 4.20, 7.19), 248_000, 71),
    },
    "qwen3-30b-a3b": {
        GOAL: {"throughput": 6900, "decode 1": 2.0, "decode 256": 18},
        VLLM: _figures(5423, (4.10, 8.86, 15.3, 18.5, 21.2), 66_100, 111),
    },
    "gpt-oss-20b MXFP4": {
        GOAL: _figures(13_500, (1.7, 2.8, 4.3, 6.0, 8.0), 90_000, None),
        # prefill: its warm-up in it
        VLLM: _figures(12_080, (2.98, 3.36, 7.12, 8.01, 9.24), 25_753, 148),
    },
    "qwen3-8b FP8": {
        GOAL: {"throughput": 13_000, "decode 1": 2.3, "decode 32": 3.0},
        VLLM: _figures(11_362, (3.66, 3.85, 4.81, 6.26, 9.53), 65_400, None),
    },
    "qwen3-8b INT4_G128": {
        GOAL: {
            "throughput": 10_500,
            "decode 1": 1.9,
            "decode 32": 2.9,
            "decode 128": 6.0,
            "decode 256": 9.5,
        }
        | {"prefill": 50_000},
        VLLM: _figures(9363, (4.42, 4.57, 4.93, 7.82, 11.9), 47_200, None),
    },
    "glm-4.7-flash": {
        GOAL: {"decode 1": 2.8, "decode 32": 13, "decode 256": 16, "prefill": 60_000},
        # with a random choice bias its router sent all rows to the same experts, so that batches of
        # 8 and more read fewer of them than they should
        VLLM: _figures(10_070, (5.17, 6.15, 6.62, 7.90, 10.2), 55_619, 139),
    },
    "qwen3.5-35b-a3b": {  # vLLM with its Triton kernels; it has no exact mode for such layers
        GOAL: _figures(6800, (2.4, 5.5, 12.5, 19, 22), 65_000, None),
        VLLM: _figures(5472, (4.16, 7.53, 18.4, 22.0, 26.0), 58_168, None),
    },
    "gemma-3-4b": {GOAL: {"decode 1": 2.2, "decode 32": 2.5, "decode 256": 5.0, "prefill": 95_000}},
}


@dataclass(frozen=True, slots=True)
class PeerFigure:
    """One other figure beside ours."""

    name: str
    value: float
    times_better: float
    """How many times better ours is; below 1 it is worse."""


def is_rate(measure: str) -> bool:
    """Whether more is better."""
    return measure in ("throughput", "prefill")


def times_better(measure: str, ours: float, other: float) -> float:
    return ours / other if is_rate(measure) else other / ours


def compare(shape: str, measure: str, ours: float) -> list[PeerFigure]:
    """Our figure next to the goal and every engine that was measured."""
    return [
        PeerFigure(name, figures[measure], times_better(measure, ours, figures[measure]))
        for name, figures in PEERS.get(shape, {}).items()
        if measure in figures
    ]


LONG_DECODES = {
    (1, 2000): 5.28,
    (1, 8000): 5.44,
    (1, 32_000): 6.36,
    (1, 64_000): 7.35,
    (4, 8000): 6.26,
    (16, 2000): 6.56,
    (16, 8000): 9.33,
    (16, 32_000): 22.2,
    (32, 8000): 13.0,
    (64, 4000): 12.6,
    (64, 8000): 21.5,
}
"""vLLM on Qwen3-8B, ms per step, by requests and context."""
LONG_PROMPTS = {8192: 38_766, 32_768: 26_584}
"""Likewise, prompt tokens per second of four prompts of this length."""

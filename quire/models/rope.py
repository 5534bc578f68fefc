"""The table of cosines and sines a model's rotary embedding uses, computed once."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.spec import QueryScale, RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int, num_positions: int = 2**31) -> Tensor:
    """The angle per position of each pair of rotated dimensions, stretched as the spec says.

    In float32 on purpose, as in training: at long positions a more precise table would not fit the
    weights.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    if rope.kind == "proportional":
        turning = torch.arange(len(frequencies)) < rope.num_turning
        return frequencies.where(turning, 0.0) / rope.factor
    if rope.kind == "factors":
        is_short = rope.short_factors and num_positions <= rope.original_max_position
        return frequencies / torch.tensor(rope.short_factors if is_short else rope.freq_factors)
    return frequencies


def cos_sin_table(rope: RopeSpec, head_dim: int, num_positions: int) -> Tensor:
    """float32 [num_positions, head_dim]: cosines in the first half, sines in the second. Dimensions
    that are not rotated, the last ones of each half, have 1 and 0.
    """
    rotated = rope.rotated or head_dim
    frequencies = inverse_frequencies(rope, rotated, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    others = (0, (head_dim - rotated) // 2)
    cos, sin = (side * rope.attention_factor for side in (angles.cos(), angles.sin()))
    sin = -sin if rope.backwards else sin
    return torch.cat((F.pad(cos, others, value=1.0), F.pad(sin, others)), dim=-1)


def query_factors(scale: QueryScale, num_positions: int) -> Tensor:
    """float32 [num_positions]: what queries are multiplied by."""
    positions = torch.arange(num_positions, dtype=torch.float32) + scale.offset
    return 1 + scale.strength * torch.log1p((positions / scale.interval).floor())


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Long wavelengths are stretched fully, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    rotations = rope.original_max_position / wavelengths
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = blend.clamp(0.0, 1.0)
    return frequencies * keep + frequencies / rope.factor * (1 - keep)


def _yarn(frequencies: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Dimensions that turn often over the original context are kept, slow ones stretched, a ramp
    between.
    """

    def dimension(rotations: float) -> float:
        wavelength = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((steps - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return frequencies / rope.factor * stretch + frequencies * (1 - stretch)

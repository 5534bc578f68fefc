"""The C++ functions as Python calls them: names and types of their arguments, in the order of the
C++ structs.

These have no bodies: they are declarations, from which `arguments.py` makes the functions that are
called. When the library is loaded each is compared with what the library says of its struct
(`QUIRE_ARGUMENTS`), field by field. Type checkers know the declarations too, so a call that leaves
an argument out or confuses two does not pass `make check`.

A pointer is a Tensor, or None where it may be null; `Address` is one to memory that no tensor owns.
A Python int is an int64_t or an int, as the struct says.
"""

from __future__ import annotations

from typing import NewType

from torch import Tensor

from quire.kernels.ops import Activation

Address = NewType("Address", int)

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "INT8", "MXFP4")
"""Formats that matrix products take without expanding them. A format's number is its index: the
library's list (`QUIRE_FORMATS`) is compared with it.
"""

ACTIVATIONS = (
    Activation.SILU,
    Activation.GELU_TANH,
    Activation.CLAMPED_SWIGLU,
    Activation.RELU2,
    Activation.GELU,
    Activation.RELU,
)
"""An activation's number is its index, as in `QUIRE_ACTIVATIONS`."""


def quantized_part(*, packed: Tensor, columns: int, format: int) -> None:
    """What `parts` of `linear_quantized` points to: one for each part of the weight, one after the
    other.
    """


def replayed_call(*, function: Address, arguments: Address) -> None:
    """What `calls` of `replay` points to."""


def replay(*, calls: Address, count: int) -> None: ...


def pack(*, weight: Tensor, packed: Tensor, columns: int, depth: int, num_threads: int) -> None: ...


def unpack_rows(
    *,
    packed: Tensor,
    ids: Tensor,
    out: Tensor,
    rows: int,
    columns: int,
    depth: int,
    num_threads: int,
) -> None: ...


def linear(
    *, x: Tensor, x_stride: int, weight: Tensor, bias: Tensor | None, out: Tensor, out_stride: int, rows: int,
    columns: int, depth: int, num_threads: int,
) -> None: ...  # fmt: skip


def linear_heads(
    *, x: Tensor, x_stride: int, x_head_stride: int, weight: Tensor, out: Tensor, rows: int, heads: int, columns: int,
    depth: int, num_threads: int, use_amx: bool,
) -> None: ...  # fmt: skip


def linear_quantized(
    *, x: Tensor, x_stride: int, parts: Address, num_parts: int, bias: Tensor | None, out: Tensor, out_stride: int,
    rows: int, depth: int, num_threads: int, use_amx: bool,
) -> None: ...  # fmt: skip


def add_low_rank(
    *, x: Tensor, x_stride: int, out: Tensor, out_stride: int, slots: Tensor, table: Tensor, num_slots: int, rows: int,
    columns: int, depth: int, num_threads: int,
) -> None: ...  # fmt: skip


def packed_size(*, columns: int, depth: int, format: int, bytes: Address) -> None: ...


def pack_quantized(
    *, stored: Tensor, channel_scales: Tensor | None, packed: Tensor, columns: int, depth: int, format: int,
    num_threads: int,
) -> None: ...  # fmt: skip


def unpack_quantized(
    *,
    packed: Tensor,
    ids: Tensor,
    out: Tensor,
    rows: int,
    depth: int,
    format: int,
    num_threads: int,
) -> None: ...


def rms_norm(
    *, x: Tensor, stride: int, inner: int, weight: Tensor, out: Tensor, rows: int, size: int, eps: float,
    offset: float, num_threads: int,
) -> None: ...  # fmt: skip


def add_rms_norm(
    *, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, rows: int, size: int, eps: float,
    offset: float, num_threads: int,
) -> None: ...  # fmt: skip


def layer_norm(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    rows: int,
    size: int,
    eps: float,
    num_threads: int,
) -> None: ...


def scale_add(
    *,
    x: Tensor,
    other: Tensor | None,
    out: Tensor,
    rows: int,
    size: int,
    scale: float,
    num_threads: int,
) -> None: ...


def xielu(
    *, x: Tensor, stride: int, positive: Tensor, negative: Tensor, out: Tensor, rows: int, size: int,
    num_threads: int,
) -> None: ...  # fmt: skip


def scale_rows(
    *, x: Tensor, stride: int, factors: Tensor, which: Tensor | None, out: Tensor, rows: int, size: int,
    num_threads: int,
) -> None: ...  # fmt: skip


def multiply(
    *, x: Tensor, x_stride: int, other: Tensor, other_stride: int, out: Tensor, rows: int, size: int, num_threads: int,
) -> None: ...  # fmt: skip


def sigmoid_mul(
    *, gate: Tensor, gate_stride: int, gate_size: int, x: Tensor, x_stride: int, out: Tensor, rows: int, size: int,
    num_threads: int,
) -> None: ...  # fmt: skip


def soft_cap(
    *, x: Tensor, stride: int, rows: int, size: int, cap: float, num_threads: int
) -> None: ...


def clamp(
    *, x: Tensor, stride: int, rows: int, size: int, limit: float, num_threads: int
) -> None: ...


def rope(
    *, x: Tensor, stride: int, positions: Tensor, cos_sin: Tensor, out: Tensor, rows: int, heads: int, head_dim: int,
    num_threads: int,
) -> None: ...  # fmt: skip


def latent_heads(
    *, absorbed: Tensor, rotated: Tensor, rotated_stride: int, rotated_head_stride: int, latent: Tensor,
    latent_stride: int, weight: Tensor, positions: Tensor, cos_sin: Tensor | None, query: Tensor, key: Tensor,
    rows: int, heads: int, rank: int, rope_dim: int, eps: float, num_threads: int,
) -> None: ...  # fmt: skip


def activate(
    *,
    x: Tensor,
    stride: int,
    out: Tensor,
    rows: int,
    size: int,
    activation: int,
    gated: bool,
    num_threads: int,
) -> None: ...


def write_kv(
    *, keys: Tensor, keys_stride: int, values: Tensor, values_stride: int, key_cache: Tensor, value_cache: Tensor,
    key_scales: Tensor | None, value_scales: Tensor | None, key_scale: float, value_scale: float, slots: Tensor,
    rows: int, heads: int, block_size: int, head_dim: int, block_stride: int, scale_stride: int,
    keys_by_dimension: bool, num_threads: int,
) -> None: ...  # fmt: skip


def gather_inputs(
    *, rows: Tensor, positions: Tensor, token_ids: Tensor, tokens_stride: int, block_tables: Tensor, tables_stride: int,
    ids: Tensor, places: Tensor, slots: Tensor, count: int, block_size: int,
) -> None: ...  # fmt: skip


def attention(
    *, query: Tensor, query_stride: int, keys: Tensor, values: Tensor, key_scales: Tensor | None,
    value_scales: Tensor | None, query_start: Tensor, context_lens: Tensor, block_tables: Tensor, table_rows: Tensor,
    out: Tensor, num_sequences: int, max_blocks: int, num_heads: int, num_kv_heads: int, head_dim: int,
    value_dim: int, block_size: int, block_stride: int, scale_stride: int, window: int, chunk: int,
    keys_by_dimension: bool,
    sinks: Tensor | None, slopes: Tensor | None, scale: float, cap: float,
    value_scale: float, num_threads: int,
) -> None: ...  # fmt: skip


def convolve(
    *, x: Tensor, x_stride: int, weight: Tensor, bias: Tensor | None, out: Tensor, inputs: Tensor,
    tail_places: Tensor | None, query_start: Tensor, context_lens: Tensor, block_tables: Tensor, table_rows: Tensor,
    slots: Tensor, state_tables: Tensor | None, rows: int, num_sequences: int, max_blocks: int, num_tables: int,
    state_blocks: int, channels: int, taps: int, block_size: int, block_stride: int, silu: bool, num_threads: int,
) -> None: ...  # fmt: skip


def recur(
    *, mixed: Tensor, mixed_stride: int, gates: Tensor, gates_stride: int, decay_gates: Tensor | None,
    decay_gates_stride: int, log_rate: Tensor, time_bias: Tensor, skip: Tensor | None, out: Tensor, keys: Tensor,
    changes: Tensor, decays: Tensor, state_places: Tensor, query_start: Tensor, context_lens: Tensor,
    block_tables: Tensor, table_rows: Tensor, slots: Tensor, state_tables: Tensor | None, rows: int,
    num_sequences: int, max_blocks: int, num_tables: int, state_blocks: int, num_key_heads: int,
    num_value_heads: int, key_dim: int, value_dim: int, block_size: int, key_stride: int, change_stride: int,
    decay_stride: int, is_delta: bool, least_step: float, largest_step: float, beta_scale: float, num_threads: int,
) -> None: ...  # fmt: skip


def gated_norm(
    *, x: Tensor, x_stride: int, gate: Tensor, gate_stride: int, weight: Tensor | None, weight_size: int, out: Tensor,
    rows: int, size: int, group_size: int, has_norm: bool, gate_first: bool, sigmoid_only: bool, eps: float,
    num_threads: int,
) -> None: ...  # fmt: skip


def gumbel_argmax(
    *, logits: Tensor, stride: int, temperature: Tensor, keys: Tensor, out: Tensor, flags: Tensor, rows: int, size: int,
    num_threads: int,
) -> None: ...  # fmt: skip


def sample_rows(
    *, logits: Tensor, stride: int, row_index: Tensor, seeds: Tensor, temperatures: Tensor, positions: Tensor,
    token_ids: Tensor, tokens_stride: int, out: Tensor, flags: Tensor, rows: int, size: int, num_threads: int,
) -> None: ...  # fmt: skip


def top_values(
    *, x: Tensor, stride: int, out: Tensor, rows: int, size: int, k: int, num_threads: int
) -> None: ...


def keep_between(
    *, x: Tensor, stride: int, low: Tensor, high: Tensor, rows: int, size: int, num_threads: int
) -> None: ...

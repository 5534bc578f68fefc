"""Whether cuBLAS gives a row the same bits in batches of any size, and those of our own kernels: tested
with random rows for each shape of weights when they are loaded.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from quire.backends.triton import cublas
from quire.backends.triton import latent as latent_kernels
from quire.backends.triton.linear import SMALLEST_BATCH, VOCABULARY_SIZE, linear, room_for
from quire.kernels.weights import Weight

logger = logging.getLogger(__name__)

_CHECKED_ROWS = (
    *range(SMALLEST_BATCH, 64),
    *range(64, 328, 8),
    384,
    448,
    512,
    1000,
    1024,
    1500,
    2047,
    2048,
)
"""With memory for split sums cuBLAS changes bits at some sizes of up to 320 rows, which differ from
shape to shape.
"""
_LARGEST_HEAD = 512 * 512
"""Numbers of a head's matrix in a stack of them; stacks of larger ones are experts."""
_BESIDE_HEADS = 64
"""Numbers that lie after a head's: those that are rotated."""


def forbid_split_sums() -> None:
    """Leaves cuBLAS no memory for partial sums where torch calls it (in FP8), unless one set these."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def rows_are_exact(weight: Tensor, has_bias: bool) -> bool:
    """Tests whether cuBLAS gives random rows, in batches of several sizes, the bits of our own
    kernel.
    """
    generator = torch.Generator(device=weight.device).manual_seed(0)
    # the head scores few rows at a time
    most = max(_CHECKED_ROWS) if weight.shape[0] < VOCABULARY_SIZE else 256
    x = torch.randn(most, weight.shape[1], device=weight.device, generator=generator).to(
        weight.dtype
    )
    bias = torch.zeros_like(weight[:, 0]) if has_bias else None
    expected = linear(x, weight)
    # few models have biases
    batches = (x[:rows] for rows in _CHECKED_ROWS[:: 6 if has_bias else 1] if rows <= most)
    found = (cublas.product(some, weight, room_for(some, len(weight)), bias) for some in batches)
    try:
        return all(torch.equal(some, expected[: len(some)]) for some in found)
    except cublas.CublasError as error:
        logger.warning("weights %s: %s", tuple(weight.shape), error)
        return False


def heads_are_exact(weight: Weight) -> bool:
    """Tests whether cuBLAS gives rows of many heads the bits of our own kernel: of x and results side
    by side, and in longer rows.
    """
    heads, size, inner = weight.shape
    if size * inner > _LARGEST_HEAD:
        return False
    counts = [rows for rows in _CHECKED_ROWS if rows > latent_kernels.MOST_JOINED]
    generator = torch.Generator(device=weight.device).manual_seed(0)
    numbers = torch.randn(
        max(counts),
        heads,
        inner + _BESIDE_HEADS,
        dtype=weight.tensor.dtype,
        device=weight.device,
        generator=generator,
    )[..., :inner]
    try:
        for x, beside in ((numbers, _BESIDE_HEADS), (numbers.contiguous(), 0)):
            expected = latent_kernels.linear_heads(x, weight)
            for rows in counts:
                out = x.new_empty(rows, heads, size + beside)[..., :size]
                if not torch.equal(
                    cublas.heads_product(x[:rows], weight.tensor, out), expected[:rows]
                ):
                    kind = f"{tuple(weight.shape)} of {weight.tensor.dtype}"
                    logger.warning(
                        "cuBLAS has no exact product for heads %s: using our own kernel", kind
                    )
                    return False
    except cublas.CublasError as error:
        logger.warning("heads %s: %s", tuple(weight.shape), error)
        return False
    return True

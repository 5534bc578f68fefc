"""Attention on NVIDIA GPUs: which kernel takes which of a step's lists."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.backends.triton import attention as paged_attention
from quire.backends.triton import prompt_rules
from quire.backends.triton.attention_work import (
    SPLIT,
    attention_work,
    decode_lists,
    shorten_attention_work_,
)
from quire.backends.triton.latent_attention import latent_attention
from quire.backends.triton.latent_work import latent_decode_lists, latent_work
from quire.backends.triton.launch import HAS_GLUON, num_multiprocessors
from quire.backends.triton.small_batches import (
    are_exact,
    latent_prompts_are_exact,
    latents_are_exact,
    prompts_are_exact,
    single_latents_are_exact,
)
from quire.kernels.latent import LatentHeads, LatentSpec
from quire.kernels.ops import AttentionSpec, HeadShape, Int32Array, LayerCache, PagedBatch
from quire.kernels.reference import ReferenceKernels

if HAS_GLUON:
    from quire.backends.triton import (
        prompt_attention,
        prompt_latent,
        single_latent,
        small_batch_attention,
        small_batch_latent,
    )


class TritonAttention(ReferenceKernels):
    """A part of `TritonKernels`."""

    keys_at_once = SPLIT
    shorten_attention_work_ = staticmethod(shorten_attention_work_)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._num_multiprocessors = num_multiprocessors(self._device)

    def attention_work(
        self,
        query_lens: Int32Array,
        context_lens: Int32Array,
        table_rows: Int32Array,
        shape: HeadShape,
    ) -> dict[str, Int32Array]:
        of_all = query_lens, context_lens, table_rows, shape, self._num_multiprocessors
        if isinstance(shape, LatentHeads):
            return latent_work(
                *of_all,
                has_small=self._has_small_latent(shape),
                has_prompts=self._has_prompt_latent(shape),
                has_single=self._has_single_latent(shape),
            )
        return attention_work(*of_all)

    def decode_lists(
        self, fewest: int, most: int, max_context_len: int, shape: HeadShape
    ) -> dict[str, int]:
        if isinstance(shape, LatentHeads):
            has_small = self._has_small_latent(shape)
            self._has_prompt_latent(shape)  # tested here, before a graph is captured
            has_single = self._has_single_latent(shape)
            return latent_decode_lists(fewest, most, max_context_len, shape, has_small, has_single)
        self._has_prompts(self._dtype, shape.head_dim)  # tested here likewise
        return decode_lists(fewest, most, max_context_len, shape, self._num_multiprocessors)

    def _has_small_latent(self, heads: LatentHeads) -> bool:
        return (
            HAS_GLUON
            and small_batch_latent.takes(heads, self._dtype)
            and latents_are_exact(self._device, self._dtype)
        )

    def _has_single_latent(self, heads: LatentHeads) -> bool:
        return (
            HAS_GLUON
            and single_latent.takes(heads, self._dtype)
            and single_latents_are_exact(self._device, self._dtype)
        )

    def _has_prompt_latent(self, heads: LatentHeads) -> bool:
        return (
            HAS_GLUON
            and prompt_latent.takes(heads, self._dtype)
            and latent_prompts_are_exact(self._device)
        )

    def _has_prompts(self, dtype: torch.dtype, head_dim: int) -> bool:
        # by the same device whoever asks, "cuda", as "cuda:0" would be tested again
        return head_dim in prompt_rules.HEAD_DIMS and prompts_are_exact(
            self._device, dtype, head_dim
        )

    def attention(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        work = batch.work
        if work is None:  # outside an engine; inside, it was made before the step was sent off
            lists = self.attention_work(
                batch.query_start.diff().cpu().numpy(),
                batch.context_lens.cpu().numpy(),
                batch.table_rows.cpu().numpy(),
                spec.heads,
            )
            work = {
                name: torch.from_numpy(values).to(query.device) for name, values in lists.items()
            }
        if isinstance(spec, LatentSpec):
            ((name, listed),) = work.items()
            attend: Callable[..., Tensor] = latent_attention
            if name == "small":
                attend = small_batch_latent.small_batch_latent
            elif name == "single":
                attend = single_latent.single_latent
            elif name == "prompts" and prompt_latent.takes_cache(query, cache):
                attend = prompt_latent.prompt_latent
            return attend(
                query,
                cache,
                batch.block_tables,
                listed,
                spec,
                batch.max_context_len,
                self._num_multiprocessors,
            )
        out = torch.empty_like(query)
        for name, some in work.items():
            self._attend(name, some, query, out, cache, batch, spec, sinks, slopes)
        return out

    def _attend(
        self,
        name: str,
        work: Tensor,
        query: Tensor,
        out: Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
        sinks: Tensor | None,
        slopes: Tensor | None,
    ) -> None:
        """Attention of one of a step's lists, by the quickest kernel; only attention.py knows soft
        caps and slopes.
        """
        arguments = query, out, cache, batch.block_tables, work
        if name == "prefill":
            is_taken = prompt_rules.takes(query, cache, spec, slopes is not None)
            if is_taken and self._has_prompts(query.dtype, query.shape[2]):
                prompt_attention.prompt_attention(
                    *arguments, spec, self._num_multiprocessors, sinks
                )
            else:
                paged_attention.prefill_attention(*arguments, spec, sinks, slopes)
            return
        num_partials = 0 if batch.max_context_len <= SPLIT else work.shape[0] - 1
        is_plain = not spec.soft_cap and slopes is None
        has_small = is_plain and are_exact(query.device, query.dtype)
        if name == "small" and has_small and small_batch_attention.takes(query, cache):
            small_batch_attention.small_batch_attention(
                *arguments, num_partials, spec, self._num_multiprocessors, sinks
            )
        else:
            paged_attention.decode_attention(*arguments, num_partials, spec, sinks, slopes)

"""The simplest cache of keys and values: room for a fixed number of tokens per sequence, side by
side.

To the kernels it is a paged cache whose block is as long as a whole sequence: sequence i lives in
block i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import InvalidRequestError, UnsupportedModelError
from quire.kernels.layer_state import CacheMemory
from quire.kernels.noise import noise_keys
from quire.kernels.ops import AttentionSpec, HeadShape, Kernels, LayerCache, PagedBatch
from quire.models.decoder import Decoder
from quire.models.spec import Mixer


class ContiguousCache:
    """Keys and values of every layer, [num_sequences, kv_heads, capacity, head_dim] each."""

    def __init__(self, decoder: Decoder, num_sequences: int, capacity: int) -> None:
        spec, device = decoder.spec, decoder.device
        if len(spec.head_shapes) > 1 or any(layer.reads_layer is not None for layer in spec.layers):
            raise UnsupportedModelError(
                f"{spec.family}: a contiguous cache is for layers with the same heads"
            )
        self.heads = spec.head_shapes[0]
        shape = (num_sequences, capacity)
        self.layers = [room_of(one, shape, decoder.dtype, device) for one in spec.mixers]
        self.capacity = capacity
        self.max_length = min(capacity, decoder.max_position)
        """Of a sequence: what its room holds, and what the model has positions for."""
        self.lengths = [0] * num_sequences
        """How many tokens of each sequence are stored."""

    def length(self, sequence: int) -> int:
        """How many tokens of a sequence are stored."""
        if not 0 <= sequence < len(self.lengths):
            raise InvalidRequestError(
                "sequence", f"{sequence} is none of the {len(self.lengths)} in the cache"
            )
        return self.lengths[sequence]

    def check(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Refuses spans of (sequence, start, end) that are not wholly inside their sequence's room.
        The kernels write where they are told: past its end is the next sequence, and past the last
        one is somebody else's memory.
        """
        for sequence, start, end in spans:
            self.length(sequence)
            if not 0 <= start < end:
                raise InvalidRequestError(
                    "tokens", f"of sequence {sequence} from {start} to {end} are none at all"
                )
            if end > self.max_length:
                raise InvalidRequestError(
                    "tokens",
                    f"{end} of sequence {sequence} don't fit: the cache has room for {self.max_length}",
                )

    def keys(self, layer: int, sequence: int) -> Tensor:
        """What is stored of one sequence, [kv_heads, length, head_dim]; the rest of its room is
        empty.
        """
        return self.layers[layer].keys[sequence, :, : self.lengths[sequence]]

    def batch(self, decoder: Decoder, spans: Sequence[tuple[int, int, int]]) -> PagedBatch:
        """What the kernels need to compute these tokens."""
        self.check(spans)
        return contiguous_batch(spans, self.capacity, decoder.kernels, self.heads, decoder.device)

    @property
    def num_bytes(self) -> int:
        """What was allocated, used or not. Values may be a part of the keys."""
        sides = [side for layer in self.layers for side in (layer.values, layer.keys)]
        return sum({side.data_ptr(): side.nbytes for side in sides}.values())


def room_of(
    mixer: Mixer, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """What one layer's attention keeps of so many sequences of so many tokens."""
    if not isinstance(mixer, AttentionSpec):
        raise UnsupportedModelError("a contiguous cache is for layers of attention alone")
    num_sequences, capacity = shape
    parts = [
        torch.empty(
            (num_sequences, part.heads, capacity, *part.shape), dtype=part.dtype, device=device
        )
        for part in mixer.layer_state(dtype, dtype).per_token
    ]
    return mixer.layer_cache(CacheMemory(parts, 0))


def contiguous_batch(
    spans: Sequence[tuple[int, int, int]],
    capacity: int,
    kernels: Kernels,
    shape: HeadShape,
    device: torch.device,
) -> PagedBatch:
    """Tells the kernels which tokens are computed: of each span's sequence those from its start to
    its end.
    """
    query_start = [0]
    slots: list[int] = []
    for sequence, start, end in spans:
        slots += range(sequence * capacity + start, sequence * capacity + end)
        query_start.append(len(slots))
    lengths = [end for _, _, end in spans]
    # Shared out once for all layers: kernels that have to find out by themselves ask the device for
    # the lengths.
    counts, ends = np.diff(query_start).astype(np.int32), np.array(lengths, np.int32)
    work = kernels.attention_work(counts, ends, np.arange(len(spans), dtype=np.int32), shape)
    return PagedBatch(
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.tensor(
            [[sequence] for sequence, _, _ in spans], dtype=torch.int32, device=device
        ),
        table_rows=torch.arange(len(spans), dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        max_context_len=max(lengths),
        work={name: torch.from_numpy(values).to(device) for name, values in work.items()},
    )


def as_token_tensor(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Token ids for the decoder, which looks them up without asking whether it has them."""
    for token in tokens:
        if not 0 <= token < decoder.spec.vocab_size:
            raise InvalidRequestError(
                "tokens", f"{token} is outside the vocabulary of {decoder.spec.vocab_size}"
            )
    return torch.tensor(list(tokens), dtype=torch.int64, device=decoder.device)


@torch.inference_mode()
def next_tokens(
    decoder: Decoder,
    cache: ContiguousCache,
    new_tokens: Mapping[int, Sequence[int]],
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[int, int]:
    """Computes the new tokens of some sequences, stores their keys and values, and picks each one's
    next: the likeliest, or with a temperature one drawn by chance, the same as the engine draws
    with this seed.
    """
    if not new_tokens:
        return {}
    spans = [
        (i, cache.length(i), cache.length(i) + len(tokens)) for i, tokens in new_tokens.items()
    ]
    batch = cache.batch(decoder, spans)
    token_ids = as_token_tensor(
        decoder, [token for tokens in new_tokens.values() for token in tokens]
    )
    positions = torch.tensor(
        [place for _, start, end in spans for place in range(start, end)], device=decoder.device
    )
    hidden = decoder(token_ids, positions, (batch,), cache.layers)
    for sequence, _, end in spans:
        cache.lengths[sequence] = end
    last_rows = batch.query_start[1:].long() - 1
    logits = decoder.logits(hidden[last_rows]).float()
    ends = np.array([end for _, _, end in spans], np.int64)  # where the drawn tokens will stand
    chosen = choose(decoder, logits, ends, temperature, seed)
    return dict(zip(new_tokens, chosen, strict=True))


def choose(
    decoder: Decoder,
    logits: Tensor,
    positions: npt.NDArray[np.int64],
    temperature: float,
    seed: int,
) -> list[int]:
    """A token from each row of logits: the argmax of logits / temperature + noise, which is a draw
    from softmax(logits / temperature). The noise is a function of seed and position, so the same
    call draws the same.
    """
    if not temperature >= 0:
        raise InvalidRequestError("temperature", f"must be at least 0, not {temperature}")
    if temperature == 0:
        likeliest: list[int] = logits.argmax(-1).tolist()
        return likeliest
    keys = torch.from_numpy(noise_keys(np.full(len(positions), seed, np.uint64), positions)).to(
        logits.device
    )
    heat = torch.full((len(positions),), temperature, device=logits.device)
    drawn: list[int] = decoder.kernels.gumbel_argmax(logits, heat, keys)[0].tolist()
    return drawn

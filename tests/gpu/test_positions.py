"""A token's hidden state has the same bits however it was computed, wherever its blocks lie,
whoever is beside it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.ops import LayerCache
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.linear import Embedding
from tests.decoding import BLOCK_SIZE, make_caches, paged_batch
from tests.gpu.support import DEVICE, decoder_of, shape_of

pytestmark = pytest.mark.gpu

LENGTH = 3000
NUM_BLOCKS = 1 + -(-LENGTH // BLOCK_SIZE)


class Sequences:
    """One sequence, or several with caches in common, computed piece by piece."""

    def __init__(
        self, decoder: Decoder, tokens: Sequence[Tensor], placement: int | None = None
    ) -> None:
        """Blocks lie in order, or shuffled by a seed."""
        self._decoder = decoder
        self._tokens = tokens
        blocks = list(range(1, 1 + NUM_BLOCKS * len(tokens)))
        if placement is not None:
            random.Random(placement).shuffle(blocks)
        self._tables = [blocks[i * NUM_BLOCKS : (i + 1) * NUM_BLOCKS] for i in range(len(tokens))]
        self._caches: list[LayerCache] = make_caches(decoder, 1 + len(blocks))

    @torch.inference_mode()
    def compute(self, pieces: Sequence[tuple[int, int, int]]) -> Tensor:
        """Hidden states of (sequence, start, end) pieces, one after the other, as one step."""
        batch = paged_batch(
            [(start, end - start, self._tables[which]) for which, start, end in pieces],
            BLOCK_SIZE,
            DEVICE,
        )
        tokens = torch.cat([self._tokens[which][start:end] for which, start, end in pieces])
        positions = torch.cat([torch.arange(start, end) for _, start, end in pieces]).to(DEVICE)
        return self._decoder(tokens, positions, (batch,), self._caches)

    def in_chunks(self, size: int) -> Tensor:
        """The first sequence, `size` tokens at a time."""
        return torch.cat(
            [self.compute([(0, i, min(i + size, LENGTH))]) for i in range(0, LENGTH, size)]
        )


def random_tokens(decoder: Decoder, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(decoder.spec.vocab_size - 1, (LENGTH,), generator=generator).to(DEVICE)


@pytest.fixture(scope="module", params=["qwen3-0.6b", "llama-3.2-1b", "qwen3-30b-a3b"])
def small(request: pytest.FixtureRequest) -> Decoder:
    """Two layers: the second sees what the first made of every position. The embedding is not the
    head, so that nothing but a lookup sees its rows.
    """
    return decoder_of(replace(shape_of(request.param, num_layers=2), tie_embeddings=False))


@pytest.fixture(scope="module")
def whole(small: Decoder) -> Tensor:
    """The truth of the following: all positions in one piece."""
    hidden = Sequences(small, [random_tokens(small, 0)]).compute([(0, 0, LENGTH)])
    assert hidden.isfinite().all()
    assert len(hidden.unique(dim=0)) == LENGTH
    return hidden


@pytest.mark.parametrize("chunk", [1, 7, 16, 100, 512, 1025])
def test_chunks_of_any_size_equal_the_whole_at_every_position(
    small: Decoder, whole: Tensor, chunk: int
) -> None:
    """A chunk of one token is a decode step."""
    assert torch.equal(Sequences(small, [random_tokens(small, 0)]).in_chunks(chunk), whole)


@pytest.mark.parametrize("placement", [1, 2])
def test_blocks_may_lie_anywhere(small: Decoder, whole: Tensor, placement: int) -> None:
    tokens = [random_tokens(small, 0)]
    assert torch.equal(Sequences(small, tokens, placement).compute([(0, 0, LENGTH)]), whole)
    assert torch.equal(Sequences(small, tokens, placement).in_chunks(333), whole)


def test_neighbours_change_nothing(small: Decoder, whole: Tensor) -> None:
    """Others decode, compute chunks and are full of NaN, at other lengths and on both sides, in the
    same steps.
    """
    tokens = [random_tokens(small, seed) for seed in range(4)]
    original = small.embedding
    poison = small.spec.vocab_size - 1  # random_tokens never draws it
    poisoned = small.weights["embedding"].tensor.clone()
    poisoned[poison] = float("nan")
    small.embedding = Embedding(Weight.dense(poisoned))
    tokens[2][::3] = poison
    try:
        sequences = Sequences(small, tokens, placement=3)
        sequences.compute([(1, 0, 1000), (2, 0, 500), (3, 0, 1)])
        parts = []
        start = 0
        source = random.Random(4)
        while start < LENGTH:
            end = min(LENGTH, start + source.choice([1, 1, 5, 64, 200]))
            step = len(parts)
            others = [(1, 1000 + step, 1001 + step), (2, 500 + 2 * step, 502 + 2 * step)]
            ahead = [(3, 1 + 3 * step, 4 + 3 * step)]
            hidden = sequences.compute([*others, (0, start, end), *ahead])
            assert hidden[1:3].isnan().any()
            parts.append(hidden[3 : 3 + end - start])
            start = end
    finally:
        small.embedding = original
    assert torch.equal(torch.cat(parts), whole)


@torch.inference_mode()
def test_logits_do_not_depend_on_how_many_rows_are_scored(small: Decoder, whole: Tensor) -> None:
    for count in (1, 2, 3, 8, 16, 17, 64, 255, 256, 1000):
        several = small.logits(whole[-count:])
        assert torch.equal(several[-1:], small.logits(whole[-1:]))
        assert torch.equal(several[:1], small.logits(whole[-count : LENGTH - count + 1]))
    everything = small.logits(whole[:256])
    for position in range(256):
        assert torch.equal(small.logits(whole[position : position + 1])[0], everything[position])

"""Divides a step's latent attention into items of work: one list for decode steps and prompts.

An item is a tile of (query, head) rows of one sequence, which all look at the same latents, and some
of the splits of the keys that the tile sees. The list has the name and the fields of the list
`decode` (`attention_work.py`), so that graphs and steps that run ahead treat it alike; its eighth
field is the tile's first row.
"""

from __future__ import annotations

import numpy as np

from quire.backends.triton.attention_work import SPLIT, _best_run
from quire.kernels.ops import HeadShape, Int32Array

LATENT_ROWS = 64
"""(query, head) rows of a tile: those of the wide tensor core instruction (wgmma)."""
MAX_LATENT_PARTIALS = 512
"""The most splits of a step that wait in memory to be merged; 128 KiB each."""


def latent_work(
    query_lens: Int32Array,
    context_lens: Int32Array,
    table_rows: Int32Array,
    shape: HeadShape,
    num_multiprocessors: int,
) -> dict[str, Int32Array]:
    """The list of a step. A program has a multiprocessor to itself."""
    heads = shape.num_heads
    first_rows = np.cumsum(query_lens) - query_lens
    tiles = -(-query_lens * heads // LATENT_ROWS)
    owner = np.repeat(np.arange(len(tiles)), tiles)
    first = (np.arange(len(owner)) - (np.cumsum(tiles) - tiles)[owner]) * LATENT_ROWS
    last = (first + LATENT_ROWS - 1) // heads
    seen = context_lens[owner] - query_lens[owner] + np.minimum(last + 1, query_lens[owner])
    splits = -(-seen // SPLIT)
    run = _run(splits, num_multiprocessors)
    pieces = -(-splits // run)
    partials = np.where(pieces > 1, splits, 0)
    tile = np.repeat(np.arange(len(pieces)), pieces)
    first_split = (np.arange(len(tile)) - (np.cumsum(pieces) - pieces)[tile]) * run
    end_split = np.minimum(first_split + run, splits[tile])
    # long items first, so that those started last are short
    lengths = np.minimum(end_split * SPLIT, seen[tile]) - first_split * SPLIT
    order = np.argsort(-lengths, kind="stable")
    tile, first_split, end_split = tile[order], first_split[order], end_split[order]
    sequence = owner[tile]
    work = np.zeros((1 + len(tile), 8), dtype=np.int32)
    work[0, :2] = len(tile), int(partials.sum())
    fields = (
        (np.cumsum(partials) - partials)[tile],
        first_split,
        first_rows[sequence],
        query_lens[sequence],
        context_lens[sequence],
        table_rows[sequence],
        end_split,
        first[tile],
    )
    for number, values in enumerate(fields):
        work[1:, number] = values
    return {"decode": work}


def latent_decode_lists(most: int, max_context_len: int, shape: HeadShape) -> dict[str, int]:
    """The list of steps of up to `most` single queries, and the most items it has."""
    tiles = most * -(-shape.num_heads // LATENT_ROWS)
    splits = -(-max_context_len // SPLIT)
    return {"decode": min(tiles * splits, tiles + MAX_LATENT_PARTIALS)}


def _run(splits: Int32Array, num_multiprocessors: int) -> int:
    """How many splits of a tile an item has: as for other attention, but so that those that wait to
    be merged have room.
    """
    run = _best_run(splits, 1, num_multiprocessors)
    while splits[splits > run].sum() > MAX_LATENT_PARTIALS:
        run *= 2
    return run

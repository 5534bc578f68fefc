"""Which tensors of a checkpoint fill the parameters of mixers that are no plain attention."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from quire.kernels.latent import LatentSpec
from quire.kernels.recurrent import ConvolutionSpec, RecurrentSpec
from quire.models.pieces import LastRowsOrder, Piece, RowRuns


def latent_pieces(
    names: Mapping[str, str],
    mixer: LatentSpec,
    own: str,
    kind: str,
    path: str,
    present: Collection[str],
) -> Iterator[Piece]:
    """The tensors of latent attention; `own` and `kind` are its parameter's name."""
    heads, rotated, interleaved = mixer.heads.num_heads, mixer.rope_dim, mixer.interleaved_rope
    sizes = {"key_up": (0, mixer.nope_dim), "value_up": (mixer.nope_dim, mixer.value_dim)}
    if own in sizes and f"{names.get(own)}.{kind}" in present:  # a matrix for each head
        yield Piece(f"{names[own]}.{kind}", path, stack=heads, is_turned=own == "key_up")
    elif own in sizes:  # one tensor for both, in which each head's rows are together
        first, count = sizes[own]
        each = mixer.nope_dim + mixer.value_dim
        runs = tuple((head * each + first, count) for head in range(heads))
        yield Piece(f"{names['key_value_up']}.{kind}", path, order=RowRuns(runs, heads * each))
    elif own == "query":
        order = LastRowsOrder(heads, mixer.query_dim, rotated, interleaved)
        name = names["query_up" if mixer.query_rank else "query"]
        yield Piece(f"{name}.{kind}", path, order=order if interleaved else None)
    elif own == "latent":
        order = LastRowsOrder(1, mixer.heads.head_dim, rotated, interleaved)
        yield Piece(f"{names['latent']}.{kind}", path, order=order if interleaved else None)
    else:
        yield Piece(f"{names[own]}.{kind}" if own else f"{names[kind]}.weight", path)


def recurrent_pieces(
    names: Mapping[str, str], mixer: ConvolutionSpec | RecurrentSpec, own: str, kind: str, path: str
) -> Iterator[Piece]:
    """The tensors of a mixer that is no attention; `own` and `kind` are its parameter's name."""
    if own == "output":
        yield Piece(f"{names['mixer_output']}.{kind}", path)
    elif own == "convolution":
        yield from _convolution_pieces(names, mixer, kind, path)
    elif own == "input" and isinstance(mixer, RecurrentSpec):
        for part, (tensor, runs, total) in enumerate(input_rows(mixer, names)):
            yield Piece(f"{tensor}.{kind}", path, part, order=RowRuns(runs, total))
    elif own == "input":
        yield Piece(f"{names['mixer_input']}.{kind}", path)
    elif own in ("decay", "gate"):
        yield Piece(f"{names[f'mixer_{own}']}.{kind}", path)
    else:
        tensor = names[f"mixer_{kind}"]
        yield Piece(f"{tensor}.weight" if kind == "norm" else tensor, path)


def _convolution_pieces(
    names: Mapping[str, str], mixer: ConvolutionSpec | RecurrentSpec, kind: str, path: str
) -> Iterator[Piece]:
    is_weight = kind == "weight"
    if "convolution" not in names:  # one for queries, one for keys, one for values
        for part, side in enumerate(("query", "key", "value")):
            tensor = f"{names[f'{side}_convolution']}.{kind}"
            yield Piece(tensor, path, part, has_middle=is_weight)
        return
    order = None
    if isinstance(mixer, RecurrentSpec) and not mixer.is_delta:
        # values, keys, queries
        values, rows = mixer.value_size, mixer.query_size
        picked = ((values + rows, rows), (values, rows), (0, values))
        order = RowRuns(picked, mixer.convolution.channels)
    yield Piece(f"{names['convolution']}.{kind}", path, order=order, has_middle=is_weight)


def input_rows(
    mixer: RecurrentSpec, names: Mapping[str, str]
) -> Iterator[tuple[str, tuple[tuple[int, int], ...], int]]:
    """Where queries, keys, values, the output's gate, decays and betas come from (or what gate and
    decays are made from): a tensor, runs of its rows, and how many it has.
    """
    rows, values, heads = mixer.query_size, mixer.value_size, mixer.num_value_heads
    if not mixer.is_delta:  # one tensor: gate, values, keys, queries, decays
        sizes = (values, values, rows, rows, heads)
        starts = [sum(sizes[:i]) for i in range(5)]
        for at in (3, 2, 1, 0, 4):
            yield names["mixer_input"], ((starts[at], sizes[at]),), sum(sizes)
    elif "mixer_input" in names:  # by key heads, each with the value heads that share it
        own = values // mixer.num_key_heads
        per_head = (mixer.key_dim, mixer.key_dim, own, own)
        total = 2 * rows + 2 * values
        for at, size in enumerate(per_head):
            first = sum(per_head[:at])
            step = sum(per_head)
            runs = tuple((step * head + first, size) for head in range(mixer.num_key_heads))
            yield names["mixer_input"], runs, total
        yield from _gate_rows(mixer, names)
    else:
        total = 2 * rows + values
        sides = (("query", 0, rows), ("key", rows, rows), ("value", 2 * rows, values))
        for side, first, size in sides:
            if "mixer_qkv" in names:
                yield names["mixer_qkv"], ((first, size),), total
            else:
                yield names[f"mixer_{side}"], ((0, size),), size
        if mixer.gate_rank:
            for gate in ("decay", "gate"):
                yield names[f"mixer_{gate}_down"], ((0, mixer.gate_rank),), mixer.gate_rank
            yield names["mixer_beta"], ((0, heads),), heads
            return
        yield names["mixer_gate"], ((0, values),), values
        if "mixer_gates" in names:
            yield from _gate_rows(mixer, names)
            return
        yield names["mixer_decay"], ((0, heads),), heads
        yield names["mixer_beta"], ((0, heads),), heads


def _gate_rows(
    mixer: RecurrentSpec, names: Mapping[str, str]
) -> Iterator[tuple[str, tuple[tuple[int, int], ...], int]]:
    """Decays and betas from one tensor that has each key head's together, betas first."""
    shared = mixer.num_value_heads // mixer.num_key_heads
    for first in (shared, 0):
        runs = tuple((2 * shared * head + first, shared) for head in range(mixer.num_key_heads))
        yield names["mixer_gates"], runs, 2 * mixer.num_value_heads

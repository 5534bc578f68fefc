"""The bytes a workload must read and the products it must compute: what no engine can avoid."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quire.models.spec import LayerSpec, Mixer, MlpSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Work:
    """What can't be avoided. Writes, activations and everything that fits a cache are left out."""

    bytes_read: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes_read + other.bytes_read, self.flops + other.flops)

    def __truediv__(self, parts: int) -> Work:
        """What each of so many devices has to do."""
        return Work(self.bytes_read / parts, self.flops / parts)


@dataclass(frozen=True, slots=True)
class Itemsizes:
    """The bytes that a weight takes, scales included."""

    plain: float
    """Of embedding, head and routers."""
    matrices: float
    """Of the layers' matrices."""
    experts: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reaches on nothing but reading, and on nothing but multiplying."""

    read_bandwidth: float
    """Bytes per second."""
    flops: float
    """Per second, in products of large matrices in the model's dtype."""

    def seconds(self, work: Work) -> float:
        """The least time: reading and multiplying may overlap."""
        return max(work.bytes_read / self.read_bandwidth, work.flops / self.flops)

    def __str__(self) -> str:
        return f"reads {self.read_bandwidth / 1e9:,.0f} GB/s, multiplies at {self.flops / 1e12:,.1f} TFLOP/s"


def mlp_width(layer: LayerSpec) -> int:
    """How many numbers a row has between the two products of the MLP."""
    if layer.mlp is None:
        return 0
    return layer.mlp.intermediate_size * (1 if isinstance(layer.mlp, MlpSpec) else layer.mlp.top_k)


def decode_work(
    spec: ModelSpec,
    contexts: Sequence[int],
    itemsize: float | Itemsizes,
    key_itemsize: float | None = None,
) -> Work:
    """One step in which sequences of these lengths (the new token included) compute one token each.
    `itemsize` is what a weight takes, on average or by kind; a key or value takes what plain
    weights do, unless `key_itemsize` says otherwise.
    """
    rows, lengths = len(contexts), Counter(contexts)
    each = key_itemsize or _by_kind(itemsize).plain
    states = Work()
    """What layers keep of the sequences."""
    for mixer, count in _mixers(spec).items():
        for context, times in lengths.items():
            read, flops = mixer.bytes_read(context, each), mixer.flops(context)
            states += Work(count * times * read, count * times * flops)
    flops = 2.0 * rows * (_layer_parameters(spec) + spec.vocab_size * spec.hidden_size)
    return states + Work(_weight_bytes(spec, rows, itemsize), flops)


def prompt_work(spec: ModelSpec, lengths: Sequence[int], itemsize: float | Itemsizes) -> Work:
    """Prompts computed in one step, each with one token sampled. Their own keys need not leave the
    cache.
    """
    rows = sum(lengths)
    mixed = sum(
        count * mixer.prompt_flops(length)
        for mixer, count in _mixers(spec).items()
        for length in lengths
    )
    head = 2.0 * len(lengths) * spec.vocab_size * spec.hidden_size
    return Work(
        bytes_read=_weight_bytes(spec, rows, itemsize),
        flops=2.0 * rows * _layer_parameters(spec) + head + mixed,
    )


def workload_work(
    spec: ModelSpec, jobs: Sequence[tuple[int, int]], itemsize: float | Itemsizes
) -> Work:
    """Requests of (prompt length, new tokens), all at once: prompts in the first step, then one
    token each.
    """
    total = prompt_work(spec, [prompt for prompt, _ in jobs], itemsize)
    for step in range(1, max(new for _, new in jobs)):
        total += decode_work(spec, [prompt + step for prompt, new in jobs if new > step], itemsize)
    return total


def gathered(
    spec: ModelSpec, rows: int, num_scored: int, ranks: int, itemsize: float
) -> tuple[int, float]:
    """What a model that is divided by output rows (docs/tensor_parallel.md) gathers in a step of so
    many tokens: how often, and the bytes that each rank receives.
    """
    if ranks == 1:
        return 0, 0.0
    hidden = spec.hidden_size
    numbers = gathers = 0
    for layer in spec.layers:
        products = len(layer.mixers) + (layer.mlp is not None)  # each gathers before and behind it
        gathers += 2 * products
        numbers += products * hidden + mlp_width(layer)
        numbers += sum(mixer.share(0, ranks).num_gathered for mixer in layer.mixers)
    total = rows * (numbers + ranks * hidden) + num_scored * spec.vocab_size
    return gathers + 2, total * itemsize * (ranks - 1) / ranks


def layer_inputs(spec: ModelSpec) -> int:
    """Of the four products of a layer, one after the other."""
    layer = spec.layers[0]
    size = 0 if layer.mlp is None else layer.mlp.intermediate_size
    return 2 * spec.hidden_size + sum(mixer.output_size for mixer in layer.mixers) + size


def _by_kind(itemsize: float | Itemsizes) -> Itemsizes:
    return itemsize if isinstance(itemsize, Itemsizes) else Itemsizes(itemsize, itemsize, itemsize)


def _weight_bytes(spec: ModelSpec, rows: int, itemsize: float | Itemsizes) -> float:
    """All layers and the head, and of an embedding that is not the head the rows that are looked
    up.
    """
    looked_up = 0 if spec.tie_embeddings else rows * spec.hidden_size
    head = spec.vocab_size * spec.hidden_size
    matrices, routers, experts = _parameters_by_kind(spec, rows)
    each = _by_kind(itemsize)
    return (
        each.plain * (head + looked_up + routers)
        + each.matrices * matrices
        + each.experts * experts
    )


def _layer_parameters(spec: ModelSpec) -> float:
    """Parameters of all layers that one row is multiplied with."""
    return sum(_parameters_by_kind(spec))


def _parameters_by_kind(spec: ModelSpec, rows: int | None = None) -> tuple[float, float, float]:
    """Of matrices, routers and experts of all layers: those that one row is multiplied with, or
    that any of so many rows is.

    Rows choose experts evenly: of E experts, n rows that take k each leave out E * (1 - k / E) ** n
    on average.
    """
    matrices = routers = experts = 0.0
    for layer in spec.layers:
        shapes = (parameter.shape for _, parameter in spec.mixer_parameters(layer))
        matrices += sum(math.prod(shape) for shape in shapes if len(shape) > 1)
        moe = layer.mlp
        if moe is None:
            continue
        if isinstance(moe, MlpSpec):
            matrices += 3 * moe.intermediate_size * spec.hidden_size
            continue
        read = (
            moe.top_k
            if rows is None
            else moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** rows)
        )
        routers += (moe.num_experts + bool(moe.shared_intermediate_size)) * spec.hidden_size
        experts += 3 * moe.intermediate_size * read * spec.hidden_size
        matrices += 3 * moe.shared_intermediate_size * spec.hidden_size
    return matrices, routers, experts


def _mixers(spec: ModelSpec) -> Counter[Mixer]:
    """How often each one occurs."""
    return Counter(spec.mixers)

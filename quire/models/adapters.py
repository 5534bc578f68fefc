"""Adapters (LoRA) for a decoder: PEFT's tensors, each at the product it belongs to.

A checkpoint's modules are found by the same table as its weights (`names.py`), so packed
projections, reordered heads and runs of rows are those of the model itself: the rows of B go where
the rows of the weight went. Every tensor must have a place; an adapter that fits only in part would
answer almost like the base model, and nobody would notice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quire.checkpoints.adapter_files import AdapterFiles, AdapterSettings, open_adapter
from quire.checkpoints.files import is_gguf
from quire.checkpoints.gguf_adapter import open_gguf_adapter
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.formats import PLAIN
from quire.kernels.low_rank import (
    LowRank,
    LowRankPart,
    PackedExperts,
    PackedHeads,
    PackedLowRank,
)
from quire.models.adapter_module import AdapterModule, read_finite
from quire.models.decoder import Decoder
from quire.models.expert_adapters import by_expert, fitting, stacks_of, unwrapped
from quire.models.families import family_named
from quire.models.gguf_adapters import gguf_modules
from quire.models.linear import AdapterPart, EmbeddingPair, HeadLinear, Linear, TrainedRows
from quire.models.load import read_piece
from quire.models.names import huggingface_pieces, other_tensor_names
from quire.models.pieces import Piece
from quire.models.spec import ModelSpec, Parameter
from quire.models.vocabulary_adapters import (
    EMBEDDING,
    HEAD,
    PREFIX,
    Segments,
    SourceOf,
    VocabularyAdapters,
)
from quire.models.weight_plan import ModelFiles

_TENSOR = re.compile(r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_magnitude_vector)(\.weight)?")
_Place = tuple[str, int | None]
"""A parameter and, of a stack, an expert."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in memory, ready for a slot."""

    digest: str
    """Of its content: the same content under two names is one adapter."""
    products: Mapping[str, AdapterPart]
    """By the names of `Decoder.linears`."""
    rank: int
    """The largest."""
    is_dora: bool = False
    """Whether it depends on the base model's weights."""

    @property
    def is_captured(self) -> bool:
        """Whether graphs and recorded steps compute it: not where Python picks rows out, nor what only
        some adapters have (in latent attention, the heads' own matrices).
        """
        others = TrainedRows | EmbeddingPair | PackedHeads
        return not any(isinstance(one, others) for one in self.products.values())

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.products.values())


class AdapterLoader:
    """Reads adapters for one decoder."""

    def __init__(
        self,
        decoder: Decoder,
        whole: ModelSpec,
        segments: Segments | None = None,
        open_base: Callable[[], ModelFiles] | None = None,
        source_of: SourceOf | None = None,
    ) -> None:
        """`whole` describes the model, of which the decoder has the rows that `segments` says (None:
        all), as `source_of` wraps them. `open_base` opens the model's own files, for DoRA, whose
        factors depend on them.
        """
        self._decoder = decoder
        self._segments = segments or _all_rows
        self._open_base = open_base
        self._parameters = dict(whole.parameters())
        self._parameters.setdefault(HEAD, Parameter((whole.vocab_size, whole.hidden_size)))
        self._places = _places(whole)
        self._whole = whole
        embeddings = _embedding_names(whole)
        self._stacks = stacks_of(whole, embeddings)
        heads = [name for name, (one, *_) in self._places.items() if one.parameter == HEAD]
        modules = {EMBEDDING: [one.removesuffix(".weight") for one in embeddings], HEAD: heads}
        self._vocabulary = VocabularyAdapters(
            decoder, whole, modules, self._segments, source_of or (lambda source: source)
        )

    def load(self, folder: Path) -> Adapter:
        """Reads a folder that PEFT wrote, or a GGUF file. What is wrong with it is an error that names
        the file and the tensor.
        """
        if is_gguf(folder):
            checkpoint, digest = open_gguf_adapter(folder)
            modules = list(gguf_modules(checkpoint, str(folder), self._whole, self._decoder))
            return self._made(digest, modules, None)
        files = open_adapter(folder)
        vocabulary = self._vocabulary.find(files)
        base = None
        if files.settings.is_dora or vocabulary.copies:
            if self._open_base is None:
                raise UnsupportedModelError(
                    f"{folder}: such an adapter needs the model's own files, which are not here"
                )
            base = BaseWeights(self._open_base())
        try:
            for name, parameter in vocabulary.copies.items():
                assert base is not None
                _check_copy(files, name, base.whole(parameter))
            modules = list(self._modules(files, vocabulary.names))
            made = self._made(files.digest, modules, base, files.settings)

            def embedding() -> Tensor:
                assert base is not None
                return base.whole(EMBEDDING)

            own_rows = dict(self._vocabulary.read(files, vocabulary, embedding))
            return replace(made, products={**made.products, **own_rows})
        finally:
            if base is not None:
                base.close()

    def _made(
        self,
        digest: str,
        modules: Sequence[AdapterModule],
        base: BaseWeights | None,
        settings: AdapterSettings | None = None,
    ) -> Adapter:
        found: dict[_Place, list[tuple[AdapterModule, list[LowRankPart]]]] = {}
        for module in modules:
            for place, parts in self._parts(module, base).items():
                found.setdefault(place, []).append((module, parts))
        products: dict[str, AdapterPart] = {}
        experts: dict[str, dict[int, PackedLowRank]] = {}
        for (parameter, expert), own in found.items():
            linear = _linear_name(parameter)
            product = self._decoder.linears[linear]
            if isinstance(product, HeadLinear):
                products[linear] = self._packed_heads(product, own)
                continue
            packed = self._packed(parameter, own)
            if expert is None:
                products[linear] = packed
            else:
                experts.setdefault(linear, {})[expert] = packed
        products |= {linear: PackedExperts(own) for linear, own in experts.items()}
        ranks = [module.a.shape[0] for module in modules]
        ranks += [settings.rank] if settings is not None and not ranks else []
        return Adapter(digest, products, max(ranks), settings is not None and settings.is_dora)

    def _modules(self, files: AdapterFiles, others: frozenset[str]) -> Iterator[AdapterModule]:
        """The adapter's tensors by module, every one checked, but for `others`."""
        settings, tensors = files.settings, files.checkpoint.tensors
        by_module: dict[str, dict[str, str]] = {}
        for name, info in tensors.items():
            if name in others:
                continue
            match = _TENSOR.fullmatch(name)
            module = "" if match is None else match["module"].removeprefix(PREFIX)
            is_known = module in self._places or unwrapped(module) in self._stacks
            if match is None or not is_known:
                raise ModelFormatError(
                    f"{info.file}: the tensor {name} has no place in this model: adapters change products, such "
                    f"as {next(iter(self._places), 'none')}, and have copies of embedding and head only, if "
                    "modules_to_save names these"
                )
            own = by_module.setdefault(module, {})
            if match["kind"] in own:
                raise ModelFormatError(
                    f"{info.file}: the tensors {own[match['kind']]} and {name} are the same"
                )
            own[match["kind"]] = name
        wanted = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if settings.is_dora else set())
        for module, own in by_module.items():
            some = next(iter(own.values()))
            file = tensors[some].file
            for kind in sorted(wanted - own.keys()):
                raise ModelFormatError(f"{file}: beside the tensor {some} its {kind} is missing")
            for kind in sorted(own.keys() - wanted):
                raise ModelFormatError(
                    f"{file}: the tensor {own[kind]} has no use: use_dora is false"
                )
            if module not in self._places:
                yield from self._stacked(files, module, own)
                continue
            total, inner = self._module_shape(module, some, settings.is_dora, file)
            rank = settings.rank_of(module)
            shapes = {
                "lora_A": (rank, inner),
                "lora_B": (total, rank),
                "lora_magnitude_vector": (total,),
            }
            read = {}
            for kind, name in own.items():
                if tensors[name].shape != shapes[kind]:
                    raise ModelFormatError(
                        f"{file}: the tensor {name} has shape {list(tensors[name].shape)}; by this model and the "
                        f"adapter's settings it is {list(shapes[kind])}: is it for another model?"
                    )
                read[kind] = read_finite(files.checkpoint, name)
            yield AdapterModule(
                module,
                self._places[module],
                read["lora_A"],
                read["lora_B"],
                read.get("lora_magnitude_vector"),
                settings.scale_of(module),
            )

    def _stacked(
        self, files: AdapterFiles, module: str, own: Mapping[str, str]
    ) -> Iterator[AdapterModule]:
        """An adapter of all experts of a layer, as one of each."""
        tensors, settings = files.checkpoint.tensors, files.settings
        info = tensors[own["lora_A"]]
        if settings.is_dora:
            raise UnsupportedModelError(
                f"{info.file}: the tensor {info.name} changes all experts of a layer, for "
                "which PEFT has no DoRA"
            )
        a, b = info.shape, tensors[own["lora_B"]].shape
        stacks = self._stacks[unwrapped(module)]
        fits = fitting(stacks, settings, a, b)
        if len(fits) != 1:
            sizes = ", ".join(
                f"{one.name} [{one.num_experts}, {one.outputs}, {one.inputs}]" for one in stacks
            )
            problem = (
                "which fits several parameters: save the adapter with PEFT 0.19 or later"
                if fits
                else "which by the adapter's rank fits none of them: is it for another model?"
            )
            raise ModelFormatError(
                f"{info.file}: the tensors {own['lora_A']} and {own['lora_B']} have shapes {list(a)} and "
                f"{list(b)}; this model has {sizes} (experts, outputs, inputs), {problem}"
            )
        name, scale = fits[0].stack.name, settings.scale_of(fits[0].stack.name)
        pairs = by_expert(
            fits[0],
            read_finite(files.checkpoint, own["lora_A"]),
            read_finite(files.checkpoint, own["lora_B"]),
        )
        for piece, own_a, own_b in pairs:
            yield AdapterModule(name, (piece,), own_a, own_b, None, scale)

    def _module_shape(self, module: str, tensor: str, is_dora: bool, file: Path) -> tuple[int, int]:
        """Of the module's weight in the model's files."""
        piece = self._places[module][0]
        parameter = self._parameters[piece.parameter]
        product = self._decoder.linears.get(_linear_of(piece))
        if isinstance(product, HeadLinear) and is_dora:
            raise UnsupportedModelError(
                f"{file}: the tensor {tensor} changes {module}, for whose matrices of heads there is no DoRA"
            )
        if product is None or piece.has_middle:
            raise UnsupportedModelError(
                f"{file}: the tensor {tensor} changes {module}, which is no product that Quire can adapt"
            )
        return piece.shape(parameter)[-1 if piece.is_turned else 0], parameter.shape[-1]

    def _parts(
        self, module: AdapterModule, base: BaseWeights | None
    ) -> dict[_Place, list[LowRankPart]]:
        """What a module's adapter adds, by product, with rows in the decoder's order. Their
        `first_rank` counts within the module's own A.
        """
        found: dict[_Place, list[LowRankPart]] = {}
        for piece in module.pieces:
            parameter = self._parameters[piece.parameter]
            rows = (
                slice(0, parameter.shape[-2])
                if piece.part is None
                else parameter.rows_of(piece.part)
            )
            b, factor = _ordered(piece, module.b), None
            if module.magnitude is not None:
                assert base is not None
                weight = base.matrix(piece)[rows]
                norm = (weight + module.scale * (b @ module.a)).norm(dim=1)
                factor = _ordered(piece, module.magnitude) / norm
                if not bool(factor.isfinite().all()):
                    raise ModelFormatError(
                        f"{module.name}: a row of the adapted weight is zero, with which DoRA has no norm"
                    )
            local = 0
            for segment in self._segments(piece.parameter, parameter):
                first, stop = max(rows.start, segment.start), min(rows.stop, segment.stop)
                if first < stop:
                    at, own = (
                        local + first - segment.start,
                        slice(first - rows.start, stop - rows.start),
                    )
                    part = LowRankPart(at, 0, b[own])
                    if factor is not None:
                        part = part._replace(
                            factor=factor[own], offset=self._offset(piece, at, factor[own])
                        )
                    found.setdefault((piece.parameter, piece.expert), []).append(part)
                local += segment.stop - segment.start
        return found

    def _offset(self, piece: Piece, first: int, factor: Tensor) -> Tensor:
        """What gives the bias of a product's outputs from `first` on back to it."""
        linear = _linear_of(piece)
        product = self._decoder.linears[linear]
        if piece.expert is not None:
            stacked = self._decoder.weights.get(f"{linear}_bias")
            bias = None if stacked is None else stacked.tensor[piece.expert].flatten()
        else:
            bias = product.bias if isinstance(product, Linear) else None
        if bias is None:
            return torch.zeros_like(factor)
        return bias[first : first + len(factor)].float().cpu() * (1 - factor)

    def _packed(
        self, name: str, own: list[tuple[AdapterModule, list[LowRankPart]]]
    ) -> PackedLowRank:
        """One pair of matrices for a product, of all modules that are packed in it."""
        dtype = torch.float32 if self._parameters[name].keep_float32 else self._decoder.dtype
        device, parts, first_rank = self._decoder.device, [], 0
        for module, made in own:
            for part in made:
                placed = part._replace(first_rank=first_rank, b=part.b.to(device, dtype))
                if part.factor is not None and part.offset is not None:
                    placed = placed._replace(
                        factor=part.factor.to(device), offset=part.offset.to(device)
                    )
                parts.append(placed)
            first_rank += module.a.shape[0]
        a = torch.cat([module.a for module, _ in own]).to(device, dtype)
        scale = torch.cat([torch.full((module.a.shape[0],), module.scale) for module, _ in own])
        return self._decoder.kernels.pack_low_rank(LowRank(a, scale.to(device), tuple(parts)))

    def _packed_heads(
        self, product: HeadLinear, own: list[tuple[AdapterModule, list[LowRankPart]]]
    ) -> PackedHeads:
        """A pair of matrices for each head of one module's."""
        ((module, parts),) = own
        dtype, device = self._decoder.dtype, self._decoder.device
        rank = module.a.shape[0]
        scale = torch.full((rank,), module.scale, device=device)
        in_order = sorted(parts, key=lambda part: part.first)
        by_head = torch.cat([part.b for part in in_order]).view(product.num_heads, -1, rank)
        found = {}
        for head, b in enumerate(by_head):
            pair = (b.t(), module.a.t()) if product.is_turned else (module.a, b)
            a, b = (one.to(device, dtype).contiguous() for one in pair)
            low_rank = LowRank(a, scale, (LowRankPart(0, 0, b),))
            found[head] = self._decoder.kernels.pack_low_rank(low_rank)
        return PackedHeads(found)


class BaseWeights:
    """The model's own weights from its files, as float32 in the decoder's order."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._last: tuple[str, Tensor] | None = None
        """A stack of experts that its files keep in one tensor: asked for expert by expert."""

    def close(self) -> None:
        self._files.checkpoint.close()

    def matrix(self, piece: Piece) -> Tensor:
        """The parameter of a piece; of a stack, that of the piece's expert."""
        if piece.expert is None:
            return self.whole(piece.parameter)
        stored = [one for one in self._files.pieces if one.parameter == piece.parameter]
        if all(one.expert is not None for one in stored):
            return self._read(piece.parameter, piece.expert)
        if self._last is None or self._last[0] != piece.parameter:
            self._last = piece.parameter, self.whole(piece.parameter)
        return self._last[1][piece.expert]

    def whole(self, name: str) -> Tensor:
        return self._read(name, None)

    def _read(self, name: str, expert: int | None) -> Tensor:
        spec = self._files.spec
        stored = EMBEDDING if name == HEAD and spec.tie_embeddings else name
        parameter = spec.parameters()[stored]
        weight = torch.empty(parameter.shape if expert is None else parameter.shape[1:])
        for piece in self._files.pieces:
            if piece.parameter == stored and (expert is None or piece.expert == expert):
                index = piece.index(parameter)
                target = weight[index if expert is None else index[1:]]
                read_piece(self._files.checkpoint, piece, PLAIN[torch.float32], (target,))
        return weight


def _places(spec: ModelSpec) -> dict[str, list[Piece]]:
    """By the name of a module whose weight is a matrix: where in the decoder that weight lies."""
    parameters = spec.parameters()
    found: dict[str, list[Piece]] = {}
    others = other_tensor_names(spec)
    ways = [{embedding, *more} for embedding in _embedding_names(spec) for more in ((), others)]
    for present in ways:
        for piece in huggingface_pieces(spec, present):
            parameter = parameters[piece.parameter]
            is_stack = len(parameter.shape) > 2 and piece.expert is None
            is_matrix = len(parameter.shape) > 1 and not parameter.is_vector and not is_stack
            if piece.name.endswith(".weight") and is_matrix and piece.parameter != EMBEDDING:
                own = found.setdefault(piece.name.removesuffix(".weight"), [])
                if piece not in own:
                    own.append(piece)
    for head in ("lm_head", family_named(spec.family).head):
        found.setdefault(head, [Piece(f"{head}.weight", HEAD)])
    return found


def _embedding_names(spec: ModelSpec) -> list[str]:
    family = family_named(spec.family)
    return [f"{prefix}.{family.embedding}.weight" for prefix in family.prefixes]


def _linear_of(piece: Piece) -> str:
    return _linear_name(piece.parameter)


def _linear_name(parameter: str) -> str:
    return parameter.removesuffix(".weight")


def _ordered(piece: Piece, tensor: Tensor) -> Tensor:
    """A module's outputs in the decoder's order, or those that the piece takes."""
    return tensor if piece.order is None else tensor[piece.order.index(tensor.shape[0])]


def _check_copy(files: AdapterFiles, name: str, own: Tensor) -> None:
    """Where embedding or head is adapted, PEFT saves what lies under the adapter, too. It must be the
    model's own.
    """
    stored = files.checkpoint.tensors[name]
    if stored.shape != tuple(own.shape) or not torch.equal(files.checkpoint.read(name), own):
        raise UnsupportedModelError(
            f"{stored.file}: the tensor {name} is not the model's own: save the adapter with "
            "save_embedding_layers=False, or train a copy of the module by modules_to_save"
        )


def _all_rows(name: str, parameter: Parameter) -> tuple[slice, ...]:
    return (slice(0, parameter.shape[max(len(parameter.shape) - 2, 0)]),)

"""Adapters (LoRA) for a decoder: PEFT's tensors, each at the product it belongs to.

A checkpoint's modules are found by the same table as its weights (`names.py`), so packed
projections, reordered heads and runs of rows are those of the model itself: the rows of B go where
the rows of the weight went. Every tensor must have a place; an adapter that fits only in part would
answer almost like the base model, and nobody would notice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.checkpoints.adapter_files import AdapterFiles, open_adapter
from quire.checkpoints.files import is_gguf
from quire.checkpoints.gguf_adapter import open_gguf_adapter
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.formats import PLAIN
from quire.kernels.low_rank import LowRank, LowRankPart, PackedExperts, PackedLowRank
from quire.models.adapter_module import AdapterModule, read_finite
from quire.models.decoder import Decoder
from quire.models.expert_adapters import by_expert, fitting, stacks_of, unwrapped
from quire.models.families import family_named
from quire.models.gguf_adapters import gguf_modules
from quire.models.linear import Linear
from quire.models.load import read_piece
from quire.models.names import huggingface_pieces
from quire.models.pieces import Piece
from quire.models.spec import ModelSpec, Parameter
from quire.models.weight_plan import ModelFiles

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_magnitude_vector)(\.weight)?")
_HEAD = "lm_head"
_COPIES = (
    f"{_HEAD}.base_layer.weight",
    f"{_HEAD}.base_layer.bias",
    f"{_HEAD}.weight",
    "embed_tokens.weight",
    "embed_tokens.base_layer.weight",
)
"""How the names end of tensors that PEFT saves beside an adapter of the head."""

_Place = tuple[str, int | None]
"""A parameter and, of a stack, an expert."""
Segments = Callable[[str, Parameter], tuple[slice, ...]]
"""The rows of a parameter that this process has: of all, or a rank's."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in memory, ready for a slot."""

    digest: str
    """Of its content: the same content under two names is one adapter."""
    products: Mapping[str, PackedLowRank | PackedExperts]
    """By the names of `Decoder.linears`."""
    rank: int
    """The largest."""
    is_dora: bool = False
    """Whether it depends on the base model's weights."""

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
    ) -> None:
        """`whole` describes the model, of which the decoder has the rows that `segments` says (None:
        all). `open_base` opens the model's own files, for DoRA, whose factors depend on them.
        """
        self._decoder = decoder
        self._segments = segments or _all_rows
        self._open_base = open_base
        self._parameters = dict(whole.parameters())
        self._parameters.setdefault("head", Parameter((whole.vocab_size, whole.hidden_size)))
        self._places = _places(whole)
        self._whole = whole
        self._stacks = stacks_of(whole, _embedding_names(whole))

    def load(self, folder: Path) -> Adapter:
        """Reads a folder that PEFT wrote, or a GGUF file. What is wrong with it is an error that names
        the file and the tensor.
        """
        if is_gguf(folder):
            checkpoint, digest = open_gguf_adapter(folder)
            modules = list(gguf_modules(checkpoint, str(folder), self._whole, self._decoder))
            return self._made(digest, modules, None)
        files = open_adapter(folder)
        copies = [name for name in files.checkpoint.tensors if name.endswith(_COPIES)]
        base = None
        if files.settings.is_dora or copies:
            if self._open_base is None:
                raise UnsupportedModelError(
                    f"{folder}: such an adapter needs the model's own files, which are not here"
                )
            base = self._open_base()
        try:
            for name in copies:
                assert base is not None
                self._check_copy(files, name, base)
            modules = list(self._modules(files, frozenset(copies)))
            return self._made(files.digest, modules, base, files.settings.is_dora)
        finally:
            if base is not None:
                base.checkpoint.close()

    def _made(
        self,
        digest: str,
        modules: Sequence[AdapterModule],
        base: ModelFiles | None,
        is_dora: bool = False,
    ) -> Adapter:
        found: dict[_Place, list[tuple[AdapterModule, list[LowRankPart]]]] = {}
        for module in modules:
            for place, parts in self._parts(module, base).items():
                found.setdefault(place, []).append((module, parts))
        products: dict[str, PackedLowRank | PackedExperts] = {}
        experts: dict[str, dict[int, PackedLowRank]] = {}
        for (parameter, expert), own in found.items():
            packed, linear = self._packed(parameter, own), _linear_name(parameter)
            if expert is None:
                products[linear] = packed
            else:
                experts.setdefault(linear, {})[expert] = packed
        products |= {linear: PackedExperts(own) for linear, own in experts.items()}
        rank = max(module.a.shape[0] for module in modules)
        return Adapter(digest, products, rank, is_dora)

    def _check_copy(self, files: AdapterFiles, name: str, base: ModelFiles) -> None:
        """Where the head is adapted, PEFT saves head and embedding, too. They must be the model's
        own: others are not computed with.
        """
        parameter = "head" if f"{_HEAD}." in name else "embedding"
        if name.endswith(".bias"):
            parameter = "head_bias"
            if parameter not in base.spec.parameters():
                raise ModelFormatError(
                    f"{files.checkpoint.tensors[name].file}: the tensor {name} has no place in this "
                    "model, whose head has no bias"
                )
        own = _base_weight(base, parameter)
        stored = files.checkpoint.tensors[name]
        if stored.shape != tuple(own.shape) or not torch.equal(files.checkpoint.read(name), own):
            raise UnsupportedModelError(
                f"{stored.file}: the tensor {name} is not the model's own, and Quire replaces no weights: save the "
                "adapter with save_embedding_layers=False"
            )

    def _modules(self, files: AdapterFiles, copies: frozenset[str]) -> Iterator[AdapterModule]:
        """The adapter's tensors by module, every one checked."""
        settings, tensors = files.settings, files.checkpoint.tensors
        by_module: dict[str, dict[str, str]] = {}
        for name, info in tensors.items():
            if name in copies:
                continue
            match = _TENSOR.fullmatch(name)
            module = "" if match is None else match["module"].removeprefix(_PREFIX)
            is_known = module in self._places or unwrapped(module) in self._stacks
            if match is None or not is_known:
                raise ModelFormatError(
                    f"{info.file}: the tensor {name} has no place in this model: adapters change "
                    f"products, such as {next(iter(self._places), 'none')}"
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
                f"{info.file}: the tensor {info.name} changes experts, for which there is no DoRA"
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
        if len(parameter.shape) > 2 and is_dora:
            raise UnsupportedModelError(
                f"{file}: the tensor {tensor} changes an expert, for which there is no DoRA"
            )
        if _linear_of(piece) not in self._decoder.linears or piece.is_turned or piece.has_middle:
            raise UnsupportedModelError(
                f"{file}: the tensor {tensor} changes {module}, which is no product that Quire can adapt"
            )
        return piece.shape(parameter)[0], parameter.shape[-1]

    def _parts(
        self, module: AdapterModule, base: ModelFiles | None
    ) -> dict[_Place, list[LowRankPart]]:
        """What a module's adapter adds, by product, with rows in the decoder's order. Their
        `first_rank` counts within the module's own A.
        """
        found: dict[_Place, list[LowRankPart]] = {}
        for piece in module.pieces:
            parameter, linear = self._parameters[piece.parameter], _linear_of(piece)
            rows = (
                slice(0, parameter.shape[-2])
                if piece.part is None
                else parameter.rows_of(piece.part)
            )
            b, factor = _ordered(piece, module.b), None
            if module.magnitude is not None:
                assert base is not None
                weight = _base_weight(base, piece.parameter)[rows]
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
                            factor=factor[own], offset=self._offset(linear, at, factor[own])
                        )
                    found.setdefault((piece.parameter, piece.expert), []).append(part)
                local += segment.stop - segment.start
        return found

    def _offset(self, linear: str, first: int, factor: Tensor) -> Tensor:
        product = self._decoder.linears[linear]
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


def _places(spec: ModelSpec) -> dict[str, list[Piece]]:
    """By the name of a module whose weight is a matrix: where in the decoder that weight lies."""
    parameters = spec.parameters()
    found: dict[str, list[Piece]] = {}
    for embedding in _embedding_names(spec):
        for piece in huggingface_pieces(spec, {embedding}):
            parameter = parameters[piece.parameter]
            is_stack = len(parameter.shape) > 2 and piece.expert is None
            is_matrix = len(parameter.shape) > 1 and not parameter.is_vector and not is_stack
            if piece.name.endswith(".weight") and is_matrix and piece.parameter != "embedding":
                own = found.setdefault(piece.name.removesuffix(".weight"), [])
                if piece not in own:
                    own.append(piece)
    found.setdefault(_HEAD, [Piece(f"{_HEAD}.weight", "head")])
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


def _base_weight(base: ModelFiles, name: str) -> Tensor:
    """A parameter from the model's files, as float32 in the decoder's order."""
    stored = "embedding" if name == "head" and base.spec.tie_embeddings else name
    parameter = base.spec.parameters()[stored]
    weight = torch.empty(parameter.shape)
    for piece in base.pieces:
        if piece.parameter == stored:
            target = weight[piece.index(parameter)]
            read_piece(base.checkpoint, piece, PLAIN[torch.float32], (target,))
    return weight


def _all_rows(name: str, parameter: Parameter) -> tuple[slice, ...]:
    return (slice(0, parameter.shape[-2]),)

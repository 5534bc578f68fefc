"""Adapters of embedding and head in PEFT's files: trained copies of either (`modules_to_save`), trained
rows of some tokens (`trainable_token_indices`), LoRA on the embedding, and the model's own weights,
which PEFT saves beside some of these.

What was trained of the embedding stays with the embedding, and of the head with the head, also where
the model ties the two: so PEFT computes it. Only trained tokens count for both then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.checkpoints.adapter_files import AdapterFiles
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.weights import Weight
from quire.models.adapter_module import read_finite
from quire.models.decoder import Decoder
from quire.models.linear import EmbeddingPair, TrainedRows
from quire.models.parameters import WeightSource
from quire.models.spec import ModelSpec, Parameter

PREFIX = "base_model.model."
EMBEDDING, HEAD, BIAS = "embedding", "head", "head_bias"
_PAIR = ("lora_embedding_A", "lora_embedding_B")
_MAGNITUDE = ("lora_magnitude_vector", "lora_magnitude_vector.weight")
_TOKENS = "token_adapter.trainable_tokens_delta"
_WEIGHTS = ("weight", "base_layer.weight", "token_adapter.base_layer.weight")
_BIASES = ("bias", "base_layer.bias")
"""How PEFT calls what lies under an adapter, if it saves that, too."""

Segments = Callable[[str, Parameter], tuple[slice, ...]]
"""The rows of a parameter that this process has: of all, or a rank's."""
SourceOf = Callable[[WeightSource], WeightSource]
"""Wraps weights as this process's kernels want them: see `Share.source_of`."""


@dataclass(frozen=True, slots=True)
class VocabularyTensors:
    """The tensors of a file that are about embedding and head; but for LoRA of the head, which is that
    of any product.
    """

    copies: Mapping[str, str]
    """Parameters by the names of tensors that must be the model's own."""
    trained: Mapping[str, str]
    """Tensors by the parameters that they replace."""
    tokens: Mapping[str, str]
    """Tensors of some tokens' rows, by `EMBEDDING` or `HEAD`."""
    pair: Mapping[str, str]
    """Those of LoRA on the embedding, by kind."""

    @property
    def names(self) -> frozenset[str]:
        own = (self.trained.values(), self.tokens.values(), self.pair.values())
        return frozenset([*self.copies, *(name for names in own for name in names)])


class VocabularyAdapters:
    """Reads them for one decoder."""

    def __init__(
        self,
        decoder: Decoder,
        whole: ModelSpec,
        modules: Mapping[str, Collection[str]],
        segments: Segments,
        source_of: SourceOf,
    ) -> None:
        """`modules`: what `EMBEDDING` and `HEAD` may be called."""
        self._decoder = decoder
        self._whole = whole
        self._modules = modules
        self._segments = segments
        self._source_of = source_of
        self._parameters = whole.parameters()
        self._shape = (whole.vocab_size, whole.hidden_size)

    def find(self, files: AdapterFiles) -> VocabularyTensors:
        """Sorts them out, and checks that they are what the settings say."""
        self._check_named(files)
        copies: dict[str, str] = {}
        trained: dict[str, str] = {}
        tokens: dict[str, str] = {}
        pair: dict[str, str] = {}
        for name in files.checkpoint.tensors:
            end, module, own = self._end_of(name)
            is_saved = any(map(module.endswith, files.settings.modules_to_save))
            held: dict[str, str] | None = None
            key = end
            if end and own in _WEIGHTS:
                held = trained if is_saved and own == "weight" else copies
            elif end == HEAD and own in _BIASES:
                held, key = trained if is_saved and own == "bias" else copies, BIAS
            elif end and own == _TOKENS:
                held = tokens
            elif end == EMBEDDING and own in (*_PAIR, *_MAGNITUDE):
                held, key = pair, own.removesuffix(".weight")
            if held is copies:
                key, name = name, key
            if held is None:
                continue
            if key in held:
                raise _error(files, name, f"is the same as the tensor {held[key]}")
            held[key] = name
        made = VocabularyTensors(copies, trained, tokens, pair)
        self._check(files, made)
        return made

    def read(
        self, files: AdapterFiles, found: VocabularyTensors, base: Callable[[], Tensor]
    ) -> Iterator[tuple[str, TrainedRows | EmbeddingPair]]:
        """What the adapter changes of the embedding or the head. `base` reads the model's embedding,
        for DoRA.
        """
        if EMBEDDING in found.trained:
            matrix = self._tensor(files, found.trained[EMBEDDING], self._shape)
            yield EMBEDDING, TrainedRows(self._divided(EMBEDDING, matrix))
        if HEAD in found.trained:
            matrix = self._tensor(files, found.trained[HEAD], self._shape)
            weight = self._divided(HEAD, matrix)
            bias = None
            if BIAS in found.trained:
                whole = self._tensor(files, found.trained[BIAS], (self._shape[0],))
                bias = self._own_rows(BIAS, whole).to(self._decoder.dtype)
            yield HEAD, TrainedRows(self._decoder.kernels.pack(weight), bias=bias)
        for end, name in found.tokens.items():
            yield from self._token_rows(files, end, name)
        if found.pair:
            yield EMBEDDING, self._pair(files, found.pair, base)

    def _end_of(self, name: str) -> tuple[str, str, str]:
        """Whether a tensor is about embedding or head, by the name of its module, and the rest of its
        name.
        """
        bare = name.removeprefix(PREFIX)
        for end, modules in self._modules.items():
            for module in modules:
                if bare.startswith(f"{module}."):
                    return end, module, bare.removeprefix(f"{module}.")
        return "", "", ""

    def _check_named(self, files: AdapterFiles) -> None:
        """The modules that the settings name must be these two."""
        settings, (embeddings, heads) = files.settings, self._modules.values()
        named = [("modules_to_save", one) for one in settings.modules_to_save]
        named += [("trainable_token_indices", one) for one in settings.trained_tokens if one]
        for setting, name in named:
            if not any(module.endswith(name) for module in (*embeddings, *heads)):
                raise UnsupportedModelError(
                    f"{files.config}: {setting} names {name!r}; Quire takes trained copies of "
                    f"{' and '.join([*list(embeddings)[:1], *list(heads)[:1]])} only: train the adapter without it"
                )

    def _check(self, files: AdapterFiles, found: VocabularyTensors) -> None:
        """Nothing is missing, and nothing is there twice."""
        settings = files.settings
        for name, parameter in found.copies.items():
            if parameter == BIAS and BIAS not in self._parameters:
                raise _error(files, name, "has no place in this model, whose head has no bias")
        for saved in settings.modules_to_save:
            for end, modules in self._modules.items():
                if any(one.endswith(saved) for one in modules) and end not in found.trained:
                    raise ModelFormatError(
                        f"{files.weights}: modules_to_save names {saved}, of which there is no tensor"
                    )
        if BIAS in found.trained and BIAS not in self._parameters:
            name = found.trained[BIAS]
            raise _error(files, name, "has no place in this model, whose head has no bias")
        if HEAD in found.trained and BIAS in self._parameters and BIAS not in found.trained:
            raise _error(files, found.trained[HEAD], "comes without its bias")
        self._check_tokens(files, found)
        wanted = [*_PAIR, *[_MAGNITUDE[0]] * settings.is_dora] if found.pair else []
        for kind in wanted:
            if kind not in found.pair:
                some = next(iter(found.pair.values()))
                raise ModelFormatError(
                    f"{files.weights}: beside the tensor {some} its {kind} is missing"
                )
        for kind in found.pair.keys() - set(wanted):
            raise _error(files, found.pair[kind], "has no use: use_dora is false")
        ways = [("trained", found.trained), ("tokens", found.tokens)]
        embedding = [held[EMBEDDING] for _, held in ways if EMBEDDING in held]
        embedding += list(found.pair.values())[:1]
        if len(embedding) > 1:
            raise UnsupportedModelError(
                f"{files.weights}: the tensors {embedding[0]} and {embedding[1]} both change the embedding"
            )
        self._check_head(files, found)

    def _check_head(self, files: AdapterFiles, found: VocabularyTensors) -> None:
        """Only one thing may change the head."""
        own = [name for name in files.checkpoint.tensors if self._end_of(name)[0] == HEAD]
        pairs = [name for name in own if ".lora_" in name]
        tied = found.tokens.get(EMBEDDING) if self._whole.tie_embeddings else None
        ways = [found.trained.get(HEAD), found.tokens.get(HEAD), tied, *pairs[:1]]
        changes = [one for one in ways if one is not None]
        if len(changes) > 1:
            raise UnsupportedModelError(
                f"{files.weights}: the tensors {changes[0]} and {changes[1]} both change the head"
            )

    def _check_tokens(self, files: AdapterFiles, found: VocabularyTensors) -> None:
        for end, name in found.tokens.items():
            if self._tokens_of(files, end) is None:
                raise _error(
                    files, name, "has no use: trainable_token_indices names no tokens of it"
                )
            changes_head = end == HEAD or self._whole.tie_embeddings
            if changes_head and BIAS in self._parameters:
                raise UnsupportedModelError(
                    f"{files.weights}: the tensor {name} changes a head with a bias, which PEFT leaves out then"
                )
        is_tied = self._whole.tie_embeddings
        for end in self._modules:
            tokens = self._tokens_of(files, end)
            # PEFT keeps the head's with the embedding's where they are tied and the tokens the same
            is_kept = is_tied and end == HEAD and tokens == self._tokens_of(files, EMBEDDING)
            if tokens is not None and end not in found.tokens and not is_kept:
                raise ModelFormatError(
                    f"{files.weights}: trainable_token_indices has tokens of the {end}, of which there is no tensor"
                )

    def _tokens_of(self, files: AdapterFiles, end: str) -> tuple[int, ...] | None:
        for module, tokens in files.settings.trained_tokens.items():
            if (not module and end == EMBEDDING) or (
                module and any(one.endswith(module) for one in self._modules[end])
            ):
                return tokens
        return None

    def _token_rows(
        self, files: AdapterFiles, end: str, name: str
    ) -> Iterator[tuple[str, TrainedRows]]:
        listed = self._tokens_of(files, end)
        assert listed is not None
        vocab, hidden = self._shape
        if max(listed) >= vocab:
            raise ModelFormatError(
                f"{files.config}: trainable_token_indices has {max(listed)}; this model's tokens end at {vocab - 1}"
            )
        rows = self._tensor(files, name, (len(listed), hidden))
        order = torch.tensor(listed).argsort()
        tokens = torch.tensor(listed)[order]
        weight = Weight.dense(rows[order].to(self._decoder.dtype))
        if end == EMBEDDING:
            yield EMBEDDING, TrainedRows(weight, tokens)
        if end == HEAD or self._whole.tie_embeddings:
            yield HEAD, TrainedRows(self._decoder.kernels.pack(weight), tokens)

    def _pair(
        self, files: AdapterFiles, found: Mapping[str, str], base: Callable[[], Tensor]
    ) -> EmbeddingPair:
        (vocab, hidden), settings = self._shape, files.settings
        module = self._end_of(found[_PAIR[0]])[1]
        rank, scale = settings.rank_of(module), settings.scale_of(module)
        a = self._tensor(files, found[_PAIR[0]], (rank, vocab))
        b = self._tensor(files, found[_PAIR[1]], (hidden, rank))
        factor, decoder = None, self._decoder
        if settings.is_dora:
            magnitude = self._tensor(files, found[_MAGNITUDE[0]], (hidden,))
            factor = magnitude / torch.addmm(base(), a.t(), b.t(), alpha=scale).norm(dim=0)
            if not bool(factor.isfinite().all()):
                raise _error(files, found[_MAGNITUDE[0]], "meets a zero column: DoRA has no norm")
        return EmbeddingPair(
            a.t().to(decoder.dtype).contiguous(),
            decoder.kernels.pack(Weight.dense(b)),
            scale,
            factor,
        )

    def _tensor(self, files: AdapterFiles, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = files.checkpoint.tensors[name]
        if stored.shape != shape:
            raise ModelFormatError(
                f"{stored.file}: the tensor {name} has shape {list(stored.shape)}; by this model and the "
                f"adapter's settings it is {list(shape)}: is it for another model?"
            )
        return read_finite(files.checkpoint, name)

    def _own_rows(self, parameter: str, tensor: Tensor) -> Tensor:
        return torch.cat(
            [tensor[run] for run in self._segments(parameter, self._parameters[parameter])]
        )

    def _divided(self, end: str, weight: Tensor) -> Weight:
        """This process's part of a matrix in the place of embedding or head."""
        name = end if end in self._parameters else EMBEDDING
        own = self._own_rows(name, weight).to(self._decoder.dtype)
        return self._source_of({name: Weight.dense(own)}).pop(name)


def _error(files: AdapterFiles, name: str, problem: str) -> ModelFormatError:
    return ModelFormatError(f"{files.weights}: the tensor {name} {problem}")

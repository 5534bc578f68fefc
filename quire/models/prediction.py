"""Layers for multi-token prediction: what a model's checkpoint may have behind its last layer, to
draft with.

Such a layer takes the model's final hidden state of a token and the embedding of the next one, each
normed, joined by a product, and guesses the token behind that. It has the model's embedding and its
head. To draft further it takes what it made itself in place of the model's hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.errors import InvalidRequestError
from quire.kernels.ops import AttentionSpec, Batches, MixerCache
from quire.kernels.tensor_memory import TensorMemory
from quire.models.decoder import Decoder, DecoderLayer, Norm, enter
from quire.models.mixers import Batch
from quire.models.names import drafting_names, prediction_pieces
from quire.models.parameters import Parameters, SleepLevel, WeightSource
from quire.models.rope import cos_sin_table
from quire.models.spec import ModelSpec
from quire.models.weight_plan import ModelFiles

_LAYER = "mtp.layers.0."
"""What names of its tensors begin with, wherever it stands."""
_QWEN = {
    "token_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "joined.weight": "mtp.fc.weight",
}
_BEHIND = {
    "token_norm": f"{_LAYER}enorm.weight",
    "hidden_norm": f"{_LAYER}hnorm.weight",
    "joined.weight": f"{_LAYER}eh_proj.weight",
}
"""Where it has the number behind the last layer's, as in DeepSeek-V3. The embedding and the head that
stand there are the model's again, and are not read.
"""


class Predictor:
    """A layer for multi-token prediction, with the embedding and the head of its model."""

    def __init__(self, spec: ModelSpec, model: Decoder, loaded: WeightSource) -> None:
        self.spec = spec
        self.kernels = model.kernels
        self._model = model
        parameters = Parameters(model.kernels, loaded, model.dtype, model.max_position)
        self._token_norm, self._hidden_norm, self._final_norm = (
            Norm(parameters, name, spec) for name in ("token_norm", "hidden_norm", "final_norm")
        )
        self._joined = parameters.linear("joined")
        (layer,) = spec.layers
        (mixer,) = layer.mixers
        table: Tensor | None = None
        if layer.rope is not None:
            assert isinstance(mixer, AttentionSpec)
            table = cos_sin_table(layer.rope, mixer.rotary_size, model.max_position)
            table = table.to(model.device)
        self._layer = DecoderLayer(parameters, "layers.0", spec, layer, [table])
        self._parameters = parameters
        tables = () if table is None else (table,)
        self._tables = TensorMemory((*tables, *parameters.constants.values()))

    def __call__(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        paged: Batches,
        caches: Sequence[MixerCache],
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states, of which `logits` makes scores of the tokens two behind `positions`,
        and what the next position takes in place of `hidden`. `token_ids` are the tokens behind
        `positions`, `hidden` the model's final hidden states there, or what this gave for the ones
        before.
        """
        batch = Batch(self.kernels, positions, paged)
        tokens = self._token_norm(batch, self._model.embed(batch, token_ids))
        joined = torch.cat((tokens, self._hidden_norm(batch, hidden)), 1)
        x, residual = self._layer(batch, self._joined(batch, joined), None, caches)
        final, stream = enter(batch, x, residual, self._final_norm)
        return final, final if self.spec.passes_on == "normed" else stream

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of final hidden states, in the model's dtype."""
        return self._model.logits(hidden)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._parameters.weights.values())

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(weight.shape) for weight in self._parameters.weights.values())

    def sleep(self, level: SleepLevel) -> None:
        """Gives the weights' memory back; the model's are its own."""
        self._parameters.sleep(level)
        self._tables.sleep(keep=True)

    def wake(self) -> None:
        """Takes it again."""
        self._parameters.wake()
        self._tables.wake()

    def release(self) -> None:
        """Sleeps for good."""
        self.sleep(2)
        self._parameters, self._tables = Parameters(self.kernels, {}), TensorMemory(())
        del self._layer, self._joined, self._token_norm, self._hidden_norm, self._final_norm
        del self._model


def prediction_files(files: ModelFiles) -> ModelFiles:
    """The layer for multi-token prediction among a model's files; refused where there is none that is
    known.
    """
    spec, tensors = files.spec, files.checkpoint.tensors
    present = drafting_names(spec, tensors.keys())
    layer = next((one for one in reversed(spec.layers) if one.attention is not None), None)
    prefix = _LAYER
    if "mtp.fc.weight" in present:
        norm, further, passes_on = "mtp.norm", _QWEN, "normed"
    else:
        joins = (name for name in present if name.endswith(".eh_proj.weight"))
        prefix = next(joins, "").removesuffix("eh_proj.weight")
        if prefix.startswith(("mtp.", "blk.")):  # Nemotron-H's, and those of GGUF files
            prefix = ""
        norm, further, passes_on = f"{_LAYER}shared_head.norm", _BEHIND, "stream"
    if layer is None or not prefix:
        raise _refusal(spec, len(present))
    stored = {
        f"{_LAYER}{one.removeprefix(prefix)}": one for one in present if one.startswith(prefix)
    }
    if any(name.startswith("mtp.layers.1.") for name in present):
        raise InvalidRequestError(
            "speculation",
            "is mtp, but this model has several layers for multi-token prediction, which are not supported: use ngram, "
            "self or draft:MODEL",
        )
    own_spec = replace(spec, layers=(layer,), passes_on=passes_on)  # type: ignore[arg-type]
    pieces = prediction_pieces(own_spec, stored.keys(), norm, further)
    named = tuple(replace(one, name=one.name.replace(_LAYER, prefix, 1)) for one in pieces)
    used = {name: tensors[name] for name in (one.name for one in named) if name in tensors}
    return ModelFiles(own_spec, files.checkpoint.with_tensors(used), named)


def _refusal(spec: ModelSpec, count: int) -> InvalidRequestError:
    if count:
        what = f"the layers for multi-token prediction of {spec.family} are not supported yet"
    else:
        what = "this checkpoint has no layers for multi-token prediction"
    return InvalidRequestError("speculation", f"is mtp, but {what}: use ngram, self or draft:MODEL")

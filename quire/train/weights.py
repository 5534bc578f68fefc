"""A trainer's weights: plain tensors with gradients, by the names that checkpoints have, and the
model that computes with them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from quire.errors import InvalidRequestError, ModelFormatError
from quire.kernels.formats import PLAIN
from quire.kernels.reference import ReferenceKernels
from quire.llm import LLM
from quire.models.decoder import Decoder
from quire.models.given_weights import given_weights
from quire.models.load import open_model, reading
from quire.models.names import huggingface_pieces
from quire.models.pieces import Piece
from quire.models.spec import ModelSpec, Parameter
from quire.models.weight_plan import plan_weights


class Weights:
    """Differentiable tensors of a model, and the packed ones that its engine computes with.

    `tensors` are by the names in safetensors; change them in place (an optimizer does), then call
    `update`. `quire.train.logprobs` refuses weights that the engine has not got.
    """

    def __init__(
        self,
        model: LLM | Decoder,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        gradient_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`tensors` are all of the model's, such as `dict(module.named_parameters())`; None: float32
        ones with gradients, read from the model's files. The model takes them over at once.
        Gradients are computed in `gradient_dtype`.
        """
        self._llm = model if isinstance(model, LLM) else None
        self.decoder = model.engine.decoder if isinstance(model, LLM) else model
        self.gradient_dtype = gradient_dtype
        _check_plain(self.decoder, self._llm)
        if tensors is None:
            path = None if self._llm is None else self._llm.engine.path
            if path is None:
                raise InvalidRequestError(
                    "tensors", "must be given: this model was not read from files"
                )
            tensors = read_tensors(path, self.decoder.device)
        self.tensors = dict(tensors)
        self._pieces = _pieces_of(self.decoder.spec, self.tensors.keys())
        self._given: dict[str, tuple[int, int]] = {}
        """By name, where a tensor was and how often it had changed when the engine got it."""
        self._has_stepped = False
        """Whether an optimizer changed some since then: fused ones do not count a tensor's changes."""
        _watch_optimizers(self)
        self._num_updates = -1
        self.update()

    def parameters(self) -> list[Tensor]:
        """Those that have gradients: what an optimizer takes."""
        return [one for one in self.tensors.values() if one.requires_grad]

    def update(self) -> None:
        """Gives the model all tensors that have gradients, and others that changed, so that it
        computes with the present ones.
        """
        if self._num_updates != self.decoder.num_updates:
            self._given = {}  # somebody else has replaced weights, nobody knows which
        names = self._kept_with(
            name
            for name, one in self.tensors.items()
            if one.requires_grad or self._given.get(name) != _state(one)
        )
        if names:
            changed = [(name, self.tensors[name]) for name in self.tensors if name in names]
            if self._llm is not None:
                self._llm.update_weights(changed)
            else:
                self.decoder.update(given_weights(self.decoder, "none", changed))
        self._given |= {name: _state(self.tensors[name]) for name in names}
        self._num_updates = self.decoder.num_updates
        self._has_stepped = False

    def check(self) -> None:
        """Raises unless the model has these weights."""
        if self._llm is not None and self._llm.engine.runner.is_asleep:
            raise InvalidRequestError("model", "is asleep: call wake_up() first")
        if self._num_updates != self.decoder.num_updates:
            raise ModelFormatError(
                "the model's weights were replaced by others: call update() of these Weights first"
            )
        if self._has_stepped:
            raise ModelFormatError(
                "an optimizer has changed weights since the model got them: call update() after each of its steps"
            )
        for name, one in self.tensors.items():
            if self._given.get(name) != _state(one):
                raise ModelFormatError(
                    f"{name} has changed since the model got it: call update() after each change"
                )

    def check_unchanged_since(self, num_updates: int) -> None:
        """Raises unless the model still has the weights that it had after so many updates: gradients
        would be those of a mixture.
        """
        self.check()
        if num_updates != self.decoder.num_updates:
            raise ModelFormatError(
                "the model's weights were replaced since these logprobs were computed: call backward() before update()"
            )

    def trained(self) -> dict[str, Tensor]:
        """Those of the decoder's parameters that have gradients, made of the tensors so that
        gradients reach them.
        """
        return {
            name: self.parameter(name)
            for name, own in self._pieces.items()
            if any(self.tensors[piece.name].requires_grad for piece in own)
        }

    @property
    def names(self) -> Iterable[str]:
        """The decoder's parameters."""
        return self._pieces.keys()

    def parameter(self, name: str) -> Tensor:
        """One of the decoder's parameters, in the dtype of gradients."""
        shape = self.decoder.spec.parameters()[name]
        return assembled(shape, self._pieces[name], self.tensors, self.gradient_dtype)

    def _kept_with(self, names: Iterable[str]) -> set[str]:
        """With those of the same matrices, which are replaced together."""
        found = set(names)
        size = -1
        while size != len(found):
            size = len(found)
            for own in self._pieces.values():
                together = {piece.name for piece in own}
                if not found.isdisjoint(together):
                    found |= together
        return found

    def stepped(self, optimizer: Optimizer) -> None:
        """Notes that an optimizer has made a step, if these tensors are among its own."""
        own = {id(one) for one in self.tensors.values()}
        changed = (one for group in optimizer.param_groups for one in group["params"])
        self._has_stepped |= any(id(one) in own for one in changed)


def _state(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _watch_optimizers(weights: Weights) -> None:
    """Has the weights know of every optimizer's steps, as long as somebody needs them."""
    watched = weakref.ref(weights)

    def note(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if (present := watched()) is not None:
            present.stepped(optimizer)

    weakref.finalize(weights, register_optimizer_step_post_hook(note).remove)


def _check_plain(decoder: Decoder, llm: LLM | None) -> None:
    """Refuses what has no gradients of its own, or other values than one decoder gives."""
    plain = {format.name for format in PLAIN.values()}
    for name, format in decoder.formats.items():
        if format not in plain:
            raise InvalidRequestError(
                "model",
                f"keeps {name} as {format}, which has no gradient: load it with "
                'quantization="none" (and dtype="float32" or "bfloat16") to train it',
            )
    if llm is None:
        return
    engine = llm.engine
    if engine.spec != decoder.spec:
        raise InvalidRequestError("model", "is divided among devices: train it on one of them")
    if engine.plan.dtype != decoder.dtype:
        raise InvalidRequestError(
            "model",
            f"keeps keys and values in {engine.plan.dtype}, which have no gradient: load it with "
            f"kv_cache_dtype={str(decoder.dtype).removeprefix('torch.')!r} or auto",
        )


def _pieces_of(spec: ModelSpec, names: Iterable[str]) -> dict[str, list[Piece]]:
    """By parameter, the tensors that it is made of. All must be there."""
    present = set(names)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in huggingface_pieces(spec, present):
        if piece.name not in present:
            raise ModelFormatError(
                f"{piece.name} is missing: gradients need all tensors of the model, also those "
                "that are not trained (requires_grad=False)"
            )
        pieces[piece.parameter].append(piece)
    return pieces


def read_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    """A model's tensors in float32 with gradients, by the names in safetensors, whatever its files
    are.
    """
    files = open_model(path)
    try:
        plan = plan_weights(files, ReferenceKernels(), torch.float32, device, "none")
        with reading(plan) as loaded:
            own = {name: loaded.pop(name).tensor for name in plan.parameters}
    finally:
        files.checkpoint.close()
    present = files.checkpoint.tensors.keys()
    tensors = as_stored(files.spec, huggingface_pieces(files.spec, present), own)
    return {name: one.requires_grad_() for name, one in tensors.items()}


def as_stored(
    spec: ModelSpec, pieces: Iterable[Piece], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint, from a decoder's parameters: what `assembled` undoes."""
    shapes = spec.parameters()
    found: dict[str, Tensor] = {}
    for piece in pieces:
        parameter = shapes[piece.parameter]
        part = parameters[piece.parameter][piece.index(parameter)]
        shape = piece.shape(parameter)
        turned = (*shape[:-2], shape[-1], shape[-2]) if piece.is_turned else shape
        if piece.name not in found:
            found[piece.name] = part.new_zeros(turned)
        target = found[piece.name]
        if piece.order is None:
            target.copy_(part.reshape(turned) - piece.added)
        else:
            axis = piece.order.axis
            index = piece.order.index(turned[axis]).to(part.device)
            rows = part.reshape(*turned[:axis], len(index), *turned[axis + 1 :])
            target.index_copy_(axis, index, rows)
        if piece.is_turned:
            found[piece.name] = target.mT.contiguous()
    return found


def assembled(
    parameter: Parameter, pieces: list[Piece], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """A parameter of the decoder from tensors of a checkpoint, as `read_piece` fills it."""
    axis = max(len(parameter.shape) - 2, 0)
    parts: dict[int, list[Tensor]] = defaultdict(list)
    for piece in pieces:
        numbers = tensors[piece.name].to(dtype)
        numbers = numbers.mT if piece.is_turned else numbers
        if (order := piece.order) is not None:
            index = order.index(numbers.shape[order.axis]).to(numbers.device)
            numbers = numbers.index_select(order.axis, index)
        elif piece.added:
            numbers = numbers + piece.added
        shape = list(parameter.shape)
        if piece.part is not None:
            shape[axis] = parameter.rows[piece.part]
        if piece.expert is not None:
            shape[0] = 1
        parts[piece.part or 0].append(numbers.reshape(shape))
    # experts that come one by one, then what is stacked along the outputs
    stacks = [torch.cat(own) if len(own) > 1 else own[0] for _, own in sorted(parts.items())]
    return torch.cat(stacks, axis) if len(stacks) > 1 else stacks[0]

"""Family: what one line of models is called, and what differs in it from plain Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.fields import Fields
from quire.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One line of models."""

    name: str
    """What `model_type` says in config.json."""
    title: str
    """Its models, for people."""
    architectures: tuple[str, ...]
    """What `architectures` says in config.json."""
    quirks: Callable[[Fields, ModelSpec], ModelSpec]
    """Reads what is particular to the family from config.json into a spec that holds the rest."""
    gguf: str | None = None
    """What `general.architecture` says in a GGUF file, if such files exist."""
    gguf_key: str = ""
    """Where families share a GGUF architecture, the first one whose key the file has is taken; ""
    fits any file.
    """
    gguf_fits: Callable[[Checkpoint], bool] | None = None
    """Where such a key does not tell them apart: whether a file is of this one."""
    gguf_others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further names of its GGUF architecture, with the keys that such a file needs besides."""
    gguf_needs: tuple[str, ...] = ()
    """Keys after the architecture's name that a GGUF file must have, as no default stands for them."""
    gguf_lists: tuple[str, ...] = ()
    """Of those, the ones that must have a number for each layer."""
    gguf_fixed: Mapping[str, object] = field(default_factory=dict)
    """Such keys that must have this value where a GGUF file has them: no other is computed."""
    gguf_final_norm: str = "output_norm"
    gguf_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that GGUF files leave out, by their names in config.json."""
    has_partial_rope: bool = False
    """Whether `partial_rotary_factor` is read; other families rotate whole heads."""
    has_rope_alpha: bool = False
    """Whether dynamic rope has a fixed `alpha`, which changes its base."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's tensors that are not the usual ones (see `names.py`), "" where there is no
    such tensor.
    """
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's tensors that count where the files have them."""
    parallel_names: Mapping[str, str] = field(default_factory=dict)
    """Names in layers whose attention and MLP norm the same input each by itself."""
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_outside: Mapping[str, str] = field(default_factory=dict)
    """What GGUF files call the tensors of `outside`."""
    interleaved_rope: bool = False
    """Rope rotates neighbouring dimensions (2i, 2i + 1): rows of q and k are reordered when they
    are loaded.
    """
    gguf_interleaved_rope: bool = False
    """The same for GGUF files, which may have q and k in another order than Hugging Face's."""
    stacked_names: Mapping[str, str] = field(default_factory=dict)
    """Names in files that hold experts stacked, where the usual files of the family have other
    ones.
    """
    turned_experts: bool = False
    """Stacked experts that are not quantised lie with inputs before outputs."""
    turned_for_peft: bool = False
    """transformers says of turned experts that they are (`is_transposed`), so that PEFT since 0.19
    takes their inputs for A's columns.
    """
    alternating_gate_up: bool = False
    """Gate and up rows of stacked experts alternate (row 0 gate, row 1 up, ...)."""
    turned_products: bool = False
    """All of a layer's matrices lie with inputs before outputs."""
    qkv_by_key_head: bool = False
    """Rows of packed queries, keys and values lie by key heads: the queries that look at one, the
    key, the value. Not in GGUF files.
    """
    final_norm: str = "norm"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    outside: Mapping[str, str] = field(default_factory=dict)
    """Names of further tensors that are in no layer, by the decoder's parameters."""
    first_position: int = 0
    """Rows of the table of learned positions before that of position 0."""
    head: str = "lm_head"
    prefixes: tuple[str, ...] = ("model",)
    """What the names of embedding, layers and final norm begin with; the first one is usual."""
    unused: tuple[str, ...] = ()
    """What the names of tensors begin with that are not for text: they are left out."""
    ignored: tuple[str, ...] = ()
    """How the names end of further tensors in files that are not needed: constants, such as masks."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Of those, which must have the number that the kernels have built in."""
    ties_whole: bool | None = None
    """What an absent `tie_word_embeddings` means for a model that also sees; None: what it means
    for its text part.
    """
    text_has_head: bool = False
    """The text part of a model that also sees has a head of its own: `tie_word_embeddings` beside
    `text_config` means nothing then.
    """
    settings: Callable[[Fields], Fields] | None = None
    """Brings config.json into the usual form before it is read."""
    numbers_blocks: bool = False
    """Mixers and MLPs are layers of their own in the files, each with one norm."""
    has_drafting_layers: bool = False
    """Files may hold layers for multi-token prediction, after the last one or under a name of their
    own; they are ignored.
    """

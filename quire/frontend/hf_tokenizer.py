"""Reads a tokenizer from a folder in Hugging Face layout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from quire.checkpoints.files import read_json, read_text, safe_member
from quire.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from quire.frontend.tokenizer_parts import TokenizerParts
from quire.sampling_defaults import read_defaults

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MAX_TEMPLATE_BYTES = 2**22
_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")


def read_hf_tokenizer(folder: Path) -> TokenizerParts:
    """tokenizer.json is the tokenizer; the other files name its special tokens and hold its chat
    template.

    As in transformers 5, the post-processor in tokenizer.json alone decides what is put around a
    text; `add_bos_token` and `add_eos_token` in tokenizer_config.json are for tokenizers without
    that file.
    """
    if not _is_there(folder / "tokenizer.json"):
        _explain_missing(folder)
    file = safe_member(folder, "tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelFormatError(f"{file}: the tokenizers library can't read it: {error}") from None
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(config)
    if "added_tokens_decoder" not in config:
        # Older models keep the names of special tokens in a file of their own.
        named |= _named_tokens(_read_json(folder / "special_tokens_map.json"))
    _add_missing_tokens(backend, config, named, folder)
    ids = {name: backend.token_to_id(token.content) for name, token in named.items()}
    added = backend.get_added_tokens_decoder()
    return TokenizerParts(
        backend=backend,
        vocab_size=max(backend.get_vocab_size(), 1 + max(added, default=-1)),
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=_eos_token_ids(folder, ids.get("eos_token")),
        unk_token_id=_unk_token_id(backend, ids.get("unk_token")),
        named_tokens={name: token.content for name, token in named.items()},
        chat_templates=_chat_templates(folder, config),
        sampling_defaults=read_defaults(
            _read_json(folder / "generation_config.json"), "generation_config.json"
        ),
        class_name=str(config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
    )


def read_chat_templates(folder: Path) -> dict[str, str]:
    """A folder's chat templates by name, without the tokenizer they belong to."""
    return _chat_templates(folder, _read_json(folder / "tokenizer_config.json"))


def write_hf_tokenizer(parts: TokenizerParts, folder: Path) -> None:
    """Writes the files that `read_hf_tokenizer` makes the same tokenizer of. (The ends of an answer
    go into generation_config.json.)
    """
    parts.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = dict(parts.named_tokens)
    if parts.chat_templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in parts.chat_templates.items()
        ]
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    generation = {"eos_token_id": list(parts.eos_token_ids)}
    (folder / "generation_config.json").write_text(
        json.dumps(generation, indent=2) + "\n", encoding="utf-8"
    )


def _explain_missing(folder: Path) -> None:
    others = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
    if others:
        raise UnsupportedModelError(
            f"{folder} has {', '.join(others)} but no tokenizer.json, the only tokenizer file Quire reads. "
            "Get one from a newer revision of the model, or make it with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    raise ModelNotFoundError(
        f"{folder} has no tokenizer.json; a model folder needs one, or --skip-tokenizer-init and prompts of token ids"
    )


def _read_json(file: Path) -> dict[str, Any]:
    return read_json(file) if _is_there(file) else {}


def _is_there(file: Path) -> bool:
    """Even if it is a link to nowhere: that is an error, not a model without the file."""
    return os.path.lexists(file)


def _as_token(value: Any) -> AddedToken | None:
    """A special token is written as its text or as an object with its text and flags."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, dict) and isinstance(value.get("content"), str) and value["content"]:
        names = ("single_word", "lstrip", "rstrip", "normalized")
        flags = {name: bool(value.get(name, False)) for name in names}
        return AddedToken(value["content"], special=bool(value.get("special", True)), **flags)
    return None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    tokens = {name: _as_token(config.get(name)) for name in _NAMED_TOKENS}
    return {name: token for name, token in tokens.items() if token is not None}


def _add_missing_tokens(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    named: Mapping[str, AddedToken],
    folder: Path,
) -> None:
    """Tokens that only tokenizer_config.json knows: by id first, then those it names as special."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    try:
        by_id = sorted((int(token_id), _as_token(token)) for token_id, token in decoder.items())
    except (AttributeError, TypeError, ValueError):
        raise ModelFormatError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map token ids to tokens"
        ) from None
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = [
        *named.values(),
        *map(_as_token, extra.values() if isinstance(extra, dict) else extra),
    ]
    for token in [token for _, token in by_id] + special:
        if token is not None and token.content not in present:
            present.add(token.content)
            backend.add_tokens([token])


def _unk_token_id(backend: tokenizers.Tokenizer, named: int | None) -> int | None:
    """Many byte-level vocabularies name an unknown-token that their model never produces."""
    if isinstance(backend.model, models.Unigram):
        return named
    unknown = backend.model.unk_token
    return None if unknown is None else backend.token_to_id(unknown)


def _eos_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    value = _read_json(folder / "generation_config.json").get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    ids = [tokenizer_eos, *listed]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool)))


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja, else chat_template.json, else the key in tokenizer_config.json: text or
    a list.
    """
    jinja = folder / "chat_template.jinja"
    if _is_there(jinja):
        return {"default": read_text(jinja, _MAX_TEMPLATE_BYTES)}
    value = _read_json(folder / "chat_template.json").get("chat_template") or config.get(
        "chat_template"
    )
    if isinstance(value, str):
        return {"default": value}
    if value is None:
        return {}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (KeyError, TypeError):
        raise ModelFormatError(
            f"{folder}: chat_template must be text or a list of objects with name and template"
        ) from None

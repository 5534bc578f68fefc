"""Rebuilds a tokenizer from GGUF metadata (`tokenizer.ggml.*`).

A GGUF file has the vocabulary but not the whole pipeline: `tokenizer.ggml.pre` only names how text is cut
into words before merging. What each name means is fixed by the tokenizer.json of the models that use it.
Where transformers' own GGUF reader does less (it knows nothing of `smollm` and skips Qwen's NFC), the
models' tokenizer.json is what we follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quire.errors import ModelFormatError, UnsupportedModelError
from quire.frontend.tokenizer_parts import TokenizerParts, bos_eos_processor

_T = TypeVar("_T")

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

_WORD_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_WORD_TAIL}"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_WORD_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before byte-level merging."""

    words: str | None = None
    """Regex of one word; None is GPT-2's, which is built into the byte-level pre-tokenizer."""
    single_digits: bool = False
    nfc: bool = False
    whole_words_first: bool = False
    """A word that is a token is taken as it is, whatever the merges say."""
    adds_bos: bool = False
    """Whether texts start with the beginning-of-sequence token where the file does not say."""


_LLAMA3 = _PreTokenizer(_LLAMA3_WORDS, whole_words_first=True, adds_bos=True)
_GPT2 = _PreTokenizer()
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenizer(_QWEN2_WORDS, nfc=True),
    # SmolLM3 is a Llama 3 tokenizer without a beginning-of-sequence token, which llama.cpp calls this.
    "smaug-bpe": _PreTokenizer(_LLAMA3_WORDS, whole_words_first=True),
    "smollm": _PreTokenizer(single_digits=True),
    "tekken": _PreTokenizer(_TEKKEN_WORDS, whole_words_first=True, adds_bos=True),
}

# Ends of turn that some files mark as control tokens without listing them as ends.
_END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")


def read_gguf_tokenizer(metadata: Mapping[str, object]) -> TokenizerParts:
    """Builds the tokenizer that `tokenizer.ggml.model` names: "gpt2" or "llama"."""
    reader = _Metadata(metadata)
    tokens = reader.strings("tokens")
    types = reader.integers("token_type", len(tokens))
    model = reader.string("model")
    if model == "gpt2":
        backend, adds_bos = _byte_level(reader, tokens)
    elif model == "llama":
        backend, adds_bos = _sentencepiece(reader, tokens, types), True
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is {model!r}; Quire reads 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    ids = {
        name: reader.token_id(key, len(tokens))
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
    }
    named = {name: (tokens[token_id], token_id) for name, token_id in ids.items() if token_id is not None}
    backend.add_tokens(_added_tokens(tokens, types, {token_id for _, token_id in named.values()}))
    backend.post_processor = bos_eos_processor(
        named.get("bos_token") if reader.flag("add_bos_token", adds_bos) else None,
        named.get("eos_token") if reader.flag("add_eos_token", False) else None,
    )
    ends = [ids["eos_token"]]
    ends += [reader.token_id(key, len(tokens)) for key in ("eot_token_id", "eom_token_id")]
    ends += [i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_TEXTS]
    return TokenizerParts(
        backend=backend,
        vocab_size=len(tokens),
        bos_token_id=ids["bos_token"],
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        unk_token_id=ids["unk_token"] if model == "llama" else None,
        named_tokens={name: token for name, (token, _) in named.items()},
        chat_templates=reader.chat_templates(),
    )


def _byte_level(reader: _Metadata, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = reader.string("pre")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer Quire does not know; "
            f"it knows {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    merges = []
    for index, merge in enumerate(reader.strings("merges")):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ModelFormatError(f"tokenizer.ggml.merges[{index}] is not two tokens with a space between")
        merges.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = _build_bpe(vocabulary, merges, ignore_merges=pre.whole_words_first)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.words is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.words is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(reader: _Metadata, tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    scores = reader.floats("scores", len(tokens))
    mergeable = {
        token: index for index, token in enumerate(tokens) if types[index] not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    }
    unknown = reader.token_id("unknown_token_id", len(tokens))
    backend = _build_bpe(
        {token: index for index, token in enumerate(tokens)},
        _merges_from_scores(mergeable, scores),
        fuse_unk=True,
        byte_fallback=any(kind == _BYTE for kind in types),
        unk_token=None if unknown is None else tokens[unknown],
    )
    space_prefix = reader.flag("add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if space_prefix else "never", split=False
    )
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(mergeable: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges a SentencePiece vocabulary implies: better scores first, then longer left and right parts.

    Control, byte and unused tokens take no part: SentencePiece never makes them out of text.
    """
    ranked = []
    for token, index in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[index], -len(left), -len(right), index, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _build_bpe(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    ignore_merges: bool = False,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    unk_token: str | None = None,
) -> tokenizers.Tokenizer:
    try:
        bpe = models.BPE(
            vocab=vocabulary,
            merges=merges,
            ignore_merges=ignore_merges,
            fuse_unk=fuse_unk,
            byte_fallback=byte_fallback,
            unk_token=unk_token,
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelFormatError(
            f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}; the file may be damaged"
        ) from None
    return tokenizers.Tokenizer(bpe)


def _added_tokens(tokens: Sequence[str], types: Sequence[int], named: set[int]) -> list[AddedToken]:
    """Control tokens (and those with a role by name) are special; user-defined ones are only matched whole.

    All are in the vocabulary already, so they keep their ids.
    """
    added = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        special = kind in (_CONTROL, _UNKNOWN) or index in named
        if token and (special or kind == _USER_DEFINED):
            added.append(AddedToken(token, special=special, normalized=False))
    return added


class _Metadata:
    """Typed access to `tokenizer.ggml.*`; what is missing or of the wrong type is a ModelFormatError."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def string(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def token_id(self, key: str, count: int) -> int | None:
        value = self._values.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise self._wrong(key, f"a token id below {count}", value)
        return value

    def strings(self, key: str) -> Sequence[str]:
        value = self._get(key)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "an array of strings", value)
        return value

    def integers(self, key: str, count: int) -> Sequence[int]:
        value = self._get(key)
        if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
            raise self._wrong(key, "an array of integers", value)
        return self._of_length(key, value, count)

    def floats(self, key: str, count: int) -> Sequence[float]:
        value = self._get(key)
        if not isinstance(value, list | tuple) or not all(isinstance(item, int | float) for item in value):
            raise self._wrong(key, "an array of numbers", value)
        return self._of_length(key, value, count)

    def chat_templates(self) -> dict[str, str]:
        """`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for each further one."""
        start = "tokenizer.chat_template"
        return {
            key.removeprefix(start).removeprefix(".") or "default": value
            for key, value in self._values.items()
            if isinstance(value, str) and (key == start or key.startswith(f"{start}."))
        }

    def _get(self, key: str) -> object:
        name = f"tokenizer.ggml.{key}"
        if name not in self._values:
            raise ModelFormatError(f"the GGUF metadata has no {name}; convert the model again with a current llama.cpp")
        return self._values[name]

    @staticmethod
    def _of_length(key: str, value: Sequence[_T], count: int) -> Sequence[_T]:
        if len(value) != count:
            raise ModelFormatError(f"tokenizer.ggml.{key} has {len(value)} entries for {count} tokens")
        return value

    @staticmethod
    def _wrong(key: str, expected: str, value: object) -> ModelFormatError:
        return ModelFormatError(f"tokenizer.ggml.{key} must be {expected}, not {str(value)[:60]!r}")

"""Rebuilds a tokenizer from GGUF metadata (`tokenizer.ggml.*`).

A GGUF file has the vocabulary but not the whole pipeline: `tokenizer.ggml.pre` only names how text
is cut into words before merging. What each name means is fixed by the tokenizer.json of the models
that use it. Where transformers' own GGUF reader does less (it knows nothing of `smollm` and skips
Qwen's NFC), the models' tokenizer.json is what we follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire.checkpoints.fields import Fields
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.frontend.tokenizer_parts import TokenizerParts
from quire.sampling_defaults import read_gguf_defaults

_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

_WORD_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_WORD_TAIL}"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_WORD_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HUNYUAN_WORDS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before byte-level merging."""

    words: str | tuple[str, ...] = ()
    """Regex of one word, or several that cut one after the other; none is GPT-2's, which is built
    into the byte-level pre-tokenizer.
    """
    single_digits: bool = False
    nfc: bool = False
    whole_words_first: bool = False
    """A word that is a token is taken as it is, whatever the merges say."""
    adds_bos: bool = False
    """Whether texts start with the beginning-of-sequence token where the file does not say."""


_LLAMA3 = _PreTokenizer(_LLAMA3_WORDS, whole_words_first=True, adds_bos=True)
_GPT2 = _PreTokenizer()
_GPT4 = _PreTokenizer(_LLAMA3_WORDS)
_STARCODER = _PreTokenizer(single_digits=True)
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _PreTokenizer(_LLAMA3_WORDS, whole_words_first=True),
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "qwen2": _PreTokenizer(_QWEN2_WORDS, nfc=True),
    # SmolLM3 is a Llama 3 tokenizer without a beginning-of-sequence token, which llama.cpp calls
    # this.
    "smaug-bpe": _PreTokenizer(_LLAMA3_WORDS, whole_words_first=True),
    "smollm": _STARCODER,
    "tekken": _PreTokenizer(_CASED_WORDS % ("", "", ""), whole_words_first=True, adds_bos=True),
    # gpt-oss and Phi-4-mini.
    "gpt-4o": _PreTokenizer(_CASED_WORDS % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}")),
    # Phi-4, OLMo 2 and 3, Granite 4: GPT-4's.
    "dbrx": _GPT4,
    "glm4": _GPT4,
    "chatglm-bpe": _GPT4,
    # StarCoder 2, and Granite 3, whose tokenizer llama.cpp knows by another model's name.
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "command-r": _PreTokenizer(single_digits=True, nfc=True),
    "seed-coder": _PreTokenizer(_SEED_WORDS),
    # of DeepSeek-V3
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3"), _PreTokenizer(_HUNYUAN_WORDS)),
}

# Architectures whose control tokens swallow the white space behind them, but for these: files do
# not say so, their models' tokenizer.json do. For SentencePiece alone: later models of such an
# architecture have other tokenizers.
_STRIPPING = {"phi3": ("<unk>", "<s>", "<|endoftext|>")}

# Ends of turn that some files mark as control tokens without listing them as ends.
_END_TEXTS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"),
    *("<end_of_turn>", "<|end|>", "<|return|>", "<|call|>"),
)
_MESSAGE_END = "<|end|>"
"""Phi's end of turn; where there is `<|call|>` (gpt-oss) it is the end of a message, after which
others may follow.
"""


def read_gguf_tokenizer(metadata: Mapping[str, object]) -> TokenizerParts:
    """Builds the tokenizer that `tokenizer.ggml.model` names: "gpt2" or "llama"."""
    fields = Fields(metadata, "the GGUF metadata", "tokenizer.ggml.")
    tokens = fields.list_of("tokens", str)
    types = _one_for_each(tokens, fields, "token_type", int)
    model = fields.string("model")
    if model == "gpt2":
        backend, adds_bos = _byte_level(fields, tokens)
    elif model == "llama":
        backend, adds_bos = _sentencepiece(fields, tokens, types), True
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is {model!r}; Quire reads 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    ids = {name: _token_id(fields, key, tokens) for name, key in _NAMED_TOKENS.items()}
    named = {
        name: (tokens[token_id], token_id) for name, token_id in ids.items() if token_id is not None
    }
    unstripped = (
        _STRIPPING.get(str(metadata.get("general.architecture"))) if model == "llama" else None
    )
    backend.add_tokens(
        _added_tokens(tokens, types, {token_id for _, token_id in named.values()}, unstripped)
    )
    bos = named.get("bos_token") if fields.boolean("add_bos_token", adds_bos) else None
    eos = named.get("eos_token") if fields.boolean("add_eos_token", False) else None
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])],
        special_tokens=[token for token in (bos, eos) if token is not None],
    )
    ends = [
        ids["eos_token"],
        *(_token_id(fields, key, tokens) for key in ("eot_token_id", "eom_token_id")),
    ]
    ends += _end_ids(tokens, types)
    return TokenizerParts(
        backend=backend,
        vocab_size=len(tokens),
        bos_token_id=ids["bos_token"],
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        unk_token_id=ids["unk_token"] if model == "llama" else None,
        named_tokens={name: token for name, (token, _) in named.items()},
        chat_templates=_chat_templates(metadata),
        sampling_defaults=read_gguf_defaults(metadata),
    )


def _end_ids(tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    found = {
        token: i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_TEXTS
    }
    if "<|call|>" in found:
        found.pop(_MESSAGE_END, None)
    return list(found.values())


def _token_id(fields: Fields, key: str, tokens: Sequence[str]) -> int | None:
    return fields.integer(key, low=0, high=len(tokens) - 1) if key in fields else None


def _one_for_each(tokens: Sequence[str], fields: Fields, key: str, kind: type) -> list[Any]:
    values = fields.list_of(key, kind)
    if len(values) != len(tokens):
        raise ModelFormatError(
            f"tokenizer.ggml.{key} has {len(values)} entries for {len(tokens)} tokens"
        )
    return values


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for each further one."""
    start = "tokenizer.chat_template"
    return {
        key.removeprefix(start).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if isinstance(value, str) and (key == start or key.startswith(f"{start}."))
    }


def _byte_level(fields: Fields, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    if "pre" not in fields:
        message = "the GGUF metadata has no tokenizer.ggml.pre; convert the model again with a current llama.cpp"
        raise ModelFormatError(message)
    name = fields.string("pre")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        message = (
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer Quire does not know; it knows {known}"
        )
        raise UnsupportedModelError(message)
    merges = [merge.partition(" ")[::2] for merge in fields.list_of("merges", str)]
    for index, (left, right) in enumerate(merges):
        if not (left and right):
            raise ModelFormatError(
                f"tokenizer.ggml.merges[{index}] is not two tokens with a space between"
            )
    backend = _build_bpe(tokens, merges, ignore_merges=pre.whole_words_first)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    cuts = (pre.words,) if isinstance(pre.words, str) else pre.words
    steps += [pre_tokenizers.Split(Regex(words), behavior="isolated") for words in cuts]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(
    fields: Fields, tokens: Sequence[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    scores = _one_for_each(tokens, fields, "scores", Real)
    mergeable = {
        token: index
        for index, token in enumerate(tokens)
        if types[index] not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    }
    unknown = _token_id(fields, "unknown_token_id", tokens)
    backend = _build_bpe(
        tokens,
        _merges_from_scores(mergeable, scores),
        fuse_unk=True,
        byte_fallback=any(kind == _BYTE for kind in types),
        unk_token=None if unknown is None else tokens[unknown],
    )
    space_prefix = fields.boolean("add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if space_prefix else "never", split=False
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if space_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(
    mergeable: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The merges a SentencePiece vocabulary implies: better scores first, then longer left and
    right parts.

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
    tokens: Sequence[str], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ModelFormatError(
            f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}; the file may be damaged"
        ) from None


def _added_tokens(
    tokens: Sequence[str], types: Sequence[int], named: set[int], unstripped: Sequence[str] | None
) -> list[AddedToken]:
    """Control tokens (and those with a role by name) are special; user-defined ones are only
    matched whole. All but the `unstripped` ones swallow the white space behind them; None: none
    does.

    All are in the vocabulary already, so they keep their ids.
    """
    marked = named.union(
        index for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
    )
    return [
        AddedToken(
            tokens[index],
            special=types[index] != _USER_DEFINED or index in named,
            normalized=False,
            rstrip=unstripped is not None and tokens[index] not in unstripped,
        )
        for index in sorted(marked)
        if tokens[index]
    ]

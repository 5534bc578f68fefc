"""Small tokenizers trained on the spot, the same ones as GGUF metadata, and text in many scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer

if TYPE_CHECKING:
    import gguf

TEXTS = [
    "The quick brown fox doesn't jump; it's lazy, isn't it?  I'LL see.",
    "Fußgängerübergänge, œuvre, naïve café, señor, Þórr, ő",
    "Съешь ещё этих мягких французских булок, да выпей чаю",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "我能吞下玻璃而不伤身体。色は匂へど散りぬるを、ｶﾀｶﾅ",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷 ❤️ a👩b",
    "e\u0301 o\u0308 n\u0303 Å \u212b \u1e9b\u0323 Z\u0351\u036b\u0343",
    "   leading, trailing   and \t tabs\n\n\nlines\r\n  \u00a0nbsp\u3000wide \n",
    "def f(x):\n    if x >= 10:\n\t\treturn [i**2 for i in range(x)]  # comment\n",
    "3.14159 1000000 12,345 0x1F 2024-11-15 ½ ² ٣٤٥ १२३  7   42",
    "\x00\x01\x1f\x7f\u200b\ufeff\ufffd \U000e0001 \U0010ffff",
    "snake_case camelCase HTTPServer iPhone's McDONALD'S ALLCAPS'RE",
    "https://example.org/a?b=c&d=%20#e <div class='x'>&amp;</div> [INST] </s>",
    "",
    " ",
    "\n",
    "a",
]

anything = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.text(st.sampled_from(" \n\t\r'aAzZ019.,<|>/_éЖ中あ한👍\u0301\u200d"), max_size=40),
    st.lists(st.sampled_from(TEXTS), max_size=3).map(" ".join),
)

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {"llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-4o": (_O200K,),
    "dbrx": (_WORDS % "{1,3}",),
    "glm4": (_WORDS % "{1,3}",),
    "chatglm-bpe": (_WORDS % "{1,3}",),
    "falcon3": (_WORDS % "{1,3}",),
    "falcon-h1": (_WORDS % "{1,3}",),
    "lfm2": (_WORDS % "{1,3}",),
    "starcoder": (),
    "refact": (),
    "command-r": (),
    "seed-coder": ((_WORDS % "{1}").replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),),
    "hunyuan-dense": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
}
"""By the name in GGUF files, the regexes of the models' tokenizer.json; none: digits, then GPT-2's
words.
"""
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]


def corpus() -> list[str]:
    return [text for text in TEXTS for _ in range(3)]


def train_byte_level(pre: str) -> Tokenizer:
    """Byte-level BPE as tokenizer.json has it for Llama 3, Qwen2, SmolLM2 or GPT-2; added tokens
    last.
    """
    tokenizer = Tokenizer(models.BPE())
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pre in WORDS:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(WORDS[pre]), "isolated")
        ]
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def resplit(tokenizer: Tokenizer, pre: str) -> Tokenizer:
    """The same vocabulary behind another of `SPLITS`."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.normalizer = normalizers.NFC() if pre == "command-r" else normalizers.Sequence([])
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[pre]
    ] or [pre_tokenizers.Digits(individual_digits=True)]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not SPLITS[pre]))
    copy.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return copy


def byte_level_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What a converter writes into a GGUF file for such a tokenizer."""
    added = tokenizer.get_added_tokens_decoder()
    tokens = [str(tokenizer.id_to_token(index)) for index in range(tokenizer.get_vocab_size())]
    merges = [" ".join(pair) for pair in _model_state(tokenizer)["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            (3 if added[index].special else 4) if index in added else 1
            for index in range(len(tokens))
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokenizer.token_to_id("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }


def sentencepiece_metadata(space_prefix: bool = True) -> dict[str, Any]:
    """A SentencePiece BPE vocabulary: control tokens, bytes, merged pieces by rank, then
    characters.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=2500, show_progress=False))
    merged = ["".join(pair) for pair in _model_state(trained)["merges"]]
    merged = list(dict.fromkeys(merged))
    # some text needs byte fallback
    characters = sorted(set(trained.get_vocab()) - set(merged) - {"é", "Ж"})
    pieces = merged + characters
    return _sentencepiece(pieces, [-float(rank) for rank in range(len(pieces))], space_prefix)


def ambiguous_metadata() -> dict[str, Any]:
    """A SentencePiece vocabulary in which most text can be merged in many ways, with many equal
    scores.
    """
    pieces = ["".join(letters) for size in (1, 2, 3, 4) for letters in product("ab▁", repeat=size)]
    return _sentencepiece(
        pieces, [-float(rank * 7 % 5) for rank in range(len(pieces))], space_prefix=True
    )


def _sentencepiece(pieces: list[str], scores: list[float], space_prefix: bool) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{b:02X}>" for b in range(256)),
            *pieces,
        ],
        "tokenizer.ggml.scores": [0.0] * 259 + scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def transformers_from_gguf(metadata: Mapping[str, Any], folder: Path) -> Any:
    """What transformers makes of a GGUF file with this metadata."""
    import gguf  # not on every machine with a GPU, where others of these functions are wanted

    writer = gguf.GGUFWriter(folder / "tokenizer.gguf", "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if key != "general.architecture":
            _write(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(folder, gguf_file="tokenizer.gguf")


def special_ids_in(ids: Iterable[int], tokenizer: Any) -> list[int]:
    return [token_id for token_id in ids if token_id in tokenizer.special_token_ids]


def _model_state(tokenizer: Tokenizer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return state


def _write(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)

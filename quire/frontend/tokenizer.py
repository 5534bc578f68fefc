"""Text to token ids and back.

Which text may become which token is decided here:

- *Special tokens* (`special: true` in tokenizer.json, type CONTROL in GGUF) steer the model.
  `encode` never makes one out of text, however the text is written; only `allow_special=True`,
  which is for text that Quire rendered itself, does. The one exception is the unknown-token, which
  stands for what a vocabulary without byte fallback has no token for.
- *Added tokens that are not special* (Qwen's `<tool_call>`, `<think>`, …) are ordinary vocabulary
  to `encode`, as they are to transformers. Inside a chat they can be turn markers; see
  `chat_template.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quire.errors import InvalidRequestError
from quire.frontend.gguf_tokenizer import read_gguf_tokenizer
from quire.frontend.hf_tokenizer import read_hf_tokenizer
from quire.frontend.token_text import TokenText, byte_level_alphabet
from quire.frontend.tokenizer_parts import TokenizerParts

# Stands before a text that continues another one, so that the tokenizer does not take its beginning
# for the beginning of everything (SentencePiece puts a space there). Two code points Unicode leaves
# to private use; met inside a user's text they are cut apart like any other forged token.
_CONTINUES = "\U0010fffd\U0010fffc"


# From here on a text is encoded by the library's call for batches: unlike the one for single texts,
# it lets other threads run meanwhile, and long texts take long.
_LONG_TEXT = 1000


def byte_backend() -> tokenizers.Tokenizer:
    """What `Tokenizer.of_bytes` computes with; saved, it is a tokenizer.json that any engine reads."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


class Tokenizer:
    """A `tokenizers` tokenizer with its special tokens, ends of answer and chat templates.

    Safe to share between threads: nothing changes after construction but a cache of token texts.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = parts.vocab_size
        self.has_text = True
        """False: tokens stand for no text (`without_text`)."""
        self.class_name = parts.class_name
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.sampling_defaults = parts.sampling_defaults
        self.named_tokens: Mapping[str, str] = dict(parts.named_tokens)
        self.chat_templates: Mapping[str, str] = dict(parts.chat_templates)
        self.added_tokens: Mapping[int, AddedToken] = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            i for i, token in self.added_tokens.items() if token.special
        )
        self._text = TokenText(self._backend, self.vocab_size)
        self.whole_texts: Mapping[bool, dict[int, str]] = {False: {}, True: {}}
        """Texts of tokens that are whole characters, with special tokens skipped or not: what
        streams have met so far (`IncrementalDetokenizer`).
        """
        self.strips_first_space = self._text.strips_first_space
        self._plain, guard_id = _without_special_tokens(self._backend)
        self._forbidden = (self.special_token_ids - {parts.unk_token_id}) | {guard_id}
        self._prefix, self._suffix = _surroundings(self._backend)

    @classmethod
    def from_hf_folder(cls, folder: str | Path) -> Tokenizer:
        """From a folder in Hugging Face layout, read as transformers' fast tokenizers read it."""
        return cls(read_hf_tokenizer(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """From a GGUF file's metadata: key to plain Python value, arrays as lists or tuples."""
        return cls(read_gguf_tokenizer(metadata))

    @classmethod
    def of_bytes(cls) -> Tokenizer:
        """Bytes as tokens, for teaching models (folders of `.npy` files), which have no tokenizer:
        token i is byte i of the text in UTF-8, for i below 256; tokens from there on stand for no
        text.
        """
        return cls(
            TokenizerParts(
                byte_backend(),
                vocab_size=256,
                bos_token_id=None,
                eos_token_ids=(),
                unk_token_id=None,
            )
        )

    @classmethod
    def without_text(cls) -> Tokenizer:
        """For a model whose prompts and answers are token ids: no token stands for any text."""
        backend = tokenizers.Tokenizer(models.BPE(vocab={}, merges=[]))
        backend.decoder = decoders.ByteLevel()
        tokenizer = cls(
            TokenizerParts(
                backend, vocab_size=0, bos_token_id=None, eos_token_ids=(), unk_token_id=None
            )
        )
        tokenizer.has_text = False
        return tokenizer

    def need_text(self, field: str) -> None:
        """Raises InvalidRequestError where there is none."""
        if not self.has_text:
            raise InvalidRequestError(
                field, "needs the model's tokenizer, and none was loaded: send token ids"
            )

    def encode(
        self, text: str, add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` puts the model's beginning-of-sequence token (and whatever else its
        tokenizer adds) around them. `allow_special` reads special tokens' text in `text` as those
        tokens: never use it on text that came from a user.
        """
        self.need_text("text")
        if allow_special:
            ids: list[int] = self._encode_with(self._backend, text).ids
        else:
            ids = self.encode_plain(text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_plain(
        self, text: str, cuts: Sequence[int] = (), continues: bool = False
    ) -> list[int]:
        """Token ids of `text` with no special token among them.

        No token spans a position in `cuts`. `continues` says that other text stands before this
        one, so its beginning gets no space of SentencePiece's own.
        """
        self.need_text("text")
        ids: list[int] = []
        bounds = sorted({0, *cuts, len(text)})
        todo = list(pairwise(bounds))[::-1]
        while todo:
            start, end = todo.pop()
            lead = _CONTINUES if continues or start else ""
            encoding = self._encode_with(self._plain, lead + text[start:end])
            piece_ids: list[int] = encoding.ids[1:] if lead else encoding.ids
            if self._forbidden.isdisjoint(piece_ids):
                ids.extend(piece_ids)
                continue
            # Merges can spell out a special token. Its text is cut apart, so that they no longer
            # do.
            inner = [start, end]
            for token_id, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
                if token_id in self._forbidden and first >= len(lead):
                    if last - first < 2:
                        raise InvalidRequestError(
                            "text",
                            f"holds {self.id_to_token(token_id)!r}, a control token of this model",
                        )
                    inner.append(start - len(lead) + first + 1)
            todo += list(pairwise(sorted(inner)))[::-1]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The tokens' bytes read as UTF-8, with U+FFFD where they are not; special tokens only when
        asked.
        """
        if not self.has_text:
            return ""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in skipped])
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; may be part of a character. A gap in the vocabulary stands for
        nothing.
        """
        self._check_id(token_id)
        return self._text[token_id]

    def id_to_token(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        self._check_id(token_id)
        return self._backend.id_to_token(token_id) or ""

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    def _check_id(self, token_id: int) -> None:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequestError("token_ids", f"token ids are whole numbers, not {token_id!r}")
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(
                "token_ids",
                f"token id {token_id} is outside the vocabulary, which has {self.vocab_size} tokens",
            )

    @staticmethod
    def _encode_with(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        try:
            if isinstance(text, str) and len(text) > _LONG_TEXT:
                return backend.encode_batch([text], add_special_tokens=False)[0]
            return backend.encode(text, add_special_tokens=False)
        except TypeError:
            if not isinstance(text, str):
                raise InvalidRequestError(
                    "text", f"must be a string, not {type(text).__name__}"
                ) from None
            raise InvalidRequestError("text", "holds half of a UTF-16 surrogate pair") from None


def _without_special_tokens(backend: tokenizers.Tokenizer) -> tuple[tokenizers.Tokenizer, int]:
    """A twin that reads special tokens' text as plain text, and the id of its continuation mark.

    The switch for that is a mutable attribute, and requests are encoded from several threads, so
    there are two tokenizers. They share the model (the vocabulary and merges), so the second costs
    well under 1 ms.
    """
    plain = tokenizers.Tokenizer(backend.model)
    plain.normalizer = backend.normalizer
    plain.pre_tokenizer = backend.pre_tokenizer
    added = sorted(backend.get_added_tokens_decoder().items())
    plain.add_tokens([token for _, token in added])
    if any(plain.token_to_id(token.content) != token_id for token_id, token in added):
        # Added tokens that are not numbered in order can only be had by reading the whole file
        # again.
        plain = tokenizers.Tokenizer.from_str(backend.to_str())
    plain.add_tokens([AddedToken(_CONTINUES, normalized=False)])
    plain.encode_special_tokens = True
    guard_id = plain.token_to_id(_CONTINUES)
    assert guard_id is not None
    return plain, guard_id


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's post-processor puts before and after every text."""
    encoding = backend.encode("a", add_special_tokens=True)
    ids: list[int] = encoding.ids
    ours = [
        index for index, is_special in enumerate(encoding.special_tokens_mask) if not is_special
    ]
    return (ids[: ours[0]], ids[ours[-1] + 1 :]) if ours else (ids, [])

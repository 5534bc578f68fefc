"""From a request's `structured` parameter to a compiled grammar, checked, cached and shared; and
where an answer stands in one.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from quire.constrain import limits
from quire.constrain.ahead import MaskCosts
from quire.constrain.checker import GrammarChecker, Verdict
from quire.constrain.guidance import (
    build_tokenizer,
    error_of,
    field_of,
    new_matcher,
    run_with_stack,
    to_guidance,
)
from quire.errors import InvalidRequestError
from quire.sampling_params import StructuredOutput

if TYPE_CHECKING:
    import llguidance

_PARSER_ERROR = "Parser Error"
"""How llguidance begins what its limits on a text's parse have to say; others are the automaton's."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TokenizerLike(Protocol):
    """What is needed of `quire.frontend.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode_plain(
        self, text: str, cuts: Sequence[int] = (), continues: bool = False
    ) -> list[int]: ...


class Vocabulary:
    """A model's tokens in the forms that compiling and masking need. One per engine."""

    def __init__(
        self, tokenizer: TokenizerLike, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        # A model's vocabulary is often padded; ids beyond the tokenizer's stand for nothing.
        known = min(tokenizer.vocab_size, vocab_size)
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (
            vocab_size - known
        )
        special = {i for i in tokenizer.special_token_ids if i < known} | set(self.eos_token_ids)
        self.special_token_ids = sorted(special)
        self.text_token_ids = [
            i for i, token in enumerate(self.tokens) if token and i not in special
        ]
        """Tokens that text is made of: only these, and the ends, are ever allowed."""

        def encode(text: str) -> list[int]:
            return tokenizer.encode_plain(text, continues=True)

        self.guidance = build_tokenizer(
            self.tokens, self.special_token_ids, self.eos_token_ids, encode
        )

    def special_ids(self, texts: Sequence[str]) -> list[int]:
        """The special tokens with these texts."""
        wanted = {text.encode() for text in texts}
        return [i for i in self.special_token_ids if self.tokens[i] in wanted]


class Grammar:
    """A compiled grammar. Many requests may use it at once; each takes a matcher of its own.

    Copies of a matcher share the automaton they build as text comes, which makes most masks cheap.
    The automaton has a limit, though, and one request's odd text must not use it up for another:
    whoever meets the limit asks for a `private_matcher` and is judged by that.
    """

    def __init__(
        self,
        text: str,
        vocabulary: Vocabulary,
        num_bytes: int,
        control_token_ids: Sequence[int] = (),
    ) -> None:
        self.vocabulary = vocabulary
        self.control_token_ids = tuple(control_token_ids)
        """Control tokens it may have the model write, beside tokens of text."""
        self.num_bytes = num_bytes
        """What it takes in memory, before requests grow its automaton."""
        self.costs = MaskCosts()
        self._text = text
        self._lock = threading.Lock()
        self._pristine: llguidance.LLMatcher | None = self._compile()
        self.first_mask = b""
        """The one that all requests begin with, computed here so that no step waits for it. Copies
        of a matcher that has it take their first token sooner, too.
        """
        if not error_of(self._pristine):
            started = time.monotonic()
            self.first_mask = self._pristine.compute_bitmask()
            self.costs.note(time.monotonic() - started)

    @property
    def error(self) -> str:
        """Why it can't be used; empty for a good one."""
        with self._lock:
            return error_of(self._pristine) if self._pristine is not None else ""

    def prepare(self) -> None:
        """Compiles it again if that is due, so that `matcher` need not."""
        with self._lock:
            if self._pristine is None:
                self._pristine = self._compile()

    def matcher(self) -> llguidance.LLMatcher:
        """At the beginning of a text, sharing what other matchers learn."""
        self.prepare()
        with self._lock:
            pristine = self._pristine
        return self._compile() if pristine is None else pristine.deep_copy()

    def private_matcher(self) -> llguidance.LLMatcher:
        """At the beginning of a text, sharing nothing. Asked for when the shared automaton is full,
        so that is let go of as well.
        """
        with self._lock:
            self._pristine = None
        return self._compile()

    def _compile(self) -> llguidance.LLMatcher:
        matchers: list[llguidance.LLMatcher] = []
        run_with_stack(
            limits.ENGINE_STACK,
            lambda: matchers.append(new_matcher(self.vocabulary.guidance, self._text)),
        )
        return matchers[0]


class GrammarState:
    """One answer's place in its grammar: which tokens it has, and so which may come next.

    Not safe to share between threads; states of one grammar are independent of each other.
    """

    def __init__(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> None:
        """`token_ids` is the answer so far, for a request that comes back after a preemption."""
        self.grammar = grammar
        self._tokens: list[int] = []
        self.is_private = False
        """Whether it has an automaton of its own."""
        self.matcher = grammar.matcher()
        for token_id in token_ids:
            self.advance(token_id)

    @property
    def is_at_start(self) -> bool:
        """Its next mask is the grammar's first."""
        return not self._tokens and not self.is_private

    @property
    def error(self) -> str:
        """What went wrong; empty if nothing did."""
        return error_of(self.matcher)

    @property
    def is_finished(self) -> bool:
        """Nothing can follow: the text is complete, or its end token has come."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def may_end(self) -> bool:
        """The text so far is a whole one."""
        return self.matcher.is_accepting()

    def advance(self, token_id: int) -> bool:
        """Takes the next token; False, for good, if the grammar does not allow it."""
        self._tokens.append(token_id)
        return self.matcher.consume_token(token_id) or (
            self.start_over() and not self.matcher.is_error()
        )

    def forced_tokens(self) -> list[int]:
        """Tokens that spell the text which must follow, as the tokenizer would cut it; none where
        there is a choice.
        """
        tokens: list[int] = [] if self.is_private else self.matcher.compute_ff_tokens()
        return tokens

    def start_over(self) -> bool:
        """After an error: takes all tokens again with an automaton of its own, which only its own
        text can fill.

        False if the error is its own: that was done before, or it is the parser's, which nobody
        shares.
        """
        if self.is_private or self.error.startswith(_PARSER_ERROR):
            return False
        self.is_private = True
        self.matcher = self.grammar.private_matcher()
        self.matcher.consume_tokens(self._tokens)
        return True


class BoundedCache(Generic[K, V]):
    """A cache with two bounds: how many entries, and how many bytes they stand for. The least
    recently used go first. Safe to share between threads.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Something larger than the whole cache is not kept."""
        with self._lock:
            old = self._entries.pop(key, None)
            self._bytes -= old[1] if old is not None else 0
            if num_bytes > self._max_bytes:
                return
            self._entries[key] = (value, num_bytes)
            self._bytes += num_bytes
            while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self._bytes -= freed


class GrammarCompiler:
    """Compiles grammars for one model, remembering the good and the bad. Safe to share between
    threads.

    Nothing is made before the first grammar: an engine nobody asks for structure pays nothing.
    """

    def __init__(
        self, tokenizer: TokenizerLike, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(i for i in eos_token_ids if i < vocab_size)
        self._vocabulary: Vocabulary | None = None
        self._checker: GrammarChecker | None = None
        self._grammars = BoundedCache[StructuredOutput, Grammar](
            limits.CACHE_ENTRIES, limits.CACHE_BYTES
        )
        self._in_use: weakref.WeakValueDictionary[StructuredOutput, Grammar] = (
            weakref.WeakValueDictionary()
        )
        """A grammar that anybody holds is found here, cached or not."""
        self._verdicts = BoundedCache[StructuredOutput, Verdict](
            limits.VERDICTS, limits.VERDICT_BYTES
        )
        self._lock = threading.Lock()

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Raises InvalidRequestError, naming the field, for a grammar that is wrong or costs too
        much.

        A usual grammar takes some milliseconds, any one at most a few seconds, and one that is
        cached or in use next to nothing. One grammar is compiled at a time.
        """
        grammar = self._grammars.get(structured) or self._in_use.get(structured)
        if grammar is None:
            with self._lock:
                # Somebody may have compiled it meanwhile.
                grammar = self._grammars.get(structured) or self._compile(structured)
        grammar.prepare()  # whoever asks first does so beside the steps
        return grammar

    def close(self) -> None:
        """Ends the process that checks grammars."""
        with self._lock:
            if self._checker is not None:
                self._checker.close()

    def _compile(self, structured: StructuredOutput) -> Grammar:
        vocabulary, checker = self._prepare()
        text = to_guidance(structured)
        verdict = self._verdicts.get(structured)
        if verdict is None:
            verdict = checker.check(text)
            if verdict.num_bytes > limits.GRAMMAR_BYTES and not verdict.error:
                error = f"takes {verdict.num_bytes >> 20} MiB; at most {limits.GRAMMAR_BYTES >> 20} are allowed"
                verdict = replace(verdict, error=error)
            self._verdicts.put(structured, verdict, _text_bytes(structured))
        if verdict.error:
            raise InvalidRequestError(field_of(structured), verdict.error)
        grammar = Grammar(
            text, vocabulary, verdict.num_bytes, vocabulary.special_ids(structured.control_tokens)
        )
        if grammar.error:
            raise InvalidRequestError(field_of(structured), grammar.error)
        self._in_use[structured] = grammar
        self._grammars.put(structured, grammar, _text_bytes(structured) + verdict.num_bytes)
        return grammar

    def _prepare(self) -> tuple[Vocabulary, GrammarChecker]:
        if self._vocabulary is None:
            if not self._eos_token_ids:
                raise InvalidRequestError(
                    "structured", "this model has no end-of-sequence token to end an answer with"
                )
            self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        if self._checker is None:
            self._checker = GrammarChecker(
                self._vocabulary.tokens, self._vocabulary.special_token_ids, self._eos_token_ids
            )
        return self._vocabulary, self._checker


def _text_bytes(structured: StructuredOutput) -> int:
    texts = (
        structured.json_schema,
        structured.regex,
        structured.grammar,
        *(structured.choice or ()),
    )
    return 1024 + sum(len(text) for text in texts if text is not None)

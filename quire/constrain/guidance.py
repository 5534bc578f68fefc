"""The border to llguidance: its import, its tokenizer, its limits, and grammars in its notation.

Used by the engine's process and by the one that tries grammars out, so it needs neither torch nor
numpy.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from quire.constrain import limits
from quire.errors import InvalidRequestError, QuireError

if TYPE_CHECKING:
    import llguidance

    from quire.sampling_params import StructuredOutput

# JSON on one line, as json.dumps writes it. With free whitespace a small model can go on indenting
# for ever. A schema may ask for other options under "x-guidance", as llguidance documents.
JSON_STYLE: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

_stack_size_lock = threading.Lock()

_RULE_TEMPERATURE = re.compile(
    r"^[ \t]*[?!]?\w+(\.-?\d+)?[ \t]*\[[^\]\n]*\btemperature\s*=", re.MULTILINE
)


def import_llguidance() -> Any:
    """The package, or an error that says how to get it."""
    try:
        import llguidance
    except ImportError:
        raise QuireError(
            "constrained generation needs llguidance: pip install 'quire[structured]'"
        ) from None
    return llguidance


def new_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A matcher at the beginning of a text; it says itself whether the grammar was an error."""
    # Verbose errors hold the whole grammar and the answer so far.
    limited = import_llguidance().LLParserLimits(**limits.PARSER_LIMITS, verbose_errors=False)
    matcher: llguidance.LLMatcher = import_llguidance().LLMatcher(
        tokenizer, grammar, log_level=0, limits=limited
    )
    return matcher


def error_of(matcher: llguidance.LLMatcher) -> str:
    """What is wrong with a matcher, in words for whoever wrote the grammar; empty if nothing is."""
    error = matcher.get_error().replace("<non-verbose/>", "").strip()[:500]
    return "there is no text it would allow" if error.startswith("NoExtension") else error


def run_with_stack(num_bytes: int, function: Callable[[], None]) -> None:
    """Calls it in a thread with that much stack, and waits for it."""
    thread = threading.Thread(target=function)
    with _stack_size_lock:
        before = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()


class _TokenTable:
    """The vocabulary as llguidance wants it: the bytes of every token, and a way to cut text into
    tokens.

    `encode` is asked for text that the grammar leaves no choice about: the answer then holds the
    tokens the model was trained on, not just any that spell it.
    """

    is_tokenizer_wrapper = True

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_token_ids: Sequence[int],
        eos_token_id: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def build_tokenizer(
    tokens: Sequence[bytes],
    special: Sequence[int],
    ends: Sequence[int],
    encode: Callable[[str], list[int]],
) -> llguidance.LLTokenizer:
    """For a vocabulary with these special tokens and ends of answers."""
    table = _TokenTable(tokens, special, ends[0], encode)
    tokenizer: llguidance.LLTokenizer = import_llguidance().LLTokenizer(table, eos_token=list(ends))
    return tokenizer


def to_guidance(structured: StructuredOutput) -> str:
    """The grammar in llguidance's notation; whether it is a good one is found out by compiling it."""
    matcher = import_llguidance().LLMatcher
    if structured.json_object:
        return _schema_grammar('{"type": "object"}')
    if structured.json_schema is not None:
        assert isinstance(structured.json_schema, str)
        return _schema_grammar(_clean_json(structured.json_schema))
    if structured.regex is not None:
        text: str = matcher.grammar_from_regex(_encodable("regex", structured.regex))
    elif structured.choice is not None:
        # One terminal rather than one rule per choice: a plain automaton, and many times quicker to
        # compile.
        quoted = (
            json.dumps(_encodable("choice", one), ensure_ascii=False) for one in structured.choice
        )
        text = matcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(quoted))
    else:
        assert structured.grammar is not None
        if _RULE_TEMPERATURE.search(structured.grammar):
            raise InvalidRequestError(
                "structured.grammar", "a rule can't set the temperature; the request does"
            )
        text = matcher.grammar_from_lark(_encodable("grammar", structured.grammar))
    return text


def field_of(structured: StructuredOutput) -> str:
    """The name of the field that was given, for error messages."""
    names = ("json_schema", "json_object", "regex", "choice", "grammar")
    return "structured." + next(
        name for name in names if getattr(structured, name) not in (None, False)
    )


def _schema_grammar(schema: str) -> str:
    try:
        text: str = import_llguidance().LLMatcher.grammar_from_json_schema(
            schema, defaults=JSON_STYLE
        )
    except ValueError as error:  # nested too deeply, or broken options under "x-guidance"
        raise InvalidRequestError("structured.json_schema", str(error)) from None
    return text


def _clean_json(schema: str) -> str:
    """Parsed and written again: llguidance pastes the text into a larger JSON text as it is."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(schema, parse_constant=refuse)
    except RecursionError:
        raise InvalidRequestError("structured.json_schema", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError("structured.json_schema", f"is not JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise InvalidRequestError("structured.json_schema", "must be a JSON object (or true)")
    if isinstance(value, dict) and not isinstance(value.get("x-guidance", {}), dict):
        raise InvalidRequestError("structured.json_schema", "x-guidance must be a JSON object")
    return json.dumps(value)


def _encodable(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"structured.{field}", "holds half of a UTF-16 surrogate pair"
        ) from None
    return text

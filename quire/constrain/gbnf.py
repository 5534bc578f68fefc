"""Grammars in the notation of llama.cpp (GBNF), which SGLang and XGrammar call EBNF, as Lark's,
which ours are.
"""

from __future__ import annotations

import re

from quire.constrain.guidance import import_llguidance
from quire.errors import InvalidRequestError

MAX_TEXT = 16 * 1024
MAX_RULES = 128
"""The converter's work grows with the square of the rules."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_RULE = re.compile(r"^\s*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)


def is_gbnf(grammar: str) -> bool:
    """Whether a text has rules like `root ::= "yes" | "no"`."""
    return _RULE.search(grammar) is not None


def to_lark(grammar: str, field: str = "structured.grammar") -> str:
    """The same grammar for `StructuredOutput.grammar`."""
    import_llguidance()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(grammar) > MAX_TEXT or grammar.count("::=") > MAX_RULES:
        limits = f"{MAX_TEXT // 1024} KiB and {MAX_RULES} rules"
        raise InvalidRequestError(field, f"in the notation with ::= at most {limits} are accepted")
    try:
        lark: str = gbnf_to_lark(_ESCAPE.sub(_plain, grammar))
    except RecursionError:
        raise InvalidRequestError(field, "is nested too deeply") from None
    except Exception as error:  # the converter raises bare ones
        raise InvalidRequestError(
            field, f"is no grammar in the notation with ::=: {str(error)[:200]}"
        ) from None
    return lark


def _plain(match: re.Match[str]) -> str:
    """The converter drops leading zeros of `\\u00e9`; characters of their own need no escape, ASCII
    has `\\x41`.
    """
    if match[3] is not None:
        return match[0]
    code = int(match[1] or match[2], 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else match[0]

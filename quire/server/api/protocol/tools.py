"""Tools that this server can't offer a model: those that another server would run itself (a search,
a sandbox), and those whose form only one company's models know.

They are left out, and named in x-quire-ignored, where the client said that the model may do without
them: it sent `tool_choice: "auto"` or `"none"`. Else they are refused by type and name: an answer
that could not use them would mean less than was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quire.errors import InvalidRequestError

_Tool = TypeVar("_Tool")
_MOST_SHOWN = 100


def offered(
    tools: Sequence[_Tool] | None,
    foreign: Callable[[_Tool], tuple[str, str | None] | None],
    is_optional: bool,
) -> tuple[list[_Tool], tuple[str, ...]]:
    """Those that the model can be offered, and what to name in x-quire-ignored. `foreign` gives the
    type and, if it has one, the name of a tool that can't be offered; None for one that can.
    """
    kept, ignored = [], []
    for place, tool in enumerate(tools or ()):
        found = foreign(tool)
        if found is None:
            kept.append(tool)
            continue
        kind, name = found[0][:_MOST_SHOWN], (found[1] or "")[:_MOST_SHOWN]
        if not is_optional:
            shown = f"{kind!r} (named {name!r})" if name and name != kind else repr(kind)
            advice = "leave it out, or send tool_choice 'auto' if the model may do without it"
            raise InvalidRequestError(
                f"tools[{place}].type", f"tools of type {shown} can't be used here: {advice}"
            )
        ignored.append(f"tools[{place}].{kind}")
    return kept, tuple(ignored)


def foreign_function(tool: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """For tools in OpenAI's form, of which functions can be offered."""
    kind = tool.get("type")
    # what is wrong with a function is found later
    if not isinstance(kind, str) or kind == "function":
        return None
    about = tool.get(kind)
    name = about.get("name") if isinstance(about, Mapping) else tool.get("name")
    return kind, name if isinstance(name, str) else None

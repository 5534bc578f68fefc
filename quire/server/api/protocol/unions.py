"""Fields that may be of several kinds: which one is meant is decided first, so that an error is
about that one.

Kinds are named in angle brackets, which no field is: `errors.field_name` leaves them out of a
field's name.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Discriminator, Tag

TEXT = Tag("<text>")
LIST = Tag("<list>")


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return TEXT.tag
    return LIST.tag if isinstance(value, list) else None


TEXT_OR_LIST = Discriminator(
    _text_or_list,
    custom_error_type="text_or_list",
    custom_error_message="Input should be a text or a list",
)


def kind(name: str) -> Tag:
    """The tag of objects whose `type` is that."""
    return Tag(f"<{name}>")


def by_type(*names: str, default: str | None = None, other: str | None = None) -> Discriminator:
    """Tells objects apart by their `type`; those without one are of the `default` kind, those with
    a type of which nothing is known here of the `other` kind.
    """

    def tag_of(value: Any) -> str | None:
        name = (
            value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        )
        if not isinstance(value, dict | BaseModel):
            return None
        if name in names:
            return f"<{name}>"
        return f"<{other}>" if other is not None and isinstance(name, str) else None

    return Discriminator(
        tag_of,
        custom_error_type="unknown_type",
        custom_error_message=f"Input should be an object whose type is one of: {', '.join(names)}",
    )
